"""Where several devices share links, one device stands for all equal ones, and one transfer for all that run beside it."""

from dataclasses import replace
from typing import Any

import pytest

from parallelism import Hardware, equal_devices, ir, models, simulate
from parallelism.simulation import CannotFold, shared_channels, simulator
from parallelism.simulation.shared_channels import are_shared
from parallelism.timeline import fair_sharing
from parallelism.transforms import SGD, Adam, Strategy, train_step

B = ir.symbol("B")
SPEC = models.TransformerSpec(
    layers=4, width=32, heads=8, vocabulary=24, sequence=16, dtype="float32", positions="rotary", tied=False)
STEP = train_step(SPEC.function(B), Adam(0.1))
SHORT = train_step(replace(SPEC, layers=2).function(B), SGD(0.1))
TEXTS = (
    "pp=2 dp=4 tp=2 1f1b:2", "dp=4 tp=4 zero=1 overlap", "pp=4 dp=4 interleaved_1f1b:4x2", "dp=16 zero=3", "ring=4 dp=4",
    "pp=2 dp=2 tp=4 zb_h1:4", "pp=4 dp=2 tp=2 sp 1f1b:8", "tp=2 pp=4 dp=2 1f1b:4")


def slowed(name: str, factor: float) -> Hardware:
    """The hardware with slower links, so that communication is most of a step."""
    hardware = Hardware.preset(name)
    return replace(hardware, links=tuple(link.slowed(factor, 0.0) for link in hardware.links))


def placed(text: str, step: ir.Function = STEP) -> dict[str, Any]:
    """A step, its mesh and its batch."""
    strategy, mesh = Strategy.parse_on_mesh(text)
    return {"operation": strategy(step), "mesh": mesh, "batch": 16}


@pytest.mark.parametrize(("name", "shared"), [
    ("dgx-h100:2", False), ("mi300x-node:2", False), ("tpu-v4:2x2x4", True), ("h100-pcie-node:2", True),
    ("trainium2:1", True)])
def test_hardware_says_whether_a_channel_may_be_of_several_devices(name: str, shared: bool) -> None:
    assert are_shared(Hardware.preset(name)) is shared
    assert not are_shared(None)


@pytest.mark.takes_seconds
def test_a_message_stands_for_those_that_equal_devices_send_over_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(simulator, "SharedChannels", lambda *given: found.append(
        shared_channels.SharedChannels(*given)) or found[-1])
    inner, outer = Hardware.preset("dgx-a100:2").links
    hardware = replace(Hardware.preset("dgx-a100:2"), links=(
        replace(inner, extents=2), replace(outer.slowed(1e-4, 0.0), ports=1, striped=False)))
    given = placed("pp=2 dp=2 1f1b:2", SHORT)
    folded = simulate(hardware=hardware, fold=True, **given)
    assert folded.ranks == (0, 2)
    path = hardware.path(0, 2)
    rate = path.bytes_per_second / hardware.links[1].bytes_per_second
    for ends in ((0, 2), (1, 3)):
        route, lag = found[-1].message_route(*ends)
        assert route is not None and lag == path.latency_seconds
        assert (dict(route.channels), route.rate) == ({path.channels[0]: 2.0}, rate)     # the two are alike
    assert equal_devices(given["operation"], hardware, mesh=given["mesh"], batch=16).sizes.tolist() == [2, 2]
    whole, alone = simulate(hardware=hardware, **given), simulate(hardware=hardware, link_sharing=False, **given)
    assert folded.makespan_seconds == pytest.approx(whole.makespan_seconds, rel=1e-12)
    assert folded.makespan_seconds > 1.5 * alone.makespan_seconds


@pytest.mark.takes_seconds
def test_devices_without_equals_are_simulated_as_all_are() -> None:
    hardware, given = slowed("h100-pcie-node:1", 1e-2), placed("pp=2 dp=2 tp=2 1f1b:4", SHORT)
    folded, whole = (simulate(hardware=hardware, fold=fold, op_by_op=True, **given) for fold in (True, False))
    assert len(folded.ranks) == 8
    assert folded.makespan_seconds == whole.makespan_seconds


@pytest.mark.takes_seconds
def test_too_many_transfers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_channels, "MOST_TRANSFERS", 7)
    given = placed("pp=2 dp=8 1f1b:2", SHORT)
    with pytest.raises(CannotFold, match=r"too many messages and collectives share links.*simulate them all"):
        simulate(hardware="tpu-v4:4x4x1", fold=True, **given)
    assert simulate(hardware="tpu-v4:4x4x1", fold=None, **given).ranks == tuple(range(16))
    assert simulate(hardware="tpu-v4:4x4x1", fold=True, link_sharing=False, **given).ranks[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "op_by_op"), [(1e-2, False), (1e-4, True)])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["tpu-v4:2x2x4", "tpu-v4:4x4x2", "h100-pcie-node:2", "trainium2:1"])
def test_folded_is_whole(name: str, text: str, factor: float, op_by_op: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_sharing, "FEW", 10**6)     # rates are exact in the whole simulation, too
    hardware, given = slowed(name, factor), placed(text)
    folded = simulate(hardware=hardware, fold=True, op_by_op=op_by_op, **given)
    whole = simulate(hardware=hardware, fold=False, **given)
    assert folded.makespan_seconds == pytest.approx(whole.makespan_seconds, rel=1e-9)
    assert {rank: whole.peaks()[rank] for rank in folded.ranks} == folded.peaks()
    assert "pcie" in name or len(folded.ranks) < 16
