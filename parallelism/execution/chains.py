"""What an op declares; and chains of ops that run as one kernel (`parallelism.ir.passes.fusion`): what they declare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

from parallelism.dtypes import is_floating
from parallelism.ir import Expression, Op, Value
from parallelism.ir.operators.attention import attention_shape
from parallelism.ir.operators.contractions import PRODUCTS, factor_dtype, product_shape
from parallelism.ir.passes.waiting import Run, Start, Step, Wait

Chain = list[Run]
"""One or more ops that run one after the other in one kernel."""
MOST_KINDS = 4
"""Kinds of ops in the name of a chain."""


class DeclaredCost(NamedTuple):
    """The cost that an op declares."""

    flops: float
    nbytes: float
    """Bytes that the op reads and writes."""
    dtype: str | None
    seconds: float | None = None
    """Seconds that the op takes, if they are known: they count in place of flops and bytes."""
    other_bytes: tuple[tuple[str, int], ...] = ()
    """Of ``nbytes``, those of values of other dtypes than ``dtype``, by dtype."""
    shape: tuple[int, ...] | None = None
    """Of products of matrices: (count, m, n, k); of attention: (count, rows, keys, width, causal)."""


def in_chains(steps: Iterable[Step], lengths: Sequence[int]) -> list[Chain | Start | Wait]:
    """The steps with those of a chain together; ``lengths`` are the numbers of ops of the chains, in order.

    A wait for a call ends a chain.
    """
    of_op = chain.from_iterable(repeat(number, length) for number, length in enumerate(lengths))
    found: list[Chain | Start | Wait] = []
    before, together = -1, Chain()
    for step in steps:
        if isinstance(step, Run):
            number = next(of_op)
            if number != before:
                together = []
                found.append(together)
            together.append(step)
            before = number
            continue
        if isinstance(step, Start):
            for _ in step.ops:
                next(of_op)
        found.append(step)
        before = -1
    return found


def inner_values(steps: Sequence[Chain | Start | Wait], outputs: Collection[Value]) -> frozenset[Value]:
    """The values that only their own chain uses, and that are not among the ``outputs``: no memory holds them."""
    made: dict[Value, int] = {}
    used, outside = set[Value](), {*outputs}
    for number, step in enumerate(steps):
        waits = isinstance(step, Start | Wait)
        for op in step.ops if isinstance(step, Start | Wait) else [each.op for each in step]:
            used.update(op.inputs)
            outside.update(value for value in op.inputs if made.get(value) != number)
            if not waits:
                made.update(dict.fromkeys(op.outputs, number))
    return frozenset(value for value in made if value in used and value not in outside)


def moved_values(ops: Sequence[Op], inner: Collection[Value]) -> list[Value]:
    """The values that a chain reads from others, and that it writes for others, each once."""
    made = {value for op in ops for value in op.outputs}
    read = dict.fromkeys(value for op in ops for value in op.inputs if value not in made)
    return [*(value for op in ops for value in op.outputs if value not in inner), *read]


def bytes_of_others(values: Iterable[Value], dtype: object) -> tuple[tuple[str, int], ...]:
    """The bytes of values of other dtypes than ``dtype``, by dtype."""
    others: Counter[str] = Counter()
    for value in values:
        if value.type.dtype != dtype:
            others[value.type.dtype.name] += whole_number(value.type.nbytes)
    return tuple(others.items())


def declared_cost(op: Op, seconds: Callable[[Op], float] | None = None) -> DeclaredCost | None:
    """The cost that an op on arrays of its own declares; None if it is nothing.  ``seconds`` as for a program."""
    cut = op.kind in ("all_slice", "relayout")  # only the part that is kept is read
    nbytes = number(2 * op.outputs[0].type.nbytes if cut else op.nbytes)
    dtypes = [value.type.dtype for value in (*op.outputs, *op.inputs)]
    shape = product_shape(op) or attention_shape(op)
    if product_shape(op):
        dtypes.insert(0, factor_dtype(op))
    floating = next(filter(is_floating, dtypes), None)
    flops = number(op.flops) if floating is not None else 0.0
    dtype = floating or dtypes[0]
    if not flops and not nbytes:
        return None
    others: Counter[str] = Counter()
    for value in (*op.outputs, *op.inputs):
        other = value.type.dtype
        # An operator that counts its own bytes does not read all of its floats.
        own = op.operator.nbytes is not None or op.operator.op_nbytes is not None
        if other != dtype and not (own and is_floating(other)):
            others[other.name] += whole_number(value.type.nbytes)
    return DeclaredCost(
        flops,
        nbytes,
        dtype.name,
        None if seconds is None or cut else seconds(op),
        tuple(others.items()),
        shape and tuple(map(whole_number, shape)),
    )


def number(extent: Any) -> Any:
    """A number of flops or bytes.  An expression of symbols stays one (`parallelism.planning` prices such programs)."""
    return extent if isinstance(extent, Expression) else float(extent)


def whole_number(extent: Any) -> Any:
    """`number` as an integer."""
    return extent if isinstance(extent, Expression) else int(extent)


def name_of(ops: Sequence[Op]) -> str:
    """The kind of an op, or the different kinds of a chain: ``add+dropout``.

    Where the results of an op are added to buffers right away, or a bias to a product, it is the kind of that op.
    """
    if ops[0].kind in PRODUCTS:
        return ops[0].kind
    kinds = [*dict.fromkeys(op.kind for op in ops if op.kind != "accumulate")] or [ops[-1].kind]
    return "+".join(kinds if len(kinds) <= MOST_KINDS else (*kinds[:MOST_KINDS], "..."))
