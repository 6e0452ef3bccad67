"""Constants of a stack from tables of measurements: each is one that the model of `parallelism.cost` has.

What the model has no constant for (attention by direction, norms, cross entropy) stays in the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import mean, median
from typing import Any

from parallelism.arrays import Floats
from parallelism.cost import Costs
from parallelism.hardware import ITEMSIZE, Hardware, HostLink, Products, Reached
from parallelism.simulation import simulate
from vcluster.calibration.fitting import fitted
from vcluster.calibration.gpu import kernel_fits
from vcluster.calibration.gpu.bases import base_of, folded
from vcluster.calibration.gpu.items import (
    COLLECTIVES,
    COPIES,
    ELEMENTWISE,
    LAUNCHES,
    OPTIMIZER,
    PRODUCTS,
    SUSTAINED,
)
from vcluster.calibration.gpu.measuring import Row, Tables
from vcluster.calibration.gpu.models import Model, Sizes
from vcluster.calibration.gpu.training import run_of

FEW_ROWS = 256
"""Products with fewer rows are of decoding; nothing is fitted to them."""
ELEMENT_BYTES = {
    "add": 6,
    "gelu": 4,
    "gelu_tanh": 4,
    "relu": 4,
    "layer_norm": 4,
    "rms_norm": 4,
    "narrow_cast": 6,
    "wide_cast": 6,
    "copy": 4,
    "accumulate": 10,
}
"""Bytes that a forward reads and writes for each element in 16 bits, of ops that are one kernel."""
OF_MEMORY = ("add", "gelu_tanh", "relu", "narrow_cast", "copy")
"""Of them those that take as long as their bytes: the rate of the memory is theirs."""
ONE_KERNEL_BYTES = 60.0
"""An update of AdamW that takes fewer bytes for a parameter is one kernel: that reads and writes 28."""
MANY_PARAMETERS = 1 << 20
"""Of fewer an update takes as long as its launches, which tell nothing of its bytes."""


@dataclass
class Fit:
    """A hardware whose constants are fitted one after the other, with what is said of each."""

    preset: str
    known: bool
    """Whether the preset is that of the GPU."""
    hardware: Hardware
    values: dict[str, Any] = field(default_factory=dict)
    """Constants of the stack by the names of its fields."""
    notes: dict[str, str] = field(default_factory=dict)
    """What each was found by."""

    def set(self, note: str, **values: Any) -> None:
        """Sets constants of the hardware and of the stack."""
        self.hardware = replace(self.hardware, **values)
        self.values |= values
        self.notes |= dict.fromkeys(values, note)


def fit(tables: Tables) -> Fit:
    """The constants that the tables tell.  ``ValueError`` where no product was measured."""
    if not tables.measured(PRODUCTS):
        raise ValueError("no product was measured; a stack needs some")
    found = Fit(*base_of(tables))
    for part in (
        _launch,
        _memory,
        _products,
        _dtypes,
        _fused,
        _kernels,
        _under_load,
        _issue,
        _host,
        _collectives,
    ):
        part(tables, found)
    if not found.known:
        rates = dict(folded(found.hardware))
        _set_attention(found, 1 / found.hardware.efficiency("bfloat16"), "of the rates that are reached")
        for name in ("flops_efficiency", "flops_efficiencies", "memory_efficiency"):
            found.values.pop(name, None)
            found.notes.pop(name, None)
        found.hardware = replace(found.hardware, flops_efficiencies={}, **rates)
        found.values |= rates
        found.notes |= dict.fromkeys(rates, "the best of this GPU in large pieces, no preset has it")
    return found


def _launch(tables: Tables, found: Fit) -> None:
    if rows := tables.measured(LAUNCHES, what="kernel"):
        found.set(
            f"{rows[0]['count']} kernels on one number, issued before the first began",
            kernel_launch_seconds=rows[0]["seconds"],
        )


# -- rates -------------------------------------------------------------------------------------------------------------


def moved(row: Row) -> float:
    """The bytes that a row of copies on the device or of elementwise ops reads and writes."""
    if "nbytes" in row:
        return 2.0 * float(row["nbytes"])
    wide = 2 if row["dtype"] == "float32" else 1
    return float(wide * ELEMENT_BYTES[row["op"]] * row["rows"] * row["width"])


def _took(row: Row) -> float:
    return float(row["seconds"] if "seconds" in row else row["forward_seconds"])


def _memory(tables: Tables, found: Fit) -> None:
    """The rate of the memory, and how short pieces reach less of it."""
    rows = [row for row in tables.measured(ELEMENTWISE) if row["op"] in OF_MEMORY]
    rows += [row for row in tables.measured(COPIES, way="device") if row["nbytes"] >= 1 << 18]
    if len(rows) < 3:
        return
    names = ("memory_efficiency", "memory_ramp_seconds")

    def seconds(hardware: Hardware, row: Row) -> float:
        return Costs(hardware).compute_seconds(nbytes=moved(row))

    values, error = _nearest(found.hardware, names, rows, seconds, (0.8, 2e-6))
    found.set(f"{len(rows)} copies and elementwise ops, told within {error:.1%} in the mean", **values)


def product_seconds(hardware: Hardware, row: Row) -> float:
    """What the model says of a product of the tables."""
    m, n, k, dtype = row["m"], row["n"], row["k"], row["dtype"]
    size = ITEMSIZE[dtype]
    result = 2 if dtype == "float8" else size
    nbytes = (m * k + k * n) * size + m * n * result
    shape = (1, m, n, k) if hardware.products is not None else None
    return Costs(hardware).compute_seconds(2.0 * m * n * k, nbytes, dtype=dtype, shape=shape)


def fitted_products(tables: Tables, dtype: str) -> list[Row]:
    """The products that constants of a dtype are fitted to."""
    return [
        row
        for row in tables.measured(PRODUCTS, dtype=dtype)
        if min(row["m"], row["n"], row["k"]) > FEW_ROWS or "multiprocessors" not in tables.machine
    ]


def _products(tables: Tables, found: Fit) -> None:
    """What products reach: in 16 bits where they were measured, else in the dtype of most rows."""
    dtypes = [
        dtype
        for dtype in ("bfloat16", "float16", *found.hardware.flops_per_second)
        if dtype in found.hardware.flops_per_second and fitted_products(tables, dtype)
    ]
    if not dtypes:
        return
    rows = fitted_products(tables, dtypes[0])
    units = tables.machine.get("multiprocessors")
    if not units or len(rows) < 4:
        values, error = _nearest(found.hardware, ("flops_efficiency",), rows, product_seconds, (0.5,))
        found.set(
            f"{len(rows)} products in {dtypes[0]}, told within {error:.1%} in the mean",
            **values,
            flops_ramp_seconds=0.0,
        )
        return

    def shaped(values: Floats) -> dict[str, Any]:
        efficiency, depth, intensity = values.tolist()
        return {
            "flops_efficiency": min(efficiency, 1.0),
            "products": Products(int(units), half_depth=depth, half_intensity=intensity),
        }

    def seconds(values: Floats) -> list[float]:
        trial = replace(found.hardware, **shaped(values))
        return [product_seconds(trial, row) for row in rows]

    best = fitted(seconds, [row["seconds"] for row in rows], (0.8, 100.0, 4.0))
    made = replace(found.hardware, **shaped(best))
    note = (
        f"{len(rows)} products in {dtypes[0]}, squares and those of layers, told within "
        f"{_error(made, rows, product_seconds):.1%} in the mean"
    )
    found.set(note, **shaped(best))


def _dtypes(tables: Tables, found: Fit) -> None:
    """What products of other dtypes reach."""
    efficiencies, notes = {}, []
    for dtype in found.hardware.flops_per_second:
        rows = fitted_products(tables, dtype)
        if not rows:
            continue

        def seconds(values: Floats, dtype: str = dtype, rows: Sequence[Row] = rows) -> list[float]:
            trial = replace(found.hardware, flops_efficiencies={dtype: min(float(values[0]), 1.0)})
            return [product_seconds(trial, row) for row in rows]

        efficiencies[dtype] = min(float(fitted(seconds, [row["seconds"] for row in rows], (0.5,))[0]), 1.0)
        tried = replace(found.hardware, flops_efficiencies=efficiencies)
        notes.append(f"{dtype} {len(rows)} within {_error(tried, rows, product_seconds):.1%}")
    found.set(f"products by dtype: {', '.join(notes)} in the mean", flops_efficiencies=efficiencies)


def _under_load(tables: Tables, found: Fit) -> None:
    """Attention for seconds on end takes longer than alone: power and heat lower the clocks.

    So do products, where there is nothing else; but between kernels that wait for memory, as in a step of training, they
    reach what they reach alone.  So theirs stay as they are (docs/accuracy.md has both).
    """
    rows = tables.measured(SUSTAINED, what="attention")
    if rows:
        part = min(1.0, median(row["alone_seconds"] / row["seconds"] for row in rows))
        _set_attention(found, part, f"times {part:.3f}: alone over the same for seconds on end")


def _set_attention(found: Fit, part: float, what: str) -> None:
    """Attention at a part of its rates, too."""
    kernels = dict(found.hardware.kernels)
    for name, kernel in kernels.items():
        if kernel.rates:
            rates = tuple(replace(rate, efficiency=min(1.0, rate.efficiency * part)) for rate in kernel.rates)
            kernels[name] = replace(kernel, rates=rates)
            found.notes[f"kernels.{name}"] += f"; {what}"
    if kernels:
        found.hardware = replace(found.hardware, kernels=kernels)
        found.values["kernels"] = kernels


def _nearest(
    hardware: Hardware,
    names: Sequence[str],
    rows: Sequence[Row],
    seconds: Callable[[Hardware, Row], float],
    start: Sequence[float],
) -> tuple[dict[str, float], float]:
    """The values of these fields that fit the rows, and the mean error without signs."""

    def named(values: Floats) -> dict[str, float]:
        told = dict(zip(names, values.tolist(), strict=True))
        for name, value in told.items():
            if name.endswith("efficiency"):
                told[name] = min(value, 1.0)
        return told

    def predict(values: Floats) -> list[float]:
        trial = replace(hardware, **named(values))  # type: ignore[arg-type]
        return [seconds(trial, row) for row in rows]

    found = named(fitted(predict, [_took(row) for row in rows], start))
    return found, _error(replace(hardware, **found), rows, seconds)  # type: ignore[arg-type]


def _error(hardware: Hardware, rows: Sequence[Row], seconds: Callable[[Hardware, Row], float]) -> float:
    return mean(abs(seconds(hardware, row) / _took(row) - 1) for row in rows)


# -- software ----------------------------------------------------------------------------------------------------------


def _fused(tables: Tables, found: Fit) -> None:
    """Whether the update is one kernel, as the model has it of fused elementwise ops."""
    if not (rows := tables.measured(OPTIMIZER, how="adamw_fused")):
        return
    rate = found.hardware.memory_bytes_per_second * found.hardware.memory_efficiency
    largest = max(rows, key=lambda row: int(row["parameters"]))
    nbytes = largest["seconds_per_parameter"] * rate
    if largest["parameters"] < MANY_PARAMETERS:
        found.set("fused AdamW ran; of too few parameters to tell its bytes", fused="elementwise")
        return
    one = nbytes < ONE_KERNEL_BYTES
    found.set(
        f"fused AdamW takes as long as {nbytes:.0f} bytes a parameter, "
        f"{'as one kernel does' if one else 'more than one kernel'}; biases are added in products",
        fused="elementwise" if one else False,
    )


def _kernels(tables: Tables, found: Fit) -> None:
    """What single kernels take, where one rate does not tell it."""
    each = [*kernel_fits.kernels(tables, found.hardware)]
    if each and found.hardware.fused:
        found.set("by the names of ops", kernels={one.name: one.kernel for one in each})
        found.notes.pop("kernels")
        found.notes |= {f"kernels.{one.name}": one.note for one in each}


def _issue(tables: Tables, found: Fit) -> None:
    """What issuing an op takes: that of a layer so small that nothing else takes time, over its ops in a simulation.

    It is a constant of the stack where ops run when they are called.  On a GPU the host issues ahead: an op takes no
    longer for it, unless all ops together do; so it is noted only.
    """
    rows = tables.measured(LAUNCHES, what="small_layer", how="eager")
    if not rows:
        return
    each = mean(
        (row["forward_seconds"] + row["backward_seconds"])
        / simulated_ops(row["style"], bool(found.hardware.fused))
        for row in rows
    )
    tables.notes["issue_seconds_of_an_op"] = each
    if "multiprocessors" not in tables.machine:
        found.set(
            "a layer of 64 features, forward and backward, over the ops that a simulation has of it: what a step "
            "takes that only issuing bounds",
            issue_seconds=each,
        )


@lru_cache(maxsize=8)
def simulated_ops(style: str, fused: bool) -> int:
    """How many ops a simulation has of a layer, forward and backward."""
    counts = []
    hardware = replace(Hardware.preset("dgx-h100:1"), fused="elementwise" if fused else False).placed([0])
    for layers in (1, 2):
        run = run_of(Model("", Sizes(style, 64, 4, 4, 128), layers, 128, 32, 1))
        columns = simulate(run.step, hardware, **run.placed, op_by_op=True).columns
        steps = columns.isin("kind", {"compute"}) & columns.isin("phase", {"F", "B"})
        counts.append(int(steps.sum()))
    return counts[1] - counts[0]


def _host(tables: Tables, found: Fit) -> None:
    """The link to the host: what small pinned copies take, and the rate of large ones."""
    rows = [row for way in ("to_device_pinned", "to_host_pinned") for row in tables.measured(COPIES, way=way)]
    if len(rows) < 2:
        return
    least = min(row["nbytes"] for row in rows)
    latency = median(row["seconds"] for row in rows if row["nbytes"] == least)
    largest = max(row["nbytes"] for row in rows)
    rate = median(row["bytes_per_second"] for row in rows if row["nbytes"] == largest)
    found.set(f"pinned copies of {least} bytes and of {largest}", host=HostLink(latency, rate))


def _collectives(tables: Tables, found: Fit) -> None:
    """The base, the step and the rate of all_reduce between the GPUs of a job."""
    rows = tables.measured(COLLECTIVES, name="all_reduce")
    link = found.hardware.links[0]
    inside = found.hardware.inside(1 if len(found.hardware.links) > 1 else 0)
    rows = [row for row in rows if row["devices"] <= inside]
    if len(rows) < 4 or link.shape == "memory":
        return

    def there(values: Floats) -> Hardware:
        base, step, bus = values.tolist()
        old = link.reached or Reached()
        reached = Reached(old.message_bytes_per_second, bus, base, step)
        return replace(found.hardware, links=(replace(link, reached=reached), *found.hardware.links[1:]))

    def predict(values: Floats) -> list[float]:
        costs = Costs(there(values))
        return [costs.collective("all_reduce", row["nbytes"], range(row["devices"])).seconds for row in rows]

    best = fitted(predict, [row["seconds"] for row in rows], (1e-5, 3e-6, link.bytes_per_second))
    found.hardware = there(best)
    reached = found.hardware.links[0].reached
    assert reached is not None
    note = f"{len(rows)} all_reduces of NCCL on {rows[0]['devices']} GPUs"
    for name in ("message_bytes_per_second", "bus_bytes_per_second", "base_seconds", "step_seconds"):
        if (value := getattr(reached, name)) is not None:
            found.values[f"reached.{link.name}.{name}"] = value
            found.notes[f"reached.{link.name}.{name}"] = note
