"""`find_plan`: every plan is timed without shared links, and the best are simulated fully, the most promising first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, overload

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Floats, Ints, plain_number
from parallelism.display.quantities import short_errors
from parallelism.hardware import Hardware, Reserve, memory_bytes_of, sized_hardware
from parallelism.ir import Function
from parallelism.layouts.stages.beginnings import by_rows
from parallelism.models import TransformerSpec
from parallelism.planning.assembled_steps import figures_of, figures_of_several
from parallelism.planning.batch_pricing import price_plans, unused_told_before
from parallelism.planning.dealing import spelled_out
from parallelism.planning.plan import Plan, Task, step_key
from parallelism.planning.plans import Plans
from parallelism.planning.settings import AXES
from parallelism.planning.space import Choices, Refused, choices
from parallelism.planning.trained import BATCH, TrainedModel
from parallelism.rarely_collected import rarely_collected
from parallelism.training import Figures
from parallelism.training.training_run import ADAM_W
from parallelism.transforms import SGD, Adam, MixedPrecision, Parts
from parallelism.transforms.pipelines import warn_of_unused

if TYPE_CHECKING:
    from parallelism.auto_sharding import AutoPlans

_log = logging.getLogger("parallelism")
AUTO_SECONDS = 60.0
"""So long the layouts of values are searched for each mesh; then the gap says how far from the best they may be."""
KEPT = 10
"""The simulated plans whose figures are kept: more than a command tells, if not asked for them."""
Progress = Callable[[str, int, int], None]
"""``(what, done, all)``: told now and then while plans are searched."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C while plans are simulated fully: ``plans`` has all that were timed, of which none may be proved to be best."""

    def __init__(self, plans: Plans) -> None:
        super().__init__(f"stopped after {plans.simulated} full simulations")
        self.plans = plans


class _Simulated(NamedTuple):
    """The plans that were simulated fully."""

    seconds: Mapping[int, float]
    """By row."""
    gap: float
    """That of `Plans`."""
    known: dict[Hashable, Figures]
    """The figures of some."""
    is_stopped: bool = False
    """Whether Ctrl-C ended the simulations."""


@overload
@rarely_collected()
def find_plan(
    model: Function,
    *,
    hardware: Hardware | str | PathLike[str],
    batch: int,
    devices: int | None = ...,
    memory: float | str | None = ...,
    optimizer: SGD | Adam | None = ...,
    strategies: Literal["auto"],
    progress: Progress | None = ...,
) -> AutoPlans: ...


@overload
@rarely_collected()
def find_plan(
    model: TransformerSpec | Function | str,
    *,
    hardware: Hardware | str | PathLike[str],
    batch: int,
    devices: int | None = ...,
    memory: float | str | None = ...,
    reserve: Reserve | float | str | None = ...,
    optimizer: SGD | Adam | None = ...,
    gradients: npt.DTypeLike = ...,
    state: Mapping[str, npt.DTypeLike] | None = ...,
    precision: MixedPrecision | None = ...,
    simulations: int | None = ...,
    figures: int = ...,
    progress: Progress | None = ...,
    strategies: None = ...,
    **fixed: Any,
) -> Plans: ...


