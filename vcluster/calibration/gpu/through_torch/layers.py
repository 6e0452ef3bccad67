"""Layers and models of Transformers in plain PyTorch, as functions of their weights.

They are what `parallelism.models.TransformerSpec` describes: a norm before each half, causal attention by
``scaled_dot_product_attention``, biases or none, gelu or a gate, learned or rotary positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from vcluster.calibration.gpu.models import Model, Sizes

Weights = Mapping[str, Any]


def made_weights(
    torch: Any, shapes: Mapping[str, tuple[int, ...]], device: str, dtype: Any
) -> dict[str, Any]:
    """Random weights of these shapes, whose gradients are wanted."""
    found = {}
    for name, shape in shapes.items():
        if "norm" in name or name.endswith(".bias"):
            weight = torch.ones(shape, device=device, dtype=dtype)
        else:
            weight = torch.randn(shape, device=device, dtype=dtype) * 0.02
        found[name] = weight.requires_grad_()
    return found


def backend_chosen(torch: Any, backend: str) -> Any:
    """A context in which attention is computed by this library: flash, cudnn, efficient, math, or any."""
    kinds = {
        "flash": "FLASH_ATTENTION",
        "cudnn": "CUDNN_ATTENTION",
        "efficient": "EFFICIENT_ATTENTION",
        "math": "MATH",
    }
    if backend == "any":
        return nullcontext()
    from importlib import import_module

    attention = import_module("torch.nn.attention")
    return attention.sdpa_kernel([getattr(attention.SDPBackend, kinds[backend])])


def rotary_tables(torch: Any, tokens: int, head_width: int, device: str, dtype: Any) -> tuple[Any, Any]:
    """The cosines and the sines of rotary positions: tokens x half of the width of a head."""
    powers = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    angles = torch.outer(torch.arange(tokens, device=device, dtype=torch.float32), 10000.0**-powers)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(torch: Any, x: Any, tables: tuple[Any, Any]) -> Any:
    """Heads (batch, heads, tokens, width) turned by their positions."""
    cosines, sines = tables
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def norm(torch: Any, sizes: Sizes, x: Any, weights: Weights, name: str) -> Any:
    """The norm of this name over the last axis."""
    functions = torch.nn.functional
    if sizes.is_gpt:
        return functions.layer_norm(x, (sizes.width,), weights[name], weights[f"{name}.bias"])
    return functions.rms_norm(x, (sizes.width,), weights[name], 1e-5)


def layer(torch: Any, sizes: Sizes, x: Any, weights: Weights, tables: tuple[Any, Any] | None) -> Any:
    """A layer of a Transformer on x (batch, tokens, width)."""
    functions = torch.nn.functional
    batch, tokens, width = x.shape
    shared = sizes.key_value_heads * sizes.head_width

    def product(name: str, of: Any) -> Any:
        return functions.linear(of, weights[name], weights.get(f"{name}.bias"))

    def heads(of: Any) -> Any:
        return of.view(batch, tokens, -1, sizes.head_width).transpose(1, 2)

    parts = product("qkv", norm(torch, sizes, x, weights, "norm1")).split((width, shared, shared), dim=-1)
    query, key, value = map(heads, parts)
    if tables is not None:
        query, key = rotated(torch, query, tables), rotated(torch, key, tables)
    attended = functions.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=sizes.key_value_heads != sizes.heads
    )
    x = x + product("out", attended.transpose(1, 2).reshape(batch, tokens, width))
    up = product("up", norm(torch, sizes, x, weights, "norm2"))
    if sizes.is_gpt:
        hidden = functions.gelu(up)
    else:
        gate, other = up.chunk(2, dim=-1)
        hidden = functions.silu(gate) * other
    return x + product("down", hidden)


def loss(
    torch: Any, model: Model, weights: Weights, tokens: Any, targets: Any, tables: tuple[Any, Any] | None
) -> Any:
    """The mean cross entropy of a batch (rows, tokens) of a model; ``tables`` are those of rotary positions."""
    functions, sizes = torch.nn.functional, model.sizes
    x = functions.embedding(tokens, weights["tokens"])
    if sizes.is_gpt:
        x = x + weights["positions"]
    for number in range(model.layers):
        own = {name: weights[f"{number}.{name}"] for name in sizes.shapes()}
        x = layer(torch, sizes, x, own, tables)
    head = weights["tokens" if sizes.is_gpt else "head"]
    logits = functions.linear(norm(torch, sizes, x, weights, "norm"), head)
    return functions.cross_entropy(logits.float().view(-1, model.vocabulary), targets.view(-1))
