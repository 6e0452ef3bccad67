"""`MatMul`: C[m, n] = A[m, k] B[k, n] of matrices that lie on a mesh in any layouts, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.sharding import TensorSharding
from tensor_parallelism.layers import PlannedOperation, check_gradient
from tensor_parallelism.products.choice import Cost, bytes_then_flops, cheapest_product
from tensor_parallelism.products.contraction import Contraction
from tensor_parallelism.products.layouts import check_shape
from tensor_parallelism.products.policies import MatMulSharding, MatMulShardingPolicy
from tensor_parallelism.products.product import ProductPlan, Shape, Task, product_plan, run_product

Array = npt.NDArray[Any]


class Saved(NamedTuple):
    """What the backward needs of the forward: the shards of the operands, and the whole shapes."""

    a: Array
    b: Array
    shapes: tuple[Shape, Shape]


class MatMul(PlannedOperation[ProductPlan]):
    """``cluster.run(MatMul(sharding), a, b).result`` is ``a @ b``; leading batch dims are as in `numpy.matmul`,
    but that an extent of 1 is not stretched.

    Any layouts of A, B and C on any mesh will do, uneven ones too: operands are moved to where shards can be
    multiplied, the products moved to where C is to lie.  ``policy=None`` chooses the cheapest way: by the bytes that
    all devices together receive, then by flops; or, with ``cost``, by what that says of both, as `Seconds` does.  A
    ``policy`` runs exactly what `MatMulShardingPolicy` says of it, and the reshard to `out`; the products of its
    backward are chosen.  ``print(operation.plan(shapes, mesh))`` says what will run, and why.

    **Communication**: ``operation.plan((a.shape, b.shape), mesh).bytes_received``, by rank.

    ``ValueError`` when made, for a policy that the layouts are not; and, on the host, before anything is sent, for
    operands whose shapes do not fit each other, their layouts or the mesh.
    """

    NAMES = ("lhs", "rhs")
    sharding: MatMulSharding

    def __init__(
        self, sharding: MatMulSharding, policy: MatMulShardingPolicy | None = None, *, cost: Cost = bytes_then_flops
    ) -> None:
        super().__init__(sharding, MatMulSharding)
        policy = None if policy is None else MatMulShardingPolicy(policy)
        if policy is not None and policy is not sharding.policy:
            raise ValueError(
                f"MatMul with policy={policy.name} needs layouts of that policy, those of "
                f"lhs={sharding.lhs!r} and rhs={sharding.rhs!r} are {sharding.policy.name}"
            )
        self.policy = policy
        self.cost = cost

    def __repr__(self) -> str:
        policy = "" if self.policy is None else f", policy={self.policy}"
        cost = "" if self.cost is bytes_then_flops else f", cost={self.cost!r}"
        return f"MatMul({self.sharding!r}{policy}{cost})"

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """The shards of A and B, by rank."""
        arrays = self._named(*args)
        self.plan([array.shape for array in arrays], mesh, np.result_type(*arrays))
        return self._shards(mesh, arrays)

    def forward(self, device: Device, *shards: Any) -> tuple[Any, Saved]:
        """This device's shard of C, from those of A and B."""
        a, b = map(np.asarray, shards)
        sharding = self.sharding
        of_a, of_b = device.global_shapes([a, b], [sharding.lhs, sharding.rhs])
        shapes = of_a, of_b
        plan = self.plan(shapes, device.mesh, np.result_type(a, b))
        return run_product(device, plan, a, b), Saved(a, b, shapes)

    def backward(self, device: Device, saved: Saved, grad: Any) -> tuple[Array, Array]:
        """The gradients of A and B in their layouts, from that of C in its layout: A' = C' B^T, B' = A^T C'.

        Each is a product of its own, carried out the cheapest way.  A gradient in a partial layout is, as any tensor,
        the sum of its terms.
        """
        a, b, shapes = saved
        of_a, of_b = self.gradient_plans(shapes, device.mesh, np.result_type(a, b))
        grad = check_gradient(device, grad, of_a.task.lhs, of_a.task.lhs_shape, "C")
        return run_product(device, of_a, grad, b), run_product(device, of_b, a, grad)

    # -- what will run -------------------------------------------------------------------------------------------------

    def gradient_plans(
        self, shapes: tuple[Sequence[int], Sequence[int]], mesh: Mesh, dtype: npt.DTypeLike = np.float64
    ) -> tuple[ProductPlan, ProductPlan]:
        """What the backward runs: for the gradient of A, and for that of B."""
        a, b = (tuple(int(n) for n in shape) for shape in shapes)
        task = self._task(a, b, mesh, np.dtype(dtype))
        return cheapest_product(task.lhs_gradient, self.cost), cheapest_product(task.rhs_gradient, self.cost)

    def _planned(self, shapes: tuple[Shape, ...], mesh: Mesh, dtype: np.dtype[Any]) -> ProductPlan:
        a, b = shapes
        task = self._task(a, b, mesh, dtype)
        if self.policy is None or self.policy is MatMulShardingPolicy.GENERAL:
            return cheapest_product(task, self.cost)
        return product_plan(task, self.sharding.split(), why=f"{self.policy.value}, as asked for")

    def _task(self, a: Shape, b: Shape, mesh: Mesh, dtype: np.dtype[Any]) -> Task:
        """The product, once its operands fit."""
        for name, shape in (("A", a), ("B", b)):
            if len(shape) < 2:
                raise ValueError(f"{name} of a MatMul is of at least 2 dims, got shape {shape}")
        try:
            contraction = Contraction.matmul(len(a), len(b))
            extents = contraction.extents(a, b)
        except ValueError as error:
            raise ValueError(f"A of shape {a} and B of shape {b} cannot be multiplied: {error}") from None
        c = tuple(extents[letter] for letter in contraction.out)
        layouts: list[TensorSharding] = []
        for name, field, shape in (("A", "lhs", a), ("B", "rhs", b), ("C", "out", c)):
            layout: TensorSharding = getattr(self.sharding, field)
            check_shape(name, shape, field, layout, mesh)
            layouts.append(layout.over(len(shape)))
        lhs, rhs, out = layouts
        return Task(contraction, lhs, rhs, out, a, b, dtype, mesh)
