"""The flags of Megatron-LM (github.com/NVIDIA/Megatron-LM, megatron/training/arguments.py) that are read here.

`OPTIONS` have a meaning here.  The others change neither the time nor the memory of a simulated step (data, learning
rates, logs, checkpoints), or they change them and are not modelled: the table ``megatron_arguments.csv`` says which.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Option(NamedTuple):
    """A flag: its name without dashes, what it is about, and its values."""

    name: str
    about: str
    """``model``, ``strategy``, ``batch`` or ``update``."""
    help: str
    choices: tuple[str, ...] = ()
    """The words that it takes."""
    unmodelled: tuple[str, ...] = ()
    """Other words that Megatron-LM takes: the flag then changes nothing here."""
    switch: bool = False
    """Whether it takes no value."""
    rate: bool = False
    """Whether it takes a rate below 1, rather than a whole number."""
    amount: bool = False
    """Whether it takes any number of at least 0."""
    text: bool = False
    """Whether it takes any text."""
    many: bool = False
    """Whether it takes several words; as a value they are one text."""

    @property
    def field(self) -> str:
        """The field of `parallelism.training.MegatronFlags`."""
        return self.name.replace("-", "_")


OPTIONS: tuple[Option, ...] = (
    Option("num-layers", "model", "number of layers"),
    Option("hidden-size", "model", "features of a token"),
    Option("ffn-hidden-size", "model", "width of the feed-forward block (4 times the hidden size)"),
    Option("num-attention-heads", "model", "heads of queries"),
    Option("group-query-attention", "model", "several heads of queries share a head of keys", switch=True),
    Option("num-query-groups", "model", "heads of keys and values, with --group-query-attention"),
    Option("seq-length", "model", "tokens of a sequence"),
    Option("vocab-size", "model", "size of the vocabulary"),
    Option("padded-vocab-size", "model", "size of the vocabulary, which is not padded"),
    Option("make-vocab-size-divisible-by", "model", "the vocabulary is padded to a multiple of N (128)"),
    Option(
        "tokenizer-type", "model", "the size of the vocabulary, of tokenizers that have but one", text=True
    ),
    Option("vocab-file", "model", "with --merge-file: the tokenizer is that of GPT-2", text=True),
    Option("merge-file", "model", "with --vocab-file: the tokenizer is that of GPT-2", text=True),
    Option("kv-channels", "model", "features of a head (the hidden size by the heads)"),
    Option("swiglu", "model", "a gate in the feed-forward block", switch=True),
    Option("normalization", "model", "the norms", choices=("LayerNorm", "RMSNorm")),
    Option(
        "position-embedding-type",
        "model",
        "how positions enter",
        choices=("learned_absolute", "rope", "yarn", "mrope", "none"),
        unmodelled=("relative",),
    ),
    Option("no-position-embedding", "model", "no learned positions", switch=True),
    Option(
        "use-rotary-position-embeddings", "model", "the same as --position-embedding-type rope", switch=True
    ),
    Option("untie-embeddings-and-output-weights", "model", "a head of its own", switch=True),
    Option("disable-bias-linear", "model", "products without biases", switch=True),
    Option("use-flash-attn", "model", "attention that does not write its scores", switch=True),
    Option(
        "attention-backend",
        "model",
        "the kernel of attention: only unfused and local write the scores",
        choices=("auto", "flash", "fused", "unfused", "local"),
    ),
    Option(
        "transformer-impl",
        "model",
        "whose layers: those of transformer_engine have fused attention",
        choices=("transformer_engine", "local"),
        unmodelled=("inference_optimized",),
    ),
    Option("use-mcore-models", "model", "the same as --transformer-impl transformer_engine", switch=True),
    Option(
        "cross-entropy-loss-fusion",
        "model",
        "the loss reads logits in 16 bits, and writes none in float32",
        switch=True,
    ),
    Option("attention-dropout", "model", "rate of dropout of attention weights (0.1)", rate=True),
    Option("hidden-dropout", "model", "rate of dropout of hidden values (0.1)", rate=True),
    Option("squared-relu", "model", "the square of relu in the feed-forward block", switch=True),
    Option("quick-geglu", "model", "a gate with gelu in the feed-forward block", switch=True),
    Option("qk-layernorm", "model", "norms of queries and keys", switch=True),
    Option("add-qkv-bias", "model", "biases of queries, keys and values alone", switch=True),
    Option("window-size", "model", "a token attends to so many before it: 1023,0", text=True),
    Option(
        "window-attn-skip-freq", "model", "every N-th layer has no window; or a list of 0 and 1", text=True
    ),
    Option("num-experts", "model", "experts of a layer"),
    Option("moe-router-topk", "model", "experts for each token (2)"),
    Option("moe-ffn-hidden-size", "model", "width of an expert (that of the feed-forward block)"),
    Option(
        "moe-layer-freq", "model", "every N-th layer has experts; or a list, as ([0]*3+[1]*11)", text=True
    ),
    Option("moe-shared-expert-intermediate-size", "model", "width of the experts that all tokens take"),
    Option("moe-latent-size", "model", "features that experts work on (those of the model)"),
    Option("moe-expert-capacity-factor", "model", "rows that an expert accepts, by the mean", amount=True),
    Option("moe-router-score-function", "model", "scores of experts", choices=("softmax", "sigmoid")),
    Option("moe-router-num-groups", "model", "groups of experts"),
    Option("moe-router-group-topk", "model", "groups for each token"),
    Option(
        "moe-token-dispatcher-type",
        "strategy",
        "how rows come to experts",
        choices=("alltoall", "flex"),
        unmodelled=("allgather",),
    ),
    Option("moe-grouped-gemm", "strategy", "products of all experts together (always)", switch=True),
    Option("multi-latent-attention", "model", "keys and values from few features", switch=True),
    Option("q-lora-rank", "model", "features of which queries are made (those of the token)"),
    Option("kv-lora-rank", "model", "features of which keys and values are made (32)"),
    Option("qk-head-dim", "model", "features of a query that are not rotated (128)"),
    Option("qk-pos-emb-head-dim", "model", "features of a query that are rotated (64)"),
    Option("v-head-dim", "model", "features of a value (128)"),
    Option("mtp-num-layers", "model", "modules that predict one more token each"),
    Option(
        "document-lengths",
        "model",
        "sequences are packed, and attention stays in each document: their mean length, or the lengths of several",
        text=True,
        many=True,
    ),
    Option(
        "document-variation",
        "model",
        "with one --document-lengths: the standard deviation of lengths by their mean (0)",
        amount=True,
    ),
    Option("lora-rank", "model", "all weights are frozen, and adapters of so many features are trained"),
    Option(
        "lora-alpha",
        "model",
        "with --lora-rank: adapters are scaled by it, divided by the rank (32)",
        amount=True,
    ),
    Option(
        "lora-products",
        "model",
        "with --lora-rank: the products with adapters, as qkv out up gate down (those of attention)",
        text=True,
        many=True,
    ),
    Option("tensor-model-parallel-size", "strategy", "devices along tp (1)"),
    Option("pipeline-model-parallel-size", "strategy", "devices along pp (1)"),
    Option(
        "num-layers-per-virtual-pipeline-stage", "strategy", "layers of a stage of an interleaved schedule"
    ),
    Option("num-virtual-stages-per-pipeline-rank", "strategy", "stages of a rank of an interleaved schedule"),
    Option("decoder-first-pipeline-num-layers", "strategy", "layers of the first rank of the pipeline"),
    Option("decoder-last-pipeline-num-layers", "strategy", "layers of the last rank of the pipeline"),
    Option(
        "account-for-embedding-in-pipeline-split", "strategy", "the embedding counts as a layer", switch=True
    ),
    Option(
        "account-for-loss-in-pipeline-split",
        "strategy",
        "the head and the loss count as a layer",
        switch=True,
    ),
    Option(
        "pipeline-model-parallel-layout",
        "strategy",
        "the stages, as Ett|(tt|)*6t|L: E embedding, t layer, L head and loss",
        text=True,
    ),
    Option("context-parallel-size", "strategy", "devices along cp (1)"),
    Option(
        "cp-comm-type",
        "strategy",
        "how attention sees whole sequences: p2p (a ring, the default), all_gather, a2a or a2a+p2p",
        text=True,
        many=True,
    ),
    Option(
        "hierarchical-context-parallel-sizes",
        "strategy",
        "with a2a+p2p: the devices of all_to_alls, and those of a ring around them",
        text=True,
        many=True,
    ),
    Option("expert-model-parallel-size", "strategy", "devices along ep (1)"),
    Option("expert-tensor-parallel-size", "strategy", "devices along tp of experts: as of others, or 1"),
    Option(
        "sequence-parallel", "strategy", "norms and dropout split along the sequence over tp", switch=True
    ),
    Option(
        "tp-comm-overlap",
        "strategy",
        "with --sequence-parallel: collectives over tp run beside their products, in chunks",
        switch=True,
    ),
    Option("use-distributed-optimizer", "strategy", "the state of the optimizer split over dp", switch=True),
    Option(
        "use-megatron-fsdp",
        "strategy",
        "weights, too, are shared out over dp, as the next flags say",
        switch=True,
    ),
    Option(
        "data-parallel-sharding-strategy",
        "strategy",
        "with --use-megatron-fsdp: what is shared out over dp (no_shard)",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    ),
    Option(
        "num-distributed-optimizer-instances",
        "strategy",
        "so many groups along dp hold each all that is shared out (1)",
    ),
    Option(
        "outer-dp-sharding-strategy",
        "strategy",
        "with --use-megatron-fsdp: what is shared out over the instances, too (no_shard)",
        choices=("no_shard", "optim"),
    ),
    Option(
        "overlap-param-gather",
        "strategy",
        "with optim_grads_params and --overlap-grad-reduce: weights of the next block are gathered ahead",
        switch=True,
    ),
    Option(
        "overlap-grad-reduce",
        "strategy",
        "gradients are summed over dp during the last backward",
        switch=True,
    ),
    Option(
        "recompute-granularity", "strategy", "what the backward computes again", choices=("full", "selective")
    ),
    Option("recompute-method", "strategy", "with full: which layers", choices=("uniform", "block")),
    Option("recompute-num-layers", "strategy", "with block: so many layers of each stage"),
    Option("recompute-activations", "strategy", "the same as --recompute-granularity selective", switch=True),
    Option("fp16", "strategy", "float16, with a main copy of the weights in float32", switch=True),
    Option(
        "bf16", "strategy", "bfloat16, with a main copy of the weights in float32 (the default)", switch=True
    ),
    Option("fp32", "strategy", "float32 throughout", switch=True),
    Option(
        "accumulate-allreduce-grads-in-fp32",
        "strategy",
        "gradients are added up and summed in float32, as without this flag",
        switch=True,
    ),
    Option("grad-reduce-in-bf16", "strategy", "gradients are added up and summed in bfloat16", switch=True),
    Option(
        "main-grads-dtype",
        "strategy",
        "dtype of gradients, with --use-precision-aware-optimizer (fp32)",
        choices=("fp32", "bf16"),
    ),
    Option(
        "use-precision-aware-optimizer",
        "strategy",
        "an optimizer that takes gradients, and keeps its state, in the next dtypes",
        switch=True,
    ),
    Option(
        "main-params-dtype",
        "strategy",
        "dtype of main copies, with --use-precision-aware-optimizer (fp32)",
        choices=("fp32", "fp16"),
    ),
    Option(
        "exp-avg-dtype",
        "strategy",
        "dtype of Adam's means, with --use-precision-aware-optimizer (fp32)",
        choices=("fp32", "fp16", "bf16"),
        unmodelled=("fp8",),
    ),
    Option(
        "exp-avg-sq-dtype",
        "strategy",
        "dtype of Adam's squares, with --use-precision-aware-optimizer (fp32)",
        choices=("fp32", "fp16", "bf16"),
        unmodelled=("fp8",),
    ),
    Option(
        "fp8-format",
        "strategy",
        "products of the blocks are in float8: e4m3, or hybrid, whose gradients are in e5m2",
        choices=("e4m3", "hybrid"),
    ),
    Option("fp8", "strategy", "as --fp8-format", choices=("e4m3", "hybrid")),
    Option(
        "fp8-recipe",
        "strategy",
        "how they are scaled (delayed); delayed and tensorwise are one scale for a tensor",
        choices=("delayed", "tensorwise", "blockwise", "mxfp8"),
    ),
    Option("fp8-amax-history-len", "strategy", "steps whose maxima make a scale, of delayed (1)"),
    Option(
        "fp8-amax-compute-algo",
        "strategy",
        "which of these maxima makes it (most_recent)",
        choices=("max", "most_recent"),
    ),
    Option(
        "fp8-param-gather",
        "strategy",
        "weights of these products are there, and gathered, in float8 alone",
        switch=True,
    ),
    Option("fp4-format", "strategy", "products of the blocks are in float4", choices=("e2m1",)),
    Option("fp4", "strategy", "as --fp4-format", choices=("e2m1",)),
    Option("fp4-recipe", "strategy", "how they are scaled (nvfp4)", choices=("nvfp4",)),
    Option(
        "first-last-layers-bf16",
        "strategy",
        "the first and the last layer stay in 16 bits, or so many as the next flags say",
        switch=True,
    ),
    Option("num-layers-at-start-in-bf16", "strategy", "of the first layers (1)", amount=True),
    Option("num-layers-at-end-in-bf16", "strategy", "of the last layers (1)", amount=True),
    Option("micro-batch-size", "batch", "sequences of a microbatch (1)"),
    Option("global-batch-size", "batch", "sequences of a step (one microbatch for each replica)"),
    Option(
        "optimizer",
        "update",
        "what updates the weights (adam, which is AdamW)",
        choices=("adam", "sgd"),
    ),
    Option("sgd-momentum", "update", "of sgd (0.9); with 0 it has no state", rate=True),
    Option(
        "loss-scale", "update", "what the loss is multiplied by before it is differentiated (1)", amount=True
    ),
    Option("clip-grad", "update", "the largest norm of all gradients (0: they are not clipped)", amount=True),
)
"""The flags with a meaning."""

MODELLED, WITHOUT_EFFECT, UNMODELLED = "modelled", "unchanging", "unmodelled"


class Argument(NamedTuple):
    """An argument of Megatron-LM: its name without dashes, its values, and what is made of it here."""

    name: str
    values: str
    """Their number; ``*`` is any, ``+`` at least one."""
    kind: str
    """``modelled`` has a meaning here; ``unchanging`` changes neither the time nor the memory of a step; ``unmodelled``
    changes them, and is left out."""


def _arguments() -> dict[str, Argument]:
    lines = Path(__file__).with_name("megatron_arguments.csv").read_text("utf-8").splitlines()
    rows = [line.split(",") for line in lines if not line.startswith("#")]
    return {name: Argument(name, values, kind) for name, values, kind in rows[1:]}


ARGUMENTS: dict[str, Argument] = _arguments()
"""All arguments of Megatron-LM by name, from ``megatron_arguments.csv``."""

UNCHANGING: dict[str, str] = {each.name: each.values for each in ARGUMENTS.values() if each.kind != MODELLED}
"""The flags that change nothing here, with the number of values that each takes: both unchanging and unmodelled ones."""
