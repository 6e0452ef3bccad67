"""What an executable would do on a hardware, without running it: the trace of `VirtualCluster.run`, made by columns.

    simulate(Executable(function, mesh), "dgx-h100").makespan_seconds

No array is touched and nothing is started.  The events are those that the devices would record, priced and timed by the
same clock, so an executed run under ``compute="modelled"`` has the same: kinds, groups, bytes, memory, times.  What
goes to and from the host is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from os import PathLike
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from parallelism.events import HOST, Columns, Table
from parallelism.hardware import Hardware
from parallelism.mesh import Mesh
from parallelism.simulation.device_events import Axes, Rows
from parallelism.simulation.event_classes import Templates, members
from parallelism.simulation.folded_links import Used, folded_ways, own_ports
from parallelism.simulation.folding import Lanes, fold as folded, priced_alike, same_prices
from parallelism.timeline import (
    COLLECTIVE,
    FREE,
    POINT,
    CollectivePrice,
    Priced,
    Prices,
    Pricing,
    Roles,
    Told,
    Way,
    replay_columns,
    roles_of,
)
from parallelism.trace import Trace

Ints = npt.NDArray[np.int64]
Price = Callable[[Rows, Ints], float | None]
"""Seconds that some events take on each of the devices that have them; None where these must be told apart."""


class Simulated(Protocol):
    """What can be simulated: it tells what its devices would record."""

    @property
    def mesh(self) -> Mesh: ...
    def templates(self, price: Price | None = None) -> Templates:
        """By class of devices; with a ``price``, what is done again and again may be one piece of compute."""


def simulate(
    executable: Simulated, hardware: Hardware | str | PathLike[str], *, fold: bool = False,
    op_by_op: bool = False, priced_dtype: str | None = None, link_sharing: bool = True,
) -> Trace:
    """The trace that ``executable`` would leave on ``hardware``: a `Hardware`, a preset's name or a file.

    ``fold``: of devices that do the same at the same times (`parallelism.simulation.folding`) only the first is
    simulated, with its real groups and their prices; the trace tells about these ranks and no others, and cannot be
    priced again.  Its times are those of all, but where all are a crowd on their links
    (`parallelism.timeline.fair_sharing`): these have approximate times, and the few that are left may have exact ones.
    What is done again and again, as by a stage for each microbatch, may be one piece of compute then, in which
    collectives are counted as compute; with ``op_by_op`` all ops and collectives are events, as without ``fold``.
    ``priced_dtype`` and ``link_sharing`` as for `Trace.on`.  ``ValueError`` for a hardware with too few devices, and
    where messages share links in a way that cannot be folded.
    """
    if not hasattr(executable, "templates"):
        raise TypeError(f"what is simulated is an Executable(function, mesh) or a PipelinedStep, got "
                        f"{type(executable).__name__}")
    mesh = executable.mesh
    pricing = Pricing.of(hardware, "modelled", priced_dtype, link_sharing).for_devices(mesh.size)
    if fold:
        pieces = _Pieces(mesh, pricing)
        standing = _standing(executable.templates(None if op_by_op else pieces), pricing)
        if _on_levels(standing.events, pricing, pieces.levels):
            standing = _standing(executable.templates(), pricing)
        return _timed(standing, pricing)
    events = executable.templates().by_rank(range(mesh.size)).events
    return Trace(events, mesh.size, mesh_shape=mesh.shape, priced=("modelled",)).priced_by(pricing)


def equal_devices(
    executable: Simulated, hardware: Hardware | str | PathLike[str], *, priced_dtype: str | None = None,
    link_sharing: bool = True,
) -> Lanes:
    """The devices that ``simulate(..., fold=True)`` takes together, with the same ``priced_dtype`` and so on."""
    pricing = Pricing.of(hardware, "modelled", priced_dtype, link_sharing).for_devices(executable.mesh.size)
    return folded(executable.templates(_Pieces(executable.mesh, pricing)), pricing.hardware, pricing.shares_links)


class _Standing(NamedTuple):
    """Those that stand for their equals, and what they record."""

    templates: Templates
    lanes: Lanes
    events: Columns
    lengths: list[int]
    looks: Ints


def _standing(templates: Templates, pricing: Pricing) -> _Standing:
    lanes = folded(templates, pricing.hardware, pricing.shares_links)
    return _Standing(templates, lanes, *templates.by_rank(lanes.first.tolist()))


def _timed(standing: _Standing, pricing: Pricing) -> Trace:
    templates, lanes, events, lengths, looks = standing
    mesh, first = templates.mesh, lanes.first.tolist()
    roles = _met(events, templates.axes_of[looks], lanes)
    prices = pricing.prices(events, roles)
    at = np.flatnonzero(roles.roles == COLLECTIVE)
    ranks = events.numbers("rank")[at]
    found, groups, of_event = _prices(templates, pricing, looks[at], ranks)
    prices.seconds[at] = np.array([price.seconds for price in found])[of_event]
    names = list(dict.fromkeys([None, *(price.algorithm for price in found)]))
    name, way = np.zeros(len(events), np.int32), np.zeros(len(events), np.int64)
    name[at] = np.array([names.index(price.algorithm) for price in found], np.int32)[of_event]
    ways: tuple[Way | None, ...] = (None,)
    if pricing.shares_links:
        used = Used(found, groups, of_event, ranks, roles.keys[at], looks[at])
        ways, way[at] = folded_ways(templates, pricing, lanes, used, messages=bool(events.isin("kind", {"send"}).any()))
    told = Told(roles, Prices(prices.seconds, Table(tuple(names), name), ways, way))
    timed = replay_columns(events, lengths, pricing, told)
    priced = Priced("modelled", pricing.priced_dtype, pricing.link_sharing)
    return Trace(timed, mesh.size, mesh_shape=mesh.shape, hardware=pricing.name, ranks=first, priced=priced)


class _Pieces:
    """Prices what devices do with nobody but their equals: a `Price`."""

    def __init__(self, mesh: Mesh, pricing: Pricing) -> None:
        self.mesh, self.pricing = mesh, pricing
        self._same: dict[tuple[Axes, bytes], bool] = {}
        self.levels: set[int] = set()
        """Of links that are used inside of pieces."""

    def __call__(self, rows: Rows, ranks: Ints) -> float | None:
        hardware = self.pricing.hardware
        if any(each[0] in ("send", "recv", "wait") for each in rows.rows):
            return None
        if hardware is not None and (hardware.stragglers or hardware.faults):
            return None
        if not all(self._same_for_all(axes, ranks) for _, axes, _, _ in rows.collectives):
            return None
        templates = Templates(self.mesh, [rows], np.zeros(self.mesh.size, np.int64))
        events, _, looks = templates.by_rank(ranks[:1].tolist())
        roles = roles_of(events)
        at = np.flatnonzero(events.isin("kind", {"collective"}))
        seconds = self.pricing.prices(events, roles).seconds
        found, _, of_event = _prices(templates, self.pricing, looks[at], events.numbers("rank")[at])
        seconds[at] = np.array([price.seconds for price in found])[of_event]
        self.levels.update(channel[0] for price in found for channel in price.crossing)
        return float(seconds.sum())

    def _same_for_all(self, axes: Axes, ranks: Ints) -> bool:
        """Whether the groups along axes are of these ranks alone, and cost the same everywhere."""
        key = axes, ranks.tobytes()
        if key not in self._same:
            groups = members(self.mesh, axes)
            own = groups[np.isin(groups, ranks).any(axis=1)]
            alone = own.size == len(ranks)
            hardware = self.pricing.hardware
            self._same[key] = alone and (hardware is None or own.shape[1] < 2 or not same_prices(hardware, own).any())
        return self._same[key]


def _met(events: Columns, axes: Ints, lanes: Lanes) -> Roles:
    """What each event is to the clock where everybody is met in the one who stands for him.

    ``axes`` number those of each collective: along other axes other groups may be met in the same ones.
    """
    group, peer = events["group"], events.numbers("peer")
    assert isinstance(group, Table)
    met: dict[Any, int] = {}
    groups: list[Any] = []
    index = []
    for ranks in group.values:
        found = None if ranks is None else tuple(lanes.first[np.unique(lanes.lane_of[list(ranks)])].tolist())
        if found not in met:
            met[found] = len(groups)
            groups.append(found)
        index.append(met[found])
    between = events.present("peer") & (peer != HOST)
    stands = peer.copy()
    stands[between] = lanes.first[lanes.lane_of[peer[between]]]
    sequence = events.numbers("sequence")
    roles = roles_of(events.with_columns(
        sequence=np.where(axes >= 0, sequence * (int(axes.max(initial=0)) + 1) + axes, sequence),
        group=Table(tuple(groups), np.array(index, np.int32)[group.index]),
        peer=stands if between.any() else None))
    sizes = np.array([0 if ranks is None else len(ranks) for ranks in group.values])[group.index]
    alone = (roles.roles == POINT) & (roles.sizes == 1) & (sizes > 1)
    return roles._replace(roles=np.where(alone, COLLECTIVE, roles.roles).astype(np.uint8))


def _prices(
    templates: Templates, pricing: Pricing, looks: Ints, ranks: Ints
) -> tuple[list[CollectivePrice], list[tuple[int, ...]], Ints]:
    """What the collectives cost, by what all of their real groups receive, whose prices these are, and by event which
    it has.

    Groups that lie alike have one price, unless it matters which links are theirs.
    """
    prices, of_event = [FREE], np.zeros(len(looks), np.int64)
    groups: list[tuple[int, ...]] = [()]
    if pricing.hardware is None:
        return prices, groups, of_event
    known: dict[tuple[int, int, int], int] = {}
    together = not pricing.shares_links or own_ports(pricing.hardware)
    slots = templates.axes_of[looks]
    numbers = templates.group_of[slots, ranks]
    for i, (look, slot, number) in enumerate(zip(looks.tolist(), slots.tolist(), numbers.tolist(), strict=True)):
        alike = int(priced_alike(templates, slot, pricing.hardware)[number]) if together else number
        key = id(templates.moved(look, number)) if together else look, slot, alike
        if key not in known:
            known[key] = len(prices)
            told = templates.collective(look, number)
            prices.append(pricing.collective(*told))
            groups.append(told[0].group)
        of_event[i] = known[key]
    return prices, groups, of_event


def _on_levels(events: Columns, pricing: Pricing, levels: Collection[int]) -> bool:
    """Whether messages share links, and one goes over these levels of them."""
    if not pricing.shares_links or not levels:
        return False
    sends = events.take(np.flatnonzero(events.isin("kind", {"send"})))
    ends = set(zip(sends.values("rank"), sends.values("peer"), strict=True))
    return any(
        channel[0] in levels for source, target in ends for channel in pricing.costs.path(source, target).channels)
