"""On fully connected nodes each link is of one device, so one device stands for all equal ones, as with ports of its own."""

from dataclasses import replace

import numpy as np
import pytest

from parallelism import Hardware, ir, models, simulate, step_parts
from parallelism.simulation.folded_links import own_channels, own_ports
from parallelism.simulation.folding import Routes
from parallelism.trace import split
from parallelism.transforms import Adam, Strategy, train_step

SPEC = models.TransformerSpec(
    layers=2, width=32, heads=8, vocabulary=23, sequence=16, dtype="float32", positions="rotary", tied=False)


@pytest.mark.parametrize(("name", "ports", "channels"), [
    ("dgx-h100", True, True), ("mi300x-node", False, True), ("mi355x-node", False, True), ("tpu-v4", False, False),
    ("h100-pcie-node", False, False), ("trainium2", False, False)])
def test_hardware_says_whether_each_channel_is_of_one_device(name: str, ports: bool, channels: bool) -> None:
    hardware = Hardware.preset(name)
    assert (own_ports(hardware), own_channels(hardware)) == (ports, channels)


@pytest.mark.slow
@pytest.mark.parametrize("op_by_op", [False, True])
@pytest.mark.parametrize(("text", "ranks"), [
    ("pp=2 dp=4 1f1b:2", 8), ("dp=4 tp=2 zero=1 overlap", 8), ("dp=2 cp=2 tp=4 sp", 16), ("dp=16 zero=3", 16),
    ("ring=4 dp=2", 8), ("pp=2 dp=2 tp=4 zb_h1:4", 16)], ids=lambda value: str(value))
def test_folded_is_whole_on_fully_connected_nodes(text: str, ranks: int, op_by_op: bool) -> None:
    strategy, mesh = Strategy.parse_on_mesh(text)
    step = strategy(train_step(SPEC.function(ir.symbol("B")), Adam(0.1)))
    given = {"mesh": mesh, "batch": 16}
    folded = simulate(step, "mi300x-node:2", fold=True, op_by_op=op_by_op, **given)
    whole = simulate(step, "mi300x-node:2", fold=False, **given)
    assert len(folded.ranks) < ranks == len(whole.ranks)
    assert folded.makespan_seconds == pytest.approx(whole.makespan_seconds, rel=1e-9)
    assert {rank: whole.peaks()[rank] for rank in folded.ranks} == folded.peaks()
    assert set(whole.peaks().values()) == set(folded.peaks().values())


@pytest.mark.slow
def test_a_folded_simulation_has_what_shares_the_ports_of_a_device() -> None:
    """Between the nodes, sums of gradients go on while activations are sent."""
    strategy, mesh = Strategy.parse_on_mesh("pp=2 dp=16 1f1b:4 overlap")
    spec = replace(SPEC, width=512)
    step = strategy(train_step(spec.function(ir.symbol("B")), Adam(0.1)))
    given = {"mesh": mesh, "batch": 128}
    whole, unshared = (
        simulate(step, "mi300x-node:4", link_sharing=shared, **given).makespan_seconds for shared in (True, False))
    folded = simulate(step, "mi300x-node:4", fold=True, op_by_op=True, **given)
    assert len(folded.ranks) < 32 and unshared < (1 - 1e-4) * whole
    assert folded.makespan_seconds == pytest.approx(whole, rel=1e-9)


DEEP = replace(SPEC, layers=4, width=64, heads=16, vocabulary=48)


@pytest.mark.takes_seconds
@pytest.mark.parametrize(("spec", "text"), [
    (DEEP, "pp=2 dp=2 ring=2 tp=8 sp zero=1 overlap interleaved_1f1b:4x2"),
    pytest.param(DEEP, "pp=3 dp=2 ring=2 tp=8 sp zero=2 overlap 1f1b:6", marks=pytest.mark.slow),
    pytest.param(
        replace(DEEP, experts=models.Experts(count=16, chosen=2, width=32)),
        "pp=2 ep=8 tp=2 sp zero:ep=1 overlap interleaved_1f1b:4x2", marks=pytest.mark.slow),
], ids=["interleaved", "one_stage", "experts"])
def test_a_collective_that_is_waited_for_before_the_next_begins_is_in_a_run(spec: models.TransformerSpec, text: str) -> None:
    """Rings, or the rows of experts, and messages share links between nodes; tensor parallelism is inside of them."""
    strategy, mesh = Strategy.parse_on_mesh(text)
    step = strategy(train_step(spec.function(ir.symbol("B")), Adam(0.1)))
    given = {"hardware": f"dgx-h100:{mesh.size // 8}+megatron-h100", "mesh": mesh, "batch": 24 * mesh.shape.get("dp", 8)}
    parts, ops = step_parts(step, **given), simulate(step, fold=True, op_by_op=True, **given)
    seconds = ops.makespan_seconds
    assert parts.trace.makespan_seconds == pytest.approx(seconds, rel=1e-12) and parts.trace.peaks() == ops.peaks()
    told = [len(trace.filter(kind="collective", axes="tp")) for trace in (parts.trace, ops)]
    assert 0 < 5 * told[0] < 4 * told[1]
    others = [axis for axis in ("cp", "ep") if axis in mesh.shape]
    for axis in others:
        few, every = (len(trace.filter(kind="collective", axes=axis)) for trace in (parts.trace, ops))
        assert few == every > 0
    for rank, one in split(ops).items():
        assert parts.split[rank] == pytest.approx(one, rel=0, abs=1e-11 * seconds)


@pytest.mark.parametrize("name", ["dgx-h100:2", "tpu-v4:2x2x4", "mi300x-node:2", "h100-pcie-node:2", "trainium2:1"])
def test_the_levels_of_many_messages_are_those_of_their_paths(name: str) -> None:
    hardware = Hardware.preset(name)
    ranks = np.arange(16)
    for distance in (1, 3, 8, 15):
        ends = ranks[:-distance], ranks[distance:]
        paths = [hardware.path(*each) for each in zip(*(side.tolist() for side in ends), strict=True)]
        assert Routes(hardware, *ends).levels(hardware) == {
            channel[0] for path in paths for channel in path.channels}
