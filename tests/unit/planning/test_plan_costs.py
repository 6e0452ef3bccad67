"""The seconds and the memory that are put together from pieces, against the simulation of each plan."""

import os
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest

from parallelism import Hardware, Pipeline, models
from parallelism.hardware import AttentionRate, Kernel
from parallelism.ir import ceil_div, gradient, largest, symbols
from parallelism.ir.passes.joined_calls import joined
from parallelism.layouts import localize
from parallelism.layouts.stages import backwards
from parallelism.pipelining.generators import SCHEDULES as GENERATORS
from parallelism.planning import find_plan
from parallelism.planning.batch_pricing import price_plans
from parallelism.planning.plan import Task
from parallelism.planning.plan_costs import PlanCosts
from parallelism.planning.space import Choices, choices
from parallelism.planning.trained import TrainedModel
from parallelism.planning.two_block_steps import Pattern, TwoBlockSteps
from parallelism.shared_results import shared_results
from parallelism.symbolic.events import Event, EventKind, Formulas, SymbolicEvents, Unpriceable
from parallelism.symbolic.orders import KINDS, MIDDLE, PLACES, Order, order_of, place_of
from parallelism.symbolic.pieces import EndPieces, inside_of, numbered
from parallelism.symbolic.stage_costs import StageCosts
from parallelism.symbolic.steady_state import _Repetitions
from parallelism.training.stage_layers import even, first_layers, longer_stages
from parallelism.training.training_run import ADAM_W

FEW: Any = {"biases": False, "norm": "rms", "activation": "relu"}
"""Of a Transformer: fewer ops, where it is not they that are looked at."""
BLOCKS = models.TransformerSpec(
    layers=4, width=28, heads=4, vocabulary=44, sequence=8, dtype="bfloat16", **FEW)
"""What 2 and 4 devices split evenly, and 3 and 5 do not.  Searches for one model share what they lay out."""
SCHEDULES = ["1f1b", "interleaved_1f1b", "gpipe", "zero_bubble_h1", "zero_bubble_v"]
PLAIN = {"cp": 1, "ep": 1, "sp": False, "chunks": 1, "balanced": False, "schedule": "1f1b", "zero": 0, "overlap": False,
         "tp_overlap": False, "instances": 1, "exchange": "all_gather", "experts_over": "ep", "recompute": "none",
         "order": "pp dp ep cp tp"}


@cache
def steps_of(spec: models.TransformerSpec) -> TwoBlockSteps:
    return TwoBlockSteps(TrainedModel.of(spec, ADAM_W), fused=False)


def table_of(task: Task, **fixed: Any) -> tuple[PlanCosts, Choices]:
    possible = choices(task.model, task.devices, task.batch, fixed)
    return PlanCosts(task, possible), possible


def assert_as_simulated(table: PlanCosts, possible: Choices, row: int) -> float:
    """A plan from pieces is the simulated one.  Returns its seconds where links are shared."""
    table.prepare(row)
    shape, settings = table.shape(row), possible.settings(row)
    trace = table.task.simulate(settings, link_sharing=False)
    found = table.seconds([row])[0]
    if table.is_exact(row):
        assert found == pytest.approx(trace.makespan_seconds, rel=1e-12), settings
    else:
        assert found <= trace.makespan_seconds * (1 + 1e-12), settings
    assert table.peaks(shape, [row])[0] == max(trace.peaks().values()), settings
    full = table.task.simulate(settings).makespan_seconds
    assert found <= full * (1 + 1e-12)
    return full


