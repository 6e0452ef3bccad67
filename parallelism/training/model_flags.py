"""`ModelFlags`: the model that Megatron-LM's flags say."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from typing import Any

from parallelism.display.quantities import shortened
from parallelism.models import Experts, LatentAttention, LoRA, TransformerSpec
from parallelism.models.spec import VOCABULARY_MULTIPLE
from parallelism.training.flag_values import FlagValues

MOE_CHOSEN = 2
"""The experts for each token, if no flag says how many."""
MOST_OF_LIST = 10_000
"""No list of layers is longer."""
VOCABULARIES = {
    "GPT2BPETokenizer": 50_257,
    "Llama2Tokenizer": 32_000,
    "BertWordPieceLowerCase": 30_522,
    "BertWordPieceCase": 28_996,
}
"""The sizes of the vocabularies of tokenizers that have but one."""


@dataclass(frozen=True, kw_only=True)
class ModelFlags(FlagValues):
    """The flags about the model, and what they mean together."""

    @property
    def _positions(self) -> str | None:
        """How positions enter, in the words of a `TransformerSpec`; None if no flag says it."""
        if self.use_rotary_position_embeddings:
            return "rotary"
        positions = _POSITIONS.get(self.position_embedding_type or "")
        return "none" if self.no_position_embedding and positions in (None, "learned") else positions

    def spec(self, named: TransformerSpec | None = None) -> TransformerSpec:
        """The model; with the ``named`` one, the flags that were given replace its figures.

        ``ValueError`` names the flags that are missing, and figures that do not fit together.
        """
        if named is None:
            self._check_needed()
        if self.num_query_groups is not None and not self.group_query_attention:
            raise ValueError("--num-query-groups has a meaning with --group-query-attention only")
        figures: dict[str, Any] = {
            "layers": self.num_layers,
            "width": self.hidden_size,
            "heads": self.num_attention_heads,
            "sequence": self.seq_length,
            "vocabulary": self.padded_vocab_size or self.vocabulary(named),
            "feed_forward": self.ffn_hidden_size,
            "activation": self._activation,
            "norm": _NORMS.get(self.normalization or ""),
            "positions": self._positions,
            "tied": False if self.untie_embeddings_and_output_weights else None,
            "biases": self._biases,
            "key_value_heads": (self.num_query_groups or 1) if self.group_query_attention else None,
            "attention_dropout": self.attention_dropout,
            "hidden_dropout": self.hidden_dropout,
            "fused_attention": self._fused_attention,
            "fused_cross_entropy": True if self.cross_entropy_loss_fusion else None,
            "query_key_norm": True if self.qk_layernorm and not self.multi_latent_attention else None,
            "head_width": None if self.multi_latent_attention else self.kv_channels,
            "attention": self._latent_attention,
            "next_tokens": self.mtp_num_layers,
            "lora": self._lora,
            **self._documents,
            **self._window(named),
        }
        figures = {name: value for name, value in figures.items() if value is not None}
        if named is not None:
            spec = replace(named, **figures)
        else:
            if figures.get("activation") in _GATED and self.ffn_hidden_size is None:
                figures["feed_forward"] = int(4 * figures["width"] * 2 / 3) // 64 * 64
            usual = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "fused_attention": False}
            spec = TransformerSpec(**usual | figures)
        spec = self._with_experts(spec)
        if self.padded_vocab_size:
            return spec
        return spec.padded(self.make_vocab_size_divisible_by or VOCABULARY_MULTIPLE)

    def _check_needed(self) -> None:
        """``ValueError`` where a figure of a model without a name is missing."""
        needed = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
        missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(self, name) is None]
        has_vocabulary = self.padded_vocab_size or self.vocabulary(None)
        if missing or not (has_vocabulary or self.tokenizer_type):
            missing += [] if has_vocabulary else ["--vocab-size"]
            raise ValueError(f"gpt needs {', '.join(missing)}")
        if not has_vocabulary:
            raise ValueError(
                f"--tokenizer-type {shortened(self.tokenizer_type, 40)[1:-1]} does not say how large the vocabulary is; give "
                "--vocab-size, such as --set vocab-size=32000"
            )

    def vocabulary(self, named: TransformerSpec | None) -> int | None:
        """The size of the vocabulary that is said, or that a model without a name has by its tokenizer."""
        if self.vocab_size is not None or named is not None:
            return self.vocab_size
        if self.tokenizer_type is None and self.vocab_file and self.merge_file:
            return VOCABULARIES["GPT2BPETokenizer"]
        return VOCABULARIES.get(self.tokenizer_type or "")

    @property
    def _biases(self) -> tuple[str, ...] | bool | None:
        """The products that have biases; False: none has.  None if no flag says it."""
        if self.add_qkv_bias:
            return ("qkv",)
        return False if self.disable_bias_linear else None

    @property
    def _fused_attention(self) -> bool | None:
        """Whether attention is fused; None if no flag says it."""
        if self.use_flash_attn:
            return True
        if self.attention_backend is not None:
            return self.attention_backend not in ("unfused", "local")
        if self.transformer_impl is not None:
            return self.transformer_impl != "local"
        return self.use_mcore_models

    @property
    def _activation(self) -> str | None:
        """The activation in the words of a `TransformerSpec`; None if no flag says it."""
        names = {"swiglu": self.swiglu, "geglu": self.quick_geglu, "relu2": self.squared_relu}
        return next((name for name, is_given in names.items() if is_given), None)

    @property
    def _latent_attention(self) -> LatentAttention | None:
        """Latent attention, with the defaults of Megatron-LM."""
        if not self.multi_latent_attention:
            return None
        return LatentAttention(
            query_rank=self.q_lora_rank,
            key_value_rank=self.kv_lora_rank or 32,
            head_width=self.qk_head_dim or 128,
            rotary_width=self.qk_pos_emb_head_dim or 64,
            value_width=self.v_head_dim or 128,
        )

    @property
    def _documents(self) -> dict[str, Any]:
        """The figures of packed sequences."""
        if self.document_lengths is None:
            if self.document_variation is not None:
                raise ValueError("--document-variation needs --document-lengths")
            return {}
        words = self.document_lengths.replace(",", " ").split()
        if not words or not all(re.fullmatch("[0-9]{1,9}", word) for word in words):
            raise ValueError(
                f"--document-lengths must be numbers of tokens, as 512 or 512 1024; got "
                f"{shortened(self.document_lengths, 40)}"
            )
        lengths = tuple(map(int, words))
        return {
            "documents": lengths[0] if len(lengths) == 1 else lengths,
            "document_variation": self.document_variation,
        }

    @property
    def _lora(self) -> LoRA | None:
        """The adapters; None if no flag says that there are any."""
        if self.lora_rank is None:
            if alone := [name for name in ("lora_alpha", "lora_products") if getattr(self, name) is not None]:
                raise ValueError(f"--{alone[0].replace('_', '-')} needs --lora-rank")
            return None
        given = {
            "alpha": self.lora_alpha,
            "products": self.lora_products and tuple(self.lora_products.split()),
        }
        figures: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return LoRA(self.lora_rank, **figures)

    def _window(self, named: TransformerSpec | None) -> dict[str, Any]:
        """The figures of sliding windows: Megatron-LM counts the tokens before a token, a spec that one, too."""
        if self.window_size is None:
            return {}
        ends = re.fullmatch(r"\(?\s*(-1|[0-9]{1,9})\s*,\s*(-1|[0-9]{1,9})\s*\)?", self.window_size)
        if ends is None:
            raise ValueError(
                f"--window-size must be the tokens before and behind one, as 1023,0; got {shortened(self.window_size, 40)}"
            )
        if ends[1] == "-1":
            return {}
        every = self.window_attn_skip_freq
        layers = self.num_layers or (named.layers if named else 0)
        if every is None or re.fullmatch(r"[0-9]{1,9}", every):
            return {"window": int(ends[1]) + 1, "full_attention_every": int(every) if every else None}
        has_window = listed_layers(every, layers, "--window-attn-skip-freq")
        return {"window": int(ends[1]) + 1, "full_attention_every": tuple(not each for each in has_window)}

    def _with_experts(self, spec: TransformerSpec) -> TransformerSpec:
        """The model with the experts of the flags, if there are any."""
        figures: dict[str, Any] = {
            "count": self.num_experts,
            "chosen": self.moe_router_topk,
            "width": self.moe_ffn_hidden_size,
            "shared_width": self.moe_shared_expert_intermediate_size,
            "latent": self.moe_latent_size,
            "capacity": self.moe_expert_capacity_factor or None,
            "router": self.moe_router_score_function,
            "groups": self.moe_router_num_groups,
            "groups_chosen": self.moe_router_group_topk,
            "deduplicated": self.moe_token_dispatcher_type == "flex" or None,
        }
        figures = {name: value for name, value in figures.items() if value is not None}
        if self.moe_layer_freq is not None:
            figures["layers"] = self._expert_layers(spec.layers)
        if spec.experts is not None:
            return replace(spec, experts=replace(spec.experts, **figures))
        if self.num_experts is None:
            return spec
        return replace(spec, experts=Experts(**{"chosen": MOE_CHOSEN} | figures))

    def _expert_layers(self, layers: int) -> tuple[bool, ...]:
        """Whether each layer has experts: every N-th from the first on, or as a list says."""
        text = self.moe_layer_freq or "1"
        if re.fullmatch(r"[1-9][0-9]{0,8}", text):
            return tuple(layer % int(text) == 0 for layer in range(layers))
        return listed_layers(text, layers, "--moe-layer-freq")


def listed_layers(text: str, layers: int, flag: str) -> tuple[bool, ...]:
    """The truth of each layer in a list such as ``([0]*3+[1]*11)``, which is parsed and never evaluated.

    ``ValueError`` for another text, and for a list of another length.
    """
    try:
        if len(text) > MOST_OF_LIST:
            raise ValueError
        found = _listed(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(
            f"{flag} must be a number, or a list of 0 and 1 as ([0]*3+[1]*11); got {shortened(text, 40)}"
        ) from None
    if len(found) != layers:
        raise ValueError(f"{flag} has {len(found)} entries, the model {layers} layers")
    return found


def _listed(node: ast.expr) -> tuple[bool, ...]:
    match node:
        case ast.List(elts=each):
            values = [one.value if isinstance(one, ast.Constant) else None for one in each]
            if any(type(value) is not int or value not in (0, 1) for value in values):
                raise ValueError
            return tuple(map(bool, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _listed(left) + _listed(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))) if (
            0 <= times <= MOST_OF_LIST
        ):
            repeated = _listed(left)
            if len(repeated) * times > MOST_OF_LIST:
                raise ValueError
            return repeated * times
    raise ValueError


_NORMS = {"LayerNorm": "layer", "RMSNorm": "rms"}
_POSITIONS = {
    "learned_absolute": "learned",
    "rope": "rotary",
    "yarn": "rotary",
    "mrope": "rotary",
    "none": "none",
}
_GATED = ("swiglu", "geglu")
