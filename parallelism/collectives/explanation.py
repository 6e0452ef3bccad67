"""Runs a collective in one process and shows each step: its messages, and the chunks that each rank then holds.

    >>> import numpy as np
    >>> steps = explain("all_reduce", algorithm="ring", inputs=[np.arange(4) + rank for rank in range(4)])
    >>> len(steps), steps[0].messages[0]
    (6, Sent(source=0, target=1, chunks=(3,), arrays=(array([3]),), reduce=True))
    >>> steps.results[2]
    array([ 6, 10, 14, 18])

The steps and the arithmetic are those that run on a cluster (`parallelism.algorithms`,
`parallelism.collectives.buffers`, `parallelism.collectives.results`), so a cluster does the same.  Nothing is started.
`print` draws the steps, and a notebook shows them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike

from parallelism.algorithms import Algorithm, ClosedForm, CollectiveKind, closed_form, kind_of
from parallelism.algorithms.algorithms import algorithm as find_algorithm
from parallelism.arrays import Array
from parallelism.collectives import buffers as chunks
from parallelism.collectives.explanation_text import text
from parallelism.collectives.results import Reduction, reduction
from parallelism.dtypes import is_numeric
from parallelism.operation import ReduceOp


@dataclass(frozen=True, eq=False)
class Sent:
    """One message with its values: ``arrays[i]`` is chunk ``chunks[i]`` as the source held it before the step."""

    source: int
    target: int
    chunks: tuple[int, ...]
    arrays: tuple[Array, ...]
    reduce: bool

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, eq=False)
class ExplainedStep:
    """One step: its messages, and by rank what is held after it (chunk -> array) and the bytes received so far."""

    number: int
    messages: tuple[Sent, ...]
    held: tuple[Mapping[int, Array], ...]
    bytes_received: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Explanation(Sequence[ExplainedStep]):
    """A collective as a sequence of its steps, the result of `explain`; it can be printed and shown in a notebook.

    >>> from parallelism import explain
    >>> ring = explain("all_reduce", inputs=[[1, 2], [3, 4]], algorithm="ring")
    >>> len(ring.steps), ring.bytes_received, [result.tolist() for result in ring.results]
    (2, (16, 16), [[4, 6], [4, 6]])

    ``inputs``, ``start`` (chunks held before the first step) and ``results`` are by rank; ``buffer_nbytes`` is
    the S of the closed form.  All arrays are read-only.
    """

    algorithm: Algorithm
    title: str
    op: str
    inputs: tuple[Array | None, ...]
    start: tuple[Mapping[int, Array], ...]
    steps: tuple[ExplainedStep, ...]
    results: tuple[Any, ...]
    buffer_nbytes: int
    closed_form: ClosedForm

    @property
    def bytes_received(self) -> tuple[int, ...]:
        """Bytes received in all, by rank."""
        return self.steps[-1].bytes_received if self.steps else (0,) * self.algorithm.size

    @property
    def bytes_sent(self) -> tuple[int, ...]:
        """Bytes sent in all, by rank."""
        sent = [0] * len(self.inputs)
        for step in self.steps:
            for message in step.messages:
                sent[message.source] += message.nbytes
        return tuple(sent)

    @overload
    def __getitem__(self, index: int) -> ExplainedStep: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ExplainedStep]: ...
    def __getitem__(self, index: int | slice) -> ExplainedStep | Sequence[ExplainedStep]:
        return self.steps[index]

    def __len__(self) -> int:
        return len(self.steps)

    def __bool__(self) -> bool:  # one rank needs no steps, and is explained all the same
        return True

    def __str__(self) -> str:
        return text(self)

    def __repr__(self) -> str:
        plan = self.algorithm
        return (
            f"<Explanation of {plan.collective}, {plan.name}, {plan.size} ranks, {len(self)} steps; print it>"
        )

    def to_svg(self) -> str:
        """A film of the steps as one SVG file, for a page or a slide.  It needs no script, and is light or dark.

        Where a reader has asked for less motion, or pictures do not move, the last step is shown.
        """
        from parallelism.collectives import explanation_film

        return explanation_film.svg(self)

    def _repr_html_(self) -> str:
        from parallelism.collectives import explanation_picture

        return explanation_picture.html(self)


def explain(
    collective: str,
    *,
    inputs: Sequence[ArrayLike | None],
    algorithm: str | None = None,
    root: int = 0,
    dim: int = 0,
    op: ReduceOp = "sum",
    split_dim: int = 0,
    concat_dim: int = 0,
    split_sizes: Sequence[int] | Sequence[Sequence[int]] | None = None,
    pairs: Sequence[tuple[int, int]] | None = None,
    by: int = 1,
) -> Explanation:
    """Every step of a collective over ``len(inputs)`` ranks, with real values.

    >>> from parallelism import explain
    >>> explain("all_gather", inputs=[[1], [2], [3]], algorithm="ring").bytes_received
    (16, 16, 16)

    ``collective`` is the name of a kind (`parallelism.algorithms.kinds`) or ``"shift"``; ``inputs`` has each rank's
    array or scalar, None where it does not count (the others of broadcast and scatter; barrier).  The other arguments
    mean what they mean on a device and are looked at where they apply; ``split_sizes`` is for all ranks, or a list of
    them by rank.  Raises ``ValueError`` or ``TypeError`` for an unknown name, a root or pairs outside the
    group, and inputs whose dtypes or shapes do not agree.
    """
    size = len(inputs)
    if not size:
        raise ValueError(f"{collective} needs the input of at least one rank, got none")
    if collective == "shift":
        collective, pairs = "permute", [(p, (p + by) % size) for p in range(size)]
    kind = kind_of(collective)
    moved = None
    if kind.paired:
        if pairs is None:
            raise ValueError(f"{collective} needs pairs=[(source, target), ...], got none")
        moved = tuple((source, target) for source, target in pairs)
    plan = find_algorithm(collective, algorithm, size, root=root if kind.rooted else 0, pairs=moved)

    cut, joined = (split_dim, concat_dim) if kind.blocks_of_all else (dim, dim)
    arrays = _checked(plan, inputs, joined)
    first = arrays[plan.root]
    rule = reduction(op, first.dtype) if kind.reduces and first is not None else None
    if rule is not None:
        arrays = [_frozen(np.asarray(array, rule.dtype)) for array in arrays]
    sizes = _sizes_by_rank(split_sizes, size) if kind.blocks_of_all else [None] * size

    held = (chunks.start(plan, rank, arrays[rank], dim=cut, sizes=sizes[rank]) for rank in range(size))
    start = tuple(map(_all_frozen, held))
    steps = played(plan, start, rule)
    results = _results(plan, steps[-1].held if steps else start, arrays, joined, rule)
    name = "" if rule is None else rule.name
    pairs_in_words = ", ".join(f"{source} to {target}" for source, target in plan.pairs)
    title = kind.title.format(op=name, root=plan.root, cut=cut, joined=joined, pairs=pairs_in_words)
    return Explanation(
        plan,
        title,
        name,
        tuple(arrays),
        start,
        steps,
        results,
        _buffer_nbytes(kind, arrays),
        closed_form(collective, plan.name, size, root=plan.root, pairs=moved),
    )


def played(
    plan: Algorithm, start: Sequence[Mapping[int, Array]], rule: Reduction | None
) -> tuple[ExplainedStep, ...]:
    """The steps of an algorithm, from what each rank holds at the start."""
    combine = None if rule is None else rule.combine
    held, steps, received = list(start), [], [0] * plan.size
    for number, step in enumerate(plan.steps, 1):
        messages = tuple(
            Sent(t.source, t.target, t.chunks, tuple(chunks.outgoing(held[t.source], t)), t.reduce)
            for t in step
        )
        for rank in range(plan.size):
            mine = [m for m in messages if m.target == rank]
            arriving = [chunks.Message(m.source, m.chunks, m.arrays, m.reduce) for m in mine]
            held[rank] = _all_frozen(chunks.arrive(held[rank], arriving, rank, combine))
            received[rank] += sum(m.nbytes for m in mine)
        steps.append(ExplainedStep(number, messages, tuple(held), tuple(received)))
    return tuple(steps)


def _results(
    plan: Algorithm,
    held: Sequence[Mapping[int, Array]],
    arrays: Sequence[Array | None],
    dim: int,
    rule: Reduction | None,
) -> tuple[Any, ...]:
    """The result of each rank, from what it holds after the last step."""
    results = []
    for rank in range(plan.size):
        result = chunks.finish(plan, rank, held[rank], arrays[rank], dim=dim)
        if rule is not None and result is not None:
            result = result.copy()
            rule.finish(result, plan.size)
        results.append(_frozen(result) if isinstance(result, np.ndarray) else result)
    return tuple(results)


def _checked(plan: Algorithm, inputs: Sequence[ArrayLike | None], dim: int) -> list[Array | None]:
    """The inputs as read-only arrays that agree where they must; None where they do not count."""
    collective, root = plan.collective, plan.root
    kind = kind_of(collective)
    free = dim if kind.joins else None
    arrays: list[Array | None] = []
    for rank, value in enumerate(inputs):
        if not kind.is_given_by(rank, root):
            arrays.append(None)
            continue
        if value is None:
            raise ValueError(f"{collective} needs an array from rank {rank}, got None")
        array = np.array(value)
        if not is_numeric(array.dtype):
            raise TypeError(f"{collective} takes numbers and bools; rank {rank} has dtype {array.dtype}")
        arrays.append(_frozen(array))
        first = arrays[root if kind.gives == "root" else 0]
        if first is None or not kind.alike:
            continue
        if array.dtype != first.dtype:
            raise ValueError(
                f"dtypes differ in {collective}: rank 0 has {first.dtype}, rank {rank} has {array.dtype}"
            )
        if first.ndim and kind.joins and not -first.ndim <= dim < first.ndim:
            raise ValueError(f"{collective} needs a dim from {-first.ndim} to {first.ndim - 1}, got {dim}")
        if _fixed(array, free) != _fixed(first, free):
            but = "" if free is None else f" in more than dim {free}"
            raise ValueError(
                f"shapes differ in {collective}{but}: rank 0 has {first.shape}, rank {rank} has {array.shape}"
            )
    return arrays


def _fixed(array: Array, free: int | None) -> tuple[int | None, ...]:
    """The shape, without the extent that ranks may choose."""
    extents: list[int | None] = list(array.shape)
    if free is not None and -array.ndim <= free < array.ndim:
        extents[free] = None
    return tuple(extents)


def _sizes_by_rank(sizes: Any, size: int) -> list[Sequence[int] | None]:
    if sizes is None or not len(sizes) or not isinstance(sizes[0], Sequence | np.ndarray):
        return [sizes] * size
    if len(sizes) != size:
        raise ValueError(f"split_sizes by rank need {size} lists, got {len(sizes)}")
    return list(sizes)


def _buffer_nbytes(kind: CollectiveKind, arrays: Sequence[Array | None]) -> int:
    """The S of `closed_forms`; where ranks differ in it, the mean."""
    sizes = [array.nbytes for array in arrays if array is not None]
    return sum(sizes) if kind.in_shards else sum(sizes) // max(len(sizes), 1)


def _all_frozen(held: Mapping[int, Array]) -> Mapping[int, Array]:
    return MappingProxyType({chunk: _frozen(held[chunk]) for chunk in sorted(held)})


def _frozen(array: Array) -> Array:
    array = array.view()
    array.flags.writeable = False
    return array