@rarely_collected()
def find_plan(
    model: TransformerSpec | Function | str,
    *,
    hardware: Hardware | str | PathLike[str],
    batch: int,
    devices: int | None = None,
    memory: float | str | None = None,
    reserve: Reserve | float | str | None = None,
    optimizer: SGD | Adam | None = None,
    gradients: npt.DTypeLike = "float32",
    state: Mapping[str, npt.DTypeLike] | None = None,
    precision: MixedPrecision | None = None,
    simulations: int | None = 8,
    figures: int = 1,
    progress: Progress | None = None,
    strategies: str | None = None,
    **fixed: Any,
) -> Plans | AutoPlans:
    """The plans for training steps of ``model`` on batches of ``batch`` rows, the best first.

    ``model`` is a `TransformerSpec`, the name of a published one, or the program of a loss with the symbol ``B`` for
    the rows of the batch.  Where layers of a program read their rows of stacked weights, each row is an input of
    `Plan.step` (`parallelism.ir.passes.unstacked`).  A published model is trained in bfloat16, with main copies in
    float32, and its vocabulary is padded to a multiple of 128 (`TransformerSpec.padded`), so that ``tp`` can divide it.
    A `TransformerSpec` is taken as it is: ``replace(spec, dtype="bfloat16")`` is in mixed precision.  ``hardware`` is a
    `Hardware`, a file, a preset with the number of its nodes (``dgx-h100:8`` has 64 GPUs), or a preset alone with the
    number of ``devices``.
    ``memory`` limits the bytes of a device, as a number or a text such as ``72GB``; None is all of its memory.
    ``reserve`` is what tensors cannot use of it: a `Reserve`, or bytes as for ``memory``; None is that of the hardware,
    or nothing if ``memory`` says what may be used.
    ``fixed`` has one value, or a list, of any of `parallelism.planning.SETTINGS`: ``tp=8``, ``zero=[0, 1]``,
    ``schedule="gpipe"``; ``fsdp=64`` and ``hsdp="8x8"`` stand for several.  ``optimizer`` is AdamW unless another is
    given; ``gradients`` is the dtype in which gradients are added up, over microbatches and devices, where precision
    is mixed; ``state`` has those in which ``main`` copies, and the ``mean`` and ``square`` of Adam, are kept.  A
    ``precision`` says both, and which products are in float8.

    Every plan is timed as if nothing shared links, and as if no device or link were slower than others, which is a lower
    bound of its time.  Then plans are simulated fully
    in the order of these bounds, until no other can be better: the first plan is then the best of all by the full
    simulation.  At most ``simulations`` are made (None: any number); `Plans.gap` says what is not proved.  Ctrl-C during
    these simulations raises `Stopped`, which has the plans so far.  `Plan.figures` of the most promising ``figures``
    programs are known then: where they will be asked for, it is quickest to compute them all at once, on all cores.

    ``strategies="auto"``, for the program of a loss: not a strategy is chosen but the layout of each value, by an
    integer program (`parallelism.auto_sharding.auto_plans`), for `AUTO_SECONDS` on each mesh; the result is its
    `AutoPlans`, with the gap of each.

    ``TypeError``, ``ValueError`` for a model, a batch, a hardware or a setting that cannot be, and, before any search,
    for a program that cannot be cut into microbatches, with the op that is the reason and its line.  If no plan fits the
    memory, there are no plans, and `Plans.best` raises `NoPlanFits`.
    """
    start = perf_counter()
    batch, devices = plain_number(batch), plain_number(devices)
    _check_counts(batch, simulations, figures)
    found, count = machine_of(hardware, devices)
    limit = memory_of(memory, found)
    optimizer = ADAM_W if optimizer is None else optimizer
    if strategies is not None:
        step = _step_of_auto(model, optimizer, strategies, batch, fixed)
        from parallelism.auto_sharding import auto_plans  # of integer programs, which other searches need not

        return auto_plans(
            step, found, devices=count, limit_bytes=int(limit), time_limit=AUTO_SECONDS, progress=progress
        )
    task = Task(TrainedModel.of(model, optimizer, gradients, state, precision), batch, found, count)
    possible = choices(task.model, count, batch, fixed, fully_sharded=found.fully_sharded)
    _check_microbatches(task.model)
    told = progress or logged
    kept = reserve_of(reserve, memory, found)
    again = partial(
        cast("Callable[..., Plans]", find_plan),
        model,
        hardware=found,
        devices=count,
        batch=batch,
        memory=limit,
        reserve=kept,
        optimizer=optimizer,
        gradients=gradients,
        state=state,
        precision=precision,
        progress=progress,
    )
    given = {name: value for name, value in spelled_out(fixed).items() if value is not None}
    question = _Question(task, limit, kept, given, again, start)
    return _simulated_first(question, possible, simulations, figures, told)


class _Question(NamedTuple):
    """What a search was asked for."""

    task: Task
    memory: float
    reserve: Reserve
    fixed: Mapping[str, Any]
    again: Callable[..., Plans]
    start: float
    """When it was asked, by `perf_counter`."""


