"""Collectives of tensor parallelism in chunks, which run beside the products that they are for.

As the *userbuffers* of Transformer Engine do it, Megatron-LM's ``--tp-comm-overlap`` (its
``transformer_engine/pytorch/module/base.py``, ``initialize_ub``; Wang et al., *Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models*, ASPLOS 2023, for the idea):

    y = all_gather(x) @ w          x0, x1 = chunks of x along the dim that is gathered
                                   y0, y1 = all_gather(x0) @ w, all_gather(x1) @ w       all_gather(x1) beside y0
                                   y = y0 and y1, each device's rows next to each other

    y = reduce_scatter(x @ w)      w0, w1 = chunks of w along its columns
                                   y0, y1 = reduce_scatter(x @ w0), ...(x @ w1)          reduce_scatter of y0 beside x @ w1
                                   y = y0 and y1, side by side

What is gathered has as many chunks as there are devices in the group, the steps of a ring; columns have `SPLITS`.  Where a
collective starts and is waited for is that of the order of the ops (`parallelism.execution.overlapping`,
`parallelism.ir.passes.overlapping`), as of any other collective.  Each element of a result is the same sum of the same terms
in the same order, and as many bytes are communicated.  A chunk is priced as one (`parallelism.algorithms.ChunkOf`).

Kernels of several chunks run at once, on streams of their own, so that tiles of the next one fill the units that the last
tiles of one leave idle (`side_by_side`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from parallelism.algorithms import ChunkOf
from parallelism.arrays import with_extent
from parallelism.ir.core import Attributes, Extent, Function, Op, TensorType, Value
from parallelism.ir.core.regions import inside
from parallelism.ir.operators.contractions import PRODUCTS, product_letters, product_shape
from parallelism.ir.passes.fusion import adds_a_bias
from parallelism.ir.passes.gradients import UPDATE

CHUNKED = "chunked_over"
"""The attribute by which a function says that devices run it so: the axis whose collectives are cut."""
MOST = 32
"""Larger groups than this are left as they are: nobody splits a product over as many devices."""
SPLITS = 4
"""So many chunks has a product whose result is scattered: the default of ``num_splits`` for the method *pipeline*, by which
Transformer Engine overlaps reduce-scatters (its ``initialize_ub``)."""
STREAMS = 3
"""So many chunks of a product are computed at once: ``NVTE_COMM_OVERLAP_MAX_STREAMS`` of Transformer Engine (its
``common/comm_gemm_overlap``), whose loops put the product of chunk i on stream i % 3."""


def chunked_over(function: Function) -> str | None:
    """The axis that the attributes of a function name; None if they name none."""
    axis: str | None = dict(function.attributes).get(CHUNKED)
    return axis


class Gathered(NamedTuple):
    """Products of what is gathered: the numbers of their ops, each with that of the bias that is added to it."""

    gathers: tuple[int, ...]
    """The gathers that are cut: of the operand, and of its scales."""
    products: tuple[tuple[int, int | None], ...]
    group: int

    @property
    def name(self) -> int:
        """The op by which the programs of several devices know it."""
        return self.gathers[0]

    @property
    def last(self) -> int:
        """The last op of the products."""
        return max(number for pair in self.products for number in pair if number is not None)


class Scattered(NamedTuple):
    """A product whose result is reduce-scattered."""

    product: int
    scatter: int
    dim: int
    """The dim of the result that is cut."""

    @property
    def name(self) -> int:
        """The op by which the programs of several devices know it."""
        return self.scatter


def candidates(program: Function, axis: str) -> dict[int, Gathered | Scattered]:
    """What can be cut in the program of one device, by the number of its collective.

    A gather over ``axis`` alone, whose result is the first operand of a product that keeps the dim; and a reduce-scatter
    over it of a product that nothing else reads, unless another product stands behind it: then it runs beside that.  The
    extents that are cut must divide by the group.  What is gathered must be computed, not an input such as a weight.
    """
    return _Candidates(program, axis).found()


def in_chunks(program: Function, axis: str, chosen: Collection[int]) -> Function:
    """The program with the collectives of ``chosen`` (`candidates`) in chunks, which computes the same."""
    known = _Candidates(program, axis)
    cut = [each for number, each in known.found().items() if number in chosen]
    return _Writer(program, cut, known.readers).function() if cut else program


def side_by_side(ops: Iterable[Op]) -> dict[Value, tuple[Extent, ...]]:
    """By the result of each product of a chunk: the shape of the products of all the chunks that are computed at once."""
    made = dict[Value, Op]()
    found = dict[Value, tuple[Extent, ...]]()
    for op in ops:
        made.update(dict.fromkeys(op.outputs, op))
        shape = product_shape(op)
        if shape is None:
            continue
        gather = made.get(op.inputs[0])
        second = made.get(op.inputs[len(op.inputs) // 2])
        rows = made.get(gather.inputs[0]) if gather is not None and gather.kind == "all_gather" else None
        for place, chunk in ((1, rows), (2, second)):
            if chunk is not None and chunk.kind == "chunk":
                beside = min(STREAMS, chunk["count"])
                found[op.outputs[0]] = with_extent(shape, place, beside * shape[place])
    return found


class _Candidates:
    def __init__(self, program: Function, axis: str) -> None:
        self.ops, self.outputs, self.axis = program.ops, program.outputs, axis
        self.made = {value: number for number, op in enumerate(self.ops) for value in op.outputs}
        self.readers: dict[Value, list[int]] = defaultdict(list)
        for number, op in enumerate(self.ops):
            for value in dict.fromkeys(op.inputs):
                self.readers[value].append(number)

    def found(self) -> dict[int, Gathered | Scattered]:
        found: dict[int, Gathered | Scattered] = {}
        for number in range(len(self.ops)):
            each = self._gathered(number) or self._scattered(number)
            if each is not None:
                found[each.name] = each
        return found

    # -- products of what is gathered ----------------------------------------------------------------------------------

    def _gathered(self, number: int) -> Gathered | None:
        """The products that a gather is for."""
        op = self.ops[number]
        if not self._is_of_group(op, "all_gather") or not self._is_computed(op.inputs[0]):
            return None
        dim, whole = op["dim"], op.outputs[0]
        products = [each for each in self.readers[whole] if self._keeps(each, whole, dim)]
        if not products or not _is_cut(op.inputs[0].type.shape[dim], op["group"]):
            return None
        scales = self._scales(products[0], dim)
        if scales is None:
            return None
        same = [
            each
            for each in products
            if self.ops[each].inputs[: 1 + len(scales)] == self._operand(products[0])
        ]
        gathers = (number, *(each for each in scales if each >= 0))
        several = Gathered(gathers, tuple((each, self._bias(each)) for each in same), op["group"])
        first = Gathered(gathers, several.products[:1], op["group"])
        return next((each for each in (several, first) if self._can_wait(each)), None)

    def _keeps(self, number: int, whole: Value, dim: int) -> bool:
        """Whether an op is a product that has a dim of its first operand, and of no other, in its result."""
        op = self.ops[number]
        letters = product_letters(op)
        if letters is None or op.inputs[0] != whole or inside(op, UPDATE):
            return False
        letter = letters.a[dim]
        return letter is not None and letter in letters.result and letter not in letters.b

    def _operand(self, number: int) -> tuple[Value, ...]:
        """The first operand of a product: its numbers and their scales."""
        inputs = self.ops[number].inputs
        return inputs[: len(inputs) // 2]

    def _scales(self, number: int, dim: int) -> list[int] | None:
        """The gathers of the scales of the first operand of a product, -1 for one that each chunk reads whole; None if
        they cannot be cut as the operand is."""
        found = []
        for value in self._operand(number)[1:]:
            if not value.type.ndim:
                found.append(-1)
                continue
            made = self.made.get(value, -1)
            op = self.ops[made]
            if made < 0 or not self._is_of_group(op, "all_gather") or op["dim"] != dim:
                return None
            extent = op.inputs[0].type.shape[dim]
            if extent != 1 and not _is_cut(extent, op["group"]):
                return None
            found.append(-1 if extent == 1 else made)
        return found

    def _bias(self, number: int) -> int | None:
        """The op that adds a bias to a product; None if there is none."""
        result = self.ops[number].outputs[0]
        readers = self.readers[result]
        if len(readers) != 1 or result in self.outputs:
            return None
        op = self.ops[readers[0]]
        is_bias = op.kind == "add" and op.inputs[0] == result and adds_a_bias(op)
        return readers[0] if is_bias and op.inputs[1] not in self.made else None

    def _can_wait(self, found: Gathered) -> bool:
        """Whether nothing before the last of the products reads what a product, or a gather that is cut, makes."""
        own = {number for pair in found.products for number in pair}
        makers = (*found.gathers, *(number for number in own if number is not None))
        return all(
            reader in own or reader > found.last
            for number in makers
            for value in self.ops[number].outputs
            for reader in self.readers[value]
        )

    # -- products whose results are scattered --------------------------------------------------------------------------

    def _scattered(self, number: int) -> Scattered | None:
        """The reduce-scatter of a product."""
        op = self.ops[number]
        letters = product_letters(op)
        if letters is None or inside(op, UPDATE):
            return None
        result = op.outputs[0]
        readers = self.readers[result]
        if len(readers) != 1 or result in self.outputs:
            return None
        scatter = self.ops[readers[0]]
        if not self._is_of_group(scatter, "reduce_scatter") or scatter["op"] != "sum":
            return None
        if self._has_product_behind(number, scatter):
            return None
        for dim, letter in enumerate(letters.result):
            if letter is None or dim == scatter["dim"] or letter in letters.a or letter not in letters.b:
                continue
            place, inputs = letters.b.index(letter), op.inputs
            second = inputs[len(inputs) // 2 : 2 * (len(inputs) // 2)]
            of_columns, *of_scales = (value.type.shape[place] for value in second if value.type.ndim)
            if _is_cut(of_columns, SPLITS) and all(each == 1 or _is_cut(each, SPLITS) for each in of_scales):
                return Scattered(number, readers[0], dim)
        return None

    def _has_product_behind(self, number: int, scatter: Op) -> bool:
        """Whether there is a product between one and the first op that reads what is scattered of its result."""
        first = min(self.readers[scatter.outputs[0]], default=len(self.ops))
        return any(op.kind in PRODUCTS for op in self.ops[number + 1 : first])

    # -- the program ---------------------------------------------------------------------------------------------------

    def _is_of_group(self, op: Op, kind: str) -> bool:
        """Whether an op is a collective of this kind over the axis alone, whose parts are equally large."""
        if op.kind != kind or op["axes"] != (self.axis,) or not 1 < op["group"] <= MOST:
            return False
        before, after = (side[0].type.shape[op["dim"]] for side in (op.inputs, op.outputs))
        if not isinstance(before, int) or not isinstance(after, int):
            return False
        return min(before, after) * int(op["group"]) == max(before, after)

    def _is_computed(self, value: Value) -> bool:
        """Whether a value is neither an input nor a view of one."""
        made = self.made.get(value)
        while made is not None and self.ops[made].operator.view:
            made = self.made.get(self.ops[made].inputs[0])
        return made is not None


class _Writer:
    """The ops of a program, some of them in chunks."""

    def __init__(
        self, program: Function, cut: Sequence[Gathered | Scattered], readers: dict[Value, list[int]]
    ) -> None:
        self.program, self.ops, self.readers = program, program.ops, readers
        self.names = {value.name for value in program.values}
        self.gathered = {each.last: each for each in cut if isinstance(each, Gathered)}
        """By the op in whose place the chunks stand."""
        self.scattered = {each.product: each for each in cut if isinstance(each, Scattered)}
        self.left_out = {number for each in cut for number in _numbers(each)}

    def function(self) -> Function:
        ops: list[Op] = []
        for number, op in enumerate(self.ops):
            if number in self.gathered:
                ops += self._of_gathered(self.gathered[number])
            elif number in self.scattered:
                ops += self._of_scattered(self.scattered[number])
            elif number not in self.left_out:
                ops.append(op)
        return replace(self.program, ops=tuple(ops))

    def _of_gathered(self, found: Gathered) -> Iterator[Op]:
        """Each chunk is gathered, and multiplied by everything; then the results are put together."""
        gathers = [self.ops[number] for number in found.gathers]
        sources = [self._chunks(op.inputs[0], op["dim"], found.group, op.region) for op in gathers]
        for each in sources:
            yield from each
        made: dict[Value, list[Value]] = {op.outputs[0]: [] for op in self._read_later(found, gathers)}
        results = []
        for product, bias in found.products:
            last = product if bias is None else bias
            results.append(self.ops[last].outputs[0])
        made |= {result: [] for result in results}
        algorithm = str(ChunkOf(found.group))
        for number in range(found.group):
            parts = dict[Value, Value]()
            for op, chunks in zip(gathers, sources, strict=True):
                x = chunks[number].outputs[0]
                extent = x.type.shape[op["dim"]] * found.group
                y = self._value(op.outputs[0], op["dim"], extent)
                yield replace(
                    op, inputs=(x,), outputs=(y,), attributes=_with(op, extent=extent, algorithm=algorithm)
                )
                parts[op.outputs[0]] = y
            for product, bias in found.products:
                yield from self._product_of_chunk(found, product, bias, gathers[0]["dim"], parts)
            for whole, chunks_of in made.items():
                chunks_of.append(parts[whole])
        for whole, values in made.items():
            dim = _dim_between(values[0].type, whole.type)
            yield _joined(whole, values, dim, found.group, gathers[0].region)

    def _read_later(self, found: Gathered, gathers: Sequence[Op]) -> list[Op]:
        """The gathers whose results are read by others than the products, or returned."""
        products = {product for product, _ in found.products}
        outputs = self.program.outputs
        return [
            op
            for op in gathers
            if op.outputs[0] in outputs or not products.issuperset(self.readers[op.outputs[0]])
        ]

    def _product_of_chunk(
        self, found: Gathered, number: int, bias: int | None, dim: int, parts: dict[Value, Value]
    ) -> Iterator[Op]:
        """The product of a chunk, and the bias; ``parts`` has the chunks of values, and gets those of the results."""
        op = self.ops[number]
        letters = product_letters(op)
        assert letters is not None
        place = letters.result.index(letters.a[dim])
        extent = op.outputs[0].type.shape[place] // found.group
        y = self._value(op.outputs[0], place, extent)
        inputs = tuple(parts.get(value, value) for value in op.inputs)
        yield replace(op, inputs=inputs, outputs=(y,))
        parts[op.outputs[0]] = y
        if bias is not None:
            added = self.ops[bias]
            z = self._value(added.outputs[0], place, extent)
            yield replace(added, inputs=(y, added.inputs[1]), outputs=(z,))
            parts[added.outputs[0]] = z

    def _of_scattered(self, found: Scattered) -> Iterator[Op]:
        """The product with each chunk of the columns is scattered; then the results are put together."""
        op, scatter = self.ops[found.product], self.ops[found.scatter]
        letters = product_letters(op)
        assert letters is not None
        place = letters.b.index(letters.result[found.dim])
        half = len(op.inputs) // 2
        operand = op.inputs[half : 2 * half]
        others = op.inputs[2 * half :]
        chunks: list[list[Op]] = []
        """Of each array of the operand; none of one that has no columns, or one for all."""
        for value in operand:
            is_whole = not value.type.ndim or value.type.shape[place] == 1
            chunks.append([] if is_whole else self._chunks(value, place, SPLITS, op.region))
            yield from chunks[-1]
        parts, algorithm = [], str(ChunkOf(SPLITS))
        for number in range(SPLITS):
            second = list(operand)
            for i, each in enumerate(chunks):
                if each:
                    second[i] = each[number].outputs[0]
            y, z = (
                self._value(value, found.dim, value.type.shape[found.dim] // SPLITS)
                for value in (op.outputs[0], scatter.outputs[0])
            )
            inputs = (*op.inputs[:half], *second, *others)
            yield replace(op, inputs=inputs, outputs=(y,))
            yield replace(scatter, inputs=(y,), outputs=(z,), attributes=_with(scatter, algorithm=algorithm))
            parts.append(z)
        yield _joined(scatter.outputs[0], parts, found.dim, 1, scatter.region)

    def _chunks(self, x: Value, dim: int, count: int, region: str | None) -> list[Op]:
        """The views of the chunks of a value."""
        extent = x.type.shape[dim] // count
        return [
            Op(
                "chunk",
                (x,),
                (("axis", dim), ("count", count), ("number", number)),
                (self._value(x, dim, extent),),
                region,
            )
            for number in range(count)
        ]

    def _value(self, like: Value, dim: int, extent: int) -> Value:
        """A new value as another one, with another extent of a dim."""
        name, number = f"{like.name}.chunk", 0
        while f"{name}{number}" in self.names:
            number += 1
        self.names.add(f"{name}{number}")
        shape = with_extent(like.type.shape, dim, extent)
        return Value(f"{name}{number}", TensorType(like.type.dtype, shape))


def _is_cut(extent: Extent, count: int) -> bool:
    """Whether a dim has so many equal chunks."""
    return isinstance(extent, int) and extent % count == 0


def _numbers(found: Gathered | Scattered) -> Iterator[int]:
    """The numbers of the ops that chunks replace."""
    if isinstance(found, Scattered):
        yield from (found.product, found.scatter)
        return
    yield from found.gathers
    for product, bias in found.products:
        yield product
        if bias is not None:
            yield bias


def _joined(whole: Value, parts: Sequence[Value], dim: int, group: int, region: str | None) -> Op:
    """What puts chunks together."""
    return Op("joined_chunks", tuple(parts), (("axis", dim), ("group", group)), (whole,), region)


def _with(op: Op, **given: object) -> Attributes:
    """The attributes of an op with others."""
    return tuple(sorted({**dict(op.attributes), **given}.items()))


def _dim_between(chunk: TensorType, whole: TensorType) -> int:
    """The dim in which they differ."""
    return next(dim for dim, (a, b) in enumerate(zip(chunk.shape, whole.shape, strict=True)) if a != b)
