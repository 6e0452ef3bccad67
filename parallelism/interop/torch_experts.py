"""Experts of models of Hugging Face's transformers, for the export: their rows are dealt, multiplied and combined.

Such a layer of experts goes over those that were hit, or groups its rows by expert, which exporters to ONNX do not
know.  While a model is exported, its experts are written with three operators of our own instead, which stand in the
file only.  `parallelism.interop.onnx_models.experts` says what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

DOMAIN = "vcluster"
"""The domain of the operators in the file, and their namespace in PyTorch."""
CHOSEN_BY_USERS = "batched_mm"
"""The implementation of experts that stays.  Only users choose it: transformers itself takes ``grouped_mm`` or, where a model
does not know that, ``eager`` (transformers 5.24, ``PreTrainedModel.get_correct_experts_implementation``)."""
_KNOWN = (
    "has_gate",
    "has_bias",
    "has_post_expert_norm",
    "is_transposed",
    "_is_expert_parallel",
    "_apply_gate",
    "down_proj",
)
"""What a layer of experts of transformers has."""


@contextmanager
def dealt_experts(torch: Any, module: Any) -> Iterator[None]:
    """A context in which the experts of transformers inside of ``module`` are written with these operators."""
    layers = [each for each in module.modules() if _is_known(each)]
    for each in layers:
        each.forward = partial(_forward, torch, each)
    try:
        yield
    finally:
        for each in layers:
            del each.forward


def _is_known(module: Any) -> bool:
    if not all(hasattr(module, name) for name in _KNOWN) or "forward" in vars(module):
        return False
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return implementation != CHOSEN_BY_USERS and not (
        module.has_post_expert_norm or module._is_expert_parallel
    )


def _forward(torch: Any, layer: Any, x: Any, experts: Any, gates: Any) -> Any:
    """What a layer makes of tokens ``(n, h)``, with the experts and the gates ``(n, k)`` of their choices."""
    written = torch.onnx.ops
    name = "gate_up_proj" if layer.has_gate else "up_proj"
    count = getattr(layer, name).shape[0]
    slots = (count, 1, (experts.shape[0] * experts.shape[1] + count - 1) // count)
    rows, of_rows = written.symbolic_multi_out(
        f"{DOMAIN}::Deal",
        (x, experts, gates),
        {"count": count},
        dtypes=(x.dtype, gates.dtype),
        shapes=((*slots, x.shape[1]), slots),
        version=1,
    )

    def multiplied(rows: Any, name: str) -> Any:
        weight = getattr(layer, name)
        how = {"transposed": int(layer.is_transposed)}
        shape = (*slots, weight.shape[2 if layer.is_transposed else 1])
        inputs = rows, weight
        made = written.symbolic(f"{DOMAIN}::Product", inputs, how, dtype=rows.dtype, shape=shape, version=1)
        return made + getattr(layer, f"{name}_bias")[:, None, None, :] if layer.has_bias else made

    hidden = multiplied(rows, name)
    hidden = layer._apply_gate(hidden) if layer.has_gate else layer.act_fn(hidden)
    made = multiplied(hidden, "down_proj").to(x.dtype)
    inputs = made, of_rows, experts
    return written.symbolic(f"{DOMAIN}::Combine", inputs, dtype=x.dtype, shape=x.shape, version=1)
