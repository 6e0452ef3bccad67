"""Parts that the model of costs has no constant of their own for: how far its one rate is from each of them.

An elementwise op takes so many times as long as the bytes that a simulation counts of it take at the stack's rate of
memory.  Attention reaches so much of the peak, by library, width of a head, number of tokens and direction.
"""

from __future__ import annotations

from statistics import median

from parallelism.cost import Costs
from parallelism.display import in_columns
from parallelism.display.quantities import count
from parallelism.hardware import Hardware
from vcluster.calibration.gpu.items import ATTENTION, ELEMENTWISE, OPTIMIZER, PRODUCTS
from vcluster.calibration.gpu.kernel_fits import computed_flops
from vcluster.calibration.gpu.measuring import Row, Tables

SIMULATED_BYTES: dict[str, tuple[int, int]] = {
    "layer_norm": (4, 6),
    "rms_norm": (4, 6),
    "rms_norm_by_hand": (4, 6),
    "gelu": (4, 6),
    "gelu_tanh": (4, 6),
    "relu": (4, 6),
    "silu_gate": (6, 10),
    "softmax": (4, 6),
    "rotary": (4, 4),
    "add": (6, 0),
    "transpose": (4, 0),
    "bias_add": (4, 0),
    "narrow_cast": (6, 0),
    "wide_cast": (6, 0),
    "copy": (4, 0),
    "accumulate": (10, 0),
    "cross_entropy_float32": (14, 6),
}
"""What a simulation counts for each element in 16 bits, forward and backward; 0: nothing, or no gradient."""
_OF_ATTENTION = ("backend", "causal", "head_width", "tokens", "heads", "key_value_heads")
BACKWARD_FLOPS = 2.5
"""Those of the gradient of attention over those of its forward, by a kernel that computes the scores again."""


def factors(tables: Tables, hardware: Hardware) -> list[Row]:
    """Of each elementwise op in 16 bits, in its largest size: how many times as long it takes, by direction."""
    largest: dict[str, Row] = {}
    for row in tables.measured(ELEMENTWISE, dtype="bfloat16"):
        if row["op"] in SIMULATED_BYTES and _elements(row) >= _elements(largest.get(row["op"], {})):
            largest[row["op"]] = row
    costs, found = Costs(hardware), []
    for op, row in largest.items():
        told: Row = {"op": op, "elements": _elements(row)}
        for way, nbytes in zip(("forward", "backward"), SIMULATED_BYTES[op], strict=True):
            if nbytes:
                told[way] = row[f"{way}_seconds"] / costs.compute_seconds(nbytes=nbytes * _elements(row))
        found.append(told)
    return found


def _elements(row: Row) -> int:
    return int(row.get("rows", 0)) * int(row.get("width", 0))


def attention_parts(tables: Tables, hardware: Hardware) -> list[Row]:
    """The part of the peak that attention reaches by direction, of the scores that its mask allows."""
    found = []
    for row in tables.measured(ATTENTION):
        flops = computed_flops(row)
        peak = hardware.peak(row["dtype"])
        told: Row = {name: row[name] for name in _OF_ATTENTION if name in row}
        found.append(
            {
                **told,
                "forward": flops / row["forward_seconds"] / peak,
                "backward": BACKWARD_FLOPS * flops / row["backward_seconds"] / peak,
            }
        )
    return found


def best_rates(tables: Tables) -> dict[str, float]:
    """The best rate of products by dtype, in flops a second."""
    found: dict[str, float] = {}
    for row in tables.measured(PRODUCTS):
        found[row["dtype"]] = max(found.get(row["dtype"], 0.0), row["flops_per_second"])
    return found


def told(tables: Tables, hardware: Hardware) -> str:
    """All of it for a terminal: the best rates, attention, elementwise ops, updates."""
    lines = [
        "reached at best: "
        + ", ".join(f"{dtype} {count(rate)}FLOP/s" for dtype, rate in best_rates(tables).items())
    ]
    lines += [
        "",
        *in_columns(
            [
                ("attention reaches of the peak", "forward", "backward"),
                *_attention_cells(attention_parts(tables, hardware)),
            ],
            2,
        ),
    ]
    cells = [("takes so many times as long as its bytes", "forward", "backward")]
    for row in factors(tables, hardware):
        cells.append(
            (row["op"], f"{row['forward']:.2f}", f"{row['backward']:.2f}" if "backward" in row else "")
        )
    lines += ["", *in_columns(cells, 2)]
    cells = [("takes for a parameter", "", "")]
    for how in dict.fromkeys(row["how"] for row in tables.measured(OPTIMIZER)):
        each = [row["seconds_per_parameter"] for row in tables.measured(OPTIMIZER, how=how)]
        cells.append((how, f"{min(each) * 1e12:.3g} ps", ""))
    return "\n".join([*lines, "", *in_columns(cells, 2)])


def _attention_cells(rows: list[Row]) -> list[tuple[str, str, str]]:
    """A line for each library, width of a head and mask: from the fewest tokens to the most."""
    cells = []
    for backend, width, causal in dict.fromkeys(
        (row["backend"], row["head_width"], row["causal"]) for row in rows
    ):
        alike = [
            row
            for row in rows
            if (row["backend"], row["head_width"], row["causal"]) == (backend, width, causal)
        ]
        ends = min(row["tokens"] for row in alike), max(row["tokens"] for row in alike)
        name = (
            f"{backend}, heads of {width}, {'causal' if causal else 'whole'}, {ends[0]} to {ends[1]} tokens"
        )
        cells.append((name, _at_ends(alike, "forward", ends), _at_ends(alike, "backward", ends)))
    return cells


def _at_ends(rows: list[Row], way: str, ends: tuple[int, int]) -> str:
    """The median shares with the fewest and with the most tokens."""
    medians = []
    for end in dict.fromkeys(ends):
        medians.append(median(row[way] for row in rows if row["tokens"] == end))
    return " to ".join(f"{share:.0%}" for share in medians)
