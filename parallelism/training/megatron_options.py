"""The flags of Megatron-LM (github.com/NVIDIA/Megatron-LM, megatron/training/arguments.py) that are read here.

`OPTIONS` have a meaning here.  `UNCHANGING` ones change neither the time nor the memory of a simulated step: data,
learning rates, logs, checkpoints, and the choice of kernels.
"""

from __future__ import annotations

from typing import NamedTuple


class Option(NamedTuple):
    """A flag: its name without dashes, what it is about, and its values."""

    name: str
    about: str
    """``model``, ``strategy``, ``batch`` or ``update``."""
    help: str
    choices: tuple[str, ...] = ()
    """The words that it takes."""
    switch: bool = False
    """Whether it takes no value."""
    rate: bool = False
    """Whether it takes a rate below 1, rather than a whole number."""
    amount: bool = False
    """Whether it takes any number of at least 0."""

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
    Option("make-vocab-size-divisible-by", "model", "the vocabulary is padded to a multiple of N (128)"),
    Option("swiglu", "model", "a gate in the feed-forward block", switch=True),
    Option("normalization", "model", "the norms", choices=("LayerNorm", "RMSNorm")),
    Option("position-embedding-type", "model", "how positions enter", choices=("learned_absolute", "rope")),
    Option("untie-embeddings-and-output-weights", "model", "a head of its own", switch=True),
    Option("disable-bias-linear", "model", "products without biases", switch=True),
    Option("use-flash-attn", "model", "attention that does not write its scores", switch=True),
    Option("attention-dropout", "model", "rate of dropout of attention weights (0.1)", rate=True),
    Option("hidden-dropout", "model", "rate of dropout of hidden values (0.1)", rate=True),
    Option("num-experts", "model", "experts of a layer"),
    Option("moe-router-topk", "model", "experts for each token"),
    Option("tensor-model-parallel-size", "strategy", "devices along tp (1)"),
    Option("pipeline-model-parallel-size", "strategy", "devices along pp (1)"),
    Option(
        "num-layers-per-virtual-pipeline-stage", "strategy", "layers of a stage of an interleaved schedule"
    ),
    Option("context-parallel-size", "strategy", "devices along cp (1)"),
    Option("expert-model-parallel-size", "strategy", "devices along ep (1)"),
    Option(
        "sequence-parallel", "strategy", "norms and dropout split along the sequence over tp", switch=True
    ),
    Option("use-distributed-optimizer", "strategy", "the state of the optimizer split over dp", switch=True),
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
    Option("micro-batch-size", "batch", "sequences of a microbatch (1)"),
    Option("global-batch-size", "batch", "sequences of a step (one microbatch for each replica)"),
    Option("optimizer", "update", "what updates the weights (adam, which is AdamW)", choices=("adam", "sgd")),
    Option("sgd-momentum", "update", "of sgd (0.9); with 0 it has no state", rate=True),
    Option(
        "loss-scale", "update", "what the loss is multiplied by before it is differentiated (1)", amount=True
    ),
    Option("clip-grad", "update", "the largest norm of all gradients (0: they are not clipped)", amount=True),
)
"""The flags with a meaning."""

UNCHANGING: dict[str, int | None] = {
    # How many values each takes; None: any number.
    "overlap-param-gather": 0,
    "tp-comm-overlap": 0,
    "no-async-tensor-model-parallel-allreduce": 0,
    "use-mcore-models": 0,
    "use-legacy-models": 0,
    "transformer-impl": 1,
    "distributed-backend": 1,
    "max-position-embeddings": 1,
    "rotary-base": 1,
    "rotary-percent": 1,
    "norm-epsilon": 1,
    "init-method-std": 1,
    "no-masked-softmax-fusion": 0,
    "no-bias-gelu-fusion": 0,
    "no-bias-swiglu-fusion": 0,
    "no-bias-dropout-fusion": 0,
    "attention-softmax-in-fp32": 0,
    "no-gradient-accumulation-fusion": 0,
    "accumulate-allreduce-grads-in-fp32": 0,
    "lr": 1,
    "min-lr": 1,
    "lr-decay-style": 1,
    "lr-decay-iters": 1,
    "lr-decay-samples": 1,
    "lr-warmup-fraction": 1,
    "lr-warmup-iters": 1,
    "lr-warmup-samples": 1,
    "weight-decay": 1,
    "adam-beta1": 1,
    "adam-beta2": 1,
    "adam-eps": 1,
    "initial-loss-scale": 1,
    "train-iters": 1,
    "train-samples": 1,
    "rampup-batch-size": None,
    "eval-interval": 1,
    "eval-iters": 1,
    "save": 1,
    "load": 1,
    "save-interval": 1,
    "log-interval": 1,
    "log-throughput": 0,
    "tensorboard-dir": 1,
    "wandb-project": 1,
    "wandb-exp-name": 1,
    "data-path": None,
    "split": 1,
    "mock-data": 0,
    "vocab-file": 1,
    "merge-file": 1,
    "tokenizer-type": 1,
    "tokenizer-model": 1,
    "num-workers": 1,
    "seed": 1,
    "exit-interval": 1,
    "no-load-optim": 0,
    "no-load-rng": 0,
    "use-cpu-initialization": 0,
    "manual-gc": 0,
    "distributed-timeout-minutes": 1,
}
"""The flags that change nothing here, with the number of values that each takes."""
