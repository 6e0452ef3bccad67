"""Steps of plans that are put together from pieces, against the programs of the whole model."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parallelism import Hardware, Mesh, models, simulate
from parallelism.events import Columns
from parallelism.ir import symbols
from parallelism.planning.assembled_steps import AssembledStep, figures_of, figures_of_run
from parallelism.planning.plan import Task, plan_of
from parallelism.planning.space import choices
from parallelism.planning.trained import TrainedModel
from parallelism.symbolic.events import Unpriceable
from parallelism.training import MegatronFlags, figures
from parallelism.training.strategy_run import strategy_run
from parallelism.training.training_run import ADAM_W
from parallelism.transforms import Strategy

DENSE = models.TransformerSpec(layers=8, width=32, heads=8, vocabulary=64, sequence=16, dtype="bfloat16")
LATENT = models.LatentAttention(query_rank=16, key_value_rank=8, head_width=8, rotary_width=4, value_width=6)
SPARSE = models.TransformerSpec(
    layers=7, width=32, heads=4, feed_forward=48, vocabulary=64, sequence=16, activation="swiglu", norm="rms",
    positions="rotary", biases=False, tied=False, dtype="bfloat16", attention=LATENT,
    experts=models.Experts(count=8, chosen=2, dense_layers=1, shared_width=16, width=24, router="sigmoid",
                           deduplicated=True))
PLAIN = {"cp": 1, "ep": 1, "sp": False, "chunks": 1, "balanced": False, "schedule": "1f1b", "zero": 0, "overlap": False,
         "tp_overlap": False, "instances": 1, "exchange": "all_gather", "experts_over": "ep", "recompute": "none",
         "order": "pp dp ep cp tp"}
NUMBERS = ("nbytes", "flops", "start_seconds", "duration_seconds", "bytes_sent", "bytes_received", "sequence", "tag", "peer")
TOLD = ("seconds", "parts", "links", "memory", "mfu", "hfu", "bubble", "peak_bytes")


def task_of(spec: models.TransformerSpec, hardware: str, devices: int, batch: int = 64) -> Task:
    return Task(TrainedModel.of(spec, ADAM_W), batch, Hardware.preset(hardware).placed(range(devices)), devices)


def assert_as_whole(task: Task, settings: dict[str, Any]) -> None:
    """The figures of an assembled step are those of the whole program to the last bit, and so is every event that is no
    change of memory; the calls of gradients that end a step may come in another order."""
    run, step = task.run(settings), AssembledStep(task, settings)
    mine, whole = figures(run, task.hardware, operation=step), figures(run, task.hardware)
    for name in TOLD:
        assert getattr(mine, name) == getattr(whole, name), name
    assert mine.step.by_operation == whole.step.by_operation
    found, wanted = (
        simulate(each, task.hardware, fold=None, op_by_op=True, **placed).columns
        for each, placed in ((step, {}), (run.step, run.placed)))
    assert described(found) == described(wanted)


def described(columns: Columns) -> list[tuple[Any, ...]]:
    """The events by rank, but for memory, without the order of those that come at the end."""
    own = columns.take(~columns.isin("kind", {"memory"}))
    words = [own.values(name) for name in ("rank", "kind", "name", "dtype", "axes", "phase", "stage", "shape")]
    numbers = [own.numbers(name).tolist() for name in NUMBERS if name != "start_seconds"]
    return sorted(zip(*words, *numbers, strict=True), key=str)


@pytest.mark.takes_seconds
def test_a_small_assembled_step_is_the_program_of_the_whole_model() -> None:
    settings = {"pp": 2, "dp": 2, "tp": 1, "microbatch": 4, "zero": 1}
    assert_as_whole(task_of(replace(DENSE, layers=4), "dgx-h100:1", 4, batch=16), PLAIN | settings)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "hardware", "settings"), [
    pytest.param(DENSE, "dgx-h100:2", {"pp": 4, "dp": 2, "tp": 2, "microbatch": 8, "zero": 1}, id="tied weights"),
    pytest.param(DENSE, "dgx-h100:2", {"pp": 2, "dp": 8, "tp": 1, "microbatch": 4, "chunks": 2, "recompute": "full",
                                       "schedule": "interleaved_1f1b"}, id="interleaved"),
    pytest.param(SPARSE, "dgx-h100:2", {"pp": 2, "dp": 2, "ep": 2, "tp": 2, "sp": True, "microbatch": 8, "zero": 1,
                                        "recompute": "selective"}, id="experts"),
    pytest.param(DENSE, "dgx-h100:2", {"pp": 2, "dp": 2, "cp": 4, "tp": 1, "microbatch": 4, "exchange": "p2p"}, id="ring"),
    pytest.param(SPARSE, "dgx-h100:2+megatron-core-h100", {"pp": 2, "dp": 2, "tp": 4, "sp": True, "microbatch": 8, "zero": 1},
                 id="stack"),
])
def test_an_assembled_step_is_the_program_of_the_whole_model(
        spec: models.TransformerSpec, hardware: str, settings: dict[str, Any]) -> None:
    assert_as_whole(task_of(spec, hardware, 16), PLAIN | settings)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hardware", ["dgx-h100:2", "dgx-h100:2+megatron-core-h100", "mi300x-node:2", "tpu-v4:2x2x4"])
@pytest.mark.parametrize("spec", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_assembled_steps_of_any_plans(spec: models.TransformerSpec, hardware: str) -> None:
    task = task_of(spec, hardware, 16)
    possible = choices(task.model, 16, 64, {})
    count = int(os.environ.get("VCLUSTER_PLANS", "6"))
    for row in np.random.default_rng(len(hardware)).permutation(len(possible)).tolist():
        try:
            assert_as_whole(task, possible.settings(row))
        except Unpriceable:
            continue
        if (count := count - 1) == 0:
            break
    assert count == 0


@pytest.mark.slow
def test_gradients_of_the_only_microbatch_are_not_held_before_it() -> None:
    assert_as_whole(task_of(DENSE, "dgx-h100:1", 8, 16), PLAIN | {"pp": 1, "dp": 4, "tp": 2, "microbatch": 4, "zero": 1})


@pytest.mark.parametrize(("spec", "devices", "settings"), [
    pytest.param(DENSE, 6, {"pp": 2, "dp": 3, "tp": 1, "microbatch": 4}, id="replicas", marks=pytest.mark.slow),
    pytest.param(SPARSE, 12, {"pp": 2, "dp": 3, "ep": 2, "tp": 1, "microbatch": 4}, id="experts", marks=pytest.mark.slow),
    pytest.param(SPARSE, 48, {"pp": 2, "dp": 6, "ep": 4, "tp": 1, "microbatch": 1}, id="parts without elements",
                 marks=pytest.mark.slow),
    pytest.param(DENSE, 12, {"pp": 2, "dp": 3, "tp": 2, "sp": True, "microbatch": 4}, id="tp", marks=pytest.mark.slow),
    pytest.param(DENSE, 48, {"pp": 2, "dp": 12, "tp": 2, "instances": 2, "microbatch": 1}, id="instances",
                 marks=pytest.mark.slow),
    pytest.param(DENSE, 48, {"pp": 2, "dp": 12, "cp": 2, "tp": 1, "microbatch": 1}, id="sequences", marks=pytest.mark.slow),
])
def test_replicas_may_have_parts_of_unequal_sizes(
        spec: models.TransformerSpec, devices: int, settings: dict[str, Any]) -> None:
    task, plan = task_of(spec, "dgx-h100:6", devices, 48), PLAIN | {"zero": 1} | settings
    step = AssembledStep(task, plan)
    of_positions = step.class_of.reshape(step.shape.ranks, -1)
    assert len(step.smaller) == len(np.unique(of_positions[0])) > 1
    assert_as_whole(task, plan)


def test_programs_are_simulated_as_a_whole() -> None:
    program = TrainedModel.of(models.mlp((8, 16, 8), symbols("B")[0]), ADAM_W)
    task = replace(task_of(DENSE, "dgx-h100:1", 6, 48), model=program)
    with pytest.raises(Unpriceable, match="a program may compute of the whole batch"):
        AssembledStep(task, PLAIN | {"pp": 2, "dp": 3, "tp": 1, "microbatch": 4})


@pytest.mark.slow
def test_a_trace_of_an_assembled_step_is_priced_on_another_software_by_the_whole_program() -> None:
    task = task_of(DENSE, "dgx-h100:2", 16)
    settings = PLAIN | {"pp": 4, "dp": 2, "tp": 2, "microbatch": 4}
    run, other = task.run(settings), Hardware.preset("dgx-h100:2+megatron-core-h100")
    trace = figures_of(task, settings).trace
    assert trace.on(other).makespan_seconds == simulate(run.step, other, fold=True, **run.placed).makespan_seconds
    assert trace.on(task.hardware).makespan_seconds == trace.makespan_seconds


SMALL: dict[str, Any] = {
    "num_layers": 5, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 128, "bf16": True,
    "global_batch_size": 32, "attention_backend": "flash", "attention_dropout": 0.0, "hidden_dropout": 0.0}


@pytest.mark.parametrize(("given", "settings"), [
    ({"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2,
      "context_parallel_size": 2, "use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2,
      "recompute_granularity": "full"},
     {"pp": 2, "dp": 4, "cp": 2, "tp": 2, "sp": 1, "zero": 1, "instances": 2, "exchange": "p2p", "recompute": "full",
      "microbatch": 1}),
    ({"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2,
      "account_for_loss_in_pipeline_split": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}, None),
    ({"pipeline_model_parallel_size": 4, "micro_batch_size": 4, "recompute_granularity": "selective",
      "attention_backend": None, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
     {"pp": 4, "dp": 8, "microbatch": 4, "recompute": "selective"}),
    ({"context_parallel_size": 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": "2 2",
      "overlap_grad_reduce": True}, {"dp": 8, "cp": 4, "exchange": "a2a+p2p", "overlap": 1, "microbatch": 1}),
    ({"clip_grad": 1.0}, None),
    ({"loss_scale": 8.0}, None),
])
def test_the_plan_that_is_a_run_of_flags_has_its_settings(given: dict[str, Any], settings: dict[str, Any] | None) -> None:
    run = MegatronFlags(**SMALL | given).run(32)
    plan = plan_of(run, Hardware.preset("dgx-h100:4"))
    if settings is None:
        assert plan is None
        return
    assert plan is not None and plan[0].run(plan[1]) == run
    usual = {"pp": 1, "dp": 1, "cp": 1, "ep": 1, "tp": 1}
    assert plan[1] == PLAIN | usual | settings


@pytest.mark.parametrize(("strategy", "axes"), [
    ("dp:data pp 1f1b:2", {"pp": 2, "data": 2}),
    ("dp tp pp 1f1b:2,meshes=dp=2|tp=2", {"devices": 4}),
])
def test_no_plan_has_axes_of_other_names(strategy: str, axes: dict[str, int]) -> None:
    flags = MegatronFlags(**SMALL | {"bf16": False})
    run = strategy_run(flags, Strategy.parse(f"precision=bf16 {strategy}"), Mesh(**axes))
    assert plan_of(run, Hardware.preset("dgx-h100:4")) is None


@pytest.mark.slow
@pytest.mark.parametrize(("given", "assembled"), [
    ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, True),
    ({"pipeline_model_parallel_layout": "Ettt|ttL"}, True),
    ({"clip_grad": 1.0}, False),
    ({"overlap_grad_reduce": True, "use_distributed_optimizer": True}, False),
])
def test_the_figures_of_a_run_are_those_of_its_program(given: dict[str, Any], assembled: bool) -> None:
    run = MegatronFlags(**SMALL | {"pipeline_model_parallel_size": 2} | given).run(8)
    mine, whole = figures_of_run(run, "dgx-h100"), figures(run, "dgx-h100")
    assert mine.json() == whole.json() and mine.run == run
    operation: Any = mine.trace.simulation
    assert isinstance(operation.operation, AssembledStep) == assembled
