"""Plan a training run without a GPU: predict the time and the memory of a step on 64 H100s, for several meshes.

A GPT in NumPy is recorded without numbers, annotated once, cut into stages, and simulated for each mesh. `zero` is
ZeRO-3: rows and weights are split over one axis, and weights are gathered for each microbatch. Replicas (`dp`) use
ZeRO-1: their all_reduce of the gradients moves as many bytes as the reduce_scatter and all_gather of ZeRO-1, and each
stores a part of the state of Adam, 12 bytes per parameter (Rajbhandari et al., arXiv:1910.02054, sections 3.1 and 7.2).
The step does not include the update. Each mesh is simulated with collectives that block, and with `Overlap()`: weights
are gathered a block ahead, and gradients are summed in buckets during the last backward.
"""

import math

import numpy as np

from parallelism import Mesh, Pipeline, PipelinedProgram, PipelinedStep, ir, step_parts
from parallelism.layouts import annotate, partition
from parallelism.trace import Split
from parallelism.transforms import Overlap

VOCABULARY, WIDTH, HEADS, LAYERS, SEQUENCE, ROWS = 51_200, 4096, 32, 16, 1024, 256


def norm(x):
    return x / np.sqrt(np.mean(np.square(x), axis=2, keepdims=True) + 1e-3)


def gpt(p, tokens, targets, causal):
    x = p["tokens"][tokens] + p["places"]
    for number, w in enumerate(p["blocks"]):
        with ir.region(f"block.{number}"):
            q, k, v = np.split((norm(x) @ w["qkv"]).reshape(*tokens.shape, HEADS, 3 * WIDTH // HEADS), 3, axis=3)
            scores = np.where(causal, np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(WIDTH // HEADS), -np.inf)
            mixed = np.einsum("bhqk,bkhd->bqhd", ir.apply("softmax", scores, axis=3), v)
            x = x + mixed.reshape(x.shape) @ w["out"]
            x = x + np.maximum(norm(x) @ w["up"], 0) @ w["down"]
    logits = (norm(x) @ p["tokens"].T).reshape(tokens.size, VOCABULARY)
    return ir.apply("softmax_cross_entropy", logits, targets.reshape(tokens.size), rows=tokens.size)


def bf16(*shape):
    return ir.TensorType("bf16", shape)


block = {"qkv": bf16(WIDTH, 3 * WIDTH), "out": bf16(WIDTH, WIDTH), "up": bf16(WIDTH, 4 * WIDTH),
         "down": bf16(4 * WIDTH, WIDTH)}
parameters = {"tokens": bf16(VOCABULARY, WIDTH), "places": bf16(SEQUENCE, WIDTH), "blocks": [block] * LAYERS}
batch, mask = ir.TensorType("i64", (ir.symbol("B"), SEQUENCE)), ir.TensorType("bool", (SEQUENCE, SEQUENCE))
program = ir.record(gpt, parameters, batch, batch, mask)

layouts = dict.fromkeys(("tokens", "targets", "p.tokens", "p.places"), "[zero, None]")
for layer in range(LAYERS):
    layouts |= {f"p.blocks.{layer}.{name}": "[zero, tp]" for name in ("qkv", "up")}     # by columns,
    layouts |= {f"p.blocks.{layer}.{name}": "[tp, zero]" for name in ("out", "down")}   # then by rows
program = annotate(program, layouts)

print(f"{sum(v.type.size for v in program.inputs if v.type.dtype.name == 'bfloat16') / 1e9:.1f} G parameters, "
      f"{ROWS} x {SEQUENCE} tokens a step, 64 devices\n")
print("                   micro-     blocking     with overlap            GB on the fullest device")
print("pp  dp  zero  tp  batches   ms  exposed   ms  exposed  bubble   weights  state    all  fits")
for pp, dp, zero, tp, microbatches in [
    (1, 64, 1, 1, 1), (1, 64, 1, 1, 4), (1, 1, 64, 1, 2), (1, 8, 1, 8, 2), (1, 8, 1, 8, 4),
    (4, 16, 1, 1, 8), (4, 4, 1, 4, 16),
]:
    print(f"{pp:2}  {dp:2}  {zero:4}  {tp:2}  {microbatches:7}", end="")
    for each in (program, Overlap()(program)):
        pipelined = PipelinedProgram(
            partition(each, pp), Pipeline(pp, microbatches, "1f1b"), inside=Mesh(zero=zero, tp=tp))
        step = PipelinedStep(pipelined, Mesh(pp=pp, dp=dp, zero=zero, tp=tp), ROWS)
        parts = step_parts(step, "dgx-h100:8")
        trace = parts.trace
        shares = Split(*np.mean([*parts.split.values()], axis=0) / trace.makespan_seconds)
        print(f"  {trace.makespan_seconds * 1e3:3.0f}  {shares.communication:7.1%}", end="")
    weights, peaks = trace.peaks("weights"), trace.peaks()
    fullest = max(peaks, key=lambda rank: peaks[rank] + 6 * weights[rank] / dp)
    state = 6 * weights[fullest] / dp       # 12 bytes of state for the 2 bytes of a weight
    whole = peaks[fullest] + state
    print(f"  {shares.bubble + shares.idle:6.1%}   {weights[fullest] / 1e9:7.1f}  {state / 1e9:5.1f}"
          f"  {whole / 1e9:5.1f}  {'yes' if whole < 80e9 else 'no':>4}")
