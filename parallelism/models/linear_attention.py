"""`LinearAttention`: layers that keep a state in place of keys and values, by their figures; and such a layer, recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

from parallelism.arrays import with_plain_numbers
from parallelism.display.quantities import short_errors
from parallelism.ir.tracing.current import region
from parallelism.ir.tracing.tracing import apply
from parallelism.models.block_parts import Parts

CONVOLUTION = "convolution"
KIMI_DELTA = "kimi_delta"
CHUNKS = {"mamba2": 256, "gated_delta": 64, KIMI_DELTA: 64, CONVOLUTION: 1}
"""The tokens of a chunk by kind: the ``chunk_size`` of Mamba-2's configurations, and of flash-linear-attention."""
GATES = ("first", "last", "alone")


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """Some layers mix tokens by linear attention with decay, the others by attention.

    The defaults are those of Mamba-2 of 2.7 billion parameters (Dao and Gu, *Transformers are SSMs*, 2024,
    arXiv:2405.21060; state-spaces/mamba2-2.7b).  ``ValueError`` for figures that do not fit together.
    """

    kind: str = "mamba2"
    """``mamba2``; ``gated_delta``: the gated delta rule (Yang et al., *Gated Delta Networks*, 2024, arXiv:2412.06464);
    ``kimi_delta``: that with a decay for each feature of a key (*Kimi Linear*, 2025, arXiv:2510.26692), whose decays and gate
    are made by narrow products; or ``convolution``: a short convolution between two gates alone, as in LFM2, whose heads are
    groups of its channels."""
    heads: int = 80
    """Heads of values, each with a state."""
    head_width: int = 64
    """Features of a value."""
    state_width: int = 128
    """Features of a query and of a key: B and C of Mamba-2."""
    groups: int = 1
    """Heads of queries and keys, each of which serves several heads of values."""
    norm_groups: int | None = None
    """Groups of values that are normed together by ``mamba2``; None: ``groups``."""
    taps: int = 4
    """The tokens that the short convolution before the state sees."""
    chunk: int | None = None
    """The tokens of a chunk of the kernel; None: 256 of ``mamba2``, 64 of ``gated_delta``."""
    layers: tuple[bool, ...] | None = None
    """Whether each layer has linear attention; None: all have it."""
    beside: bool = False
    """Whether these layers have attention, too, behind the same norm: both are added, as in Falcon-H1."""
    gate: str | None = None
    """Whether the gate comes ``first``, before the norm behind the state, ``last``, or ``alone``, without a norm; None:
    first of ``mamba2``, and last of ``gated_delta``."""
    epsilon: float | None = None
    """That of the norm behind the state; None: that of the model."""
    norm_places: str | None = None
    """Where the norms of these layers stand; None: where those of others do."""
    least_step: float = 0.0
    """Steps of ``mamba2`` are at least so large."""
    doubled_rates: bool = False
    """Whether the rates of ``gated_delta`` are up to 2, so that a state may change its sign (Grazzi et al., 2024,
    arXiv:2411.12537)."""

    @short_errors
    def __post_init__(self) -> None:
        with_plain_numbers(self)
        if self.kind not in CHUNKS:
            raise ValueError(
                f"kind of linear attention must be one of {', '.join(CHUNKS)}, got {self.kind!r}"
            )
        names = "heads", "head_width", "state_width", "groups", "normed_groups", "taps", "tokens_of_chunk"
        for name in names:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                told = {"tokens_of_chunk": "chunk", "normed_groups": "norm_groups"}.get(name, name)
                raise ValueError(
                    f"{told} of linear attention must be an integer of at least 1, got {value!r}"
                )
        if self.heads % self.groups:
            raise ValueError(
                f"groups of linear attention must divide its heads, got groups={self.groups} and heads={self.heads}"
            )
        if self.gate not in (None, *GATES):
            raise ValueError(
                f"gate of linear attention must be one of {', '.join(GATES)}, or None; got {self.gate!r}"
            )
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(bool(each) for each in self.layers))

    @property
    def is_delta(self) -> bool:
        """Whether the state follows the delta rule."""
        return self.kind in ("gated_delta", KIMI_DELTA)

    @property
    def gating(self) -> str:
        """When the gate comes: first, last or alone."""
        return self.gate or ("last" if self.is_delta else "first")

    @property
    def tokens_of_chunk(self) -> int:
        """The tokens of a chunk of the kernel."""
        return CHUNKS[self.kind] if self.chunk is None else self.chunk

    @property
    def normed_groups(self) -> int:
        """Groups of values that are normed together by ``mamba2``."""
        return self.groups if self.norm_groups is None else self.norm_groups

    def is_dealt(self, devices: int) -> bool:
        """Whether so many devices have equal parts of the heads, with groups or copies of one."""
        return self.groups % devices == 0 or (devices % self.groups == 0 and self.heads % devices == 0)

    def over(self, devices: int) -> LinearAttention:
        """The same layer with copies of queries and keys, so that each of so many devices has a group.

        ``ValueError`` for heads that cannot be dealt to them.
        """
        if not self.is_dealt(devices):
            raise ValueError(
                f"the {self.heads} heads of linear attention, in {self.groups} groups, are not split or copied evenly over "
                f"{devices} devices"
            )
        return replace(self, groups=devices, norm_groups=self.normed_groups)

    @property
    def inner(self) -> int:
        """The features of the values of all heads."""
        return self.heads * self.head_width

    def at(self, layer: int) -> bool:
        """Whether this layer has linear attention."""
        return self.layers is None or self.layers[layer]

    @property
    def parts(self) -> tuple[int, ...]:
        """The columns that a group has in the product before the state: of what gates the result, of values, of keys, of
        queries, and of numbers of each head, one or two.  A convolution alone has those of both gates, and its channels."""
        served = self.heads // self.groups
        inner = served * self.head_width
        if self.kind == CONVOLUTION:
            return inner, inner, inner
        if self.kind == KIMI_DELTA:
            return inner, self.state_width, self.state_width, served
        return inner, inner, self.state_width, self.state_width, served * (2 if self.is_delta else 1)

    @property
    def convolved(self) -> tuple[int, ...]:
        """Those of `parts` that go through the convolution: values, keys and queries."""
        first = {CONVOLUTION: 2, KIMI_DELTA: 0}.get(self.kind, 1)
        return self.parts[first : first + 3]

    def weights(self, width: int) -> dict[str, tuple[int, ...]]:
        """The parameters of a layer of a model of so many features, but its biases and norms before and after it.

        The columns of ``state_in``, and the rows of ``convolution``, of a group of queries and keys follow each other.
        """
        ends: dict[str, tuple[int, ...]] = {
            "state_in": (width, self.groups * sum(self.parts)),
            "convolution": (self.groups * sum(self.convolved), self.taps),
            "state_out": (self.inner, width),
        }
        if self.kind == CONVOLUTION:
            return ends
        if self.kind == KIMI_DELTA:
            narrow, keys = self.head_width, self.heads * self.state_width
            return ends | {
                "decay_down": (width, narrow),
                "decay_up": (narrow, keys),
                "gate_down": (width, narrow),
                "gate_up": (narrow, self.inner),
                "rate_bias": (keys,),
                "decay": (self.heads,),
                "state_norm": (self.head_width,),
            }
        norm = {"state_norm": (self.head_width if self.is_delta else self.inner,)}
        return ends | {
            "rate_bias": (self.heads,),
            "decay": (self.heads,),
            **({} if self.is_delta else {"skip": (self.heads,)}),
            **({} if self.gating == "alone" else norm),
        }

    @property
    def state_flops(self) -> int:
        """The operations of the products of a token with the states: it is read, written, and lost from by the delta
        rule."""
        if self.kind == CONVOLUTION:
            return 0
        return 2 * (3 if self.is_delta else 2) * self.inner * self.state_width


