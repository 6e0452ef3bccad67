"""Decoder-only Transformers by their figures: parameters, floating-point operations, and the program of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.display.quantities import short_errors
from parallelism.ir.core import Extent, Function, TensorType, checked_dtype
from parallelism.ir.recording import record
from parallelism.ir.tracing.current import region
from parallelism.ir.tracing.tracing import apply
from parallelism.models.layers import attention, cross_entropy, dropout, rotary

Shape = tuple[int, ...]
Parameters = dict[str, Any]

VOCABULARY_MULTIPLE = 128
"""What Megatron-LM pads a vocabulary to a multiple of for one tensor-parallel device."""
CHOICES = {
    "activation": ("gelu", "relu", "swiglu"),
    "norm": ("layer", "rms"),
    "positions": ("learned", "rotary"),
}


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """A decoder-only Transformer with causal attention, and norms before each block and at the end.

    The defaults are those of GPT-2 (Radford et al., *Language Models are Unsupervised Multitask Learners*, 2019).
    ``ValueError`` for figures that do not fit together.
    """

    layers: int
    width: int
    """The number of features of a token: the hidden size."""
    heads: int
    vocabulary: int
    sequence: int
    """The number of tokens of a sequence."""
    key_value_heads: int | None = None
    """Heads of keys and values, each of which serves several heads of queries; None: ``heads``."""
    feed_forward: int | None = None
    """The width between the products of the feed-forward block; None: 4 times ``width``."""
    activation: str = "gelu"
    """``gelu``, ``relu``, or ``swiglu``, which has a gate, a third product."""
    norm: str = "layer"
    """``layer``, with a bias, or ``rms``."""
    positions: str = "learned"
    """``learned``, a table with a row for each position, or ``rotary``."""
    biases: bool = True
    """Whether the products of the blocks have biases."""
    tied: bool = True
    """Whether the table of tokens is the last product, too."""
    dropout: float = 0.0
    """The rate of dropout of attention weights and hidden values, unless one of the next two says otherwise."""
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    fused_attention: bool = True
    """Whether attention is one operator that never writes its scores."""
    epsilon: float = 1e-5
    """What norms add to the variance."""
    rotary_base: float = 10000.0
    dtype: npt.DTypeLike = np.float32
    """The dtype of parameters and values.  The loss is computed in float32 at least."""

    @short_errors
    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary", "sequence", "groups", "hidden"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(
                    f"{_FIELDS.get(name, name)} must be an integer of at least 1, got {getattr(self, name)!r}"
                )
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("dropout", "attention_dropout", "hidden_dropout"):
            rate = getattr(self, name)
            if rate is not None and not 0 <= rate < 1:
                raise ValueError(f"{name} must be in [0, 1), got {rate!r}")
        if self.width % self.heads or self.heads % self.groups:
            raise ValueError(
                f"heads must divide width, and key_value_heads must divide heads, got width={self.width}, "
                f"heads={self.heads} and key_value_heads={self.groups}"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(f"rotary positions need an even width of a head, got {self.head_width}")
        object.__setattr__(self, "dtype", checked_dtype(self.dtype))

    @property
    def groups(self) -> int:
        """The number of heads of keys and values."""
        return self.heads if self.key_value_heads is None else self.key_value_heads

    @property
    def hidden(self) -> int:
        """The width between the products of the feed-forward block."""
        return 4 * self.width if self.feed_forward is None else self.feed_forward

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.width // self.heads

    @property
    def rates(self) -> tuple[float, float]:
        """The rates of dropout: of attention weights, and of hidden values."""
        attention, hidden = self.attention_dropout, self.hidden_dropout
        return self.dropout if attention is None else attention, self.dropout if hidden is None else hidden

    def padded(self, multiple: int = VOCABULARY_MULTIPLE) -> TransformerSpec:
        """The same model with its vocabulary padded to a multiple, so that devices can share it evenly.

        Megatron-LM pads as well (``--make-vocab-size-divisible-by``).  The rows that are added stand for no token, but
        are computed with.

        >>> TransformerSpec(layers=12, width=768, heads=12, vocabulary=50_257, sequence=1024).padded().vocabulary
        50304
        """
        return replace(self, vocabulary=-(-self.vocabulary // multiple) * multiple)

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> dict[str, Shape]:
        """The shape of each parameter, by name.  Those of block 3 begin with ``3.``.

        ``qkv`` holds for each head of keys and values the columns of the queries that it serves, of the key and of the
        value, so that its columns can be split by these heads.  ``tokens``, and ``head`` where it is not tied, have a
        row for each token.
        """
        h, f, inner = self.width, self.hidden, (self.heads + 2 * self.groups) * self.head_width
        block: dict[str, Shape] = {"norm1": (h,), "qkv": (h, inner), "out": (h, h), "norm2": (h,)}
        block |= {"gate": (h, f)} if self.activation == "swiglu" else {}
        block |= {"up": (h, f), "down": (f, h)}
        if self.norm == "layer":
            block |= {"norm1_bias": (h,), "norm2_bias": (h,)}
        if self.biases:
            products = [name for name in ("qkv", "out", "gate", "up", "down") if name in block]
            block |= {f"{name}_bias": block[name][1:] for name in products}
        shapes: dict[str, Shape] = {"tokens": (self.vocabulary, h)}
        shapes |= {"positions": (self.sequence, h)} if self.positions == "learned" else {}
        shapes |= {f"{i}.{name}": shape for i in range(self.layers) for name, shape in block.items()}
        shapes |= {"norm": (h,)} | ({"norm_bias": (h,)} if self.norm == "layer" else {})
        return shapes if self.tied else shapes | {"head": (self.vocabulary, h)}

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(int(np.prod(shape)) for shape in self.weights.values())

    def flops(self, tokens: int) -> int:
        """Floating-point operations of the products of a training step on so many tokens, forward and backward.

        The backward of a product takes twice its forward.  Attention counts as if every token attended to the whole
        sequence; lookups, norms, activations and what is computed twice do not count.  For GPT this is the formula of
        Narayanan et al., 2021, arXiv:2104.04473, section 5.1, without the recomputation:
        72 tokens layers width^2 (1 + sequence / (6 width) + vocabulary / (12 width layers)).
        """
        return 3 * self.forward_flops(tokens)

    def forward_flops(self, tokens: int) -> int:
        """Floating-point operations of the products of a forward on so many tokens; see `flops`."""
        inner = (self.heads + 2 * self.groups) * self.head_width
        feed_forward = (3 if self.activation == "swiglu" else 2) * self.hidden
        block = 2 * self.width * (inner + self.width + feed_forward) + 4 * self.sequence * self.width
        return tokens * (self.layers * block + 2 * self.width * self.vocabulary)

    # -- the program ---------------------------------------------------------------------------------------------------

    def function(self, batch: Extent) -> Function:
        """The program of the loss: the mean cross-entropy of the following tokens.

        Its inputs are the parameters, named ``p.`` and their names in `weights`; ``tokens`` and ``targets``, integers
        of shape ``(batch, sequence)``; with dropout also ``step``, a single integer, the number of the training step.
        ``batch`` is a number or a symbol.  The regions are ``embedding``, ``block.3.attention`` with ``norm``, ``qkv``,
        ``core`` and ``out`` inside, ``block.3.feed_forward`` with ``norm``, ``up``, ``activation`` and ``down`` inside,
        ``head`` and ``loss``.
        """
        weights = {name: TensorType(self.dtype, shape) for name, shape in self.weights.items()}
        places = TensorType(np.int64, (batch, self.sequence))
        step = [TensorType(np.int64, ())] if any(self.rates) else []

        def loss(p: Parameters, tokens: Any, targets: Any, step: Any = None) -> Any:
            return _Forward(self, p, step).loss(tokens, targets)

        return record(loss, weights, places, places, *step, name="transformer")


_FIELDS = {"groups": "key_value_heads", "hidden": "feed_forward"}


class _Forward:
    """One forward: a specification, its parameters, and the step that selects the masks of dropout."""

    def __init__(self, spec: TransformerSpec, p: Parameters, step: Any) -> None:
        self.spec, self.p, self.step = spec, p, step
        self.seeds: Iterator[int] = count()
        """Every dropout has a seed of its own."""

    def loss(self, tokens: Any, targets: Any) -> Any:
        spec, p = self.spec, self.p
        with region("embedding"):
            x = apply("take", p["tokens"], tokens, axis=0)
            if spec.positions == "learned":
                x = x + p["positions"]
            x = self._dropped(x)
        for i in range(spec.layers):
            with region(f"block.{i}"):
                for name, part in (("attention", self._attention), ("feed_forward", self._feed_forward)):
                    with region(name):
                        x = x + self._dropped(part(x, f"{i}."))
        with region("head"):
            x = self._norm(x, "norm")
            logits = np.einsum("bsd,vd->bsv", x, p["tokens" if spec.tied else "head"])
        with region("loss"):
            return cross_entropy(logits, targets)

    def _attention(self, x: Any, block: str) -> Any:
        spec = self.spec
        batch, rows, _ = x.shape
        groups, each, width = spec.groups, spec.heads // spec.groups, spec.head_width
        with region("norm"):
            x = self._norm(x, f"{block}norm1")
        with region("qkv"):
            joined = self._product(x, f"{block}qkv").reshape((batch, rows, groups, each + 2, width))
            q, k, v = np.split(joined, [each, each + 1], axis=3)
            q = q.reshape((batch, rows, spec.heads, width))
            k, v = (part.reshape((batch, rows, groups, width)) for part in (k, v))
            if spec.positions == "rotary":
                q, k = (rotary(part, spec.rotary_base) for part in (q, k))
        with region("core"):
            x = attention(
                q, k, v, step=self.step, rate=spec.rates[0], seed=next(self.seeds), fused=spec.fused_attention
            )
        with region("out"):
            return self._product(x.reshape((batch, rows, spec.width)), f"{block}out")

    def _feed_forward(self, x: Any, block: str) -> Any:
        with region("norm"):
            x = self._norm(x, f"{block}norm2")
        with region("up"):
            hidden = self._product(x, f"{block}up")
            gate = [self._product(x, f"{block}gate")] if self.spec.activation == "swiglu" else []
        with region("activation"):
            hidden = apply(self.spec.activation, *gate, hidden)
        with region("down"):
            return self._product(hidden, f"{block}down")

    def _product(self, x: Any, name: str) -> Any:
        y = x @ self.p[name]
        return y + self.p[f"{name}_bias"] if self.spec.biases else y

    def _norm(self, x: Any, name: str) -> Any:
        if self.spec.norm == "rms":
            return apply("rms_norm", x, self.p[name], epsilon=self.spec.epsilon)
        return apply("layer_norm", x, self.p[name], self.p[f"{name}_bias"], epsilon=self.spec.epsilon)

    def _dropped(self, x: Any) -> Any:
        return dropout(x, self.step, self.spec.rates[1], next(self.seeds))