@pytest.fixture(scope="module")
def table() -> tuple[PlanCosts, Choices]:
    task = Task(TrainedModel.of(BLOCKS, ADAM_W), 24, Hardware.preset("dgx-h100:1").placed(range(8)), 8)
    return table_of(task, schedule=SCHEDULES, sp=[False, True], order=["pp dp cp tp", "dp pp cp tp", "pp cp tp dp"])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {"pp": 2, "dp": 4, "tp": 1, "microbatch": 3, "zero": 1, "schedule": "interleaved_1f1b", "chunks": 2},
    {"pp": 2, "dp": 2, "tp": 2, "microbatch": 3, "sp": True, "zero": 1},
    {"pp": 2, "dp": 2, "tp": 2, "microbatch": 2, "sp": True, "zero": 1, "schedule": "interleaved_1f1b", "chunks": 2},
    pytest.param({"pp": 4, "dp": 2, "tp": 1, "microbatch": 3, "recompute": "full"}, marks=pytest.mark.slow),
    pytest.param({"pp": 2, "dp": 1, "tp": 4, "microbatch": 6, "schedule": "zero_bubble_h1"}, marks=pytest.mark.slow),
    pytest.param({"pp": 2, "dp": 2, "tp": 2, "microbatch": 4, "schedule": "zero_bubble_v", "chunks": 2,
                  "zero": 2, "recompute": "selective"}, marks=pytest.mark.slow),
    pytest.param({"pp": 1, "dp": 4, "tp": 2, "microbatch": 1, "zero": 2, "order": "pp ep cp tp dp"},
                 marks=pytest.mark.slow),
    pytest.param({"pp": 4, "dp": 2, "tp": 1, "microbatch": 2, "schedule": "gpipe", "zero": 1, "order": "dp pp ep cp tp"},
                 marks=pytest.mark.slow),
])
def test_a_plan_from_pieces_is_the_simulated_one(table: tuple[PlanCosts, Choices], settings: dict[str, Any]) -> None:
    plans, possible = table
    rows = [row for row in range(len(possible)) if possible.settings(row) == PLAIN | settings]
    assert len(rows) == 1
    assert_as_simulated(plans, possible, rows[0])


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "chunks", "pp"), [
    ("interleaved_1f1b", 2, 3), ("interleaved_1f1b", 3, 2), ("looped_bfs", 2, 3), ("1f1b", 1, 3), ("gpipe", 1, 2),
    ("interleaved_1f1b", 5, 2),
])
def test_uneven_stages_from_pieces_are_the_simulated_ones(schedule: str, chunks: int, pp: int) -> None:
    """Eleven layers on 2 to 10 stages: even but for one layer, and with a head that costs several layers."""
    spec = replace(BLOCKS, layers=11, vocabulary=16 * BLOCKS.width)
    task = Task(TrainedModel.of(spec, ADAM_W), 12, Hardware.preset("dgx-h100:1").placed(range(2 * pp)), 2 * pp)
    plans, possible = table_of(task, schedule=schedule, chunks=chunks, pp=pp, tp=1, zero=[0, 1], microbatch=1)
    counts = set()
    for row in range(len(possible)):
        assert_as_simulated(plans, possible, row)
        counts.add(task.model.layers_of(pp * chunks, balanced=possible.settings(row)["balanced"]))
    assert {len({*each}) > 1 for each in counts} == {True}
    assert len(counts) == (1 if chunks == 5 else 2)     # with one layer a stage nothing can be taken from the last


