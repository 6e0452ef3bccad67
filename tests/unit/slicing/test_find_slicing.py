"""`find_slicing`: what it chooses by is what a simulation says, and it refuses what cannot be."""

import numpy as np
import pytest
from sliced import B, every_slicing, slow, uneven

from parallelism import Mesh, ir, models
from parallelism.slicing import NoSlicingFits, SlicedPlan, SlicedPlans, SlicingTask, find_slicing, search
from parallelism.slicing.search import _slices, _Timed
from parallelism.transforms import SGD, Strategy

ASKED = {"hardware": slow(), "devices": 4, "batch": 16, "microbatches": 4}


@pytest.fixture(scope="module", autouse=True)
def priced():
    """The blocks of a task are priced once for all tests; the tasks with their prices."""
    price, found = search._priced, []

    def once(task, *told):
        if not any(each == task for each, _ in found):
            found.append((task, price(task, *told)))
        return next(prices for each, prices in found if each == task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_priced", once)
        yield once


@pytest.fixture(scope="module")
def found(priced):
    return find_slicing(uneven(), **ASKED, optimizer=SGD(0.1), simulations=2)


@pytest.mark.slow
def test_the_first_is_the_fastest_of_those_that_were_simulated(found):
    assert isinstance(found, SlicedPlans) and isinstance(found.task, SlicingTask) and found.best is found[0]
    simulated = [each for each in found if each.simulated_seconds is not None]
    assert len(simulated) == 2 and simulated == list(found[:2]) and isinstance(found[0], SlicedPlan)
    assert [each.seconds for each in simulated] == sorted(each.seconds for each in simulated)
    for each in simulated:
        trace = each.simulate()
        assert (trace.makespan_seconds, max(trace.peaks().values())) == (each.simulated_seconds, each.peak_bytes)
    assert len({mesh.size for mesh in found.best.meshes}) > 1 and found.best.mesh == Mesh(devices=4)
    assert sum(mesh.size for mesh in found.best.meshes) == 4
    assert Strategy.parse_on_mesh(str(found.best)) == (found.best.strategy, found.best.mesh)
    assert "@mlp.step on 4 devices of dgx-h100, 16 rows in 4 microbatches" in str(found)


@pytest.mark.slow
def test_no_even_split_of_the_same_devices_is_faster(found):
    even = [each for each in found if len({mesh.size for mesh in each.meshes}) == 1]
    assert even and min(each.simulate().makespan_seconds for each in even) > found.best.seconds


@pytest.mark.slow
def test_stages_of_one_block_are_timed_and_weighed_as_they_are_simulated():
    # Four blocks on four devices, so that some slicing has a block on each; without shared links nothing is missing.
    plans = find_slicing(models.mlp((8, 16, 64, 32, 4), B), **ASKED, optimizer=SGD(0.1), simulations=1, strategy="tp")
    alone = next(each for each in plans if len(each.meshes) == 4)
    trace = alone.simulate(link_sharing=False)
    assert alone.timeline_seconds == pytest.approx(trace.makespan_seconds, rel=1e-9)
    slices = _slices(search._priced(plans.task)[1])
    weighed = [slices.bytes_of(each, 4 - place) for place, each in enumerate(alone.slicing.slices)]
    assert weighed == [trace.peaks()[rank] for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_every_slicing_is_nearly_as_it_was_timed_and_weighed(found, every):
    slices = _slices(search._priced(found.task)[1])
    for each in found[::every]:
        trace, first = each.simulate(link_sharing=False), 0
        assert each.timeline_seconds == pytest.approx(trace.makespan_seconds, rel=0.02)
        for place, (own, mesh) in enumerate(zip(each.slicing.slices, each.meshes, strict=True)):
            peak = max(trace.peaks()[rank] for rank in range(first, first + mesh.size))
            assert 0.98 * peak <= slices.bytes_of(own, min(len(each.meshes) - place, 4)) <= 1.1 * peak
            first += mesh.size


@pytest.mark.slow
def test_the_first_timeline_is_the_least_of_all_slicings():
    plans = find_slicing(uneven(), **ASKED, optimizer=SGD(0.1), simulations=0)
    _, costs, _ = search._priced(plans.task)
    clock, slices = _Timed(plans.task, costs), _slices(costs)
    every = [each for each, _ in every_slicing(slices, devices=4, microbatches=4, most_stages=5)]
    assert len(every) > 5 * len(plans) and plans.best.peak_bytes is None
    assert min(clock.plan(each).timeline_seconds for each in every) == plans.best.timeline_seconds


@pytest.mark.slow
def test_less_memory_leads_to_stages_that_hold_less(found):
    limit = found.best.peak_bytes - 1
    smaller = find_slicing(uneven(), **ASKED, optimizer=SGD(0.1), simulations=1, memory=limit)
    assert smaller.best.peak_bytes <= limit and smaller.best.seconds > found.best.seconds
    with pytest.raises(NoSlicingFits, match=r"no slicing has 5 blocks .* with 1 kB a device: the one that needs least"):
        find_slicing(uneven(), **ASKED, optimizer=SGD(0.1), memory=1000)


@pytest.mark.slow
def test_meshes_that_the_rows_do_not_fill_are_refused_with_the_reason():
    plans = find_slicing(uneven(), **ASKED | {"batch": 8}, optimizer=SGD(0.1), simulations=1, strategy="dp",
                         begin=["layer.2"])
    assert plans.refused == {Mesh(dp=4): "2 rows of a microbatch are no multiple of dp=4"}
    assert all(mesh.size < 4 for each in plans for mesh in each.meshes)


@pytest.mark.slow
def test_only_tensors_may_be_split():
    plans = find_slicing(uneven(), **ASKED, optimizer=SGD(0.1), simulations=0, strategy="tp",
                         begin=["layer.2", "layer.3"])
    assert {mesh.axes for each in plans for mesh in each.meshes} == {("tp",)}
    assert {each.first for plan in plans for each in plan.slicing.slices} <= {0, 1, 2}
    assert str(plans.best) == "tp pp@layer.2,layer.3 1f1b:4,meshes=tp=1|tp=2|tp=1"


@pytest.mark.slow
def test_a_model_without_numbered_regions_is_one_block():
    def loss(p, x):
        return np.mean((x @ p["w"]) ** 2)

    function = ir.record(loss, {"w": ir.TensorType("f8", (8, 4))}, ir.TensorType("f8", (B, 8)), name="plain")
    plans = find_slicing(function, **ASKED, optimizer=SGD(0.1), simulations=1)
    assert {len(each.meshes) for each in plans} == {1} and plans.best.strategy.pipeline.begin == ()
    assert plans.best.simulate().makespan_seconds == plans.best.seconds


@pytest.mark.takes_seconds
def test_an_axis_that_splits_nothing_is_left_out():
    def loss(p, x):
        return np.mean((x * p["scale"] + p["shift"]) ** 2)

    vector = ir.TensorType("f8", (8,))
    function = ir.record(loss, {"scale": vector, "shift": vector}, ir.TensorType("f8", (B, 8)), name="scaled")
    plans = find_slicing(function, **ASKED, optimizer=SGD(0.1), simulations=0)
    assert {mesh.axes for each in plans for mesh in each.meshes} == {("dp",)}
    assert {*plans.refused} == {Mesh(dp=1, tp=2), Mesh(dp=2, tp=2), Mesh(dp=1, tp=4)}
    assert "no weight of @scaled.step is left to be split over 'tp'" in plans.refused[Mesh(dp=1, tp=2)]
    with pytest.raises(NoSlicingFits, match="no mesh can have a stage: tp: no weight of "):
        find_slicing(function, **ASKED, strategy="tp")


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("more", "message"), [
    ({"begin": ["layer.9"]}, "no mesh can have a stage: .*layer.9"),
    ({"batch": 18}, "batch must be a multiple of the 4 microbatches, got 18"),
    ({"microbatches": 0}, "microbatches must be an integer of at least 1, got 0"),
    ({"simulations": True}, "simulations must be an integer of at least 0, got True"),
    ({"strategy": "dp tp pp 1f1b:2"}, "inside a stage, without a pipeline; got dp tp pp"),
    ({"strategy": "dp tp cp"}, "over one axis or two, such as dp tp; got 'dp cp tp', over dp and cp and tp"),
    ({"strategy": "recompute=layer.*"}, "over none"),
])
def test_what_cannot_be_is_refused(more, message):
    with pytest.raises(ValueError, match=message):
        find_slicing(uneven(), **ASKED | more)


def test_a_program_must_have_the_symbol_of_its_rows():
    with pytest.raises(ValueError, match="must have the symbol B for the rows of its batch"):
        find_slicing(uneven(4), **ASKED)


def test_the_only_symbol_of_a_program_is_that_of_its_rows():
    assert str(find_slicing(uneven(ir.symbol("N")), **ASKED)) == str(find_slicing(uneven(), **ASKED))
