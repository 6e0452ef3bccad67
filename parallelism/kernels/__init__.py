"""The arithmetic of a network in NumPy, forward and backward, written once: layers, losses, optimizers.

Every function is pure: it reads its arguments and returns new arrays of the same dtype.  A batch is an
array of shape ``(rows, features)``; it may have no rows.
"""

from parallelism.kernels.activations import ACTIVATIONS, IDENTITY, Activation
from parallelism.kernels.attention import (
    Attended,
    attend,
    attend_backward,
    attend_backward_flops,
    attend_flops,
    causal_mask,
    gather_heads,
    merge,
    row_products,
    spread_heads,
)
from parallelism.kernels.dense import (
    dense,
    dense_backward_flops,
    dense_backward_input,
    dense_backward_weights,
    dense_forward_flops,
)
from parallelism.kernels.losses import LOSSES, Loss, mean_squared_error, softmax_cross_entropy
from parallelism.kernels.optimizers import SGD, Adam, AdamState, Optimizer

__all__ = [
    "ACTIVATIONS",
    "IDENTITY",
    "LOSSES",
    "SGD",
    "Activation",
    "Adam",
    "AdamState",
    "Attended",
    "Loss",
    "Optimizer",
    "attend",
    "attend_backward",
    "attend_backward_flops",
    "attend_flops",
    "causal_mask",
    "dense",
    "dense_backward_flops",
    "dense_backward_input",
    "dense_backward_weights",
    "dense_forward_flops",
    "gather_heads",
    "mean_squared_error",
    "merge",
    "row_products",
    "softmax_cross_entropy",
    "spread_heads",
]
