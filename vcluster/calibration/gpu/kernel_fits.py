"""Constants of single kernels from tables of measurements: what `parallelism.hardware.kernels` has by the names of ops.

Each is found from rows of one op alone.  A simulation counts so many bytes of an op (`SOURCES`); what the op took,
over what these bytes take at the stack's rate of memory, is how many times as long it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple

from parallelism.cost import Costs
from parallelism.hardware import AttentionRate, Hardware, Kernel
from parallelism.hardware.kernels import SCALARS
from parallelism.ir.operators.masked_scores import allowed_scores
from parallelism.kernels import Mask
from vcluster.calibration.fitting import fitted
from vcluster.calibration.gpu.items import ATTENTION, ELEMENTWISE, LAYERS, OPTIMIZER, SUSTAINED
from vcluster.calibration.gpu.measuring import Row, Tables, given_of

FORWARD, BACKWARD = "forward_seconds", "backward_seconds"


class Source(NamedTuple):
    """What tells the constants of an op: a measured op, in one direction, and the bytes that a simulation counts."""

    op: str
    way: str
    nbytes: float
    """For each element."""


SOURCES: dict[str, tuple[Source, ...]] = {
    "layer_norm": (Source("layer_norm", FORWARD, 4),),
    "layer_norm_gradient": (Source("layer_norm", BACKWARD, 6),),
    "rms_norm": (Source("rms_norm", FORWARD, 4),),
    "rms_norm_gradient": (Source("rms_norm", BACKWARD, 6),),
    "gelu": (Source("gelu", FORWARD, 4),),
    "gelu_gradient": (Source("gelu", BACKWARD, 6),),
    "swiglu": (Source("swiglu", FORWARD, 6), Source("silu_gate", FORWARD, 6)),
    "swiglu_gradient": (Source("swiglu", BACKWARD, 10), Source("silu_gate", BACKWARD, 10)),
    "softmax": (Source("softmax", FORWARD, 4),),
    "softmax_gradient": (Source("softmax", BACKWARD, 6),),
    "rotary": (Source("rotary", FORWARD, 4),),
    "concatenate": (Source("split", BACKWARD, 4),),
    "convert": (Source("wide_cast", FORWARD, 6),),
    "sum": (Source("column_sum", FORWARD, 2),),
    "cross_entropy_gradient": (Source("cross_entropy_float32", BACKWARD, 6),),
}
"""By the name of an op; of several sources the first that was measured."""
LOSS = ("max", "exponential_sums")
"""The ops of a cross entropy behind the cast of its logits: they read 4 bytes for each element, one after the other."""
UPDATE = "multiply+add+divide+sqrt+..."
"""The chain of AdamW in a trace."""
UPDATE_BYTES = 30.0
"""What a simulation counts of it for a parameter: three states in float32, a gradient, a weight in 16 bits."""
WIDE_BYTES = {"copy_foreach": 4.0, "accumulate_foreach": 8.0}
"""What a simulation counts in float32, of a product that makes a gradient or that adds it, for a parameter."""


@dataclass(frozen=True)
class Found:
    """The constants of an op, and what they are from."""

    name: str
    kernel: Kernel
    note: str


def kernels(tables: Tables, hardware: Hardware) -> Iterator[Found]:
    """The constants of all ops that the tables tell something of, on a hardware whose rates are known."""
    yield from _elementwise(tables, hardware)
    yield from _loss(tables, hardware)
    yield from _weights(tables, hardware)
    yield from _attention(tables, hardware)


# -- elementwise -------------------------------------------------------------------------------------------------------


def _elementwise(tables: Tables, hardware: Hardware) -> Iterator[Found]:
    for name, sources in SOURCES.items():
        for source in sources:
            rows = tables.measured(ELEMENTWISE, op=source.op, dtype="bfloat16")
            rows = [row for row in rows if row.get(source.way, 0.0) > 0]
            if rows:
                kernel, error = _nearest(hardware, rows, source)
                way = source.way.partition("_")[0]
                yield Found(name, kernel, f"{source.op} {way} in {len(rows)} sizes, told within {error:.1%}")
                break
    if tables.measured(ELEMENTWISE):
        yield Found(
            "split", Kernel(0, 0), "estimate: in PyTorch the parts of a row are views, which take nothing"
        )
        yield Found(SCALARS, Kernel(0, 0), "estimate: work on few numbers is part of kernels, or of the host")


def _nearest(hardware: Hardware, rows: Sequence[Row], source: Source) -> tuple[Kernel, float]:
    """How many kernels, and how many times the bytes, tell these rows best; and the mean error without signs."""
    sizes = [source.nbytes * row["rows"] * row["width"] for row in rows]
    took = [row[source.way] for row in rows]

    def told(kernel: Kernel) -> list[float]:
        return [_seconds(hardware, kernel, size) for size in sizes]

    def made(launches: float, times: float) -> Kernel:
        return Kernel(max(launches, 1.0), times)

    if len({*sizes}) > 1:
        launches, times = fitted(lambda values: told(made(*values.tolist())), took, (1.0, 1.0)).tolist()
    else:
        launches = 1.0
        times = float(fitted(lambda values: told(made(1.0, float(values[0]))), took, (1.0,))[0])
    kernel = made(launches, times)
    return kernel, mean(abs(one / other - 1) for one, other in zip(told(kernel), took, strict=True))


def _seconds(hardware: Hardware, kernel: Kernel, nbytes: float) -> float:
    """What a kernel without flops takes."""
    return kernel.launches * hardware.kernel_launch_seconds + kernel.times * moving(hardware, nbytes)


def moving(hardware: Hardware, nbytes: float) -> float:
    """The seconds of bytes at the rate of memory, without a launch."""
    return Costs(hardware).compute_seconds(nbytes=nbytes) - hardware.kernel_launch_seconds


def _loss(tables: Tables, hardware: Hardware) -> Iterator[Found]:
    """The forward of a cross entropy in float32, less the cast before it."""
    rows = tables.measured(ELEMENTWISE, op="cross_entropy_float32", dtype="bfloat16")
    casts = tables.measured(ELEMENTWISE, op="wide_cast", dtype="bfloat16")
    if not rows or not casts:
        return
    cast, _ = _nearest(hardware, casts, Source("wide_cast", FORWARD, 6))
    found = []
    for row in rows:
        elements = row["rows"] * row["width"]
        left = row[FORWARD] - _seconds(hardware, cast, 6 * elements)
        found.append(left / sum(moving(hardware, 4 * elements) for _ in LOSS))
    note = f"cross entropy of float32 logits, forward, less the cast, in {len(rows)} sizes"
    for name in LOSS:
        yield Found(name, Kernel(times=max(mean(found), 0.0)), note)


def _weights(tables: Tables, hardware: Hardware) -> Iterator[Found]:
    """Fits the kernel of the optimizer, and the kernels that copy or add 16-bit gradients of weights to those in float32."""
    if rows := tables.measured(OPTIMIZER, how="adamw_main_weights"):
        largest = max(rows, key=lambda row: int(row["parameters"]))
        took = largest["seconds"] / moving(hardware, UPDATE_BYTES * largest["parameters"])
        yield Found(UPDATE, Kernel(0, took), "fused AdamW, and the copy of its weights to 16 bits")
    found, told = [], []
    for how, wide in WIDE_BYTES.items():
        if rows := tables.measured(OPTIMIZER, how=how):
            largest = max(rows, key=lambda row: int(row["parameters"]))
            found.append(largest["seconds"] / moving(hardware, wide * largest["parameters"]))
            told.append(how)
    if found:
        note = f"gradients in 16 bits go into those in float32 by kernels of their own: {', '.join(told)}"
        for name in ("einsum", "matmul"):
            yield Found(name, Kernel(others=mean(found)), note)


# -- attention ---------------------------------------------------------------------------------------------------------


def library(tables: Tables) -> str:
    """The library of attention that PyTorch chooses by itself: the one that takes as long as what it chose."""
    apart: dict[str, list[float]] = {}
    for backend, seconds, chosen in (*_attention_chosen(tables), *_layers_chosen(tables)):
        apart.setdefault(backend, []).append(abs(seconds / chosen - 1))
    return min(apart, key=lambda name: mean(apart[name]), default="flash")


def _attention_chosen(tables: Tables) -> Iterator[tuple[str, float, float]]:
    """Each library with its seconds, and those of the one that was chosen, for the same attention."""
    for row in tables.measured(ATTENTION, backend="any"):
        same = given_of(row, "causal", "head_width", "tokens", "batch", "heads", "dtype")
        for other in tables.measured(ATTENTION, **same):
            if other["backend"] != "any" and "key_value_heads" not in other:
                yield other["backend"], other[FORWARD], row[FORWARD]


def _layers_chosen(tables: Tables) -> Iterator[tuple[str, float, float]]:
    """The same of whole layers: older tables have no attention that PyTorch chose by itself."""
    for row in tables.measured(SUSTAINED, what="layer", backend="any"):
        same = given_of(row, "style", "width", "tokens", "batch", "feed_forward")
        for other in tables.measured(LAYERS, **same, recompute="none"):
            yield other["backend"], other["both_seconds"], row["alone_seconds"]


def _attention(tables: Tables, hardware: Hardware) -> Iterator[Found]:
    chosen = library(tables)
    rows = [row for row in tables.measured(ATTENTION, backend=chosen) if "key_value_heads" not in row]
    for name, way, flops in (("attention", FORWARD, 1.0), ("attention_gradient", BACKWARD, 2.5)):
        rates, errors = [], []
        for width, causal in sorted({(row["head_width"], row["causal"]) for row in rows}):
            alike = [row for row in rows if (row["head_width"], row["causal"]) == (width, causal)]
            if len({row["tokens"] for row in alike}) > 1:
                rate, error = _rate(hardware, alike, way, flops)
                rates.append(rate)
                errors.append(error)
        if rates:
            note = (
                f"attention by {chosen}, which PyTorch chooses, {way.partition('_')[0]}, {len(rows)} rows of "
                f"{min(row['tokens'] for row in rows)} to {max(row['tokens'] for row in rows)} tokens, told within "
                f"{mean(errors):.1%}"
            )
            yield Found(name, Kernel(rates=tuple(rates)), note)


def computed_flops(row: Row) -> float:
    """Those of a row of attention that its kernel computes: the table has those of all scores."""
    tokens = row["tokens"]
    allowed = allowed_scores(Mask(causal=bool(row["causal"])), tokens, tokens)
    return float(row["flops"] * int(allowed) / tokens**2)


def _rate(hardware: Hardware, rows: Sequence[Row], way: str, flops: float) -> tuple[AttentionRate, float]:
    """The part of the peak, and the length at which half of it is reached, of rows of one width and mask."""
    took = [row[way] for row in rows]

    def made(efficiency: float, half: float) -> AttentionRate:
        return AttentionRate(rows[0]["head_width"], rows[0]["causal"], min(efficiency, 1.0), half)

    def told(rate: AttentionRate) -> list[float]:
        return [hardware.kernel_launch_seconds + rate.seconds(at_peak(row), row["tokens"]) for row in rows]

    def at_peak(row: Row) -> float:
        return flops * computed_flops(row) / hardware.peak(row["dtype"])

    rate = made(*fitted(lambda values: told(made(*values.tolist())), took, (0.4, 300.0)).tolist())
    return rate, mean(abs(one / other - 1) for one, other in zip(told(rate), took, strict=True))