def random_space(rng: np.random.Generator) -> tuple[models.TransformerSpec, int, int, dict[str, Any]]:
    """A model, devices, a batch and fixed settings, of which only a few plans are left."""
    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    heads = one(1, 2, 4, 6)
    spec = models.TransformerSpec(
        layers=one(1, 2, 4, 5, 6, 7), width=heads * one(4, 6, 16), heads=heads, vocabulary=one(24, 48, 50), dtype=one(
            "float32", "bfloat16"), sequence=one(6, 8, 12), activation=one("gelu", "relu", "swiglu"),
        norm=one("layer", "rms"), positions=one("learned", "rotary"), biases=one(True, False), tied=one(True, False),
        fused_attention=one(True, False), key_value_heads=one(None, 1 if heads == 1 else heads // 2 or 1),
        window=one(None, None, 1, 4))
    fixed = {"schedule": one(*SCHEDULES, "zero_bubble_h2", "dual_pipe_v", "looped_bfs", "interleaved_zero_bubble"),
             "zero": one(0, [0, 1], 1, 2), "recompute": one("none", "selective", "full"), "sp": one(False, True, None),
             "microbatch": one(1, 2, 3), "order": one("pp dp cp tp", "dp pp cp tp", "pp cp tp dp")}
    return spec, one(1, 2, 4, 6, 8, 12), one(6, 12, 24), fixed


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {"pp": 1, "dp": 1, "tp": 2, "microbatch": 12, "sp": True},
    {"pp": 2, "dp": 2, "tp": 2, "microbatch": 3, "sp": True, "zero": 1},
    pytest.param({"pp": 2, "dp": 2, "tp": 2, "microbatch": 2, "recompute": "selective"}, marks=pytest.mark.slow),
    pytest.param({"pp": 2, "dp": 2, "tp": 2, "microbatch": 3, "sp": True, "recompute": "full"}, marks=pytest.mark.slow),
    pytest.param({"pp": 2, "dp": 1, "tp": 4, "microbatch": 6, "schedule": "zero_bubble_h1"}, marks=pytest.mark.slow),
    pytest.param({"pp": 2, "dp": 2, "cp": 2, "tp": 1, "microbatch": 3, "zero": 1}, marks=pytest.mark.slow),
    pytest.param({"pp": 2, "dp": 2, "cp": 2, "tp": 1, "microbatch": 3}, marks=pytest.mark.slow),
    {"pp": 1, "dp": 8, "tp": 1, "microbatch": 3, "zero": 1},
    pytest.param({"pp": 2, "dp": 2, "tp": 2, "sp": True, "microbatch": 3, "schedule": "zero_bubble_v", "chunks": 2},
                 marks=pytest.mark.slow),
])
def test_a_plan_from_pieces_is_the_simulated_one_on_a_stack(settings: dict[str, Any]) -> None:
    """Its collectives run beside products, and take a share of the device from them."""
    devices = settings["pp"] * settings["dp"] * settings["tp"] * settings.get("cp", 1)
    spec = models.TransformerSpec(layers=4 * settings["pp"], width=48, heads=4, vocabulary=96, sequence=16,
                                  dtype="bfloat16", fused_attention=False, attention_dropout=0.1)
    if devices == 2:
        spec = replace(BLOCKS, layers=2)
    hardware = Hardware.preset("dgx-a100:1+megatron-a100").placed(range(devices))
    fixed = {name: value for name, value in (PLAIN | settings).items() if name != "dp"}
    table, possible = table_of(Task(TrainedModel.of(spec, ADAM_W), 24, hardware, devices), **fixed)
    assert len(possible) == 1 and hardware.overlapping and hardware.collective_share > 0
    assert_as_simulated(table, possible, 0)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {"pp": 1, "dp": 2, "tp": 1, "microbatch": 12, "zero": 1},
    {"pp": 2, "dp": 1, "tp": 2, "sp": True, "microbatch": 24, "recompute": "full"},
    {"pp": 2, "dp": 2, "tp": 1, "microbatch": 12, "schedule": "gpipe", "chunks": 1},
    pytest.param({"pp": 2, "dp": 2, "tp": 1, "microbatch": 12, "zero": 1, "sp": False, "cp": 2}, marks=pytest.mark.slow),
])
@pytest.mark.parametrize("software", [{}, {"fused": "elementwise", "overlapping": True}], ids=["plain", "fused"])
def test_a_plan_of_one_microbatch_from_pieces_is_the_simulated_one_with_buffers_of_gradients_and_without(
    settings: dict[str, Any], software: dict[str, Any],
) -> None:
    devices = settings["pp"] * settings["dp"] * settings["tp"] * settings.get("cp", 1)
    plain = replace(Hardware.preset("dgx-h100:1").placed(range(devices)), **software)
    fixed = {name: value for name, value in (PLAIN | settings).items() if name != "dp"}
    seconds, peaks = [], []
    for hardware in (plain, replace(plain, gradient_buffers=True)):
        table, possible = table_of(Task(TrainedModel.of(BLOCKS, ADAM_W), 24, hardware, devices), **fixed)
        assert len(possible) == 1 and table.shape(0).microbatches == 1
        seconds.append(assert_as_simulated(table, possible, 0))
        peaks.append(int(table.peaks(table.shape(0), [0])[0]))
    assert seconds[0] != seconds[1] and peaks[0] < peaks[1]      # each gradient is added to what is there from the start


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {"pp": 1, "dp": 2, "tp": 2, "sp": True, "microbatch": 3},
    {"pp": 2, "dp": 1, "tp": 2, "microbatch": 2, "recompute": "full"},
    {"pp": 2, "dp": 1, "tp": 1, "cp": 2, "microbatch": 2, "window": 5},
    {"pp": 1, "dp": 1, "tp": 1, "cp": 4, "microbatch": 4, "window": 3, "recompute": "selective"},
    {"pp": 1, "dp": 2, "tp": 1, "cp": 2, "microbatch": 4},
])
def test_a_plan_from_pieces_is_the_simulated_one_with_constants_of_kernels(settings: dict[str, Any]) -> None:
    settings = dict(settings)
    window, devices = settings.pop("window", None), prod(settings.get(axis, 1) for axis in ("pp", "dp", "cp", "tp"))
    spec = models.TransformerSpec(layers=2 * settings["pp"], width=48, heads=4, vocabulary=96, sequence=16,
                                  dtype="bfloat16", window=window)
    plain = Hardware.preset("dgx-a100:1+megatron-a100").placed(range(devices))
    kernels = {"attention": Kernel(rates=(AttentionRate(12, True, 0.01, 100.0),)), "einsum": Kernel(others=3.0),
               "layer_norm": Kernel(launches=5.0, times=2.0), "scalars": Kernel(0, 0)}
    fixed = {name: value for name, value in (PLAIN | settings).items() if name != "dp"}
    seconds = []
    for hardware in (plain, replace(plain, kernels=kernels)):
        table, possible = table_of(Task(TrainedModel.of(spec, ADAM_W), 24, hardware, devices), **fixed)
        assert len(possible) == 1
        seconds.append(assert_as_simulated(table, possible, 0))
        assert table.is_exact(0)
    assert seconds[0] < seconds[1]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {"pp": 2, "dp": 4, "instances": 2, "zero": 1, "tp": 2, "sp": True}, {"pp": 2, "dp": 8, "instances": 2, "zero": 2},
    {"pp": 1, "dp": 8, "instances": 4, "zero": 1}, {"pp": 1, "dp": 4, "instances": 2, "zero": 1, "cp": 2},
])
def test_a_plan_from_pieces_is_the_simulated_one_with_several_instances_of_the_optimizer(settings: dict[str, Any]) -> None:
    """Gradients are reduce-scattered inside of each instance, and all-reduced over them."""
    devices = prod(settings.get(axis, 1) for axis in ("pp", "dp", "tp", "cp"))
    spec = models.TransformerSpec(layers=4, width=48, heads=8, vocabulary=96, sequence=24, dtype="bfloat16")
    hardware = Hardware.preset("dgx-h100:2").placed(range(devices))
    fixed = {name: value for name, value in (PLAIN | {"tp": 1, "microbatch": 2} | settings).items() if name != "dp"}
    task = Task(TrainedModel.of(spec, ADAM_W), 48, hardware, devices)
    seconds = []
    for instances in (1, settings["instances"]):
        table, possible = table_of(task, **fixed | {"instances": instances})
        assert len(possible) == 1
        assert_as_simulated(table, possible, 0)
        seconds.append(table.seconds([0])[0])
    assert seconds[0] != seconds[1]


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["p2p", "a2a", "a2a+p2p"])
@pytest.mark.parametrize(("stack", "settings"), [
    ("", {"pp": 1, "dp": 2, "microbatch": 2, "zero": 1, "recompute": "selective"}),
    ("+megatron-a100", {"pp": 2, "dp": 1, "microbatch": 3, "recompute": "full"}),
    ("+megatron-a100", {"pp": 1, "dp": 1, "tp": 2, "sp": True, "microbatch": 6, "zero": 2}),
    ("", {"pp": 2, "dp": 1, "microbatch": 3, "schedule": "zero_bubble_h1"}),
    ("", {"pp": 2, "dp": 1, "microbatch": 2, "schedule": "interleaved_1f1b", "chunks": 2}),
])
def test_a_plan_from_pieces_is_the_simulated_one_for_each_exchange_of_sequences(
    stack: str, settings: dict[str, Any], exchange: str,
) -> None:
    """Four devices deal sequences, with 2 x 2 all_to_alls and rings; blocks that travel are under way during attention."""
    devices = 4 * settings["pp"] * settings["dp"] * settings.get("tp", 1)
    spec = models.TransformerSpec(layers=4, width=48, heads=8, vocabulary=96, sequence=24, dtype="bfloat16",
                                  positions="rotary")
    hardware = Hardware.preset(f"dgx-a100:1{stack}").placed(range(devices))
    dealt = {"tp": 1, "cp": 4, "exchange": exchange}
    fixed = {name: value for name, value in (PLAIN | dealt | settings).items() if name != "dp"}
    table, possible = table_of(Task(TrainedModel.of(spec, ADAM_W), 24, hardware, devices), **fixed)
    assert len(possible) == 1 and table.task.run(possible.settings(0)).mesh.shape.get("cp_heads", 1) == (
        2 if exchange == "a2a+p2p" else 1)
    assert_as_simulated(table, possible, 0)
    assert table.is_exact(0)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "settings"), [
    (4, {"pp": 3, "microbatch": 2, "recompute": "full"}),
    pytest.param(7, {"pp": 4, "microbatch": 2, "zero": 1}, marks=pytest.mark.slow),
    pytest.param(3, {"pp": 2, "microbatch": 1, "recompute": "full"}, marks=pytest.mark.slow),
    pytest.param(7, {"pp": 4, "tp": 2, "sp": True, "microbatch": 2, "schedule": "zero_bubble_h1"},
                 marks=pytest.mark.slow),
    pytest.param(14, {"pp": 8, "microbatch": 1, "schedule": "gpipe"}, marks=pytest.mark.slow),
    pytest.param(10, {"pp": 8, "microbatch": 1}, marks=pytest.mark.slow),
])
def test_stages_may_have_unequal_numbers_of_blocks(layers: int, settings: dict[str, Any]) -> None:
    """Of three stages of four blocks the one in the middle has two; of four of seven the first has one, the others
    two; of two of three, the last has two."""
    spec = BLOCKS if layers == 4 else models.TransformerSpec(
        layers=layers, width=24, heads=2, vocabulary=26, sequence=4, dtype="bfloat16")
    devices, batch = (3, 6) if settings["pp"] == 3 else (8, 40)
    task = Task(TrainedModel.of(spec, ADAM_W), batch, Hardware.preset("dgx-h100:1").placed(range(devices)), devices)
    table, possible = table_of(task, **(PLAIN | {"tp": 1} | settings))
    assert len(possible) == 1 and layers % settings["pp"]
    assert_as_simulated(table, possible, 0)