def _simulated_first(
    question: _Question, possible: Choices, simulations: int | None, figures: int, told: Progress
) -> Plans:
    """The plans of a space that fit: all are priced, and the most promising are simulated, which come first."""
    task, memory, reserve = question.task, question.memory, question.reserve
    limits = usable_bytes(reserve, memory, possible)
    priced = price_plans(hardware_without_faults(task), possible, limits, told)
    possible, seconds, peaks = priced.possible, priced.seconds, priced.peaks
    expected = seconds
    if task.hardware.port_faults:
        expected = price_plans(hardware_with_slow_links(task), possible, limits, told).seconds
    fits = peaks <= usable_bytes(reserve, memory, possible)
    refused = dict(possible.refused)
    if not fits.all():
        first = int(np.flatnonzero(~fits)[0])
        refused["memory"] = Refused(int(np.count_nonzero(~fits)), possible.settings(first))
    rows = np.flatnonzero(fits)
    rows = rows[np.lexsort((rows, peaks[rows], seconds[rows], expected[rows]))]
    ahead = min(figures, KEPT) if simulations != 0 else 0
    full, gap, known, is_stopped = _best_first(task, possible, seconds, peaks, rows, simulations, ahead, told)
    order = sorted(range(len(rows)), key=lambda i: (rows[i] not in full, full.get(int(rows[i]), 0.0), i))
    rows = rows[order]
    elapsed = perf_counter() - question.start
    _log.info("%d plans timed, %d simulated, in %.1f s", priced.timed, len(full), elapsed)
    plans = Plans(
        task,
        possible.take(rows),
        seconds[rows],
        peaks[rows],
        {number: full[row] for number, row in enumerate(rows.tolist()) if row in full},
        memory,
        reserve,
        sum(each.count for each in possible.refused.values()) + len(possible),
        refused,
        priced.timed,
        elapsed,
        priced.setup_seconds,
        priced.timing_seconds,
        gap,
        question.fixed,
        question.again,
        known=known,
        one_by_one=priced.one_by_one,
    )
    if len(possible) and not fits.any():
        least = int(np.argmin(peaks))
        bound = float(seconds[least])
        smallest = Plan(
            possible.settings(least), bound, bound, int(peaks[least]), is_simulated=False, plans=plans
        )
        object.__setattr__(plans, "tightest", smallest)
    if is_stopped:
        raise Stopped(plans)
    return plans


def _check_counts(batch: Any, simulations: Any, figures: Any) -> None:
    if type(batch) is not int or batch < 1:
        raise ValueError(f"batch must be an integer of at least 1, got {batch!r}")
    if simulations is not None and (type(simulations) is not int or simulations < 0):
        raise ValueError(f"simulations must be an integer of at least 0, or None, got {simulations!r}")
    if type(figures) is not int or figures < 0:
        raise ValueError(f"figures must be an integer of at least 0, got {figures!r}")


def _check_microbatches(model: TrainedModel) -> None:
    """``ValueError`` for a program that cannot be cut into microbatches, as every plan does, with the op and its line."""
    if isinstance(model.model, Function):
        parts = Parts.of(model.step)
        warn_of_unused(parts, stacklevel=5)
        try:
            by_rows(parts.forward, BATCH, [value.name for value in parts.parameters])
        except ValueError as error:
            raise ValueError(f"no plan of @{model.model.name} can be: {error}") from None


def _step_of_auto(
    model: Any, optimizer: SGD | Adam, strategies: str, batch: int, fixed: Mapping[str, Any]
) -> Function:
    """The step for ``strategies="auto"``.  ``ValueError`` or ``TypeError`` for what does not go with it."""
    if strategies != "auto" or fixed:
        raise ValueError(
            f'strategies is "auto", and then there are no settings to fix; got {strategies!r}'
            f"{''.join(f', {name}={value!r}' for name, value in fixed.items())}"
        )
    if not isinstance(model, Function):
        raise TypeError(
            'strategies="auto" takes the program of a loss, such as TransformerSpec(...).function(B); '
            f"got {model!r}"
        )
    return TrainedModel.of(model, optimizer).step.specialize(**{BATCH: batch})


@unused_told_before()
def _best_first(
    task: Task,
    possible: Choices,
    bounds: Floats,
    peaks: Ints,
    rows: Ints,
    most: int | None,
    ahead: int,
    told: Progress,
) -> _Simulated:
    """Simulates plans fully, in the order of the ``rows``, until no other can be better; of so many programs ahead the
    figures will be asked for in any case."""
    full = dict[int, float]()
    key_of = partial(_key_of, possible, bounds, peaks)
    known, is_stopped = _figures_ahead(task, possible, _first_of(rows, key_of, ahead), told)
    best = np.inf
    least = np.minimum.accumulate(bounds[rows][::-1])[::-1]  # of a plan and all behind it
    for done, row in enumerate(rows.tolist()):
        if least[done] >= best:
            return _Simulated(full, 0.0, known, is_stopped)
        unproved = float(1 - least[done] / best) if full else 1.0
        key = key_of(row)
        if (most is not None and done >= most) or (is_stopped and key not in known):
            return _Simulated(full, unproved, known, is_stopped)
        told("simulated", done, min(len(rows), most or len(rows)))
        try:
            found = known.get(key) or figures_of(task, possible.settings(row))
        except KeyboardInterrupt:
            return _Simulated(full, unproved, known, is_stopped=True)
        full[row] = found.seconds
        best = min(best, full[row])
        if len(known) < KEPT:
            known[key] = found
    return _Simulated(full, 0.0, known, is_stopped)


