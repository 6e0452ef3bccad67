"""Whether the record of an algorithm is complete, and its parts agree: checked before it is registered, and by tests.

For some sizes, roots and pairs: the messages lie inside the group and their chunks inside the buffer; the steps give
what the kind says; the bytes of the closed form are those that the steps move and those that the phases price.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from parallelism.algorithms import (
    HIERARCHICAL,
    KINDS,
    TORUS,
    Algorithm,
    CollectiveAlgorithm,
    CollectiveKind,
    Cost,
    Listed,
    Pairs,
    Pairwise,
    Phase,
    RegistrationError,
)
from parallelism.collectives import buffers as chunks
from parallelism.collectives.call import MemberCall, payload_bytes
from parallelism.collectives.results import reduction, result_of

SIZES = (2, 3, 4, 5, 8)


def check(record: CollectiveAlgorithm, sizes: Sequence[int] = SIZES) -> None:
    """Raises `RegistrationError` for the first thing that is wrong with a record."""
    def refuse(why: str) -> None:
        raise RegistrationError(f"algorithm {record.name!r}: {why}")

    if not (isinstance(record.name, str) and record.name.isidentifier()):
        refuse("name must be an identifier")
    if record.name in (HIERARCHICAL, TORUS):
        refuse("this name stands for prices that depend on the hardware")
    if not record.kinds:
        refuse("kinds must name at least one kind")
    for name in record.kinds:
        if name not in KINDS.records:
            refuse(f"there is no kind {name!r}; register it first")
        if KINDS.records[name].reduces and record.steps is not None and not record.order:
            refuse(f"{name} reduces: order must say in which order")
    if not record.formula:
        refuse("formula must say what a position receives")
    closed_form: Any = record.closed_form
    if not callable(closed_form):
        refuse(f"closed_form must be a function of (size, root, pairs), got {closed_form!r}")
    if record.steps is None and record.phases is None:
        refuse("there are neither steps, to be run, nor phases, to be priced")
    if record.applies is not None and not record.needs:
        refuse("needs must say in words what applies() asks of a size")
    applying = [size for size in sizes if record.fits(size)]
    if not applying:
        refuse(f"it applies to none of the sizes {tuple(sizes)}")
    for name in record.kinds:
        for size in applying:
            for root in (0, size - 1) if KINDS.records[name].rooted else (0,):
                try:
                    _check_one(record, KINDS.records[name], size, root)
                except RegistrationError:
                    raise
                except Exception as error:
                    raise RegistrationError(
                        f"algorithm {record.name!r}, {name} over {size} with root {root}: {type(error).__name__}: "
                        f"{error}") from error


def _check_one(record: CollectiveAlgorithm, kind: CollectiveKind, g: int, root: int) -> None:
    def refuse(why: str) -> None:
        raise RegistrationError(f"algorithm {record.name!r}, {kind.name} over {g} with root {root}: {why}")

    pairs: Pairs = tuple((p, (p + 1) % g) for p in range(g - 1)) if kind.paired else ()
    cost = Cost(*record.closed_form(g, root, pairs))
    for field in ("sent", "received", "messages"):
        if len(getattr(cost, field)) != g:
            refuse(f"closed_form gives {len(getattr(cost, field))} numbers as {field}, for {g} positions")
    if sum(cost.sent) != sum(cost.received):
        refuse(f"by closed_form {sum(cost.sent)} parts of S are sent and {sum(cost.received)} received")
    sent = [Fraction(part, cost.whole) for part in cost.sent]
    received = [Fraction(part, cost.whole) for part in cost.received]
    if record.steps is not None:
        stages: tuple[Any, ...] = tuple(record.steps(g, root, pairs))
        for stage in stages:
            if not isinstance(stage, Listed | Pairwise):
                refuse(f"a step must be Listed(...) or Pairwise(...), got {type(stage).__name__}")
        plan = Algorithm(kind.name, record.name, g, root, record.chunks(g), record.order, pairs, record, stages)
        for step in plan.steps:
            for each in step:
                ends = each.source, each.target
                if not all(0 <= p < g for p in ends) or ends[0] == ends[1]:
                    refuse(f"a message goes from position {ends[0]} to {ends[1]}")
                if any(not 0 <= chunk < plan.chunks for chunk in each.chunks):
                    refuse(f"a message carries chunks {each.chunks} of {plan.chunks}")
                if each.reduce and not kind.reduces:
                    refuse("a message reduces, and the kind does not")
        part = Fraction(1, plan.chunks_of_buffer)
        for what, by_form, by_steps in (
            ("sent", sent, plan.bytes_sent([1] * plan.chunks)),
            ("received", received, plan.bytes_received([1] * plan.chunks)),
        ):
            if by_form != [n * part for n in by_steps]:
                refuse(f"closed_form says {_shown(by_form)} S {what}, the steps {_shown([n * part for n in by_steps])}")
        if cost.messages != plan.messages_sent() or cost.steps != len(plan.steps):
            refuse(f"closed_form says {cost.steps} steps and messages {cost.messages}, the steps {len(plan.steps)} and "
                   f"{plan.messages_sent()}")
        _check_results(plan, kind, refuse)
    if record.phases is not None:
        priced_sent, priced_received = [Fraction(0)] * g, [Fraction(0)] * g
        for phase in map(Phase._make, record.phases(g, root, pairs)):
            times = 1 if phase.piped else phase.times
            ends_and_parts = (phase.sources.tolist(), phase.targets.tolist(), phase.parts.tolist())
            for source, target, parts in zip(*ends_and_parts, strict=True):
                priced_sent[source] += Fraction(times * parts, phase.whole)
                priced_received[target] += Fraction(times * parts, phase.whole)
        if (priced_sent, priced_received) != (sent, received):
            refuse(f"closed_form says {_shown(sent)} S sent, the phases {_shown(priced_sent)}")


def _check_results(plan: Algorithm, kind: CollectiveKind, refuse: Any) -> None:
    """Play the steps through with integers, and compare with what the kind says."""
    g, root = plan.size, plan.root
    shape = (2 * g, g)
    inputs = [np.arange(2 * g * g).reshape(shape) * (p + 1) + p for p in range(g)]
    given = [inputs[p] if kind.is_given_by(p, root) else None for p in range(g)]
    calls = [
        MemberCall(kind.name, None if x is None else x.dtype, None if x is None else x.shape, root=root,
                   pairs=plan.pairs if kind.paired else None, sizes=(2,) * g if kind.cuts else ())
        for x in given
    ]
    rule = reduction("sum", inputs[0].dtype) if kind.reduces else None
    held = [chunks.start(plan, p, given[p]) for p in range(g)]
    for step in plan.steps:
        messages = [(each, chunks.outgoing(held[each.source], each)) for each in step]
        held = [
            chunks.arrive(
                held[p], [chunks.Message(each.source, each.chunks, arrays, each.reduce)
                          for each, arrays in messages if each.target == p],
                p, rule.combine if rule else None)
            for p in range(g)
        ]
    for p in range(g):
        found = chunks.finish(plan, p, held[p], inputs[p], shape=shape)
        if kind.lists:
            right = all(np.array_equal(a, b) for a, b in zip(found, inputs, strict=True))
        else:
            expected = result_of(calls, p, inputs, rule)
            if expected is None:
                right = found is None
            else:
                array = np.empty(expected.shape, expected.dtype)
                expected.fill(array)
                right = np.array_equal(found, array)
        if not right:
            refuse(f"position {p} does not get what {kind.name} says")
    nbytes = [inputs[0].nbytes // plan.chunks_of_buffer] * plan.chunks
    if plan.chunks and payload_bytes(plan, nbytes) != inputs[0].nbytes:
        refuse(f"{plan.chunks} chunks do not make up one buffer")


def _shown(parts: Sequence[Fraction]) -> str:
    return ", ".join(map(str, parts))