@pytest.mark.parametrize(("layers", "stages"), [(7, 4), (10, 8), (3, 2), (126, 16), (8, 4), (5, 1)])
def test_the_longer_stages_are_those_of_the_cut(layers: int, stages: int) -> None:
    first = [*first_layers(even(layers, stages)), layers]
    lengths = [end - start for start, end in pairwise(first)]
    longer = longer_stages(layers, stages)
    assert [stage in longer for stage in range(stages)] == [each > min(lengths) for each in lengths]
    assert sum(lengths) == layers and max(lengths) - min(lengths) == (layers % stages > 0)


def uneven_replicas(hardware: str, spec: models.TransformerSpec, **settings: Any) -> tuple[PlanCosts, Choices]:
    devices = settings.pop("devices")
    task = Task(TrainedModel.of(spec, ADAM_W), 4 * devices, Hardware.preset(hardware).placed(range(devices)), devices)
    return table_of(task, **(PLAIN | {"microbatch": 2} | settings))


@pytest.mark.slow
@pytest.mark.parametrize(("hardware", "settings"), [
    ("dgx-a100:1", {"devices": 3, "pp": 1, "tp": 1, "zero": 1}),
    pytest.param("dgx-a100:1", {"devices": 6, "pp": 1, "tp": 2, "sp": True, "zero": 1}, marks=pytest.mark.slow),
    pytest.param("dgx-a100:2", {"devices": 10, "pp": 2, "tp": 1, "zero": 2}, marks=pytest.mark.slow),
    pytest.param("dgx-a100:1+megatron-a100", {"devices": 5, "pp": 1, "tp": 1, "zero": 2}, marks=pytest.mark.slow),
])
def test_zero_may_split_unevenly(hardware: str, settings: dict[str, Any]) -> None:
    """A dim of 44 over 3, 5 and (2, 3) devices: the first has the largest parts, and the others wait for it."""
    table, possible = uneven_replicas(hardware, BLOCKS, **settings)
    assert len(possible) == 1
    assert_as_simulated(table, possible, 0)