_WHOLE = partial(apply, "short_convolution"), partial(apply, "linear_attention")


def linear_attention(
    parts: Parts,
    x: Any,
    number: int,
    block: str,
    convolve: Callable[..., Any] = _WHOLE[0],
    attend: Callable[..., Any] = _WHOLE[1],
) -> Any:
    """The linear attention of block ``number`` to ``x``, of shape ``(batch, sequence, width)``, behind its norm.

    The names of its parameters begin with ``block``.  ``convolve`` and ``attend`` go through the tokens: as training does, of
    sequences from their beginning.
    """
    layer = parts.spec.linear_attention
    assert layer is not None
    batch, tokens, _ = x.shape
    groups, inner = layer.groups, layer.inner // layer.groups
    heads = (batch, tokens, layer.heads)
    with region("in"):
        joined = parts.product(x, block, "state_in").reshape((batch, tokens, groups, sum(layer.parts)))
        if layer.kind == CONVOLUTION:
            gate, first, mixed = np.split(joined, 3, axis=3)
            mixed = first * mixed
        elif layer.kind == KIMI_DELTA:
            mixed, numbers = np.split(joined, [sum(layer.convolved)], axis=3)
            gate = parts.product(parts.product(x, block, "gate_down"), block, "gate_up")
        else:
            gate, mixed, numbers = np.split(joined, [inner, sum(layer.parts[:4])], axis=3)
    with region("convolution"):
        names = (
            ("convolution", "convolution_bias") if f"{block}convolution_bias" in parts.p else ("convolution",)
        )
        taps, *bias = (parts.p[f"{block}{name}"] for name in names)
        taps = taps.reshape((groups, sum(layer.convolved), layer.taps))
        bias = [each.reshape((groups, sum(layer.convolved))) for each in bias]
        if layer.kind == CONVOLUTION:
            y = gate * convolve(mixed, taps, *bias, plain=True)
            y = y.reshape((batch, tokens, layer.inner))
            return parts.product(y, block, "state_out")
        mixed = convolve(mixed, taps, *bias)
        v, k, q = np.split(mixed, [inner, inner + layer.state_width], axis=3)
        v = v.reshape((*heads, layer.head_width))
    with region("state"):
        if layer.kind == KIMI_DELTA:
            decays, rates = _decays_of_features(parts, x, block), apply("sigmoid", numbers.reshape(heads))
        else:
            decays, rates = _numbers(parts, numbers, block)
        how: dict[str, Any] = {
            "chunk": layer.tokens_of_chunk,
            "delta": layer.is_delta,
            "unit": layer.is_delta,
        }
        scale = 1 / sqrt(layer.state_width) if layer.is_delta else 1.0
        y = attend(q, k, v, decays, rates, scale=scale, **how)
        if not layer.is_delta:
            y = y + v * parts.p[f"{block}skip"].reshape((layer.heads, 1))
    with region("gate"):
        y = _gated(parts, y, gate, block)
    with region("out"):
        return parts.product(y.reshape((batch, tokens, layer.inner)), block, "state_out")


