"""A product of sharded tensors: both operands are resharded, shards are multiplied, and the result is resharded.

During the local products each letter is split over the same axes wherever it occurs.  Then the product of two shards
is a shard of the product, or a term of one if a summed letter is split.  The ways to compute a product differ only in
the axes of each letter.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Self

import numpy as np

from parallelism.arrays import Array
from parallelism.display.markup import beside, figure, inside, note, preformatted
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.resharding import ReshardingPlan, plan_resharding, run_plan
from parallelism.sharding import TensorSharding
from tensor_parallelism.products.contraction import Contraction

Axes = tuple[str, ...]
DType = np.dtype[Any]
AxisOrAxes = str | Axes
ByRank = tuple[int, ...]
"""A number for each rank."""
Shape = tuple[int, ...]
Split = Mapping[str, Axes]
"""The axes of each letter, outermost first; a letter that is not a key is whole."""
Change = tuple[TensorSharding, TensorSharding, Shape]
"""The layout of a tensor before and after it is resharded, and its shape."""


@dataclass(frozen=True)
class Task:
    """A product to compute: the contraction, with the shapes and layouts of the tensors, on a mesh."""

    contraction: Contraction
    lhs: TensorSharding
    rhs: TensorSharding
    out: TensorSharding
    lhs_shape: Shape
    rhs_shape: Shape
    dtype: DType
    mesh: Mesh

    @cached_property
    def extents(self) -> dict[str, int]:
        """The extent of each letter."""
        return self.contraction.extents(self.lhs_shape, self.rhs_shape)

    @cached_property
    def out_shape(self) -> Shape:
        return tuple(self.extents[letter] for letter in self.contraction.out)

    @property
    def lhs_gradient(self) -> Self:
        """The product for the gradient of the left operand, with both gradients in the layouts of their tensors."""
        return replace(
            self,
            contraction=self.contraction.lhs_gradient,
            lhs=self.out,
            out=self.lhs,
            lhs_shape=self.out_shape,
        )

    @property
    def rhs_gradient(self) -> Self:
        """The product for the gradient of the right operand."""
        return replace(
            self,
            contraction=self.contraction.rhs_gradient,
            rhs=self.out,
            out=self.rhs,
            rhs_shape=self.out_shape,
        )


@dataclass(frozen=True)
class ProductPlan:
    """The reshardings before and after the local products; ``print`` it.  `run_product` runs it.

    >>> from parallelism import Mesh, TensorSharding
    >>> from tensor_parallelism import MatMul, MatMulSharding
    >>> rows, columns = TensorSharding("tp", None), TensorSharding(None, "tp")
    >>> plan = MatMul(MatMulSharding(columns, rows, TensorSharding(None, None))).plan([(3, 4), (4, 2)], Mesh(tp=2))
    >>> plan.bytes_received
    (48, 48)
    """

    task: Task
    split: tuple[tuple[str, Axes], ...]
    """The axes of each letter during the local products."""
    lhs: ReshardingPlan
    rhs: ReshardingPlan
    out: ReshardingPlan
    why: str = ""

    @property
    def mesh(self) -> Mesh:
        return self.task.mesh

    @property
    def moves(self) -> tuple[ReshardingPlan, ReshardingPlan, ReshardingPlan]:
        """The reshardings of both operands and of the result."""
        return self.lhs, self.rhs, self.out

    @cached_property
    def bytes_received(self) -> ByRank:
        """The bytes that each rank receives in the three reshardings together."""
        return bytes_by_rank((move.bytes_received for move in self.moves), self.mesh)

    @cached_property
    def flops(self) -> ByRank:
        """The flops of the local product of each rank."""
        task = self.task
        shapes = (
            (
                self.lhs.target.local_shape(task.lhs_shape, task.mesh, rank),
                self.rhs.target.local_shape(task.rhs_shape, task.mesh, rank),
            )
            for rank in range(task.mesh.size)
        )
        return tuple(task.contraction.flops(task.contraction.extents(*pair)) for pair in shapes)

    @property
    def cost(self) -> tuple[int, int, int]:
        """Bytes and flops of all ranks together, then communications."""
        flops = flops_of(self.task, dict(self.split))
        return sum(self.bytes_received), flops, sum(move.communications for move in self.moves)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The collectives that run, in order."""
        return tuple(step.kind for move in self.moves for step in move.steps if step.kind != "slice")

    def __str__(self) -> str:
        contraction = self.task.contraction
        left, right, result = (
            ", ".join(letters) for letters in (contraction.lhs, contraction.rhs, contraction.out)
        )
        over = [f"{letter} over {', '.join(axes)}" for letter, axes in self.split if axes]
        pending, flops = self.out.source.partial, sum(self.flops)
        waiting = f"; a sum over {', '.join(pending)} is pending" if pending else ""
        return "\n".join(
            [
                f"C[{result}] = A[{left}] B[{right}] on {self.mesh!r}{': ' if self.why else ''}{self.why}",
                *_move_lines("A", self.lhs),
                *_move_lines("B", self.rhs),
                f"  multiply with {' and '.join(over) or 'nothing split'}: {flops} flops{waiting}",
                *_move_lines("C", self.out),
                f"  in all {sum(self.bytes_received)} bytes, {flops} flops",
            ]
        )

    def _repr_html_(self) -> str:
        drawn = [
            inside(layout.draw(move.shape, self.mesh).html)
            for move, layout in (
                (self.lhs, self.lhs.source),
                (self.rhs, self.rhs.source),
                (self.out, self.out.target),
            )
        ]
        named = [
            note(f"{name}, as {how}") + picture
            for name, how, picture in zip(
                "ABC", ("it comes", "it comes", "it is returned"), drawn, strict=True
            )
        ]
        return figure(
            beside(*named),
            preformatted("\n".join(str(self).splitlines()[1:])),
            title=str(self).splitlines()[0],
        )