@pytest.mark.slow
def test_parts_of_one_element_are_in_the_chains_of_larger_ones() -> None:
    spec = models.TransformerSpec(layers=1, width=6, heads=2, vocabulary=26, sequence=4, dtype="bfloat16", **FEW)
    table, possible = uneven_replicas("dgx-a100:1+megatron-a100", spec, devices=6, pp=1, tp=1, zero=1)
    assert_as_simulated(table, possible, 0)


@pytest.mark.slow
def test_weights_of_two_stages_of_a_device_that_are_summed_inside_of_each_have_no_pieces() -> None:
    """Tied embeddings under context parallelism, with a schedule in the form of a V; other weights have pieces."""
    settings = PLAIN | {"pp": 2, "chunks": 2, "cp": 2, "tp": 1, "schedule": "zero_bubble_v", "microbatch": 2}
    hardware = Hardware.preset("dgx-a100:1").placed(range(4))
    for tied in (False, True):
        spec = models.TransformerSpec(layers=4, width=48, heads=4, vocabulary=96, sequence=16, tied=tied)
        table, possible = table_of(Task(TrainedModel.of(spec, ADAM_W), 8, hardware, 4), **settings)
        assert len(possible) == 1
        if not tied:
            assert_as_simulated(table, possible, 0)
        else:
            with pytest.raises(Unpriceable, match="share weights"):
                table.prepare(0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(int(os.environ.get("VCLUSTER_PLANS", "50"))))
def test_plans_of_random_spaces(seed: int) -> None:
    """Of each of four spaces: plans from pieces are the simulated ones, and the pick is that of all simulations."""
    rng, spaces = np.random.default_rng(seed), 0
    while spaces < 4:
        spec, devices, batch, fixed = random_space(rng)
        model = TrainedModel.of(spec, ADAM_W)
        hardware = Hardware.preset(("dgx-a100:2", "dgx-a100:2+megatron-a100")[rng.integers(2)])
        task = Task(model, batch, hardware.placed(range(devices)), devices)
        possible = choices(model, devices, batch, fixed)
        if not 1 < len(possible) <= 8:
            continue
        spaces, full = spaces + 1, []
        for row in range(len(possible)):
            try:  # where tp is more than the heads of keys and values, the model has copies of these
                table = PlanCosts(task.at(possible.settings(row)), possible)
                full.append(assert_as_simulated(table, possible, row))
            except Unpriceable:
                full.append(task.simulate(possible.settings(row)).makespan_seconds)
        plans = find_plan(spec, hardware=task.hardware, batch=batch, simulations=None, **fixed)
        assert plans.best.seconds == min(full)
        assert plans.gap == 0


