"""`find_mixed`: its rows are what a simulation of the program says, and its first plan is the best of all that there are."""

from dataclasses import replace
from itertools import product

import pytest
from mixed_nodes import FAST, FUSED, SLOW, both
from transformed import transformer

from parallelism import ir, simulate
from parallelism.hardware import mixed
from parallelism.mixing import MixedPlan, MixedPlans, Replicas, Stages, find_mixed
from parallelism.mixing.uneven_step import UnevenStep
from parallelism.planning import find_plan
from parallelism.planning.plan import Task
from parallelism.planning.space import choices
from parallelism.planning.trained import TrainedModel
from parallelism.training.training_run import ADAM_W

SPEC = transformer(layers=5, width=32, sequence=16, dtype="float32")
ASKED = {"batch": 8, "recompute": "none"}


@pytest.fixture(scope="module")
def found():
    return find_mixed(SPEC, hardware=both(), simulations=2, pp=2, microbatch=1, zero=1, **ASKED)


@pytest.fixture(scope="module")
def replicated():
    return find_mixed(SPEC, hardware=both(), simulations=1, pp=1, tp=2, zero=1, **ASKED)


def every_plan(hardware, **fixed):
    """All plans over both parts, in either order, by themselves: nothing is timed or weighed."""
    model = TrainedModel.of(SPEC, ADAM_W)
    possible = choices(model, hardware.devices, ASKED["batch"], {"schedule": "1f1b", "recompute": "none", **fixed})
    for row in range(len(possible)):
        settings = possible.settings(row)
        width = hardware.devices // settings["pp"]
        if settings["pp"] > 1 and all(part.devices % width == 0 for part in hardware.parts):
            for parts in (hardware.parts, hardware.parts[::-1]):
                task = Task(model, ASKED["batch"], mixed(*parts, across=hardware.across, lanes=width), hardware.devices)
                for counts in product(range(1, SPEC.layers + 1), repeat=settings["pp"]):
                    if sum(counts) == SPEC.layers:
                        yield MixedPlan(task, settings, Stages(counts), 0.0, (0, 0))


def every_plan_of_replicas(hardware, **fixed):
    """All plans with replicas in both parts, by themselves."""
    model, batch = TrainedModel.of(SPEC, ADAM_W), ASKED["batch"]
    wanted = {"schedule": "1f1b", "recompute": "none", "order": "dp pp cp ep tp", **fixed, "microbatch": 1}
    possible = choices(model, hardware.devices, hardware.devices, wanted)
    for row in range(len(possible)):
        settings = possible.settings(row)
        width = hardware.devices // settings["dp"]
        if settings["dp"] == 1 or any(part.devices % width for part in hardware.parts):
            continue
        task = Task(model, batch, hardware.dealt(width), hardware.devices)
        counts = tuple(part.devices // width for part in hardware.parts)
        given = fixed.get("microbatch", range(1, batch + 1))
        rows = [given] if isinstance(given, int) else given
        for microbatches, first, second in product(range(1, batch + 1), rows, rows):
            if microbatches * (counts[0] * first + counts[1] * second) == batch:
                yield MixedPlan(task, settings, Replicas(microbatches, counts, (first, second)), 0.0, (0, 0))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("hardware", "fixed"), [
    pytest.param(both(), {"pp": 1, "tp": 2, "zero": 1}, marks=pytest.mark.slow),
    pytest.param(both(), {"pp": 2, "tp": 2, "microbatch": 2, "zero": 1}, marks=pytest.mark.slow),
    pytest.param(both(), {"pp": 4, "tp": 1, "microbatch": [1, 2]}, marks=pytest.mark.slow),
    pytest.param(both(rate=2e8), {"pp": [2, 4], "microbatch": [1, 4], "zero": 1}, marks=pytest.mark.slow),
    pytest.param(both(FAST, SLOW), {"microbatch": [1, 2], "zero": 1}, marks=pytest.mark.slow),
    pytest.param(both(), {"pp": 1, "zero": [0, 1]}, marks=pytest.mark.slow),
    pytest.param(both(rate=1e8), {"pp": 1, "tp": [1, 2], "zero": 1}, marks=pytest.mark.slow),
])
def test_the_first_plan_is_the_best_of_all_that_there_are(hardware, fixed):
    plans = find_mixed(SPEC, hardware=hardware, simulations=None, **ASKED, **fixed)
    every = [plan.simulate(fold=True).makespan_seconds for plan in every_plan(hardware, **fixed)]
    every += [plan.simulate(fold=True).makespan_seconds for plan in every_plan_of_replicas(hardware, **fixed)]
    assert plans.gap == 0 and len(every) >= 4
    assert plans.found[0].seconds == pytest.approx(min(every), rel=1e-9)
    assert all(plan.bound_seconds <= plan.seconds * (1 + 1e-12) for plan in plans.found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Stages, Replicas])