def _key_of(possible: Choices, bounds: Floats, peaks: Ints, row: int) -> Hashable:
    """The `step_key` of a row."""
    return step_key(possible.settings(row), bounds[row], peaks[row])


def _first_of(rows: Ints, key_of: Callable[[int], Hashable], count: int) -> dict[Hashable, int]:
    """The first row of each of so many programs, by its key."""
    found = dict[Hashable, int]()
    for row in rows.tolist():
        if len(found) == count:
            break
        found.setdefault(key_of(row), row)
    return found


def _figures_ahead(
    task: Task, possible: Choices, rows: Mapping[Hashable, int], told: Progress
) -> tuple[dict[Hashable, Figures], bool]:
    """The figures of several programs; and whether Ctrl-C ended this, so that some are missing."""
    keys, known = [*rows], dict[Hashable, Figures]()
    if len(keys) < 2:  # there is nothing to do beside the first
        return known, False
    try:
        figures_of_several(
            task,
            [possible.settings(row) for row in rows.values()],
            partial(told, "simulated"),
            lambda place, found: known.update({keys[place]: found}),
        )
    except KeyboardInterrupt:
        return known, True
    return known, False


def hardware_without_faults(task: Task) -> Task:
    """The task where all devices and links are alike: no plan takes longer there, and all are put together from pieces."""
    hardware = task.hardware
    if not (hardware.stragglers or hardware.faults):
        return task
    return replace(task, hardware=replace(hardware, stragglers=(), faults=()))


def hardware_with_slow_links(task: Task) -> Task:
    """The task where all ports of a level are as slow as its slowest one, as they are for a group that has it.

    What plans take there says which are likely to be good; it is no bound.
    """
    hardware = task.hardware
    links = list(hardware.links)
    for number, link in enumerate(links):
        slow = [fault for fault in hardware.port_faults if fault.level == link.name]
        if slow:
            factor = min(fault.bandwidth_factor for fault in slow)
            links[number] = link.slowed(factor, max(fault.delay_seconds for fault in slow))
    return replace(task, hardware=replace(hardware, links=tuple(links), stragglers=(), faults=()))


def logged(what: str, done: int, count: int) -> None:
    """The progress of a search that nobody else is told of: it is logged."""
    _log.debug("%s: %d of %d", what, done, count)


# -- the hardware that is planned for, as a user gives it --------------------------------------------------------------


def machine_of(hardware: Hardware | str | PathLike[str], devices: int | None) -> tuple[Hardware, int]:
    """The hardware, and the number of its devices that are planned for.

    ``ValueError`` as from `sized_hardware`, and for the name of a preset without any number.
    """
    preset = hardware.partition("+")[0] if isinstance(hardware, str) else ""  # in front of its stack
    if devices is None and preset in Hardware.presets():
        raise ValueError(
            f"say how many devices of {preset} there are: devices=64, or a number of nodes behind a "
            "colon, as in dgx-h100:8"
        )
    found = sized_hardware(hardware, devices)
    return found, devices or found.ranks


@short_errors
def memory_of(memory: float | str | None, hardware: Hardware) -> float:
    """The bytes of memory of a device: a number, a text such as ``72GB`` or ``64GiB``, or None for the hardware's."""
    return hardware.memory_bytes if memory is None else memory_bytes_of("memory", memory)


def reserve_of(
    reserve: Reserve | float | str | None, memory: float | str | None, hardware: Hardware
) -> Reserve:
    """What is reserved: as said, or that of the hardware where ``memory`` does not say what may be used."""
    if isinstance(reserve, Reserve):
        return reserve
    if reserve is None:
        return hardware.reserve if memory is None else Reserve()
    return Reserve(memory_bytes_of("reserve", reserve, zero=True))


def usable_bytes(reserve: Reserve, memory: float, possible: Choices) -> Floats:
    """By plan, the bytes that its tensors may use on a device."""
    communicators = np.zeros(len(possible))
    for axis in AXES:
        communicators += possible.columns[axis] > 1
    found: Floats = reserve.usable_bytes(memory, communicators)
    return found