@pytest.mark.slow
def test_plans_that_hold_too_much_all_the_time_are_refused_before_their_actions_are_laid_out() -> None:
    task = Task(TrainedModel.of(BLOCKS, ADAM_W), 8, Hardware.preset("dgx-h100:1").placed(range(4)), 4)
    possible = choices(task.model, 4, 8, {
        "pp": [1, 2], "tp": 1, "schedule": "1f1b", "recompute": "none", "zero": [0, 1], "order": "pp dp cp tp"})
    each = np.ones(len(possible))
    every = price_plans(task, possible, np.inf * each, lambda *_: None)
    limit = float(np.quantile(every.peaks, 0.4))
    some = price_plans(task, possible, limit * each, lambda *_: None)
    none = price_plans(task, possible, 0 * each, lambda *_: None)
    assert ((every.peaks <= limit) == (some.peaks <= limit)).all()
    assert (some.peaks <= every.peaks).all()
    assert (some.peaks < every.peaks).any()
    assert np.array_equal(some.seconds, np.where(every.peaks <= limit, every.seconds, np.inf))
    assert np.array_equal(none.peaks, every.peaks)


# -- the pieces of it --------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("schedule", "ranks", "microbatches", "chunks"), [
    ("1f1b", 4, 9, 1), ("1f1b", 3, 2, 1), ("gpipe", 3, 5, 1), ("interleaved_1f1b", 4, 8, 3),
    ("zero_bubble_h1", 4, 7, 1),
    ("zero_bubble_h2", 3, 8, 1), ("interleaved_zero_bubble", 2, 4, 2), ("zero_bubble_v", 3, 6, 2),
    ("dual_pipe_v", 4, 9, 2), ("v_min", 3, 7, 2), ("looped_bfs", 2, 4, 2), ("1f1b", 1, 3, 1),
])
def test_an_order_is_timed_as_the_schedule(schedule: str, ranks: int, microbatches: int, chunks: int) -> None:
    rng, stages, (order, repeats) = np.random.default_rng(0), ranks * chunks, order_of(
        schedule, ranks, microbatches, chunks)
    assert repeats == 0
    durations = rng.integers(1, 1000, (16, 3)).astype(float)
    messages = np.append(np.full((len(order.messages), 3), rng.integers(0, 300, 3)), np.zeros((1, 3)), axis=0)
    ends = order.ends(durations, messages.astype(float))
    for plan in range(3):
        costs: dict[str, Any] = {
            kind: [float(durations[4 * place_of(stage, stages) + i, plan]) for stage in range(stages)]
            for i, kind in enumerate(KINDS)}
        timeline = Pipeline(stages, microbatches, schedule, chunks).schedule.timeline(
            costs | {"message": float(messages[0, plan])})
        assert [row[-1].end for row in timeline.spans] == ends[:, plan].tolist()


@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize(("schedule", "ranks", "microbatches", "chunks"), [
    ("1f1b", 2, 40, 1), ("1f1b", 5, 83, 1), ("interleaved_1f1b", 3, 60, 2), ("interleaved_1f1b", 4, 92, 3),
    ("zero_bubble_h1", 4, 61, 1), ("zero_bubble_h2", 3, 50, 1), ("zero_bubble_v", 3, 70, 2),
])
def test_repeated_levels_take_as_long_as_those_of_the_whole_order(
    schedule: str, ranks: int, microbatches: int, chunks: int
) -> None:
    """Plans with different slowest stages, of which some come to a steady state late, and with other messages."""
    rng, (order, repeats) = np.random.default_rng(1), order_of(schedule, ranks, microbatches, chunks)
    whole = Order.of(GENERATORS[schedule], ranks, microbatches, chunks)
    assert repeats > 0
    assert order.count < whole.count
    durations = rng.integers(95, 105, (16, 30)) / 3
    durations[:, :3] = [[1 / 3], *[[1 / 7]] * 15]
    messages = np.append(rng.integers(0, 30, (len(order.messages), 30)) / 7, np.zeros((1, 30)), axis=0)
    expected = whole.ends(durations, messages)
    np.testing.assert_allclose(order.ends(durations, messages, repeats), expected, rtol=1e-13, atol=0)
    fewer = rng.integers(0, repeats + 1, 30)
    fewer[0] = repeats
    np.testing.assert_allclose(order.ends(durations, messages, fewer)[:, 0], expected[:, 0], rtol=1e-13, atol=0)
    changes, peaks = rng.integers(0, 50, (2 * PLACES, 3)), rng.integers(0, 90, (16, 3))
    assert (order.peaks(changes, peaks) == whole.peaks(changes, peaks)).all()