def test_rows_are_simulations_of_the_program_in_seconds_and_memory(found, replicated, kind):
    plans = found if kind is Stages else replicated
    assert isinstance(plans, MixedPlans) and plans.simulated >= 1
    for plan in [plan for plan in plans.found if isinstance(plan.arrangement, kind)][:1]:
        full = plan.simulate()
        assert plan.figures.seconds == pytest.approx(full.makespan_seconds, rel=1e-9)
        assert max(plan.peak_bytes) == max(full.peaks().values()) == plan.figures.peak_bytes
        by_part = [0, 0]
        for rank, peak in full.peaks().items():
            number = plan.hardware.number_of_part(rank)
            by_part[number] = max(by_part[number], peak)
        assert plan.peak_bytes == tuple(by_part)
        alone = plan.simulate(link_sharing=False, fold=True).makespan_seconds
        assert plan.bound_seconds <= alone * (1 + 1e-9)
        if isinstance(plan.arrangement, Stages):         # the ends of replicas in both parts are bounded, not timed
            assert plan.bound_seconds == pytest.approx(alone, rel=1e-9)


@pytest.mark.slow
def test_the_devices_of_a_stage_share_a_slow_link_between_sites_evenly():
    plans = find_mixed(SPEC, hardware=both(rate=1e7), simulations=2, pp=4, tp=1, microbatch=1, recompute="none", batch=32)
    best = next(plan for plan in plans.found if isinstance(plan.arrangement, Stages)).simulated()
    assert best.hardware.lanes == 2 and best.hardware.across.bytes_per_second == 1e7
    assert best.seconds == pytest.approx(best.simulate().makespan_seconds, rel=1e-9)
    assert best.bound_seconds <= best.seconds
    assert best.bound_seconds == pytest.approx(best.simulate(link_sharing=False).makespan_seconds, rel=1e-9)
    shared = simulate(best.run.step, best.hardware.dealt(1), **best.run.placed)
    # Under ZeRO the two replicas update parts of unequal sizes, and do not send at quite the same time.
    assert best.seconds == pytest.approx(shared.makespan_seconds, rel=1e-6)


@pytest.mark.slow
def test_stages_are_told_by_their_layers_where_a_block_has_several():
    turns = replace(SPEC, layers=12, window=4, full_attention_every=2)
    plans = find_mixed(turns, hardware=both(), simulations=1, pp=2, tp=2, microbatch=1, zero=1, **ASKED)
    best = next(plan for plan in plans.found if isinstance(plan.arrangement, Stages))
    layers = [count for part in best.arrangement.of_parts(best.hardware) for count in part]
    assert sum(best.arrangement.counts) == 6 and sum(layers) == 12
    assert best.run.pipeline.begin == (f"block.{layers[0]}",)
    assert [part["layers"] for part in best.arrangement.json(best.hardware)] == [[count] for count in layers]
    simulated = simulate(UnevenStep(best.task, best.settings, best.arrangement.counts), best.task.hardware)
    assert best.simulated().seconds == pytest.approx(simulated.makespan_seconds, rel=1e-9)


@pytest.mark.slow
def test_faster_stages_have_more_blocks_and_memory_bounds_them(found):
    plan = next(each for each in found.found if isinstance(each.arrangement, Stages))
    of_parts = dict(zip(plan.hardware.labels, plan.arrangement.of_parts(plan.hardware), strict=True))
    assert max(of_parts["slow"]) < max(of_parts["fast"])
    assert sum(of_parts["slow"] + of_parts["fast"]) == SPEC.layers
    need = max(plan.peak_bytes)
    small = both(SLOW, replace(FAST, memory_bytes=need - 1))
    fewer = find_mixed(SPEC, hardware=small, simulations=1, pp=2, microbatch=1, **ASKED)
    for plan in fewer.found:
        assert all(peak <= part.memory_bytes for peak, part in zip(plan.peak_bytes, plan.hardware.parts, strict=True))
    none = find_mixed(SPEC, hardware=small, memory=1000.0, simulations=1, pp=2, microbatch=1, **ASKED)
    assert none.found == () and none.best is None and "memory" in none.refused
    assert "no plan fits over both parts" in str(none) and "slow alone: no plan fits" in none.text()


@pytest.mark.slow
def test_each_part_alone_has_the_plan_that_a_search_on_it_finds(found):
    for alone, part in zip(found.alone, (SLOW, FAST), strict=True):
        plans = find_plan(SPEC, hardware=part, devices=4, simulations=2, pp=2, microbatch=1, zero=1, **ASKED)
        assert (alone.plan.seconds, alone.plan.settings) == (plans.best.seconds, plans.best.settings)
    assert found.fastest_alone.name == "fast"
    assert found.best is min((found.found[0], found.alone[1].plan), key=lambda plan: plan.seconds)
    assert found.verdict.startswith("fast alone: ") and "; both: " in found.verdict


