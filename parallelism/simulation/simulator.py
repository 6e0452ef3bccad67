"""`simulate`: the trace that a run of a program would leave on a hardware, without the run.

    simulate(Executable(function, mesh), "dgx-h100").makespan_seconds
    simulate(program, "dgx-h100", mesh=Mesh(pp=4, dp=2), batch=64).makespan_seconds     # a PipelinedProgram

The program itself is run once for each class of devices that run the same program, on a device whose arrays are only
types, without numbers (`parallelism.simulation.typed_device`).  Its events are priced and replayed in the same way as
those of a real run.  So a real run with ``compute="modelled"`` has the same kinds, groups, bytes, memory and times.  A
simulation has no traffic with the host.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from typing import NamedTuple

import numpy as np

from parallelism.arrays import Ints
from parallelism.events import Columns, Table
from parallelism.hardware import Hardware, MixedHardware, Software
from parallelism.ir import Function
from parallelism.mesh import Mesh
from parallelism.rarely_collected import rarely_collected
from parallelism.simulation.device_events import DeviceEvents
from parallelism.simulation.event_classes import Templates, members
from parallelism.simulation.folded_links import folded_routes
from parallelism.simulation.folding import CannotFold, EqualDevices, Routes, fold as folded
from parallelism.simulation.operations import (
    PriceEvents,
    Simulable,
    SimulatedOperation,
    StepOfMany,
    simulated_operation,
)
from parallelism.simulation.parts import StepParts, parts_of
from parallelism.simulation.priced_pieces import PricedPieces, collective_prices, folded_roles
from parallelism.simulation.shared_channels import SharedChannels, are_shared
from parallelism.simulation.steady_steps import Repetition
from parallelism.timeline import (
    COLLECTIVE,
    Priced,
    Prices,
    Pricing,
    Route,
    replay_columns,
)
from parallelism.trace import Trace
from parallelism.transforms import Step


@rarely_collected()
def simulate(
    operation: Simulable,
    hardware: Hardware | str | PathLike[str],
    *,
    mesh: Mesh | None = None,
    batch: int | None = None,
    numbers: Mapping[str, int] | None = None,
    fold: bool | None = False,
    op_by_op: bool = False,
    priced_dtype: str | None = None,
    link_sharing: bool = True,
) -> Trace:
    """The trace that ``operation`` would leave on ``hardware``: a `Hardware`, a preset's name or a file.

    >>> from parallelism import Mesh, models, simulate
    >>> trace = simulate(models.mlp((1024, 4096, 1024), 8192), "dgx-h100", mesh=Mesh(dp=8))
    >>> f"{trace.makespan_seconds * 1e6:.0f} us", trace.count("all_reduce")
    ('3396 us', 0)

    Without layouts a program is run whole on every device, so this one has no collectives.

    What else is needed depends on the operation.  An `Executable` needs nothing.  An `ir.Function`, a
    `PipelinedProgram` and the `parallelism.transforms.Step` of a pipeline need a ``mesh``, and the numbers of their
    symbols: ``batch`` is the number of rows, of the symbol B or of the only one; ``numbers`` are those of all others, or
    of all.  `parallelism.execution.operation_on` places what is no operation yet.

    With ``fold``, equal devices (`parallelism.simulation.folding`) are simulated once: one device, the representative,
    stands for them.  Its collectives have the prices of its real groups.  The trace has the events of the
    representatives only.  Its times equal those without ``fold``, except where more than 16 transfers share links.
    There the full simulation uses approximate rates (`parallelism.timeline.fair_sharing`), and the folded one may be
    exact, because it has fewer transfers.  ``fold=None`` folds unless that cannot be (`CannotFold`).

    With ``fold``, repeated work, such as that of a stage for each microbatch, may become one compute event, which also
    contains the seconds of its collectives, or one for each run of compute between two collectives.  With
    ``op_by_op``, every op and collective is an event, as without ``fold``.  ``priced_dtype`` and ``link_sharing`` are
    those of `Trace.on`, which simulates the same on another hardware; for this the trace keeps the ``operation``.

    ``TypeError`` for an operation that cannot be simulated, and for a ``mesh`` that is missing, or numbers that are not
    wanted.  ``ValueError`` for a symbol without a number, for a mesh that does not fit, for a hardware with too few
    devices, and, with ``fold``, for messages or collectives that share links in a way that cannot be folded
    (`CannotFold`).
    """
    made_by = Simulation(operation, mesh, batch, numbers and dict(numbers), fold, op_by_op)
    return made_by.on(Pricing.of(hardware, "modelled", priced_dtype, link_sharing))


@rarely_collected()
def step_parts(
    operation: Simulable,
    hardware: Hardware | str | PathLike[str],
    *,
    mesh: Mesh | None = None,
    batch: int | None = None,
    numbers: Mapping[str, int] | None = None,
    priced_dtype: str | None = None,
    link_sharing: bool = True,
) -> StepParts:
    """The breakdown of the time of a step: as exact as a simulation op by op, but without an event for each op.

    >>> from parallelism import Mesh, models, step_parts
    >>> from parallelism.transforms import SGD, train_step
    >>> step = train_step(models.mlp((1024, 4096, 1024), 8192), SGD(0.1))
    >>> parts = step_parts(step, "dgx-h100", mesh=Mesh(dp=8))
    >>> {name: f"{seconds * 1e3:.2f} ms" for name, seconds in parts.split[0]._asdict().items() if seconds}
    {'forward': '3.40 ms', 'backward': '5.56 ms', 'other': '0.13 ms'}

    This program has no layouts, so every device computes the whole and nothing is communicated.

    The parts are those of ``simulate(..., fold=True, op_by_op=True)``: counts, bytes and flops are equal, seconds
    differ by rounding.  Work that is repeated, such as that of a stage for each microbatch, is priced once and counted
    as often as it is repeated.  The arguments and errors are those of `simulate`.
    """
    made_by = Simulation(operation, mesh, batch, numbers, fold=True)
    return made_by.folded_on(Pricing.of(hardware, "modelled", priced_dtype, link_sharing)).parts()


def equal_devices(
    operation: Simulable,
    hardware: Hardware | str | PathLike[str],
    *,
    mesh: Mesh | None = None,
    batch: int | None = None,
    numbers: Mapping[str, int] | None = None,
    priced_dtype: str | None = None,
    link_sharing: bool = True,
) -> EqualDevices:
    """The sets of equal devices that ``simulate(..., fold=True)`` finds for the same arguments.

    >>> from parallelism import Mesh, equal_devices, models
    >>> equal = equal_devices(models.mlp((16, 32, 8), 64), "dgx-h100", mesh=Mesh(dp=4))
    >>> equal.sizes.tolist()
    [4]
    """
    pricing = Pricing.of(hardware, "modelled", priced_dtype, link_sharing)
    simulated = Simulation(operation, mesh, batch, numbers, fold=True).placed_on(pricing)
    return _equal_devices(simulated.templates(PricedPieces(simulated.mesh, pricing)), pricing)[0]


@dataclass(frozen=True)
class Simulation:
    """The arguments of `simulate` but for the hardware and its prices."""

    operation: Simulable
    mesh: Mesh | None
    batch: int | None
    numbers: Mapping[str, int] | None
    fold: bool | None
    op_by_op: bool = False

    @rarely_collected()
    def on(self, pricing: Pricing) -> Trace:
        """The trace that the operation would leave under these prices."""
        if self.fold:
            return self.folded_on(pricing).trace
        if self.fold is None:
            with suppress(CannotFold):
                return self.folded_on(pricing).trace
        simulated = self.placed_on(pricing)
        events, lengths, _ = simulated.templates().by_rank(range(simulated.mesh.size))
        return self._trace(replay_columns(events, lengths, pricing), simulated.mesh, pricing)

    def placed_on(self, pricing: Pricing) -> SimulatedOperation:
        """The operation in a form that makes events, for the software of the hardware."""
        software = _one_software(self.operation, pricing.hardware)
        under = getattr(self.operation, "under", None)
        operation = self.operation if under is None else under(software)
        simulated = simulated_operation(operation, self.mesh, self.batch, self.numbers, software=software)
        pricing.for_devices(simulated.mesh.size)
        return simulated

    def folded_on(self, pricing: Pricing) -> "Folded":
        """A simulation of the representatives.  Where that is exact, an action of a stage is one piece.

        It is not with ``op_by_op``, if messages use the links of a piece's collectives, or if the members of a group do
        not start the piece at the same time.  Without ``op_by_op``, each run between two collectives is a piece then:
        one of compute and of collectives on links that nothing else uses meanwhile, or else one of compute alone.
        """
        simulated = self.placed_on(pricing)
        pieces = PricedPieces(simulated.mesh, pricing, _levels_between_stages(simulated, pricing))
        each = self._exact(simulated, pieces, pricing)
        if each is None:
            runs = None if self.op_by_op else pieces.of_computes
            each = _representatives(simulated.templates(runs), pricing)
        trace = self._trace(_timed(each, pricing), simulated.mesh, pricing, each)
        return Folded(each, pieces, trace)

    def _exact(
        self, simulated: SimulatedOperation, pieces: PricedPieces, pricing: Pricing
    ) -> "_Representatives | None":
        """The representatives with pieces that may have collectives, where these are exact; None where they are not."""
        few = _of_few(simulated)
        for price in () if self.op_by_op else (pieces, pieces.of_own_channels):
            if few is not None and not _are_alone(few.templates(price), pieces, price):
                continue  # what is not alone in a step of few microbatches is not alone in one of many
            templates = simulated.templates(price)
            if _are_alone(templates, pieces, price):
                each = _representatives(templates, pricing)
                if _are_exact(pieces, each, pricing):
                    return each
        return None

    def _trace(
        self, events: Columns, mesh: Mesh, pricing: Pricing, each: "_Representatives | None" = None
    ) -> Trace:
        """The trace with these events, of all devices or of representatives."""
        ranks = range(mesh.size) if each is None else each.equal.first.tolist()
        has_pieces = each is not None and any(part.pieces for part in each.templates.classes)
        priced = Priced(
            "modelled",
            pricing.priced_dtype,
            pricing.link_sharing,
            folded=len(ranks) < mesh.size,
            pieces=has_pieces,
            software=self._software(pricing),
        )
        return Trace(
            events,
            mesh.size,
            mesh_shape=mesh.shape,
            hardware=pricing.name,
            ranks=ranks,
            priced=priced,
            simulation=self,
        )

    def _software(self, pricing: Pricing) -> Software | None:
        """The software that the ops depend on; None if the operation was placed before it was simulated."""
        if not isinstance(self.operation, Function | Step):
            software: Software | None = getattr(self.operation, "software", None)
            return software
        return Software.of(pricing.hardware)


def _one_software(operation: object, hardware: Hardware | None) -> Software:
    """The software of a hardware.  ``ValueError`` if it has two, by which a program would be run in two ways."""
    if (
        isinstance(hardware, MixedHardware)
        and not hardware.is_alike
        and isinstance(operation, Function | Step)
    ):
        stacks = " and ".join(part.stack or part.name for part in hardware.parts)
        raise ValueError(
            f"a program runs with other ops on {stacks}; give both parts a stack that runs it alike, as "
            f"{hardware.parts[0].name}+plain"
        )
    return Software.of(hardware)


@dataclass(frozen=True)
class _Representatives:
    """The devices that are simulated in place of all equal ones, with their events."""

    templates: Templates
    equal: EqualDevices
    events: Columns
    lengths: list[int]
    """The number of events of each representative."""
    looks: Ints
    """For each event, its number in `Templates.looks`, which has each different event once."""
    shared: SharedChannels | None = None
    """Where several devices share links."""


def _of_few(simulated: SimulatedOperation) -> SimulatedOperation | None:
    """The step with as few microbatches as ranks, which has all kinds of actions; None where this spares little."""
    if not isinstance(simulated, StepOfMany):
        return None
    count = simulated.pipeline.ranks
    return simulated.with_microbatches(count) if simulated.pipeline.microbatches >= _FEW * count else None


_FEW = 4
"""With so many times as few microbatches, it is worth while to make the events of few first."""


def _are_alone(templates: Templates, pieces: PricedPieces, price: PriceEvents) -> bool:
    """Whether nothing else is on the links of the collectives in pieces meanwhile, as far as devices tell themselves."""
    if price == pieces:
        return pieces.levels.isdisjoint(pieces.refused)
    own = templates.looks.only("kind", "work")
    bounds = templates.starts.tolist()
    return not any(
        is_beside_others(own.take(slice(*bounds[number : number + 2])), events)
        for number, events in enumerate(templates.classes)
    )


def is_beside_others(columns: Columns, events: DeviceEvents) -> bool:
    """Whether a piece with collectives comes while a collective of the same device is under way."""
    places = [piece.places for piece in events.pieces if piece.events.collectives]
    if not places:
        return False
    works, later = columns.numbers("work"), columns.present("work")
    begins = later & columns.isin("kind", {"collective"})
    ends = later & columns.isin("kind", {"wait"}) & np.isin(works, works[begins])
    under_way = np.cumsum(begins.astype(np.int64) - ends)
    return bool(under_way[np.concatenate(places)].any())


def _are_exact(pieces: PricedPieces, each: _Representatives, pricing: Pricing) -> bool:
    """Whether no message uses the links of pieces, and the members of all groups in them begin at the same time."""
    return not _on_levels(each.events, pricing, pieces.levels) and pieces.are_of_equals(each.equal)


def _representatives(templates: Templates, pricing: Pricing) -> _Representatives:
    equal, shared = _equal_devices(templates, pricing)
    return _Representatives(templates, equal, *templates.by_rank(equal.first.tolist()), shared)


def _equal_devices(templates: Templates, pricing: Pricing) -> tuple[EqualDevices, SharedChannels | None]:
    """The sets of equal devices; and where several devices share links, what these links carry."""
    if not (pricing.shares_links and are_shared(pricing.hardware)):
        return folded(templates, pricing.hardware, pricing.shares_links), None
    shared = SharedChannels(templates, pricing, folded(templates, pricing.hardware, False, shifted=True))
    return shared.equal, shared


def _timed(each: _Representatives, pricing: Pricing) -> Columns:
    """The events of the representatives with their times."""
    templates, events, looks = each.templates, each.events, each.looks
    roles = folded_roles(events, templates.axes_of[looks], each.equal)
    prices = pricing.prices(events, roles)
    at = np.flatnonzero(roles.roles == COLLECTIVE)
    own = collective_prices(templates, pricing, looks[at], events.numbers("rank")[at])
    prices.seconds[at] = own.seconds
    names = list(dict.fromkeys([None, *(price.algorithm for price in own.prices)]))
    name, route = np.zeros(len(events), np.int32), np.zeros(len(events), np.int64)
    name[at] = np.array([names.index(price.algorithm) for price in own.prices], np.int32)[own.price]
    routes: tuple[Route | None, ...] = (None,)
    if each.shared is not None:
        routes, route[at] = each.shared.collective_routes(looks[at], events.numbers("rank")[at])
    elif pricing.shares_links:
        routes, route[at] = folded_routes(
            templates,
            pricing,
            each.equal,
            own,
            roles.keys[at],
            messages=bool(events.isin("kind", {"send"}).any()),
        )
    return replay_columns(
        events,
        each.lengths,
        pricing,
        roles=roles,
        prices=Prices(
            prices.seconds,
            Table(tuple(names), name),
            routes,
            route,
            None if each.shared is None else each.shared.message_route,
        ),
    )


class Folded(NamedTuple):
    """A simulation of the representatives."""

    representatives: _Representatives
    pieces: PricedPieces
    trace: Trace

    @property
    def classes(self) -> list[DeviceEvents]:
        """The events of each representative."""
        templates = self.representatives.templates
        return [templates.classes[number] for number in templates.class_of[list(self.trace.ranks)]]

    def parts(self, more: Repetition | None = None) -> StepParts:
        """The parts of the step, with ``more`` of its periods."""
        each, pieces = self.representatives, self.pieces
        devices = each.equal.sizes.tolist()
        return parts_of(
            self.trace, self.classes, each.lengths, devices, pieces.priced, pieces.same_price, more
        )


def _levels_between_stages(simulated: SimulatedOperation, pricing: Pricing) -> set[int]:
    """The levels of the links between neighbouring stages of a pipeline, if links are shared."""
    axis: str | None = getattr(simulated, "pipeline_axis", None)
    if axis is None or not pricing.shares_links:
        return set()
    stages, hardware = members(simulated.mesh, (axis,)), pricing.costs.hardware
    return Routes(hardware, stages[:, :-1].ravel(), stages[:, 1:].ravel()).levels(hardware)


def _on_levels(events: Columns, pricing: Pricing, levels: Collection[int]) -> bool:
    """Whether messages share links and one of them crosses a link of these levels."""
    if not pricing.shares_links or not levels:
        return False
    sends = events.take(np.flatnonzero(events.isin("kind", {"send"})))
    ends = set(zip(sends.values("rank"), sends.values("peer"), strict=True))
    return any(
        channel[0] in levels
        for source, target in ends
        for channel in pricing.costs.path(source, target).channels
    )
