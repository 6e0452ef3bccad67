"""Kernels: the arithmetic of networks in NumPy, forward and backward.  Layers, losses and optimizers.

Every function is pure: it reads its arguments and returns new arrays of the same dtype.  A batch is an
array of shape ``(rows, features)``; it may have no rows.
"""

from parallelism.kernels.activations import ACTIVATIONS, IDENTITY, Activation, swiglu, swiglu_backward
from parallelism.kernels.attention import (
    Attended,
    attend,
    attend_backward,
    attend_backward_flops,
    attend_flops,
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
    sum_of_rows,
)
from parallelism.kernels.dropout import dropout, dropout_mask, splitmix64
from parallelism.kernels.losses import LOSSES, Loss, mean_squared_error, softmax_cross_entropy
from parallelism.kernels.masks import Mask, causal_mask
from parallelism.kernels.normalization import (
    feature_products,
    feature_sums,
    layer_norm,
    layer_norm_backward,
    normalization_backward,
    normalization_backward_sums,
    normalization_scale,
    rms_norm,
    rms_norm_backward,
)
from parallelism.kernels.optimizers import SGD, Adam, AdamState, AdamW, Optimizer, clipped
from parallelism.kernels.rotary import rotate, rotate_backward
from parallelism.kernels.rotary_scaling import RotaryScaling
from parallelism.kernels.routing import (
    Choice,
    balance_loss,
    choose_experts,
    choose_experts_backward,
    count_choices,
    expert_capacity,
    places_before,
)
from parallelism.kernels.vocabulary import (
    cross_entropy_backward,
    exponentials,
    largest_logits,
    lookup,
    lookup_backward,
    target_logits,
)

__all__ = [
    "ACTIVATIONS",
    "IDENTITY",
    "LOSSES",
    "SGD",
    "Activation",
    "Adam",
    "AdamState",
    "AdamW",
    "Attended",
    "Choice",
    "Loss",
    "Mask",
    "Optimizer",
    "RotaryScaling",
    "attend",
    "attend_backward",
    "attend_backward_flops",
    "attend_flops",
    "balance_loss",
    "causal_mask",
    "choose_experts",
    "choose_experts_backward",
    "clipped",
    "count_choices",
    "cross_entropy_backward",
    "dense",
    "dense_backward_flops",
    "dense_backward_input",
    "dense_backward_weights",
    "dense_forward_flops",
    "dropout",
    "dropout_mask",
    "expert_capacity",
    "exponentials",
    "feature_products",
    "feature_sums",
    "gather_heads",
    "largest_logits",
    "layer_norm",
    "layer_norm_backward",
    "lookup",
    "lookup_backward",
    "mean_squared_error",
    "merge",
    "normalization_backward",
    "normalization_backward_sums",
    "normalization_scale",
    "places_before",
    "rms_norm",
    "rms_norm_backward",
    "rotate",
    "rotate_backward",
    "row_products",
    "softmax_cross_entropy",
    "splitmix64",
    "spread_heads",
    "sum_of_rows",
    "swiglu",
    "swiglu_backward",
    "target_logits",
]
