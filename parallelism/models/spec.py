"""Decoder-only Transformers by their figures: parameters, floating-point operations, and the program of the loss."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.arrays import with_plain_numbers
from parallelism.display.quantities import short_errors
from parallelism.ir.core import Extent, Function, TensorType, checked_dtype
from parallelism.ir.operators.losses import FUSED_LOSS
from parallelism.ir.passes.frozen import frozen
from parallelism.ir.recording import record
from parallelism.kernels import RotaryScaling
from parallelism.models import inference
from parallelism.models.block_parts import Parameters
from parallelism.models.expert_layers import Experts
from parallelism.models.figures import (
    GATED,
    NORM_PLACES,
    PARTS_OF_QKV,
    Shape,
    check_layer_parts,
    forward_flops_of,
    frozen_flops_of,
    idle_parameters,
    parameters_of,
    weights_of,
)
from parallelism.models.forward import Forward, checked_program
from parallelism.models.latent_attention import LatentAttention
from parallelism.models.linear_attention import LinearAttention
from parallelism.models.lora import LoRA, adapters_of, check_adapters
from parallelism.models.packed import check_documents, document_lengths

VOCABULARY_MULTIPLE = 128
"""What Megatron-LM pads a vocabulary to a multiple of for one tensor-parallel device."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "activation": ("gelu", "gelu_exact", "relu", "relu2", "silu", *GATED),
    "norm": ("layer", "rms"),
    "norm_parameters": ("all", "weights", "none"),
    "norm_places": NORM_PLACES,
    "positions": ("learned", "rotary", "alibi", "none"),
    "query_key_norm": (False, True, "head", "all_heads", "without_weights"),
    "parallel": (False, True, "one_norm"),
}


