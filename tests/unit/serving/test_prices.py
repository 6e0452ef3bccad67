"""Prices of steps are those of their simulation, and a workload at these prices is the engine simulated step by step."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from served_models import SERVED
from workloads import random_workload

from parallelism import Hardware, Mesh, models, simulate
from parallelism.models.figures import kind_of_layer
from parallelism.serving import (
    Engine,
    EngineSettings,
    PricedRun,
    ServedModel,
    StepPrices,
    Workload,
    run_engine,
)
from parallelism.serving.engine import Row, Work, read_and_scored
from parallelism.serving.expert_rows import ExpertRows
from parallelism.serving.placement import ALONE, Placement, usual_strategy
from parallelism.serving.precision import Precision
from parallelism.serving.priced_engine import PricedEngine
from parallelism.serving.prices import kinds_in
from parallelism.serving.requests import Request
from parallelism.serving.served_model import numbers_of, sampled_rows
from parallelism.serving.workloads import lengths_in

PLAIN, MEASURED = "dgx-h100", "dgx-h100+pytorch-h100"
WORKS = [{"t": 8, "r": 4, "pages": 5, "read_full": 80, "scored_full": 101, "read_window": 40, "scored_window": 30,
          "read_states": 4, "scored_states": 3},
         {"t": 4, "r": 4, "pages": 3, "read_full": 40, "scored_full": 31, "read_window": 20, "scored_window": 20,
          "read_states": 4, "scored_states": 0}]


def model(name, layers=6):
    spec = SERVED[name]
    if spec.linear_attention is None:
        spec = replace(spec, layers=layers)
    spec = replace(spec, dtype="bfloat16")
    return replace(spec, full_attention_every=3) if spec.full_attention_every else spec


def placed(spec, axes):
    mesh = Mesh(**axes) if axes else ALONE
    return Placement(spec, mesh, usual_strategy(mesh))


def settings(placement, **more):
    return EngineSettings(**{"batch": 4, "chunk": 8, "page_tokens": 4, "pages": {"full": 20, "window": 20, "states": 20},
                             "replicas": placement.replicas} | more)


@pytest.mark.takes_seconds
@pytest.mark.sampled(18)
@pytest.mark.parametrize("hardware", [PLAIN, MEASURED])
@pytest.mark.parametrize(("name", "axes"), [
    ("gpt2", {}), ("llama3", {"tp": 2}), ("llama3", {"pp": 3, "tp": 2}), ("mixtral", {"ep": 2, "tp": 2}),
    ("bloom", {"dp": 2}), ("deepseek-v3", {"pp": 2, "ep": 2}), ("deepseek-v3", {"tp": 2}),
    ("gemma3", {"pp": 2, "tp": 2}), ("gpt-oss", {"tp": 2}), ("nemotron-h", {"pp": 2, "tp": 2}), ("qwen3-next", {"tp": 2}),
    ("falcon-h1", {"tp": 2}), ("lfm2", {"pp": 2}), ("kimi-linear", {"tp": 2}),
])
def test_a_step_is_priced_as_it_is_simulated_and_holds_what_it_holds(name, axes, hardware):
    placement, found = placed(model(name), axes), Hardware.preset(hardware)
    given = settings(placement)
    prices = StepPrices(placement, given, found, as_run=True)
    trace = simulate(ServedModel(placement, given, room=False, fused=found.fused).simulated(WORKS), found)
    assert prices.seconds(WORKS) == pytest.approx(trace.makespan_seconds, rel=1e-9)
    parts = prices.parts(WORKS[0])
    assert parts.seconds == pytest.approx(prices.step_seconds(WORKS[:1]), rel=1e-12)
    alone = simulate(ServedModel(placement, given, room=False, fused=found.fused).simulated(WORKS[:1]), found)
    stages = axes.get("pp", 1)
    first = [min(rank for rank in range(placement.mesh.size) if placement.place(rank)[0] == stage) for stage in range(stages)]
    computed = sum(event.duration_seconds for event in alone if event.rank in first and event.kind == "compute")
    assert parts.products + parts.attention == pytest.approx(computed, rel=1e-9)
    assert parts.messages == pytest.approx(alone.makespan_seconds - computed, rel=1e-7)
    assert parts.attention > 0 and parts.products > 0 and parts.host == prices.host_seconds(WORKS[:1])
    ranks = range(placement.mesh.size)
    assert prices.weights_bytes() == max(trace.peak_bytes(rank, "weights") for rank in ranks)
    cache = [sum(20 * nbytes for nbytes in pages.values()) for pages in prices.page_bytes()]
    assert max(cache) == max(trace.peak_bytes(rank, "cache") for rank in ranks)


@pytest.mark.takes_seconds
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama3", "deepseek-v3", "gemma3"])
def test_activations_are_those_of_a_simulation(name):
    placement = placed(model(name), {"tp": 2})
    given = settings(placement)
    trace = simulate(ServedModel(placement, given, room=False).simulated(WORKS[:1]), PLAIN)
    prices = StepPrices(placement, given, Hardware.preset(PLAIN), fused=False)
    assert prices.activations_bytes(WORKS[0])[0] == trace.peak_bytes(0) - sum(
        trace.peak_bytes(0, category) for category in ("weights", "cache", "inputs"))


def test_a_stretch_of_steps_is_its_steps():
    placement = placed(model("gemma3"), {"pp": 2, "tp": 2})
    prices = StepPrices(placement, settings(placement), Hardware.preset(MEASURED))
    moving = {"read_full": np.array([40, 44, 48]), "scored_full": np.array([9, 10, 11]), "pages": np.array([3, 3, 4]),
              "read_window": np.array([20, 20, 20]), "scored_window": np.array([5, 6, 6])}
    found = prices.seconds_of_stretch([{"t": 4, "r": 4}] * 2, [moving, moving], 3)
    steps = [{"t": 4, "r": 4} | {name: int(each[step]) for name, each in moving.items()} for step in range(3)]
    assert found.tolist() == pytest.approx([prices.seconds([step, step]) for step in steps], rel=1e-12)


def test_a_program_that_runs_keeps_rings():
    placement = placed(model("gemma3"), {})
    with pytest.raises(ValueError, match="programs that run keep windows in rings: frees_pages is for prices alone"):
        ServedModel(placement, settings(placement, frees_pages=True))


def test_a_stretch_reads_the_pages_that_its_steps_read():
    spec = model("gemma3")
    placement = placed(spec, {})
    chosen = settings(placement, chunk=4, frees_pages=True)
    engine = PricedEngine(Engine(spec, chosen), StepPrices(placement, chosen, Hardware.preset(PLAIN)))
    step = Work(((Row(0, 5, 6, True), Row(1, 17, 18, True)),))
    _, (moving,) = engine._numbers((step,), 9)
    for later in range(9):
        for kind in ("full", "window"):
            read, scored = read_and_scored(spec, chosen, step.later(later), kind)
            assert (moving[f"read_{kind}"][later], moving[f"scored_{kind}"][later]) == (read, scored)


def test_blocks_that_do_the_same_are_priced_once():
    spec = model("deepseek-v3", layers=30)
    kinds = kinds_in(spec, placed(spec, {}).parts[0])
    dense, experts = ("both", False, None, True), ("both", True, None, True)
    assert (kinds.blocks, kinds.times) == ((dense, experts, experts), (1, 1, 28))
    spec = model("gemma3", layers=12)
    kinds = kinds_in(spec, placed(spec, {}).parts[0])
    assert sum(kinds.times) == 12 and len(kinds.blocks) == 5
    assert kinds.blocks[-1] == kind_of_layer(spec, 11) or kinds.times[-1] == 0


# -- experts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "chosen", "tokens", "sharing"), [(4, 1, 3, 1), (4, 2, 3, 1), (5, 2, 1, 3), (3, 3, 1, 1)])
def test_experts_that_a_token_takes_are_the_mean_of_all_choices(count, chosen, tokens, sharing):
    choices = [*itertools.combinations(range(count), chosen)]
    every = [*itertools.product(choices, repeat=tokens * sharing)]
    mean = sum(len(set(itertools.chain(*each))) for each in every) / len(every)
    rows = ExpertRows(models.Experts(count=count, chosen=chosen), sharing, "t")
    assert rows.reached(tokens) * count == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("axes", [{}, {"tp": 2}])
@pytest.mark.parametrize("precision", ["bf16", "int4"])
def test_a_token_alone_reads_the_experts_that_it_takes(axes, precision):
    """It costs what it does in a model that has no other experts; in a program that runs all experts are read."""
    spec = replace(models.transformer("mixtral-8x7b"), dtype="bfloat16", experts=models.Experts(count=32, chosen=2))
    few = replace(spec, experts=models.Experts(count=2, chosen=2))
    one = {"t": 1, "r": 1, "pages": 1, "read_full": 4, "scored_full": 4}
    seconds = []
    for each, even in ((spec, False), (few, False), (spec, True)):
        placement = placed(each, axes)
        prices = StepPrices(placement, settings(placement), Hardware.preset(PLAIN), precision=Precision.parse(precision),
                            as_run=even)
        seconds.append(prices.seconds([one]))
    assert seconds[0] == pytest.approx(seconds[1], rel=0.02)
    assert seconds[2] > 5 * seconds[0]


def test_rows_of_experts_are_sent_and_computed_as_they_are():
    """With so many tokens that every expert has the same number, and all are reached, they are those of a program that runs;
    a token of each of two devices sends two rows there and back, not one of every expert."""
    placement = placed(model("mixtral", layers=2), {"ep": 2})
    given = settings(placement, chunk=512)
    own, even = (StepPrices(placement, given, Hardware.preset(PLAIN), as_run=each) for each in (False, True))
    many = {"t": 256, "r": 4, "pages": 5, "read_full": 80, "scored_full": 101}
    assert own.seconds([many]) == pytest.approx(even.seconds([many]), rel=1e-12)
    sent = []
    for prices in (own, even):
        (stage,) = prices.stages
        numbers = prices._numbers(stage, {"t": 1, "r": 1})
        sent.append([numbers[stage.bounds[number]] for number, event in enumerate(stage.events)
                     if event.kind.what == "collective" and event.kind.name == "all_to_all"])
    assert all(2 * mine == all_of_them for mine, all_of_them in zip(*sent, strict=True))   # 2 of 4 experts


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("text", "part"), [("int8", 0.5), ("int4", 0.25), ("fp8", 0.5)])
def test_weights_in_fewer_bits_are_read_faster(text, part):
    spec = replace(models.transformer("llama3-8b"), dtype="bfloat16")
    placement = placed(spec, {})
    found = [StepPrices(placement, settings(placement), Hardware.preset(PLAIN), precision=Precision.parse(each))
             for each in ("bf16", text)]
    whole, fewer = (prices.weights_bytes() for prices in found)
    tables = 2 * 2 * spec.vocabulary * spec.width  # of tokens, in and out: they stay
    assert fewer - tables == pytest.approx(part * (whole - tables), rel=1e-3)
    one = {"t": 1, "r": 1, "pages": 1, "read_full": 4, "scored_full": 4}
    seconds = [prices.seconds([one]) for prices in found]
    assert seconds[1] < seconds[0] * (part + 0.25)


def test_a_precision_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="precision must be one of bf16, fp16, fp8, int8, int4, got 'fp4'"):
        Precision.parse("fp4")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", ["fp8", "int4"])
@pytest.mark.parametrize(("name", "axis"), [("llama3", "tp"), ("mixtral", "ep"), ("gpt-oss", "tp"), ("deepseek-v3", "tp")])
def test_weights_in_few_bits_are_split_as_those_in_16_are(text, name, axis):
    """Two devices save at least half each of what one device saves; no more where they share all that is in few bits."""
    spec, saved = model(name, layers=2), []
    for axes in ({}, {axis: 2}):
        placement = placed(spec, axes)
        given, hardware = settings(placement), Hardware.preset(PLAIN)
        wide, few = (StepPrices(placement, given, hardware, precision=Precision.parse(each)).weights_bytes()
                     for each in ("bf16", text))
        saved.append(wide - few)
    assert saved[0] / 2 <= saved[1] < 0.75 * saved[0]


# -- workloads ---------------------------------------------------------------------------------------------------------


def on_simulator(served, hardware):
    """Steps simulated on a hardware.  Every answer has all its tokens, which are 0."""
    known = {}

    def run(engine, step):
        numbers = [numbers_of(served.placement, served.settings, work) for work in step]
        simulated = served.simulated(numbers)
        if simulated.numbers not in known:
            known[simulated.numbers] = simulate(simulated, hardware).makespan_seconds
        return {request: 0 for work in step for _, _, request in sampled_rows(work)}, known[simulated.numbers]

    return run


def priced_and_simulated(seed, name, axes, hardware=PLAIN):
    """A random workload of requests that arrive by themselves, priced in stretches, and simulated step by step."""
    spec, found = model(name, layers=3), Hardware.preset(hardware)
    placement = placed(spec, axes)
    chosen, requests = random_workload(seed, spec)
    chosen = replace(chosen, replicas=placement.replicas)
    requests = [replace(request, stop=frozenset(), arrival_seconds=request.arrival_seconds * 1e-4) for request in requests]
    served = ServedModel(placement, chosen, room=False, fused=found.fused)
    simulated = run_engine(Engine(placement.spec, chosen, requests), on_simulator(served, found))
    workload = Workload(((1, 1),), rate=1.0)
    run = PricedRun(Engine(placement.spec, chosen), StepPrices(placement, chosen, found, as_run=True), workload, 0)
    for request in sorted(requests, key=lambda each: each.arrival_seconds):
        run.engine.add(request)
    return run.served(), simulated


def assert_same(priced, simulated):
    assert priced.steps == simulated.steps
    assert priced.seconds == pytest.approx(simulated.seconds, rel=1e-9)
    for mine, theirs in zip(priced.requests, simulated.requests, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.first_token_seconds == pytest.approx(theirs.first_token_seconds, rel=1e-9)
        assert mine.last_token_seconds == pytest.approx(theirs.last_token_seconds, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "name", "axes"), [
    (1, "llama3", {"tp": 2}), (2, "gemma3", {}), (3, "mixtral", {"ep": 2}), (4, "llama3", {"pp": 2}), (5, "deepseek-v3", {}),
])
def test_a_workload_is_priced_as_the_engine_is_simulated_step_by_step(seed, name, axes):
    assert_same(*priced_and_simulated(seed, name, axes))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_many_workloads_are_priced_as_they_are_simulated(seed):
    name = [*SERVED][seed % len(SERVED)]
    axes = [{}, {"tp": 2}, {"pp": 2}, {"pp": 3, "tp": 2}][seed // len(SERVED) % 4]
    assert_same(*priced_and_simulated(seed, name, axes, MEASURED))


def test_one_request_at_a_time_takes_what_its_steps_take():
    spec = replace(models.transformer("llama3-8b"), dtype="bfloat16")
    placement = placed(spec, {})
    given = settings(placement, batch=1, chunk=64, page_tokens=16, pages={"full": 10})
    prices = StepPrices(placement, given, Hardware.preset(PLAIN))
    run = PricedRun(Engine(spec, given), prices, Workload(((100, 20),), concurrency=1), 5).served()

    def step(tokens, stop, picked=1):
        scored = stop * (stop + 1) // 2 - (stop - tokens) * (stop - tokens + 1) // 2
        padded = tokens if tokens <= 1 else -(-tokens // 8) * 8
        pages = -(-stop // 16)
        return prices.seconds([{"t": padded, "r": picked, "pages": pages, "read_full": pages * 16, "scored_full": scored}])

    first = step(64, 64) + step(36, 100)
    later = sum(step(1, 100 + number) for number in range(1, 20))
    assert run.seconds == pytest.approx(5 * (first + later), rel=1e-9)
    assert [each.waited_seconds for each in run.requests] == pytest.approx([first] * 5, rel=1e-9)
    assert run.requests[3].token_seconds == pytest.approx(later / 19, rel=1e-9)


def test_a_queue_waits_as_long_as_its_recursion_says():
    """One server with a fixed service S: a request waits for max(0, wait of the one before + S - time between them)
    (Lindley, *The theory of queues with a single server*, 1952)."""
    spec = replace(models.transformer("gpt2"), dtype="bfloat16")
    placement = placed(spec, {})
    given = settings(placement, batch=1, chunk=128, page_tokens=16, pages={"full": 8})
    prices = StepPrices(placement, given, Hardware.preset(PLAIN))
    service = PricedRun(Engine(spec, given), prices, Workload(((100, 1),), concurrency=1), 1).served().seconds
    workload = Workload(((100, 1),), rate=0.8 / service, seed=3)
    run = PricedRun(Engine(spec, given), prices, workload, 500).served()
    wait, before = 0.0, run.requests[0].arrival_seconds
    for each in run.requests:
        wait, before = max(0.0, wait - (each.arrival_seconds - before)), each.arrival_seconds
        assert each.waited_seconds == pytest.approx(wait + service, rel=1e-9)
        wait += service
    mean = sum(each.waited_seconds for each in run.requests) / 500 - service
    assert 0.5 < mean / (0.8 * service / (2 * (1 - 0.8))) < 2  # Pollaczek and Khinchine, for ever


def test_a_prefix_in_the_cache_is_not_computed_again():
    spec = replace(models.transformer("llama3-8b"), dtype="bfloat16")
    placement = placed(spec, {})
    given = settings(placement, batch=1, chunk=2048, page_tokens=16, pages={"full": 100})
    prices = StepPrices(placement, given, Hardware.preset(PLAIN))
    waited = [PricedRun(Engine(spec, given), prices, Workload(((1000, 2),), concurrency=1, hits=hits), 1).served()
              .requests[0].waited_seconds for hits in (0.0, 0.9)]
    assert waited[1] < waited[0] / 3


@pytest.mark.parametrize(("given", "message"), [
    ({"lengths": ()}, "lengths must have at least one pair"), ({"lengths": ((3, 0),)}, "pairs of integers of at least 1"),
    ({"rate": 2.0}, "a workload has either a concurrency or a rate"), ({"concurrency": 0}, "concurrency must be an integer"),
    ({"concurrency": None}, "a workload has either a concurrency or a rate"), ({"hits": 1.0}, "hits must be at least 0"),
    ({"concurrency": None, "rate": -1.0}, "rate must be a number of requests a second"),
])
def test_a_workload_is_checked(given, message):
    with pytest.raises(ValueError, match=message):
        Workload(**{"lengths": ((3, 4),), "concurrency": 2} | given)


def test_lengths_are_read_from_a_file(tmp_path):
    path = tmp_path / "requests.json"
    path.write_text('[{"input_tokens": 3, "output_tokens": 4}, {"input_tokens": 5, "output_tokens": 6, "id": 1}]')
    assert lengths_in(path) == ((3, 4), (5, 6))
    path.write_text('{"input_tokens": 3, "output_tokens": 4}\n{"input_tokens": 5, "output_tokens": 6}\n')
    assert lengths_in(path) == ((3, 4), (5, 6))
    for wrong in ("", "[1]", '[{"input_tokens": 3}]', '[{"input_tokens": "3", "output_tokens": 4}]', "[" * 10**5, "\xff"):
        path.write_text(wrong)
        if wrong:
            with pytest.raises(ValueError, match="must be a list of requests in JSON"):
                lengths_in(path)


def test_a_run_refuses_a_prefix_that_nobody_computed():
    with pytest.raises(ValueError, match="prefix_tokens must be at least 0 and fewer than the prompt has, got 3"):
        Request((1, 2, 3), 1, prefix_tokens=3)
