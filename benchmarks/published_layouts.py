"""``python -m benchmarks.published_layouts``: layouts of one model that were tried, beside what a search says of them.

``published_layouts.csv`` has the rows of a grid, with the source.  All of its layouts are priced as those of a search are.
For each model and set of kernels it tells the rank correlation of predicted and measured seconds, by how much the first
choice took longer than the fastest run, the mean error, and how many layouts are told to fit rightly.

The code of the grid is PyTorch's: where a row names no kernel for norms, each is some ops in float32, `OPS`.  The table has
two stacks: that of Megatron-LM, and that of PyTorch.  And it has two accounts of memory: what a search counts, with such
norms (`held_by_norms`), and what such code holds (`held_by_code`).
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallelism.hardware import Hardware, on_stack, sized_hardware
from parallelism.hardware.kernels import Kernel
from parallelism.models import TransformerSpec
from parallelism.planning import find_plan
from parallelism.training import MegatronFlags, figures

ROWS = Path(__file__).with_name("published_layouts.csv")
MODELS = {"13B": (40, 5120, 13824, 40), "30B": (60, 6656, 17920, 52), "65B": (80, 8192, 22016, 64)}
"""Layers, width, features between the products of a gated block, and heads."""
DEVICES, WORDS, TOKENS = 64, 128_000, 2048 * 2048
NORMS = " + norms"
"""What the kernels of a row end with if there is one for norms."""
OPS = {"rms_norm": Kernel(launches=6, times=9), "rms_norm_gradient": Kernel(launches=15, times=14)}
"""LLaMA's norm (github meta-llama/llama, llama/model.py, RMSNorm) as ops of PyTorch, counted: to float32, square, mean, times
the inverse root, to 16 bits, times the weight move 36 bytes for a number, and a kernel 4; the ops of its gradient move 84,
and a kernel 6."""


LOSS_BYTES = 18
"""Of the loss of such code, by logit of the whole vocabulary: in 16 bits, in float32, their log softmax, and the gradients of
both.  13B with tp=2, microbatches of 8, and every layer computed again ran out of memory: there is little else to hold."""
SEEN_BYTES, WASTE = 81e9, 0.02
"""What tensors and the waste of the allocator have of a GPU of 80 GiB beside the process, and that waste."""


class Layout(NamedTuple):
    """How a model lies on the devices."""

    tp: int
    sp: int
    pp: int
    microbatch: int
    again: int


@dataclass(frozen=True)
class Row:
    """A layout that was tried."""

    model: str
    sequence: int
    kernels: str
    layout: Layout
    seconds: float | None
    """None if it ran out of memory."""

    @property
    def flags(self) -> MegatronFlags:
        """The run as flags of Megatron-LM: a distributed optimizer, gradients in 16 bits, and no overlap."""
        layers, width, features, heads = MODELS[self.model]
        given: dict[str, Any] = {
            "num_layers": layers, "hidden_size": width, "ffn_hidden_size": features, "num_attention_heads": heads,
            "seq_length": self.sequence, "vocab_size": WORDS, "micro_batch_size": self.layout.microbatch,
            "global_batch_size": self.batch, "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope",
            "untie_embeddings_and_output_weights": True, "disable_bias_linear": True, "attention_dropout": 0.0,
            "hidden_dropout": 0.0, "attention_backend": "flash" if self.kernels.startswith("flash") else "unfused",
            "bf16": True, "grad_reduce_in_bf16": True, "tensor_model_parallel_size": self.layout.tp,
            "pipeline_model_parallel_size": self.layout.pp, "use_distributed_optimizer": True}
        if self.layout.sp:
            given |= {"sequence_parallel": True}
        if self.layout.again:
            given |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        return MegatronFlags(**given)

    @property
    def spec(self) -> TransformerSpec:
        return replace(self.flags.spec(), dtype="bfloat16")

    @property
    def batch(self) -> int:
        """The sequences of a step."""
        return TOKENS // self.sequence


class Priced(NamedTuple):
    """What is told of a layout."""

    seconds: float
    peak_bytes: int


def rows() -> list[Row]:
    """All rows, each layout of a model and its kernels once."""
    lines = (line for line in ROWS.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    found: dict[tuple[str, int, str, Layout], Row] = {}
    for given in csv.DictReader(lines):
        layout = Layout(*(int(given[name]) for name in Layout._fields))
        row = Row(given["model"], int(given["sequence"]), given["kernels"], layout,
                  float(given["seconds"]) if given["seconds"] else None)
        found.setdefault((row.model, row.sequence, row.kernels, layout), row)
    return [*found.values()]


def priced(group: Sequence[Row], hardware: Hardware) -> dict[Layout, Priced]:
    """What a search says of the layouts of rows with one model; one whose stages differ is simulated."""
    first, known = group[0], dict[Layout, Priced]()
    for sp in {row.layout.sp for row in group}:
        layouts = [row.layout for row in group if row.layout.sp == sp]
        plans = find_plan(
            first.spec, hardware=hardware, devices=DEVICES, batch=first.batch, memory=1e15, gradients="bfloat16",
            simulations=0, progress=lambda *told: None, cp=1, chunks=1, schedule="1f1b", balanced=0, overlap=0, zero=[0, 1],
            sp=sp, **{name: sorted({getattr(layout, name) for layout in layouts}) for name in ("tp", "pp", "microbatch")},
            recompute=sorted({"full" if layout.again else "none" for layout in layouts}))
        for plan in plans:
            given = plan.settings
            if given["zero"] == (given["dp"] > 1):
                layout = Layout(given["tp"], sp, given["pp"], given["microbatch"], int(given["recompute"] == "full"))
                known[layout] = Priced(plan.seconds, plan.peak_bytes)
    for row in group:
        if row.layout not in known:
            step = figures(row.flags.run(DEVICES), hardware)
            known[row.layout] = Priced(step.seconds, step.peak_bytes)
    return known


def held_by_code(row: Row) -> float:
    """The bytes of the fullest stage, where each op of PyTorch keeps what its gradient reads.

    For each number of a token there are in a layer 8 bytes of the inputs of both norms and of the products behind them, or 16
    where norms are ops in float32, and 4 of what is gathered for the products under sequence parallelism.  Over ``tp`` lie
    the queries, keys, values and their result, the three arrays of a gated block, and scores, where no kernel leaves them
    out: 5 bytes (Korthikanti et al., 2022, equation 2), and 4 more of a softmax in float32.
    """
    layers, width, features, heads = MODELS[row.model]
    tp, sp, pp, microbatch, again = row.layout
    replicas, tokens = DEVICES // tp // pp, microbatch * row.sequence
    norms = (8 if row.kernels.endswith(NORMS) else 16) * width
    scores = {"softmax": 5, "torch": 9}.get(row.kernels, 0) * heads * row.sequence
    layer = tokens * ((norms / tp + 4 * width if sp else norms) + (8 * width + 6 * features + scores) / tp)
    kept = tokens * 2 * width / (tp if sp else 1) if again else layer
    found = []
    for stage in range(pp):
        ends = (stage == 0) + (stage == pp - 1)
        parameters = (layers / pp * (4 * width**2 + 3 * width * features) + ends * WORDS * width) / tp
        under_way = min(pp - stage, row.batch // replicas // microbatch)
        loss = LOSS_BYTES * tokens * WORDS if stage == pp - 1 else 0
        found.append(parameters * (4 + 12 / replicas) + under_way * layers / pp * kept + again * layer + loss)
    return max(found)


def held_by_norms(row: Row) -> float:
    """The bytes that norms hold as ops in float32 beyond those of a kernel: 8 for each number in each layer that is kept."""
    if row.kernels.endswith(NORMS):
        return 0.0
    layers, width, *_ = MODELS[row.model]
    tp, sp, pp, microbatch, again = row.layout
    under_way = min(pp, row.batch // (DEVICES // tp // pp) // microbatch)
    kept = 1 if again else under_way * layers / pp
    return 8.0 * width * microbatch * row.sequence / (tp if sp else 1) * kept


def room(hardware: Hardware, layout: Layout) -> float:
    """The bytes that tensors may use on a device."""
    sizes = (layout.tp, layout.pp, DEVICES // layout.tp // layout.pp)
    usable: float = hardware.reserve.usable_bytes(hardware.memory_bytes, sum(size > 1 for size in sizes))
    return usable


def order(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """The rank correlation (Spearman), equal numbers with their mean rank."""
    ranks = []
    for numbers in (predicted, measured):
        among = np.array(numbers)
        ranks.append([np.mean(np.flatnonzero(np.sort(among) == number)) for number in among])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def groups() -> Iterator[tuple[str, list[Row]]]:
    """The rows of each model and set of kernels."""
    for model, sequence, kernels in dict.fromkeys((row.model, row.sequence, row.kernels) for row in rows()):
        name = f"{model}, {sequence} tokens, {kernels}".replace(", 2048 tokens", "")
        yield name, [row for row in rows() if (row.model, row.sequence, row.kernels) == (model, sequence, kernels)]


def seconds_told(group: Sequence[Row], known: Mapping[Layout, Priced]) -> str:
    """The order, the first choice and the mean error of the rows that ran."""
    ran = [(known[row.layout].seconds, row.seconds) for row in group if row.seconds is not None]
    predicted, measured = zip(*ran, strict=True)
    late = ran[int(np.argmin(predicted))][1] / min(measured) - 1
    error = float(np.mean([told / took - 1 for told, took in ran]))
    return f"{order(predicted, measured):5.2f} {late:7.1%} {error:+7.1%}"


def memory_told(
    group: Sequence[Row], seconds: Mapping[Layout, Priced], fits: Mapping[Layout, bool], counted: Counter[str]
) -> str:
    """Of the layouts that ran, and of those that ran out of memory, how many are told so; and what the first choice did."""
    ran = [row for row in group if row.seconds is not None]
    out = [row for row in group if row.seconds is None]
    right = sum(fits[row.layout] for row in ran), sum(not fits[row.layout] for row in out)
    counted.update({"fit": right[0], "ran": len(ran), "do not fit": right[1], "ran out": len(out)})
    best = min((row for row in group if fits[row.layout]), key=lambda row: seconds[row.layout].seconds)
    return f"{right[0]:3} of {len(ran):2} {right[1]:3} of {len(out):2} {'ran' if best.seconds else 'ran out':7}"


def both_memories(
    group: Sequence[Row], known: Sequence[Mapping[Layout, Priced]], hardware: Hardware, counted: Sequence[Counter[str]]
) -> list[str]:
    """By what a search counts, with norms as they are, and by what the code holds."""
    whole = replace(hardware, memory_bytes=SEEN_BYTES, reserve=replace(hardware.reserve, waste=WASTE))
    counts = {
        row.layout: known[0][row.layout].peak_bytes + held_by_norms(row) <= room(hardware, row.layout) for row in group}
    holds = {row.layout: held_by_code(row) <= room(whole, row.layout) for row in group}
    fits = (counts, holds)
    return [memory_told(group, *each) for each in zip(known, fits, counted, strict=True)]


def as_its_code_is(kernels: str, hardware: Hardware) -> Hardware:
    """Norms as ops of PyTorch where the kernels have none for them."""
    known: Mapping[str, Kernel] = hardware.kernels
    return hardware if kernels.endswith(NORMS) else replace(hardware, kernels={**known, **OPS})


def main() -> None:
    """Prints the table."""
    machine = sized_hardware("dgx-a100", DEVICES)
    kernels, ops = on_stack(machine, "megatron-a100"), on_stack(machine, "torch-fsdp-a100")
    print(f"{'':33} {'megatron-a100':43} PyTorch's ops")
    columns = f"{'order':>5} {'first':>7} {'error':>7}  {'fit':>8} {'do not':>9} first  "
    print(f"{'':33} {columns}  {columns}".rstrip())
    counted = Counter[str](), Counter[str]()
    for name, group in groups():
        known = [priced(group, as_its_code_is(group[0].kernels, each)) for each in (kernels, ops)]
        memory = both_memories(group, known, machine, counted)
        told = [f"{seconds_told(group, each)}  {fits}" for each, fits in zip(known, memory, strict=True)]
        print(f"{name:33} {'  '.join(told)}".rstrip())
    for each in counted:
        print(f"{each['fit']} of {each['ran']} that ran fit; {each['do not fit']} of {each['ran out']} that ran out do not")


if __name__ == "__main__":
    main()
