"""Groups that lie alike share a price, and ports of their own are priced by rule: equal to each looked at by itself."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drawn import up_to
from hypothesis import given, strategies as st

from parallelism.algorithms import kind_of
from parallelism.algorithms.patterns import Around, OneByOne, Phase, Rule, Swap, Turns, each_phase, with_root
from parallelism.cost import Costs, cost, own_ports, phase_costs
from parallelism.cost.group_shapes import blocks_of, group_shapes, has_own_ports
from parallelism.cost.hierarchical import Groups
from parallelism.cost.lines import Line, Term
from parallelism.hardware import Hardware, Link

BASE = Hardware.preset("dgx-h100:2")
KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "scatter", "gather", "barrier")
SHAPES = ("switch", "fully_connected", "ring")


@st.composite
def hardwares(draw: st.DrawFn) -> Hardware:
    """Up to three levels of links, on which ranks may lie in any order."""
    links, inside = [], 1
    for level in range(draw(st.integers(1, 3))):
        ports = draw(st.sampled_from([None, None, 1, inside]))
        link = Link(
            f"level {level}", draw(st.integers(2, 4)), draw(st.sampled_from([0.0, 1e-6, 1.1e-6, 3e-6])),
            draw(st.sampled_from([1e9, 3.3e9, 7e8])), draw(st.sampled_from(SHAPES)), ports)
        links.append(link)
        inside *= link.units
    hardware = replace(BASE, links=tuple(links), placement=())
    return hardware.placed(draw(st.permutations(range(inside)))) if draw(st.booleans()) else hardware


@st.composite
def groups_of(draw: st.DrawFn, hardware: Hardware) -> tuple[int, ...]:
    """Neighbours, or ranks at equal distances, or any."""
    count = hardware.ranks
    size = draw(st.integers(2, count))
    step = draw(st.integers(1, count // size))
    regular = range(draw(st.integers(0, count - 1 - (size - 1) * step)), count, step)[:size]
    return tuple(draw(st.sampled_from([regular, draw(st.permutations(range(count)))[:size]])))


@up_to(15)
@given(st.data())
def test_prices_are_those_of_each_group_looked_at_message_by_message(data: st.DataObject) -> None:
    hardware = data.draw(hardwares())
    groups = [data.draw(groups_of(hardware)) for _ in range(3)]
    kind, nbytes = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from([0, 1000, 2**20, 2**31 + 1]))

    def told(costs: Costs) -> list[object]:
        found: list[object] = []
        for group in groups:
            root = len(group) - 1 if kind_of(kind).rooted else 0
            price = costs.collective(kind, nbytes, group, root=root)
            found += [price, costs.channel_bytes(price, group, root=root), costs.prices(kind, nbytes, group, root=root)]
        return found

    by_rule = told(Costs(hardware))
    with pytest.MonkeyPatch.context() as patch:
        for module in (cost, phase_costs):
            patch.setattr(module, "has_own_ports", lambda hardware: False)
        patch.setattr(cost.Costs, "_like", lambda self, ranks: ranks)
        phase_costs.patterns_of.cache_clear()
        assert told(Costs(hardware)) == by_rule


def test_turns_have_the_terms_of_their_phases_in_their_order() -> None:
    for extents in ((2, 3, 2), (4, 3), (5,), (2, 2, 2)):
        links = [Link(f"level {i}", extent, 1e-6 / (i + 1), 1e9 * (i + 1)) for i, extent in enumerate(extents)]
        hardware = replace(BASE, links=tuple(links), placement=())
        for size in range(2, hardware.ranks + 1):
            turns = Turns(size, 3, size)
            for start in range(hardware.ranks - size + 1):
                groups = (tuple(range(start, start + size)),)
                by_rule = phase_costs.terms(hardware, (turns, turns), groups)
                one_by_one = phase_costs.terms(hardware, tuple(turns) * 2, groups)
                assert list(by_rule.items()) == list(one_by_one.items())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("striped", [False, True])
def test_single_messages_in_turn_have_the_terms_of_their_phases(striped: bool) -> None:
    for extents in ((2, 3, 2), (4, 3), (5,)):
        links = [Link(f"level {i}", extent, 1e-6 / (i + 1), 1e9 * (i + 1), striped=striped and i == len(extents) - 1)
                 for i, extent in enumerate(extents)]
        hardware = replace(BASE, links=tuple(links), placement=())
        for size, step in ((size, step) for size in range(2, hardware.ranks + 1) for step in (1, 2, 3)):
            groups = (tuple(range(0, size * step, step)),)
            if groups[0][-1] >= hardware.ranks:
                continue
            for root, away in ((0, True), (size - 1, False), (size // 2, True)):
                around_it = np.arange(root, root + size) % size
                chain = OneByOne(around_it[:-1], around_it[1:], 1)
                for rule in (with_root(size, root, away, size), chain):
                    by_rule = phase_costs.terms(hardware, (rule,), groups)
                    in_turn = phase_costs.terms(hardware, tuple(rule), groups)
                    assert list(by_rule.items()) == list(in_turn.items()), (groups, root)


def test_groups_that_lie_alike_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Groups] = []

    def counted(hardware: Hardware, rules: Any, groups: Groups, *more: Any) -> dict[phase_costs.Term, int]:
        asked.append(groups)
        return phase_costs.terms(hardware, rules, groups, *more)

    monkeypatch.setattr(cost, "terms", counted)
    costs = Costs(Hardware.preset("dgx-h100:4"))
    first = costs.collective("all_reduce", 2**20, range(0, 32, 2))
    count = len(asked)
    assert count and all(len(groups) == 1 for groups in asked)     # the groups of a part lie alike, too
    assert costs.collective("all_reduce", 2**20, range(1, 32, 2)) == first
    assert costs.collective("all_reduce", 2**21, range(1, 32, 2)) != first
    assert len(asked) == count
    costs.collective("all_reduce", 2**20, range(16))
    assert len(asked) > count


def test_shapes_of_groups() -> None:
    hardware = Hardware.preset("dgx-h100:4")
    assert has_own_ports(hardware)
    shapes = group_shapes(hardware, np.array([[0, 1, 8, 9], [3, 5, 30, 24], [0, 8, 1, 9], [0, 1, 2, 8]]))
    alike = [[bool((one == other).all()) for other in shapes] for one in shapes]
    assert alike == [[True, True, False, False], [True, True, False, False], [False, False, True, False],
                     [False, False, False, True]]
    blocks = blocks_of(hardware, tuple(range(8, 24)))
    assert blocks is not None and blocks.inside == (1, 8, 16)
    assert [blocks.levels(distance) for distance in (1, 7, 8, 9, 15)] == [(0, 1), (0, 1), (1,), (0, 1), (0, 1)]
    assert blocks_of(hardware, (0, 1, 8)) is None and blocks_of(hardware, (0, 8, 1, 9)) is None
    with pytest.raises(ValueError, match="dgx-h100 has places for ranks 0 to 31, got rank 32"):
        Costs(hardware).collective("all_reduce", 1, [0, 32])


def test_messages_between_the_same_ranks_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    pattern = phase_costs._pattern
    monkeypatch.setattr(phase_costs, "_pattern", lambda hardware, phase, *more: looked.append(
        len(phase.sources)) or pattern(hardware, phase, *more))
    phase_costs.patterns_of.cache_clear()
    hardware = Hardware.preset("tpu-v5e")
    ring = [Costs(hardware).collective("all_to_all", 2**20 * i, range(64), algorithm="ring") for i in (1, 2)]
    assert ring[0].seconds < ring[1].seconds and looked == [64]         # 63 phases round one ring
    Costs(Hardware.preset("tpu-v5e")).collective("all_reduce", 2**20, range(64), algorithm="ring")
    assert looked == [64]
    Costs(hardware).collective("all_reduce", 2**20, range(64), algorithm="recursive_doubling")
    assert looked == [64] * 7
    for kind in ("reduce_scatter", "all_gather"):
        Costs(hardware).collective(kind, 2**20, range(64), algorithm="ring")
        Costs(hardware).collective("all_reduce", 2**20, range(64), algorithm="halving_doubling")
    assert looked == [64] * 7


def test_where_each_device_has_ports_of_its_own_no_message_of_a_rule_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[list[int]] = []
    many = phase_costs.many_lines
    monkeypatch.setattr(phase_costs, "many_lines", lambda hardware, made, *more: looked.append(
        [len(phase.sources) for phase in made]) or many(hardware, made, *more))
    monkeypatch.setattr(phase_costs, "_pattern", None)
    costs = Costs(Hardware.preset("dgx-h100:64"))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"):
        for name in costs.algorithms(kind, range(512)):
            if name not in ("tree", "hierarchical"):
                costs.collective(kind, 2**20, range(512), algorithm=name)
    assert not looked
    costs.collective("reduce", 2**20, range(512), algorithm="tree")
    assert looked == [[256, 128, 64, 32, 16, 8, 4, 2, 1]]


def _lines_by_hand(hardware: Hardware, phase: Phase, group: tuple[int, ...]) -> tuple[Line, ...]:
    """Of messages that are each alone at their ends: message by message, in plain Python."""
    messages = [(group[source], group[target], part) for source, target, part in
                zip(phase.sources.tolist(), phase.targets.tolist(), phase.parts.tolist(), strict=True)]
    lines = []
    for level, link in enumerate(hardware.links):
        met = [each for each in messages if each[0] != each[1] and hardware.level(*each[:2]) == level]
        if not met:
            continue
        load, ports = max(part for *_, part in met), 1
        if link.striped:
            units = [[hardware.place(rank) // hardware.inside(level) for rank in ranks] for ranks in (
                group, [source for source, *_ in met], [target for _, target, _ in met])]
            loads = []
            for unit in sorted(set(units[0])):
                crossing = max(sum(part for each, (*_, part) in zip(ends, met, strict=True) if each == unit)
                               for ends in units[1:])
                loads.append((crossing, units[0].count(unit)))
            load, ports = max(loads, key=lambda each: each[0] / each[1])
        lines.append(Line(link.latency_seconds, load, phase.whole * link.bytes_per_second * ports))
    return tuple(lines)


@up_to(60)
@given(st.data())
def test_phases_and_rules_have_the_lines_of_their_messages_on_striped_links_too(data: st.DataObject) -> None:
    extents = data.draw(st.sampled_from([(2, 3, 2), (4, 3), (5,), (2, 2, 2), (8, 2)]))
    links = [Link(f"level {i}", extent, 1e-6 / (i + 1), 1e9 * (i + 1), striped=i == len(extents) - 1)
             for i, extent in enumerate(extents)]
    hardware = replace(BASE, links=tuple(links), placement=())
    group = data.draw(groups_of(hardware))
    size = len(group)
    parts = st.integers(1, 9)
    distance = data.draw(st.integers(1 - size, size - 1).filter(bool))
    rules: list[Rule] = [Around(size, distance, (data.draw(parts),), 7, 3)]
    if size & (size - 1) == 0:
        rules += [Swap(size, 1 << k, data.draw(parts), 5) for k in range(size.bit_length() - 1)]
    if blocks_of(hardware, group) is None:
        rules.append(Turns(size, data.draw(parts), size))
    some = data.draw(st.integers(1, size))
    sources, targets = (np.array(data.draw(st.permutations(range(size)))[:some]) for _ in range(2))
    rules.append(Phase(1, sources, targets, np.array(data.draw(st.lists(parts, min_size=some, max_size=some))), 3))
    by_hand: dict[Term, int] = {}
    for phase in each_phase(rules):
        term = Term(_lines_by_hand(hardware, phase, group))
        by_hand[term] = by_hand.get(term, 0) + phase.times
    assert list(phase_costs.terms(hardware, rules, (group,)).items()) == list(by_hand.items())


@pytest.mark.parametrize("preset", ["dgx-h100:4", "tpu-v5e"])
def test_few_phases_at_a_time_have_the_terms_of_many(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware, group = Hardware.preset(preset), (0, 1, 2, 3, 4, 8, 9, 12, 17)
    for kind, root in (("all_reduce", 0), ("all_to_all", 0), ("broadcast", 4), ("gather", 8)):
        told = Costs(hardware).prices(kind, 2**20, group, root=root)
        with monkeypatch.context() as patch:
            patch.setattr(phase_costs, "MOST_LOADS", 20)
            patch.setattr(own_ports, "MOST_IN_TURNS", 8)
            assert Costs(hardware).prices(kind, 2**20, group, root=root) == told


def test_phases_that_differ_in_their_parts_take_as_long_together_as_one_by_one() -> None:
    for preset, size in (("dgx-h100:4", 24), ("dgx-a100:2", 13), ("ethernet-cpu", 4), ("laptop", 4)):
        hardware = Hardware.preset(preset)
        for group in ((tuple(range(size)),), (tuple(range(size))[::-1],)):
            falling = Around(size, 1, range(size - 1, 0, -1), size)
            together = phase_costs.terms(hardware, (falling,), group)
            one_by_one = phase_costs.terms(hardware, tuple(falling), group)
            assert len(one_by_one) == size - 1 > len(together) == 1
            for nbytes in (0, 3, 2**20, 3e9 + 0.3):
                seconds = [float(sum(term.seconds(times, nbytes) for term, times in found.items()))
                           for found in (together, one_by_one)]
                assert seconds[0] == seconds[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["all_to_all", "all_reduce", "gather", "broadcast"])
def test_loads_of_many_phases_are_those_of_one_after_the_other(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ("dgx-h100:4", range(1, 30, 2)), ("dgx-a100:2", (3, 9, 1, 15, 14)), ("ethernet-cpu", range(3))
    for preset, group in cases:
        hardware = Hardware.preset(preset)
        costs = Costs(hardware)
        for name in costs.algorithms(kind, group):
            loads = []
            for most in (2**20, 40, 0):
                monkeypatch.setattr(phase_costs, "MOST_LOADS", most)
                price = Costs(hardware).collective(kind, 1000, group, algorithm=name)
                loads.append(Costs(hardware).channel_bytes(price, group))
            assert loads[0] == loads[1] == loads[2] != {}