@pytest.mark.slow
def test_it_says_all_of_this_as_text_and_as_plain_values(replicated):
    found = replicated
    best, text, values = found.found[0], str(found), found.json(2)
    assert best.split == f"{best.settings_text}: {best.parts_text}"
    assert best.parts_text in text and best.settings_text in text and found.counted[:20] in text
    assert [row["seconds"] for row in values["plans"]] == [plan.seconds for plan in found.found[:2]]
    of_parts = zip(best.hardware.labels, best.arrangement.json(best.hardware), best.peak_bytes, strict=True)
    assert values["plans"][0]["parts_of_hardware"] == [
        {"hardware": name, **own, "peak_bytes": peak} for name, own, peak in of_parts]
    assert [row["hardware"] for row in values["alone"]] == ["slow", "fast"] and values["verdict"] == found.verdict
    assert values["plans"][0]["mfu"] == best.figures.mfu and values["plans"][0]["simulated"]


@pytest.mark.slow
def test_a_stage_runs_as_the_software_of_its_part_runs_it():
    plans = find_mixed(SPEC, hardware=both(SLOW, FUSED), simulations=1, pp=2, tp=2, microbatch=1, **ASKED)
    best = next(plan for plan in plans.found if isinstance(plan.arrangement, Stages))
    first, second = (part.name for part in best.hardware.parts)
    computes = {}
    for parts in (best.hardware.parts, [best.hardware.parts[0]] * 2, [best.hardware.parts[1]] * 2):
        task = replace(best.task, hardware=mixed(*parts))
        trace = simulate(UnevenStep(task, best.settings, best.arrangement.counts), task.hardware)
        computes[tuple(part.name for part in parts)] = [
            [(e.name, e.seconds, e.flops) for e in trace if e.rank == rank and e.kind == "compute"] for rank in (0, 7)]
    assert computes[first, second] == [computes[first, first][0], computes[second, second][1]]
    assert len(computes[first, first][0]) != len(computes[second, second][0])
    with pytest.raises(ValueError, match="runs with other ops on"):
        best.simulate()


@pytest.mark.parametrize(("fixed", "words"), [
    ({"schedule": "gpipe"}, "plans over two kinds of nodes have schedule=1f1b; got 'gpipe'"),
    ({"chunks": 2}, "have chunks=1; got 2"),
    ({"balanced": True}, "have balanced=False; got True"),
    ({"order": "dp pp cp ep tp"}, "pp is outermost; got order='dp pp cp ep tp'"),
])
def test_it_refuses_settings_that_such_plans_cannot_have(fixed, words):
    with pytest.raises(ValueError, match=words):
        find_mixed(SPEC, hardware=both(), **ASKED, **fixed)


@pytest.mark.takes_seconds
def test_where_no_combination_can_be_the_reasons_are_told():
    plans = find_mixed(SPEC, hardware=both(), simulations=1, pp=3, **ASKED)
    assert plans.found == () and plans.best is None and plans.json(1)["plans"] == []
    assert "no plan over both parts: " in plans.counted and "do not divide the devices (" in plans.counted
    assert "slow alone: no plan is possible" in " ".join(str(plans).split())


def test_it_refuses_a_program():
    with pytest.raises(ValueError, match="are for Transformers; transformer is a program"):
        find_mixed(SPEC.function(ir.symbol("B")), hardware=both(), batch=8)


@pytest.mark.takes_seconds
def test_a_step_lasts_at_least_as_long_as_its_messages_hold_the_link_between_sites():
    plans = find_mixed(SPEC, hardware=both(rate=2e5), simulations=1, pp=2, tp=2, sp=True, zero=0, microbatch=1,
                       recompute="none", batch=32)
    best = next(plan for plan in plans.found if isinstance(plan.arrangement, Stages)).simulated()
    nbytes = SPEC.sequence * SPEC.width * 4              # of a sequence, in float32, which both replicas send
    held = best.microbatches * best.mesh.shape["dp"] * nbytes / 2e5
    assert held < best.bound_seconds <= best.seconds < 2.5 * held


@pytest.mark.slow
def test_a_faster_part_has_more_rows(replicated):
    best = replicated.found[0]
    (slow, fast), counts = best.arrangement.rows, best.arrangement.counts
    assert best.hardware.labels == ("slow", "fast") and slow < fast and counts == (2, 2)
    assert best.arrangement.microbatches * 2 * (slow + fast) == 8
    assert best.run.pipeline.shares == (slow, slow, fast, fast) and best.mesh.axes[0] == "dp"
    assert best.parts_text == f"2 replicas on slow with mb={slow}, 2 replicas on fast with mb={fast}; microbatches: 1"
    assert best.json()["parts_of_hardware"][1] == {
        "hardware": "fast", "replicas": 2, "microbatch": fast, "microbatches": 1, "peak_bytes": best.peak_bytes[1]}