def test_a_wait_that_goes_down_the_pipeline_and_back_is_a_cycle_of_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages take longer than the warm-up covers, so a microbatch waits for the one as many before as there are
    ranks; but in the last plan the first rank is the slowest, and every microbatch adds the same."""
    done = [0, 0]
    repeated = _Repetitions._repeated

    def counted(self: _Repetitions, going: Any, cycle: int) -> Any:
        done[cycle > 1] += cycle
        return repeated(self, going, cycle)

    monkeypatch.setattr(_Repetitions, "_repeated", counted)
    ranks, microbatches = 6, 1003
    order, repeats = order_of("1f1b", ranks, microbatches, 1)
    durations = np.full((16, 3), 2 / 3)
    durations[4:8] = [[0.5], [1.0], [1], [1]]
    durations[:4, 2] = 5.0
    messages = np.append(np.full((len(order.messages), 3), [1 / 7, 3 / 7, 1 / 7]), np.zeros((1, 3)), axis=0)
    expected = Order.of(GENERATORS["1f1b"], ranks, microbatches, 1).ends(durations, messages)
    np.testing.assert_allclose(order.ends(durations, messages, repeats), expected, rtol=1e-13, atol=0)
    assert repeats > 900
    assert done[1] >= 2 * ranks and sum(done) < 250


def test_an_order_whose_levels_do_not_repeat_is_made_as_a_whole() -> None:
    order, repeats = order_of("gpipe", 2, 40, 1)
    assert (order.window, repeats, order.count) == (None, 0, 160)


def test_formulas_are_evaluated_at_once() -> None:
    rows, devices = symbols("B tp")
    extents = (0, 7, rows * 3 * 2**40 + 5, rows * 96 // devices, largest(rows, 4 * devices), -rows,
               rows * ceil_div(7, devices) * 3 + 1)
    for b, tp in ((1, 2), (5, 3), (17, 32)):
        assert Formulas(extents).at({"B": b, "tp": tp}).astype(int).tolist() == [
            0, 7, b * 3 * 2**40 + 5, b * 96 // tp, max(b, 4 * tp), -b, b * -(-7 // tp) * 3 + 1]


def test_stages_are_differentiated_once_whatever_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(backwards, "gradient", lambda *given, **more: made.append(given) or gradient(*given, **more))
    spec = models.TransformerSpec(layers=2, width=12, heads=3, vocabulary=24, sequence=6, dtype="bfloat16", **FEW)
    steps = TwoBlockSteps(TrainedModel.of(spec, ADAM_W), fused=False)
    kept = Pattern(in_stages=True, split=False, tp=False, sp=False, cp=1, recompute="none", zero=0)
    with shared_results():
        steps.actions(kept, 2, 1)
        count = len(made)
        again = steps.actions(kept._replace(recompute="full"), 2, 1)
    assert count == len(made) > 0
    assert any(kind.again for kind in again.symbolic.kinds)


@pytest.mark.slow
def test_uneven_parts_have_no_price() -> None:
    spec = models.TransformerSpec(layers=2, width=12, heads=3, vocabulary=24, sequence=6, dtype="bfloat16", **FEW)
    steps = steps_of(spec)
    pattern = Pattern(in_stages=False, split=False, tp=True, sp=False, cp=1, recompute="none", zero=0)
    assert len(steps.actions(pattern, 2, 3).values)
    with pytest.raises(Unpriceable, match=r"a dim of .* is not split evenly over tp"):
        steps.actions(pattern, 2, 5)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tied", "tp", "zero"), [
    ("bfloat16", True, True, 1), pytest.param("float32", False, False, 0, marks=pytest.mark.slow),
    pytest.param("float32", False, True, 1, marks=pytest.mark.slow)])
def test_the_update_of_a_stage_is_a_part_of_that_of_all(dtype: str, tied: bool, tp: bool, zero: int) -> None:
    more = FEW if dtype == "bfloat16" else {"biases": tied}
    spec = models.TransformerSpec(
        layers=2, width=12, heads=3, vocabulary=24, sequence=6, dtype=dtype, tied=tied, **more)
    steps = steps_of(spec)
    pattern = Pattern(True, split=False, tp=tp, sp=tp, cp=1, recompute="none", zero=zero)
    pieces = steps._pieces(pattern, 1)
    whole = EndPieces(pieces.stages, [0, 1, 2, 4], inside_of(dp=0))
    updates = steps._updates(pattern._replace(in_stages=False), whole.layouts, whole.pending, replicated=True)
    step = steps._step(pattern, 1, replicated=True)
    for stage, first in zip(pieces.stages, whole.first, strict=True):
        names = stage.functions.trained
        layouts = {value.name: value.layout for value in stage.functions.forward.inputs if value.layout}
        pending = dict(whole.pending)
        own_pending = {name: pending[kept] for name in names if (kept := numbered(name, -first)) in pending}
        own = localize(step.update(names, layouts, replicas=("dp",), pending=own_pending), updates.devices)
        wanted = updates.needed(numbered(name, -first) for name in names)
        part = [op for op, is_wanted in zip(updates.program.function.ops, wanted, strict=True) if is_wanted]
        in_order = joined(own.program()).of(own.program()).ops
        rows, expected = ([(op.kind, [value.type.specialize({"tp": 2, "dp": 2}) for value in op.inputs])
                           for op in ops] for ops in (part, in_order))
        assert rows == expected
        assert rows


def test_what_runs_again_is_laid_out_once_where_what_is_kept_is_the_same() -> None:
    """ZeRO changes nothing of these actions, and each is as it is without the other; under sequence parallelism it does."""
    spec = models.TransformerSpec(layers=2, width=12, heads=2, vocabulary=24, sequence=6, dtype="bfloat16", **FEW)
    steps, alone = (TwoBlockSteps(TrainedModel.of(spec, ADAM_W), fused=False) for _ in range(2))
    pattern = Pattern(False, split=False, tp=True, sp=False, cp=1, recompute="full", zero=1)
    found = []
    for again in ("full", "selective"):
        first, second = (pattern._replace(recompute=again, zero=zero) for zero in (1, 0))
        assert steps._pieces(first, 1) is steps._pieces(second, 1)
        found.append([[*pieces.actions([0], "FB", several=True)] for pieces in (
            steps._pieces(second, 1), alone._laid_out_pieces(second, 1))])
        assert found[-1][0] == found[-1][1]
    assert found[0] != found[1]
    sequences = [steps._pieces(pattern._replace(sp=True, zero=zero), 1) for zero in (0, 1)]
    assert sequences[0] is not sequences[1]


def test_a_peak_of_many_blocks() -> None:
    """Of 5 bytes more, 3 less in each block; and 1 less, 2 more behind them.  Of what follows, each block frees 2."""
    def row(change: int, block: int | None) -> Event:
        return Event(EventKind("memory", "activations"), [change], block)

    sizes = {((MIDDLE, blocks), "F", "kept"): [Event(EventKind("size", "kept"), [0])] for blocks in (1, 2)}
    behind = [row(-1, None), row(2, None), row(-2, 0)]
    two = [row(5, 0), row(-3, 0), row(5, 1), row(-3, 1), *behind, row(-2, 1)]
    costs = StageCosts(SymbolicEvents.of([*sizes.items(), (((MIDDLE, 2), "F"), two)]).at({}))
    # 5 -3 -1 2 -2; 5 -3 5 -3 5 -3 -1 2 -2 -2 -2.
    assert [costs.memory(MIDDLE, "F", blocks).peak for blocks in (1, 3)] == [5, 9]
    two = [row(1, None), row(2, 0), row(-1, 0), row(4, 1), row(-1, 1), row(-3, None)]
    assert [run.is_repeated for run in SymbolicEvents.of([("F", two)]).runs("F")] == [False, True, False]


@pytest.mark.slow
def test_constants_that_stand_before_a_backward_count_with_their_blocks() -> None:
    spec = replace(BLOCKS, residual_scale=0.5)
    task = Task(TrainedModel.of(spec, ADAM_W), 16, Hardware.preset("dgx-h100:1").placed(range(8)), 8)
    found, possible = table_of(task, **PLAIN | {"pp": 1, "dp": 8, "tp": 1, "microbatch": 2})
    assert_as_simulated(found, possible, 0)


@pytest.mark.slow
def test_halves_of_backwards_have_the_order_of_zero_that_they_run_in() -> None:
    """The half for the weights frees what it was given in another order under ZeRO, and so has another peak."""
    task = Task(TrainedModel.of(replace(BLOCKS, layers=2), ADAM_W), 24, Hardware.preset("dgx-h100:1").placed(range(4)), 4)
    fixed = PLAIN | {"schedule": "zero_bubble_h1", "recompute": "full", "zero": [0, 1]}
    found, possible = table_of(task, **fixed | {"pp": 2, "dp": 2, "tp": 1, "microbatch": 1})
    assert len(possible) == 2
    for row in range(2):
        assert_as_simulated(found, possible, row)