def _move_lines(name: str, plan: ReshardingPlan) -> list[str]:
    if not plan.communications:
        after = f" -> {plan.target.short()}, local" if plan.steps else " as it is"
        return [f"  {name} {plan.source.short()}{after}"]
    rows = str(plan).splitlines()[1:]
    return [
        f"  {name} {plan.source.short()} -> {plan.target.short()}: {sum(plan.bytes_received)} bytes",
        *(f"  {row}" for row in rows),
    ]


def product_plan(
    task: Task, split: Split, lhs_partial: Axes = (), rhs_partial: Axes = (), why: str = ""
) -> ProductPlan:
    """The plan with each letter over the axes of ``split`` during the local products.

    ``lhs_partial``, ``rhs_partial``: sums that stay pending through the product.
    """
    moves = moves_around(task, split, lhs_partial, rhs_partial)
    lhs, rhs, out = (plan_resharding(*move, task.dtype, task.mesh) for move in moves)
    return ProductPlan(
        task,
        tuple((letter, tuple(split.get(letter, ()))) for letter in task.contraction.letters),
        lhs,
        rhs,
        out,
        why,
    )


def flops_of(task: Task, split: Split) -> int:
    """The flops of all ranks together; ranks along axes that split no letter compute the same."""
    used = prod(task.mesh.shape[axis] for axes in split.values() for axis in axes)
    return task.contraction.flops(task.extents) * (task.mesh.size // used)


def moves_around(
    task: Task, split: Split, lhs_partial: Axes = (), rhs_partial: Axes = ()
) -> tuple[Change, ...]:
    """What is resharded before and after the local products: both operands, and their result."""
    contraction = task.contraction
    summed = (axis for letter in contraction.summed for axis in split.get(letter, ()))
    lhs = _layout(contraction.lhs, split, lhs_partial)
    rhs = _layout(contraction.rhs, split, rhs_partial)
    result = _layout(contraction.out, split, (*summed, *lhs_partial, *rhs_partial))
    return (
        (task.lhs, lhs, task.lhs_shape),
        (task.rhs, rhs, task.rhs_shape),
        (result, task.out, task.out_shape),
    )


def _layout(letters: str, split: Split, partial: Axes) -> TensorSharding:
    return TensorSharding(*(split.get(letter, ()) for letter in letters), partial=partial)


def without(axes: Iterable[str], others: Container[str]) -> Axes:
    """The ``axes`` that are not among ``others``."""
    return tuple(axis for axis in axes if axis not in others)


def run_product(device: Device, plan: ProductPlan, a: Array, b: Array) -> Array:
    """This device's shard of the product in its layout, from its shards of the operands: a new array.

    **Communication**: ``plan.bytes_received[device.rank]`` bytes are received, by the collectives ``plan.kinds``.
    """
    result = plan.task.contraction.run(
        device, moved(device, plan.lhs, a), moved(device, plan.rhs, b), shared=bool(plan.out.communications)
    )
    return moved(device, plan.out, result, spent=True)


def moved(device: Device, plan: ReshardingPlan, x: Array, *, spent: bool = False) -> Array:
    """``x`` in the target layout of the plan; ``x`` itself if the plan has no steps.

    ``spent`` says that ``x`` is not needed afterwards and may be overwritten.
    """
    x = x.astype(plan.dtype, copy=False)
    return run_plan(device, plan, x, spent=spent) if plan.steps else x


def bytes_by_rank(received: Iterable[ByRank], mesh: Mesh) -> ByRank:
    """The bytes that each rank receives in all of some communications, of which each has them by rank."""
    return tuple(map(sum, zip(*received, strict=True))) or (0,) * mesh.size


def all_different(axes: Iterable[str]) -> bool:
    """Whether no axis occurs twice."""
    used = list(axes)
    return len(set(used)) == len(used)
