"""The memory that tensors cannot use: what a hardware reserves, what a search leaves free, and what is told of it."""

from dataclasses import replace

import pytest

from parallelism import Hardware, models
from parallelism.hardware import Reserve
from parallelism.planning import NoPlanFits, find_plan

SPEC = models.TransformerSpec(
    layers=2, width=12, heads=2, vocabulary=22, sequence=6, biases=False, norm="rms", activation="relu")
FEW = {"microbatch": 2, "recompute": "none", "order": "pp dp cp tp", "schedule": "1f1b", "sp": False, "zero": 0}
DGX = Hardware.preset("dgx-h100:1").placed(range(2))


def found(**options):
    return find_plan(SPEC, **{"hardware": DGX, "devices": 2, "batch": 4, **FEW, **options})


def test_what_tensors_may_use_is_what_the_reserve_leaves():
    reserve = Reserve(context_bytes=10, communicator_bytes=3, waste=0.25)
    assert reserve.usable_bytes(100, 0) == 72
    assert reserve.usable_bytes(100, 5) == 60
    assert Reserve().usable_bytes(100, 5) == 100
    assert not Reserve() and reserve
    assert reserve.text == "10 B a process, 3 B a communicator, 25 % of what tensors hold"


@pytest.mark.parametrize(("fields", "error"), [
    ({"waste": 1.5}, ValueError), ({"context_bytes": -1}, ValueError), ({"communicator_bytes": "1"}, TypeError)])
def test_a_reserve_that_cannot_be_is_refused_by_its_field(fields, error):
    with pytest.raises(error, match=next(iter(fields))):
        Reserve(**fields)


@pytest.mark.slow
def test_a_plan_fits_if_its_tensors_and_the_reserve_do():
    every = found(memory=1e6)
    assert {sum(n > 1 for n in plan.mesh.shape.values()) for plan in every} == {1}
    least = min(plan.peak_bytes for plan in every)
    reserve = Reserve(context_bytes=1000, communicator_bytes=500, waste=0.5)
    for limit, fits in ((1000 + 500 + 1.5 * least, True), (1000 + 500 + 1.5 * least - 1, False)):
        plans = found(memory=limit, reserve=reserve)
        assert bool(len(plans)) == fits
        if not fits:
            with pytest.raises(NoPlanFits, match=r"reserved in part \(1 kB a process, 500 B a communicator, 50 % of what"):
                plans.best  # noqa: B018
    assert [plan.peak_bytes for plan in every] == [plan.peak_bytes for plan in found(memory=1e6, reserve=reserve)]


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "reserve", "kept"), [
    (None, None, DGX.reserve), ("72GB", None, Reserve()), ("72GB", "4GB", Reserve(4e9)), (None, 5e9, Reserve(5e9)),
    (None, 0, Reserve()), (None, "0", Reserve()), ("72GB", Reserve(1.0), Reserve(1.0))])
def test_the_hardware_says_what_is_reserved_unless_the_memory_or_the_reserve_is_given(memory, reserve, kept):
    plans = found(memory=memory, reserve=reserve)
    assert plans.reserve == kept
    assert plans.again(zero=1).reserve == kept


@pytest.mark.parametrize(("reserve", "message"), [
    ("much", "reserve must be a number of bytes, or a text such as 72GB"), (-1, "reserve must be at least 0 bytes"),
    ("-1", "reserve must be at least 0 bytes and finite; got '-1'"), ("4", "reserve must have a unit, such as 4GB")])
def test_a_reserve_that_is_no_amount_is_refused(reserve, message):
    with pytest.raises(ValueError, match=message):
        found(reserve=reserve)


def test_presets_of_gpus_reserve_and_others_do_not():
    names = {name for name in Hardware.presets() if Hardware.preset(name).reserve}
    assert {"dgx-h100", "dgx-a100", "h200-node", "mi300x-node", "l40s-node"} <= names
    assert names.isdisjoint({"laptop", "ethernet-cpu", "tpu-v4", "trainium2"})
    reserve = DGX.reserve
    assert replace(DGX, reserve=Reserve()) != DGX
    assert 1e9 < 80e9 - reserve.usable_bytes(80e9, 3) < 8e9