def _gated(parts: Parts, y: Any, gate: Any, block: str) -> Any:
    """What the heads read, ``(batch, tokens, heads, width)``, gated and normed: each head, or the heads of a group together.

    A group whose heads are split has one sum for each token, which is reduced.
    """
    layer = parts.spec.linear_attention
    assert layer is not None
    if layer.gating == "alone":
        return apply("swiglu", gate.reshape(y.shape), y)
    weight, first = parts.p[f"{block}state_norm"], layer.gating == "first"
    epsilon = parts.spec.epsilon if layer.epsilon is None else layer.epsilon
    groups = layer.normed_groups
    if layer.kind == KIMI_DELTA:
        return apply("rms_norm", y, weight, epsilon=epsilon) * apply("sigmoid", gate.reshape(y.shape))
    if layer.is_delta or groups == layer.groups:
        shape = y.shape if layer.is_delta else (*y.shape[:2], groups, layer.inner // groups)
        weight = weight if layer.is_delta else weight.reshape(shape[2:])
        y, gate = y.reshape(shape), gate.reshape(shape)
        return apply("gated_rms_norm", y, gate, weight, epsilon=epsilon, gate_first=first)
    wide = np.result_type(y.dtype, np.float32)
    gate = apply("silu", gate.reshape(y.shape).astype(wide))
    values = y.astype(wide) * gate if first else y.astype(wide)
    of_groups = values.reshape((*y.shape[:2], groups, layer.heads // groups, layer.head_width))
    scale = (np.mean(of_groups * of_groups, axis=(3, 4), keepdims=True) + epsilon) ** -0.5
    normed = (of_groups * scale).reshape(y.shape) * weight.reshape((layer.heads, layer.head_width))
    return (normed if first else normed * gate).astype(y.dtype)


def _decays_of_features(parts: Parts, x: Any, block: str) -> Any:
    """The log-decays of each feature of the keys of all heads: ``-exp(decay) softplus(numbers + bias)``."""
    layer = parts.spec.linear_attention
    assert layer is not None
    numbers = parts.product(parts.product(x, block, "decay_down"), block, "decay_up")
    wide = np.result_type(numbers.dtype, np.float32)
    shape = layer.heads, layer.state_width
    numbers = numbers.reshape((*x.shape[:2], *shape)).astype(wide)
    steps = np.logaddexp(numbers + parts.p[f"{block}rate_bias"].reshape(shape).astype(wide), 0)
    return steps * -np.exp(parts.p[f"{block}decay"].astype(wide)).reshape((layer.heads, 1))


def _numbers(parts: Parts, numbers: Any, block: str) -> tuple[Any, Any]:
    """The log-decays and the rates of all heads, ``(batch, tokens, heads)``, of what the product made for them.

    With steps dt = softplus(numbers + bias) the log-decays are ``-exp(decay) dt``.  The rates are the steps, or those of
    the delta rule, a sigmoid of numbers of their own.
    """
    layer = parts.spec.linear_attention
    assert layer is not None
    heads = (*numbers.shape[:2], layer.heads)
    wide = np.result_type(numbers.dtype, np.float32)
    given = [numbers]
    if layer.is_delta:
        given = np.split(numbers, 2, axis=3)
    *rates, steps = (each.reshape(heads) for each in given)
    steps = np.logaddexp(steps.astype(wide) + parts.p[f"{block}rate_bias"].astype(wide), 0)
    if layer.least_step:
        steps = np.maximum(steps, layer.least_step)
    decays = steps * -np.exp(parts.p[f"{block}decay"].astype(wide))
    if not rates:
        return decays, steps
    (rates,) = rates
    rates = apply("sigmoid", rates)
    return decays, rates * 2 if layer.doubled_rates else rates
