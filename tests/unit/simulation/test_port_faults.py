"""Faults of single ports: what a group pays for them, and that equal devices still stand for each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parallelism import Costs, Hardware, LinkFault, Mesh, models
from parallelism.planning import find_plan
from parallelism.simulation.folding import same_prices

SPEC = models.TransformerSpec(layers=4, width=16, heads=4, vocabulary=24, sequence=12, dtype="bfloat16")
NODES = Hardware.preset("dgx-h100:3")


def slowed(hardware: Hardware, *ranks: int, factor: float = 0.5, level: str = "infiniband") -> Hardware:
    for rank in ranks:
        hardware = hardware.fault(source=rank, bandwidth_factor=factor, level=level)
        hardware = hardware.fault(target=rank, bandwidth_factor=factor, level=level)
    return hardware


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize(("group", "is_slow"), [
    (range(24), True), (range(0, 24, 8), True), (range(1, 24, 8), False), (range(8), False), (range(8, 24), False),
    ((0, 1), False), ((0, 9), True), ((9, 0, 1), True)])
def test_a_group_goes_as_fast_as_its_slowest_port_where_it_crosses_the_level(group: Any, is_slow: bool) -> None:
    """Half the bandwidth of InfiniBand is what hardware with half of it everywhere has; other groups notice nothing."""
    node, network = NODES.links
    slow = replace(NODES, links=(node, network.slowed(0.5, 0.0)))
    faulty = Costs(slowed(NODES, 0))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        for nbytes in (2**12, 2**28):
            expected = Costs(slow if is_slow else NODES).collective(kind, nbytes, group)
            found = faulty.collective(kind, nbytes, group)
            assert found == expected
            assert dict(faulty.channel_bytes(found, group)) == dict(Costs(NODES).channel_bytes(expected, group))


def test_a_message_meets_the_fault_on_its_level_alone() -> None:
    faulty = Costs(slowed(NODES, 0, factor=0.25))
    for source, target, is_slow in ((0, 8, True), (8, 0, True), (0, 1, False), (1, 9, False)):
        whole = Costs(NODES).path(source, target)
        found = faulty.path(source, target)
        assert found.bytes_per_second == (0.25 * 50e9 if is_slow else whole.bytes_per_second)
        assert len(found.channels) == len(whole.channels) + is_slow
    late = Costs(NODES.fault(source=3, delay_seconds=1.0, level="nvlink"))
    assert late.message_seconds(0, 3, 2) > 1 > late.message_seconds(0, 2, 3)
    assert late.collective("all_reduce", 8.0, range(8)).seconds > 1 > late.collective("all_reduce", 8.0, (0, 8, 16)).seconds


def test_groups_have_equal_prices_behind_equally_slow_ports() -> None:
    groups = np.arange(24).reshape(3, 8).T.copy()
    assert same_prices(NODES, groups).tolist() == [0] * 8
    found = same_prices(slowed(NODES, 2, 13, 21), groups)
    assert (found == found[2]).tolist() == [False, False, True, False, False, True, False, False]
    assert len({*found.tolist()}) == 2
    assert len({*same_prices(slowed(slowed(NODES, 2), 5, factor=0.3), groups).tolist()}) == 3
    assert same_prices(slowed(NODES, 2, level="nvlink"), groups).tolist() == [0] * 8


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {"pp": 3, "dp": 4, "tp": 2, "zero": 1}, {"pp": 1, "dp": 12, "tp": 2, "zero": 1}, {"pp": 3, "dp": 8, "tp": 1, "zero": 0},
    {"pp": 2, "dp": 3, "tp": 4, "zero": 1, "chunks": 2, "schedule": "interleaved_1f1b"},
    {"pp": 1, "dp": 6, "tp": 4, "zero": 1, "overlap": True}], ids=str)
@pytest.mark.parametrize("ranks", [(0,), (0, 10, 20)], ids=str)
def test_a_folded_step_is_the_whole_one(settings: dict[str, Any], ranks: tuple[int, ...]) -> None:
    given: dict[str, Any] = {"schedule": "1f1b", "microbatch": 1, "sp": False, "recompute": "none", "cp": 1,
                             "order": "pp dp cp tp", **settings}
    plan = find_plan(SPEC, hardware=NODES, devices=24, batch=48, simulations=0, **given)[0]
    for hardware in (slowed(NODES, *ranks), slowed(NODES, *ranks).slow(rank=5, factor=1.5)):
        task = replace(plan.task, hardware=hardware)
        for link_sharing in (False, True):
            folded = task.simulate(plan.settings, link_sharing=link_sharing)
            whole = task.simulate(plan.settings, fold=False, link_sharing=link_sharing)
            assert folded.makespan_seconds == pytest.approx(whole.makespan_seconds, rel=1e-9)
            if not link_sharing and len(ranks) == 1 and not hardware.stragglers:
                assert len(folded.ranks) < 24 == len(whole.ranks)
        perfect = replace(plan.task, hardware=NODES).simulate(plan.settings, link_sharing=False).makespan_seconds
        assert task.simulate(plan.settings, link_sharing=False).makespan_seconds >= perfect * (1 - 1e-12)


def test_a_fault_of_a_port_has_one_end_and_a_level_that_there_is(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="a fault of a port on the level nvlink has one end; got source 0 and target 1"):
        LinkFault(0, 1, level="nvlink")
    with pytest.raises(ValueError, match=r"faults\[0\].level must be one of nvlink, infiniband; got 'ethernet'"):
        NODES.fault(source=0, level="ethernet")
    faulty = slowed(NODES, 3)
    assert "3 to any on infiniband: 0 s later, 0.5 of the bandwidth" in " ".join(str(faulty).split())
    faulty.save(tmp_path / "faulty.json")
    assert Hardware.load(tmp_path / "faulty.json").faults == faulty.faults and Mesh(dp=24).size == faulty.devices