class _Derived(int):
    """The width of a head that follows from other figures, so that `dataclasses.replace` derives it anew."""


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """A decoder-only Transformer with causal attention.

    The defaults are those of GPT-2 (Radford et al., *Language Models are Unsupervised Multitask Learners*, 2019): norms
    before each block and at the end.  ``ValueError`` for figures that do not fit together.
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
    key_value_copies: int = 1
    """So many devices of tensor parallelism work with each head of keys and values, where the devices are more than these
    heads: see `for_tensor_parallel`."""
    head_width: int = None  # type: ignore[assignment]
    """Features of a head.  None when it is made, and then a number: ``width / heads``, or the width of a query of
    latent attention."""
    feed_forward: int | None = None
    """The width between the products of the feed-forward block; None: 4 times ``width``."""
    activation: str = "gelu"
    """``gelu`` (its tanh form), ``gelu_exact``, ``relu``, ``relu2``, its square, or ``silu``; or one with a gate, a
    third product: ``swiglu``, ``geglu``, ``geglu_exact``, ``reglu``, or ``clamped_swiglu``, that of gpt-oss."""
    norm: str = "layer"
    """``layer``, with a bias, or ``rms``."""
    norm_parameters: str = "all"
    """``all`` of a norm, only its ``weights``, or ``none``."""
    norm_places: str = "before"
    """Norms stand ``before`` attention and feed-forward, ``after`` them, before the residual sum, or at ``both``."""
    positions: str = "learned"
    """``learned``, a table with a row for each position, ``rotary``, ``alibi``, or ``none``."""
    biases: bool | str | tuple[str, ...] = True
    """Whether the products of the blocks have biases; or the names of those that have (see `weights`), as ``qkv``.
    Those of routers and of the head are always said by name."""
    tied: bool = True
    """Whether the table of tokens is the last product, too."""
    dropout: float = 0.0
    """The rate of dropout of attention weights and hidden values, unless one of the next two says otherwise."""
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    fused_attention: bool = True
    """Whether attention is one operator that never writes its scores."""
    fused_cross_entropy: bool = False
    """Whether the loss reads the logits in their own dtype, so that no copy of them is written in float32."""
    epsilon: float = 1e-5
    """What norms add to the variance."""
    rotary_base: float = 10000.0
    rotary_width: int | None = None
    """So many features of a head, the first, are rotated; None: all."""
    window_rotary_base: float | None = None
    """The base of layers with a window; None: ``rotary_base``."""
    rotary_scaling: str | None = None
    """How the frequencies of long contexts are stretched: the text of a `parallelism.kernels.RotaryScaling`."""
    rotary_factor: float = 1.0
    """What the rotated features are multiplied by, as by YaRN."""
    unrotated_every: int | tuple[bool, ...] | None = None
    """Layer i has no rotary positions where ``(i + 1) % n == 0``, or where it is true; None: all have them."""
    query_key_norm: bool | str = False
    """A norm of queries and keys: of each ``head`` (True), of ``all_heads`` together, or of each head, behind the
    rotation, ``without_weights``."""
    window: int | None = None
    """A token attends to so many tokens, itself among them; None: to all before it."""
    documents: int | tuple[int, ...] | None = None
    """Sequences are packed: a token attends to its own document alone.  A number is the mean length of documents; several
    are their lengths, one behind another, and behind the last one they begin anew.  None: a sequence is one document."""
    document_variation: float = 0.0
    """The coefficient of variation of the lengths, the standard deviation by the mean, where the mean is given."""
    full_attention_every: int | tuple[bool, ...] | None = None
    """Layer i has no window where ``(i + 1) % n == 0``, or where it is true; None: all have it."""
    attention_scale: float | None = None
    """What scores are multiplied by; None: 1 / sqrt(head_width)."""
    attention_softcap: float | None = None
    """Scores x become ``cap * tanh(x / cap)`` (Gemma 2, 2024, arXiv:2408.00118, section 2); None: they stay."""
    attention_sinks: bool = False
    """Whether a learned score of each head, which no value belongs to, is in the sum of the softmax, as in gpt-oss."""
    alibi_scale: float = 1.0
    """What the slopes of ``alibi`` are multiplied by."""
    parallel: bool | str = False
    """Whether attention and feed-forward of a block both work on its input; ``one_norm``: behind the same norm."""
    embedding_scale: float = 1.0
    """What the rows of the table of tokens are multiplied by."""
    embedding_norm: bool = False
    """Whether a norm stands behind the embedding."""
    residual_scale: float = 1.0
    """What attention and feed-forward are multiplied by before the residual sum."""
    logit_scale: float = 1.0
    """What logits are multiplied by."""
    logit_softcap: float | None = None
    """As ``attention_softcap``, of the logits."""
    experts: Experts | None = None
    """The experts of layers that have them."""
    attention: LatentAttention | None = None
    """Latent attention in place of heads of queries, keys and values; None: these."""
    linear_attention: LinearAttention | None = None
    """Linear attention, which keeps a state, in place of attention in the layers that it names; None: in none."""
    attention_gate: bool = False
    """Whether a sigmoid for each feature multiplies what attention gives, before the product behind it."""
    layer_parts: tuple[str, ...] | None = None
    """What each layer has: ``attention`` or ``feed_forward`` alone, or ``both``; None: all layers have both."""
    next_tokens: int = 0
    """Modules that predict one more token each (DeepSeek-V3, 2024, arXiv:2412.19437, section 2.2)."""
    remarks: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """What a reader of a file has to say about it."""
    lora: LoRA | None = None
    """Low-rank adapters, which alone are trained then; None: all weights are trained."""
    dtype: npt.DTypeLike = np.float32
    """The dtype of parameters and values.  The loss is computed in float32 at least."""

    @short_errors
    def __post_init__(self) -> None:
        self._derive()
        for name in ("layers", "width", "heads", "vocabulary", "sequence", "groups", "head_width", "hidden"):
            if (
                not isinstance(getattr(self, name), int)
                or getattr(self, name) is True
                or getattr(self, name) < 1
            ):
                raise ValueError(
                    f"{_FIELDS.get(name, name)} must be an integer of at least 1, got {getattr(self, name)!r}"
                )
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                told = ", ".join(map(str, choices))
                raise ValueError(f"{name} must be one of {told}, got {getattr(self, name)!r}")
        for name in ("dropout", "attention_dropout", "hidden_dropout"):
            rate = getattr(self, name)
            if rate is not None and not 0 <= rate < 1:
                raise ValueError(f"{name} must be in [0, 1), got {rate!r}")
        if self.heads % self.groups:
            raise ValueError(self._uneven)
        self._check_copies()
        self._check_positions()
        self._check_layers()
        check_adapters(self)
        check_documents(self)
        object.__setattr__(self, "dtype", checked_dtype(self.dtype))

    def _derive(self) -> None:
        """The figures that were not given."""
        with_plain_numbers(self)
        if self.query_key_norm is True:
            object.__setattr__(self, "query_key_norm", "head")
        if not isinstance(self.biases, bool):
            given = (self.biases,) if isinstance(self.biases, str) else self.biases
            object.__setattr__(self, "biases", tuple(given) or False)
        if self.head_width is not None and type(self.head_width) is not _Derived:
            return
        if self.attention is not None:
            object.__setattr__(self, "head_width", _Derived(self.attention.query_width))
            return
        for name in ("width", "heads"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {getattr(self, name)!r}")
        if self.width % self.heads:
            raise ValueError(self._uneven)
        object.__setattr__(self, "head_width", _Derived(self.width // self.heads))

    def _check_copies(self) -> None:
        """``ValueError`` for copies of heads of keys and values that the heads of queries cannot be dealt to."""
        copies = self.key_value_copies
        if type(copies) is not int or copies < 1:
            raise ValueError(f"key_value_copies must be an integer of at least 1, got {copies!r}")
        if self.heads % self.copied_groups:
            raise ValueError(
                f"{copies} copies of {self.groups} heads of keys and values must divide the {self.heads} heads, got "
                f"key_value_copies={copies}"
            )
        if copies > 1 and self.attention is not None:
            raise ValueError("latent attention has no heads of keys and values to copy: key_value_copies=1")

    def _check_positions(self) -> None:
        if self.positions == "rotary" and self.rotated % 2:
            raise ValueError(f"rotary positions need an even width of a head, got {self.rotated}")
        if not 0 < self.rotated <= self.head_width:
            raise ValueError(
                f"rotary_width must be at most the {self.head_width} of a head, got {self.rotated}"
            )
        if self.rotary_scaling is not None:
            RotaryScaling.parse(self.rotary_scaling)
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ValueError(f"window must be a number of tokens, at least 1, or None, got {self.window!r}")
        if self.attention is not None and (
            self.positions not in ("rotary", "none") or self.query_key_norm or self.groups != self.heads
        ):
            raise ValueError(
                "latent attention has rotary positions or none, as many heads of keys and no query_key_norm"
            )
        if type(self.next_tokens) is not int or self.next_tokens < 0:
            raise ValueError(f"next_tokens must be an integer of at least 0, got {self.next_tokens!r}")

    def _check_layers(self) -> None:
        """Choices of layers that are listed have an entry for each."""
        for name in ("full_attention_every", "unrotated_every"):
            value = getattr(self, name)
            if value is None or (type(value) is int and value >= 1):
                continue
            if isinstance(value, str) or not hasattr(value, "__iter__"):
                raise ValueError(
                    f"{name} must be an integer of at least 1, or a bool for each layer, got {value!r}"
                )
            object.__setattr__(self, name, tuple(bool(each) for each in value))
        listed: dict[str, Any] = {
            "full_attention_every": self.full_attention_every,
            "unrotated_every": self.unrotated_every,
        }
        if self.experts is not None:
            listed["layers of experts"] = self.experts.layers
        if self.linear_attention is not None:
            listed["layers of linear attention"] = self.linear_attention.layers
        check_layer_parts(self)
        listed["layer_parts"] = self.layer_parts
        for name, value in listed.items():
            if isinstance(value, tuple) and len(value) < self.layers:
                raise ValueError(
                    f"{name} must have an entry for each of the {self.layers} layers, got {len(value)}"
                )

    @property
    def _uneven(self) -> str:
        return (
            f"heads must divide width, and key_value_heads must divide heads, got width={self.width}, "
            f"heads={self.heads} and key_value_heads={self.groups}"
            + (", and no head_width" if type(self.head_width) is not int else "")
        )

    @property
    def groups(self) -> int:
        """The number of heads of keys and values."""
        return self.heads if self.key_value_heads is None else self.key_value_heads

    @property
    def copied_groups(self) -> int:
        """The number of heads of keys and values that attention has, copies among them."""
        return self.groups * self.key_value_copies

    @property
    def hidden(self) -> int:
        """The width between the products of the feed-forward block."""
        return 4 * self.width if self.feed_forward is None else self.feed_forward

    @property
    def document_lengths(self) -> tuple[int, ...]:
        """The lengths of the documents of a packed sequence, as a `Mask` has them; none if it is one document."""
        if self.documents is None or isinstance(self.documents, tuple):
            return self.documents or ()
        lengths = document_lengths(self.sequence, self.documents, self.document_variation)
        return lengths[:1] if len({*lengths}) == 1 else lengths

    @property
    def expert_width(self) -> int:
        """The width between the products of one expert."""
        given = None if self.experts is None else self.experts.width
        return self.hidden if given is None else given

    @property
    def rotated(self) -> int:
        """The features of a head that are rotated."""
        if self.rotary_width is not None:
            return self.rotary_width
        return self.head_width if self.attention is None else self.attention.rotary_width

    @property
    def biased(self) -> frozenset[str]:
        """The names of the products that are said to have biases."""
        return frozenset() if isinstance(self.biases, bool) else frozenset(self.biases)

    @property
    def rates(self) -> tuple[float, float]:
        """The rates of dropout: of attention weights, and of hidden values."""
        attention, hidden = self.attention_dropout, self.hidden_dropout
        return self.dropout if attention is None else attention, self.dropout if hidden is None else hidden

    def window_of(self, layer: int) -> int | None:
        """The window of a layer; None: it attends to all tokens before each."""
        return None if _holds(self.full_attention_every, layer) else self.window

    def is_rotated(self, layer: int) -> bool:
        """Whether a layer has rotary positions."""
        return self.positions == "rotary" and not _holds(self.unrotated_every, layer)

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has linear attention."""
        return self.linear_attention is not None and self.linear_attention.at(layer)

    def has(self, part: str, layer: int) -> bool:
        """Whether a layer has its ``attention``, linear or not, or its ``feed_forward``."""
        return self.layer_parts is None or self.layer_parts[layer] in (part, "both")

    def for_tensor_parallel(self, devices: int) -> TransformerSpec:
        """The model as so many devices of tensor parallelism compute it: with copies of the heads of keys and values, if
        these are fewer.

        A device has one head of keys and values then, and several devices have the same.  Their weights are a parameter of
        their own (`weights`), split evenly over all devices.  What this product makes of the tokens is gathered
        over the devices, each takes the head that its queries need, and the gradients of the copies are summed by a
        reduce_scatter.  Megatron-LM does the same (``megatron/core/transformer/attention.py``, ``num_query_groups`` below
        the devices), but gathers the queries with them.  A single head of keys and values is computed by each device:
        its weights are whole, and the gradients of its copies are summed by an all_reduce.

        The same model, if no copies are needed, and if copies do not fit: devices that neither divide these heads nor are
        a multiple of them.

        >>> spec = TransformerSpec(layers=2, width=64, heads=16, key_value_heads=4, vocabulary=128, sequence=32)
        >>> spec.for_tensor_parallel(8).key_value_copies
        2
        """
        copies = self.copies_over(devices)
        if copies == 1:
            return self
        lora = None if self.lora is None else self.lora.of_parts("qkv", PARTS_OF_QKV)
        return replace(self, key_value_copies=copies, lora=lora)

    def copies_over(self, devices: int) -> int:
        """How many of so many devices of tensor parallelism work with each head of keys and values; 1: the heads suffice, or
        cannot be dealt to these devices."""
        groups = self.groups
        is_dealt = devices % groups == 0 and self.heads % devices == 0
        return devices // groups if is_dealt and devices > groups and self.attention is None else 1

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
        value, so that its columns can be split by these heads.  With ``key_value_copies`` these are two parameters:
        ``query``, and ``key_value`` with the columns of the key and of the value of each head.

        ``tokens``, and ``head`` where it is not tied, have a
        row for each token.  Weights of experts, ``expert_gate``, ``expert_up`` and ``expert_down``, have a first dim of
        experts; ``router`` has a column for each of them; those of shared experts begin with ``shared_``.  Latent
        attention has ``query_down`` and ``query_up`` (or ``query``), ``key_value_down``, whose last columns are the
        rotated key, and ``key_value_up``, with the columns of the key and of the value for each head.  Those of the
        modules that predict further tokens begin with ``next.0.``.  `LinearAttention.weights` has those of linear attention.
        """
        return weights_of(self)

    @property
    def adapters(self) -> dict[str, Shape]:
        """The shape of each weight of the adapters (`LoRA`), by name: ``3.qkv.down`` and ``3.qkv.up`` in block 3."""
        return adapters_of(self)

    @property
    def trained_parameters(self) -> int:
        """The number of parameters that are trained: with adapters those of the adapters, else `parameters`."""
        return self.parameters if self.lora is None else sum(map(prod, self.adapters.values()))

    @property
    def parameters(self) -> int:
        """The number of parameters, without those of adapters and of the modules that predict further tokens."""
        return parameters_of(self)[0]

    @property
    def next_token_parameters(self) -> int:
        """The number of parameters of the modules that predict further tokens."""
        return parameters_of(self)[1]

    @property
    def active_parameters(self) -> int:
        """The number of parameters without those of the experts that a token does not take."""
        return self.parameters - idle_parameters(self)

    def flops(self, tokens: int) -> int:
        """Floating-point operations of the products of a training step on so many tokens, forward and backward.

        The backward of a product takes twice its forward, and that of a frozen weight (`LoRA`) as much as it.  Attention
        counts as if every token attended to its whole document, which is the sequence unless it is packed; lookups,
        norms, activations and what is computed twice do not count.  Of experts those count that a token takes, and its
        router.  For GPT this is the formula of Narayanan et al., 2021, arXiv:2104.04473, section 5.1, without the
        recomputation: 72 tokens layers width^2 (1 + sequence / (6 width) + vocabulary / (12 width layers)).
        """
        return 3 * self.forward_flops(tokens) - frozen_flops_of(self, tokens)

    def forward_flops(self, tokens: int) -> int:
        """Floating-point operations of the products of a forward on so many tokens; see `flops`."""
        return forward_flops_of(self, tokens)

    # -- the program ---------------------------------------------------------------------------------------------------

    def function(self, batch: Extent) -> Function:
        """The program of the loss: the mean cross-entropy of the following tokens.

        Its inputs are the parameters, named ``p.`` and their names in `weights`; ``tokens`` and ``targets``, integers
        of shape ``(batch, sequence)``; with dropout also ``step``, a single integer, the number of the training step.
        ``batch`` is a number or a symbol.  Weights of adapters stand behind the parameters, named ``lora.`` and their
        names in `adapters`; the parameters are frozen then.  The regions are ``embedding``, ``block.3.attention`` with
        ``norm``, ``qkv``, ``core`` and ``out`` inside, ``block.3.feed_forward`` with ``norm``, ``up``, ``activation`` and
        ``down`` inside, ``head`` and ``loss``.

        ``ValueError`` for figures that have parameters and floating-point operations, but no program yet.
        """
        checked_program(self)
        weights = {name: TensorType(self.dtype, shape) for name, shape in self.weights.items()}
        adapters = {name: TensorType(self.dtype, shape) for name, shape in self.adapters.items()}
        places = TensorType(np.int64, (batch, self.sequence))
        step = [TensorType(np.int64, ())] if any(self.rates) else []

        def loss(p: Parameters, tokens: Any, targets: Any, step: Any = None) -> Any:
            return Forward(self, p, step).loss(tokens, targets)

        def tuning_loss(p: Parameters, lora: Parameters, tokens: Any, targets: Any, step: Any = None) -> Any:
            return Forward(self, p, step, lora).loss(tokens, targets)

        if adapters:
            function = record(tuning_loss, weights, adapters, places, places, *step, name="transformer")
            function = frozen(function, "p")
        else:
            function = record(loss, weights, places, places, *step, name="transformer")
        if self.fused_cross_entropy:
            return replace(function, attributes=(*function.attributes, (FUSED_LOSS, True)))
        return function

    def cache_bytes(self, tokens: Extent, dtype: npt.DTypeLike = "bfloat16") -> Extent:
        """The bytes that a cache of keys and values has for one sequence of so many tokens, a number or a symbol.

        Of each token and layer it has a key and a value for each of the ``groups``: ``2 groups head_width`` numbers.  A layer
        with a window has those of its last tokens.  With latent attention it has ``key_value_rank + rotary_width`` numbers.
        One with linear attention has states, however many tokens there are: those of all layers are ``cache_bytes(0)``.
        The sources are named in `parallelism.models.inference.caches`.

        >>> spec = TransformerSpec(layers=32, width=4096, heads=32, key_value_heads=8, vocabulary=128_256, sequence=8192)
        >>> spec.cache_bytes(1)
        131072
        """
        return inference.cache_bytes(self, tokens, dtype)

    def prefill(
        self,
        batch: Extent,
        tokens: Extent,
        context: Extent | None = None,
        *,
        cache_dtype: npt.DTypeLike | None = None,
    ) -> Function:
        """The program that writes prompts into an empty cache, and returns the logits of the last token of each.

        Its inputs are the parameters, named ``p.``; the cache; ``tokens``, integers of shape ``(batch, tokens)``; and
        ``at.lengths``, ``(batch,)``: so many tokens has each prompt, and what stands behind them is read nowhere.  The
        outputs are the logits, ``(batch, 1, vocabulary)``, and the cache, in the memory of that which came in.

        The cache has room for ``context`` tokens of each sequence; None: for ``tokens``.  Its arrays are ``cache.0.keys`` and
        ``cache.0.values`` for block 0, ``(batch, 1, context, groups, head_width)``, or ``cache.0.latent``, and have as many
        places as the window if the layer has one.  They are of ``cache_dtype``; None: that of the model.  Extents may be
        symbols.  Experts drop no token.
        """
        return inference.prefill(self, batch, tokens, context, cache_dtype=cache_dtype)

    def decode(self, batch: Extent, context: Extent, *, cache_dtype: npt.DTypeLike | None = None) -> Function:
        """The program of one token more of each sequence, with a cache that has room for ``context`` tokens.

        Its inputs and outputs are those of `prefill`, with ``tokens`` of shape ``(batch, 1)``; ``at.lengths`` says how many
        tokens of each sequence are in the cache already, so that the new one has this position.
        """
        return inference.decode(self, batch, context, cache_dtype=cache_dtype)


def _holds(every: int | tuple[bool, ...] | None, layer: int) -> bool:
    """Whether a choice of layers holds for this one."""
    if isinstance(every, tuple):
        return every[layer]
    return every is not None and (layer + 1) % every == 0


_FIELDS = {"groups": "key_value_heads", "hidden": "feed_forward"}
