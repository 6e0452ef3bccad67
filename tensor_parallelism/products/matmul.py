"""`MatMul`: C[m, n] = A[m, k] B[k, n] of matrices in any layouts on a mesh, forward and backward."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array
from parallelism.mesh import Mesh
from parallelism.operation import Device
from tensor_parallelism.products.choice import Cost, bytes_then_flops, cheapest_product
from tensor_parallelism.products.contraction import Contraction
from tensor_parallelism.products.planned_operation import PlannedOperation, check_shard
from tensor_parallelism.products.policies import MatMulSharding, MatMulShardingPolicy
from tensor_parallelism.products.product import DType, ProductPlan, Shape, Task, product_plan, run_product

Saved = tuple[Array, Array, ProductPlan]
"""What the backward needs of the forward: the shards of the operands, and the plan."""


class MatMul(PlannedOperation[MatMulSharding, ProductPlan]):
    """``cluster.run(MatMul(sharding), a, b).result`` is ``a @ b``.  Leading batch dims are as in `numpy.matmul`,
    except that an extent of 1 is not broadcast.

    >>> import numpy as np
    >>> from parallelism import TensorSharding
    >>> from tensor_parallelism import MatMul, MatMulSharding
    >>> from vcluster import VirtualCluster
    >>> rows, columns = TensorSharding("tp", None), TensorSharding(None, "tp")
    >>> with VirtualCluster(tp=2, backend="thread") as cluster:
    ...     operation = MatMul(MatMulSharding(columns, rows, TensorSharding(None, None)))
    ...     run = cluster.run(operation, np.ones((3, 4)), np.ones((4, 2)))
    >>> run.result.tolist(), run.trace.count("all_reduce")
    ([[4.0, 4.0], [4.0, 4.0], [4.0, 4.0]], 1)

    A, B and C may have any layouts on any mesh, including uneven ones.  Operands are resharded so that shards can be
    multiplied, and the product is resharded to the layout of C.  ``policy=None`` chooses the cheapest way: the fewest
    bytes received by all devices together, then the fewest flops; with ``cost``, the smallest cost of both (see
    `Seconds`).  A ``policy`` runs exactly as `MatMulShardingPolicy` describes, followed by the reshard to `out`; the
    products of its backward are chosen.  ``print(operation.plan(shapes, mesh))`` shows what will run, and why.

    **Communication**: ``operation.plan((a.shape, b.shape), mesh).bytes_received``, by rank.

    ``ValueError`` at construction for a policy that the layouts do not have.  The host raises it before anything is
    sent for operands whose shapes do not fit each other, their layouts or the mesh.
    """

    KIND = MatMulSharding
    NAMES = ("lhs", "rhs")

    def __init__(
        self,
        sharding: MatMulSharding,
        policy: MatMulShardingPolicy | None = None,
        *,
        cost: Cost = bytes_then_flops,
    ) -> None:
        super().__init__(sharding)
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

    def forward(self, device: Device, *shards: Any) -> tuple[Array, Saved]:
        """This device's shard of C, from its shards of A and B."""
        (a, b), plan = self._arrived(device, *shards)
        return run_product(device, plan, a, b), (a, b, plan)

    def backward(self, device: Device, saved: Saved, grad: Any) -> tuple[Array, Array]:
        """The gradients of A and B in their layouts, given that of C in its layout: A' = C' B^T, B' = A^T C'.

        Each is a separate product, computed in the cheapest way.  A gradient in a partial layout is, like any tensor,
        the sum of its terms.
        """
        a, b, plan = saved
        grad = check_shard(device, grad, plan.task.out, plan.task.out_shape, "the gradient of C")
        of_a, of_b = self._gradient_plans(plan.task)
        return run_product(device, of_a, grad, b), run_product(device, of_b, a, grad)

    # -- what will run -------------------------------------------------------------------------------------------------

    def gradient_plans(
        self, shapes: tuple[Sequence[int], Sequence[int]], mesh: Mesh, dtype: npt.DTypeLike = np.float64
    ) -> tuple[ProductPlan, ProductPlan]:
        """The plans of the backward: for the gradient of A, and for that of B."""
        return self._gradient_plans(self.plan(shapes, mesh, dtype).task)

    def _gradient_plans(self, task: Task) -> tuple[ProductPlan, ProductPlan]:
        return cheapest_product(task.lhs_gradient, self.cost), cheapest_product(task.rhs_gradient, self.cost)

    def _planned(self, shapes: tuple[Shape, ...], mesh: Mesh, dtype: DType) -> ProductPlan:
        a, b = shapes
        for name, shape in (("A", a), ("B", b)):
            if len(shape) < 2:
                raise ValueError(f"{name} of a MatMul is of at least 2 dims, got shape {shape}")
        try:
            contraction = Contraction.matmul(len(a), len(b))
            extents = contraction.extents(a, b)
        except ValueError as error:
            raise ValueError(f"A of shape {a} and B of shape {b} cannot be multiplied: {error}") from None
        whole = {"lhs": a, "rhs": b, "out": tuple(extents[letter] for letter in contraction.out)}
        self._check_shapes(whole, mesh, lhs="A", rhs="B", out="C")
        lhs, rhs, out = (getattr(self.sharding, name).over(len(shape)) for name, shape in whole.items())
        task = Task(contraction, lhs, rhs, out, a, b, dtype, mesh)
        if self.policy is None or self.policy is MatMulShardingPolicy.GENERAL:
            return cheapest_product(task, self.cost)
        return product_plan(task, self.sharding.split(), why=f"{self.policy.value}, as asked for")
