"""Kinds of collectives and algorithms added from outside the package, and the checks that they pass.

    register_kind(CollectiveKind("scan", "rank j gets the {op} of ranks 0 to j", "reduced",
                                 sources=lambda position, size: range(position + 1)))
    prefix = device.collective("scan", x)

A kind that is registered can be called, recorded, explained, priced and traced at once: by a ``direct`` algorithm that
follows from its record.  Registered records travel with each run to the devices, whether the cluster was started
before or after.

`check` makes sure that the record of an algorithm is complete and that its parts agree.  For some sizes, roots and
pairs: the messages stay inside the group and their chunks inside the buffer; the steps give the results of the kind;
the closed form, the steps and the phases have the same bytes.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np

from parallelism.algorithms import (
    ALGORITHMS,
    HIERARCHICAL,
    KINDS,
    MPI,
    TORUS,
    Algorithm,
    CollectiveAlgorithm,
    CollectiveKind,
    Cost,
    Pairs,
    RegistrationError,
    check_kind,
    direct_of,
)
from parallelism.algorithms.patterns import Stage, each_phase
from parallelism.algorithms.registry import refuse
from parallelism.collectives import buffers as chunks
from parallelism.collectives.call import MemberCall, payload_bytes
from parallelism.collectives.explanation import played
from parallelism.collectives.results import reduction, result_of

SIZES = (2, 3, 4, 5, 8)


def _check_with_direct(kind: CollectiveKind) -> None:
    check_kind(kind)
    check(direct_of(kind))


def register_kind(kind: CollectiveKind, *, replace: bool = False) -> None:
    """Add a kind of collective, with its ``direct`` algorithm.

    >>> from parallelism import CollectiveKind, explain, register_kind
    >>> register_kind(CollectiveKind(
    ...     "scan", "rank j gets the {op} of ranks 0 to j", "reduced", lambda position, size: range(position + 1)))
    >>> [int(result[0]) for result in explain("scan", inputs=[[1], [2], [3]]).results]
    [1, 3, 6]

    Registering the same record again changes nothing.  Raises `RegistrationError` for a record that is incomplete or
    contradicts itself, and for a name that is taken; ``replace`` puts it in the place of one that was registered.
    """
    KINDS.register(kind, _check_with_direct, replace)


def register_algorithm(algorithm: CollectiveAlgorithm, *, replace: bool = False) -> None:
    """Add an algorithm for kinds that there are.

    >>> from parallelism import CollectiveAlgorithm, Costs, Hardware, register_algorithm
    >>> from parallelism.algorithms import Cost
    >>> from parallelism.algorithms.patterns import Listed
    >>> register_algorithm(CollectiveAlgorithm(
    ...     "swap", ("all_gather",), "S/2, for two members",
    ...     closed_form=lambda size, root, pairs: Cost(1, (1, 1), (1, 1), (1, 1), 2),
    ...     steps=lambda size, root, pairs: [Listed(((0, 1, (0,)), (1, 0, (1,))))],
    ...     chunks=lambda size: 2, applies=lambda size: size == 2, needs="two members"))
    >>> "swap" in Costs(Hardware.preset("dgx-h100")).algorithms("all_gather", range(2))
    True

    Its steps, closed form and phases are played through for some sizes and compared.  Registering the same record
    again changes nothing.  Raises `RegistrationError` for a record that is incomplete or contradicts itself, and for a
    name that is taken; ``replace`` puts it in the place of one that was registered.
    """
    ALGORITHMS.register(algorithm, check, replace)


def unregister(record: CollectiveKind | CollectiveAlgorithm) -> None:
    """Removes a record that was registered; with a kind go all algorithms that serve it."""
    if isinstance(record, CollectiveAlgorithm):
        ALGORITHMS.forget(record)
        return
    for algorithm in ALGORITHMS.outside:
        if record.name in algorithm.kinds:
            ALGORITHMS.forget(algorithm)
    KINDS.forget(record)


def check(record: CollectiveAlgorithm, sizes: Sequence[int] = SIZES) -> None:
    """Raises `RegistrationError` for the first error in a record."""
    what = f"algorithm {record.name!r}"
    refuse(
        what,
        (not (isinstance(record.name, str) and record.name.isidentifier()), "name must be an identifier"),
        (record.name in (HIERARCHICAL, TORUS), "this name stands for prices that depend on the hardware"),
        (record.name == MPI, "this name stands for the collectives of an MPI library"),
        (not record.kinds, "kinds must name at least one kind"),
    )
    for name in record.kinds:
        kind = KINDS.records.get(name)
        refuse(
            what,
            (kind is None, f"there is no kind {name!r}; register it first"),
            (
                kind is not None and kind.reduces and record.steps is not None and not record.order,
                f"{name} reduces: order must say in which order",
            ),
        )
    refuse(
        what,
        (not record.formula, "formula must say what a position receives"),
        (
            not callable(record.closed_form),
            f"closed_form must be a function of (size, root, pairs), got {record.closed_form!r}",
        ),
        (
            record.steps is None and record.phases is None,
            "there are neither steps, to be run, nor phases, to be priced",
        ),
        (
            record.applies is not None and not record.needs,
            "needs must say in words what applies() asks of a size",
        ),
    )
    applying = [size for size in sizes if record.fits(size)]
    refuse(what, (not applying, f"it applies to none of the sizes {tuple(sizes)}"))
    for name in record.kinds:
        for size in applying:
            for root in (0, size - 1) if KINDS.records[name].rooted else (0,):
                try:
                    _check_one(record, KINDS.records[name], size, root)
                except RegistrationError:
                    raise
                except Exception as error:
                    raise RegistrationError(
                        f"{what}, {name} over {size} with root {root}: {type(error).__name__}: {error}"
                    ) from error


def _check_one(record: CollectiveAlgorithm, kind: CollectiveKind, g: int, root: int) -> None:
    what = f"algorithm {record.name!r}, {kind.name} over {g} with root {root}"
    pairs: Pairs = tuple((p, (p + 1) % g) for p in range(g - 1)) if kind.paired else ()
    cost = Cost(*record.closed_form(g, root, pairs))
    refuse(
        what,
        *(
            (len(numbers) != g, f"closed_form gives {len(numbers)} numbers as {field}, for {g} positions")
            for field, numbers in (
                ("sent", cost.sent),
                ("received", cost.received),
                ("messages", cost.messages),
            )
        ),
        (
            sum(cost.sent) != sum(cost.received),
            f"by closed_form {sum(cost.sent)} parts of S are sent and {sum(cost.received)} received",
        ),
    )
    stages = None if record.steps is None else tuple(record.steps(g, root, pairs))
    if stages is not None:
        refuse(
            what,
            *(
                (
                    not isinstance(stage, Stage),
                    f"a step must be Listed(...) or Pairwise(...), got {type(stage).__name__}",
                )
                for stage in stages
            ),
        )
        plan = Algorithm(
            kind.name, record.name, g, root, record.chunks(g), record.order, pairs, record, stages
        )
        _check_messages(plan, kind, what)
        _check_cost(plan, cost, what)
        _check_results(plan, kind, what)
    if record.phases is not None:
        _check_phases(each_phase(record.phases(g, root, pairs)), cost, what)


def _parts(numbers: Sequence[int], whole: int) -> list[Fraction]:
    return [Fraction(part, whole) for part in numbers]


def _check_messages(plan: Algorithm, kind: CollectiveKind, what: str) -> None:
    """Each message goes to another position, and carries chunks that there are."""
    for each in chain.from_iterable(plan.steps):
        ends = each.source, each.target
        refuse(
            what,
            (
                each.source == each.target or not all(0 <= p < plan.size for p in ends),
                f"a message goes from position {each.source} to {each.target}",
            ),
            (
                any(not 0 <= chunk < plan.chunks for chunk in each.chunks),
                f"a message carries chunks {each.chunks} of {plan.chunks}",
            ),
            (each.reduce and not kind.reduces, "a message reduces, and the kind does not"),
        )


def _check_cost(plan: Algorithm, cost: Cost, what: str) -> None:
    """The closed form says what the steps send and receive."""
    for verb, by_form, count in (
        ("sent", _parts(cost.sent, cost.whole), plan.bytes_sent),
        ("received", _parts(cost.received, cost.whole), plan.bytes_received),
    ):
        by_steps = _parts(count([1] * plan.chunks), plan.chunks_of_buffer)
        told = f"closed_form says {_shown(by_form)} S {verb}, the steps {_shown(by_steps)}"
        refuse(what, (by_form != by_steps, told))
    refuse(
        what,
        (
            cost.messages != plan.messages_sent() or cost.steps != len(plan.steps),
            f"closed_form says {cost.steps} steps and messages {cost.messages}, the steps {len(plan.steps)} and "
            f"{plan.messages_sent()}",
        ),
    )


def _check_phases(phases: Iterable[Any], cost: Cost, what: str) -> None:
    """The closed form says what the phases send and receive."""
    sent, received = ([Fraction(0)] * len(cost.sent) for _ in range(2))
    for phase in phases:
        messages = phase.sources.tolist(), phase.targets.tolist(), phase.parts.tolist()
        for source, target, parts in zip(*messages, strict=True):
            moved = Fraction(phase.sendings * parts, phase.whole)
            sent[source] += moved
            received[target] += moved
    by_form = _parts(cost.sent, cost.whole), _parts(cost.received, cost.whole)
    told = f"closed_form says {_shown(by_form[0])} S sent, the phases {_shown(sent)}"
    refuse(what, ((sent, received) != by_form, told))


def _check_results(plan: Algorithm, kind: CollectiveKind, what: str) -> None:
    """Runs the steps with integers, and compares the results with those of the kind."""
    g, root = plan.size, plan.root
    shape = (2 * g, g)
    inputs = [np.arange(2 * g * g).reshape(shape) * (p + 1) + p for p in range(g)]
    rule = reduction("sum", inputs[0].dtype) if kind.reduces else None
    pairs = plan.pairs if kind.paired else None
    sizes = (2,) * g if kind.cuts else ()
    calls, start = [], []
    for p, x in enumerate(inputs):
        is_given = kind.is_given_by(p, root)
        dtype, extents = (x.dtype, x.shape) if is_given else (None, None)
        calls.append(MemberCall(kind.name, dtype, extents, root=root, pairs=pairs, sizes=sizes))
        start.append(chunks.start(plan, p, x if is_given else None))
    steps = played(plan, start, rule)
    held = steps[-1].held if steps else start
    for p in range(g):
        result = chunks.finish(plan, p, held[p], inputs[p], shape=shape)
        expected = result_of(calls, p, inputs, rule)
        if kind.lists:
            is_right = all(np.array_equal(a, b) for a, b in zip(result, inputs, strict=True))
        elif expected is None:
            is_right = result is None
        else:
            array = np.empty(expected.shape, expected.dtype)
            expected.fill(array)
            is_right = np.array_equal(result, array)
        refuse(what, (not is_right, f"position {p} does not get what {kind.name} gives"))
    nbytes = [inputs[0].nbytes // plan.chunks_of_buffer] * plan.chunks
    refuse(
        what,
        (
            plan.chunks and payload_bytes(plan, nbytes) != inputs[0].nbytes,
            f"{plan.chunks} chunks do not make up one buffer",
        ),
    )


def _shown(parts: Sequence[Fraction]) -> str:
    return ", ".join(map(str, parts))
