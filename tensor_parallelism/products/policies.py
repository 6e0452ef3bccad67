"""Named policies of sharding C[m, n] = A[m, k] B[k, n], and the policy of a triple of layouts."""

from dataclasses import dataclass
from enum import Enum

from parallelism.sharding import TensorSharding
from tensor_parallelism.products.planned_operation import Sharding
from tensor_parallelism.products.product import Axes


class MatMulShardingPolicy(Enum):
    """The layouts of A[m, k] and B[k, n], and the communication that they need.

    >>> from tensor_parallelism import MatMulShardingPolicy
    >>> [policy.name for policy in MatMulShardingPolicy]
    ['UNSHARDED', 'MATCHED_INNER', 'UNMATCHED_INNER', 'OUTER', 'FULL', 'GENERAL']

    X and Y are mesh axes, or several together, and also their numbers of devices; |A| is the number of bytes of A, p
    the number of devices of the mesh.  The given bytes are received by all devices together, for extents that divide
    evenly.  Then C is resharded from the layout named here to that of `out`; nothing moves if they are equal.
    """

    UNSHARDED = "unsharded"
    """A[m, k] B[k, n] = C[m, n]: nothing is sharded, every device multiplies everything.  0 bytes."""

    MATCHED_INNER = "matched_inner"
    """A[m, kX] B[kX, n] = C[m, n] partial over X: a term on each device.

    Then an all_reduce over X, 2 (X-1)/X p |C| bytes; or a reduce_scatter if `out` has X on a dim, (X-1)/X p |C|.
    """

    UNMATCHED_INNER = "unmatched_inner"
    """A[m, kX] B[kY, n]: all_gather of A over X and of B over Y, then every device multiplies everything: C[m, n].

    (X-1)/X p |A| + (Y-1)/Y p |B| bytes.
    """

    OUTER = "outer"
    """A[mX, kY] B[kX, n]: all_gather of A over Y and of B over X, then C[mX, n].

    (Y-1)/Y p |A|/X + (X-1)/X p |B| bytes.
    """

    FULL = "full"
    """A[mX, kY] B[kX, nY]: all_gather of A over Y and of B over X, then C[mX, nY].

    (Y-1)/Y p |A|/X + (X-1)/X p |B|/Y bytes.
    """

    GENERAL = "general"
    """Any other layouts, including sharded batch dims and partial operands: the cheapest way."""


@dataclass(frozen=True)
class MatMulSharding(Sharding, ndims=(2, 2, 2)):
    """The layouts of C[m, n] = A[m, k] B[k, n]: ``lhs`` of A, ``rhs`` of B, ``out`` of C; batch dims may lead.

    >>> sharding = MatMulSharding(TensorSharding(None, "x"), TensorSharding("x", None), TensorSharding(None, None))
    >>> sharding.policy
    <MatMulShardingPolicy.MATCHED_INNER: 'matched_inner'>

    ``TypeError`` for what is no layout, ``ValueError`` for one of fewer than two dims.
    """

    lhs: TensorSharding
    rhs: TensorSharding
    out: TensorSharding

    @property
    def policy(self) -> MatMulShardingPolicy:
        """The named policy of the operands' layouts; GENERAL if they have none."""
        policies = MatMulShardingPolicy
        lhs = _sides(self.lhs)
        rhs = _sides(self.rhs)
        if lhs is None or rhs is None:
            return policies.GENERAL
        (m, k), (k_of_b, n) = lhs, rhs
        split = bool(m), bool(k), bool(k_of_b), bool(n)
        fits = {
            policies.UNSHARDED: not any(split),
            policies.MATCHED_INNER: split == (False, True, True, False) and k == k_of_b,
            policies.UNMATCHED_INNER: split == (False, True, True, False) and not {*k} & {*k_of_b},
            policies.OUTER: split == (True, True, True, False) and m == k_of_b,
            policies.FULL: all(split) and m == k_of_b and n == k,
            policies.GENERAL: True,
        }
        return next(policy for policy, fit in fits.items() if fit)

    def split(self) -> dict[str, Axes]:
        """Over what m, k and n lie during the local products, as the policy names it."""
        (m, k), (_, n) = _sides(self.lhs) or ((), ()), _sides(self.rhs) or ((), ())
        policy = MatMulShardingPolicy
        return {policy.MATCHED_INNER: {"k": k}, policy.OUTER: {"m": m}, policy.FULL: {"m": m, "n": n}}.get(
            self.policy, {}
        )


def _sides(layout: TensorSharding) -> tuple[Axes, Axes] | None:
    """The axes of the last two dims, if nothing else is sharded and nothing pending."""
    *batch, rows, columns = layout.over(max(2, len(layout.dims))).dims
    return None if layout.partial or any(dim.axes for dim in batch) else (rows.axes, columns.axes)
