"""The matmul demo: a sharded product under a named policy, with what it has to move beside the closed form.

The policies are short kernels here: a product, and a collective before or after it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallelism.mesh import Mesh
from parallelism.operation import Device
from vcluster.demo.command_line import WrongWords, mesh_of
from vcluster.demo.screen import Screen

Extents = tuple[int, int, int]
"""m, k and n of C[m, n] = A[m, k] B[k, n]."""


@dataclass(frozen=True)
class Policy:
    """Which dims are cut over which axes, what a device does, and what that moves in all."""

    summary: str
    axes: tuple[str, ...]
    a: tuple[str | None, str | None]
    b: tuple[str | None, str | None]
    c: tuple[str | None, str | None]
    kernel: Callable[[Device, np.ndarray, np.ndarray], np.ndarray]
    steps: tuple[str, ...]
    formula: str
    bytes_received: Callable[[Mesh, Extents], int]
    """Summed over the devices, for float64."""


def _unsharded(device: Device, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    product: np.ndarray = device.matmul(a, b)
    return product


def _matched_inner(device: Device, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    c: np.ndarray = device.all_reduce(device.matmul(a, b), "tp")
    return c


def _outer(device: Device, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    whole_k = device.all_gather(a, "tp", dim=1)
    product: np.ndarray = device.matmul(whole_k, device.all_gather(b, "dp", dim=0))
    return product


def _outer_bytes(mesh: Mesh, extents: Extents) -> int:
    (m, k, n), rows, columns = extents, mesh.shape["dp"], mesh.shape["tp"]
    # Along tp the g members of a group each lack what g - 1 others hold: (g - 1) times the group's rows of A.
    return 8 * ((columns - 1) * m * k + columns * (rows - 1) * k * n)


POLICIES = {
    "unsharded": Policy(
        "nothing is cut: every device multiplies everything",
        ("tp",), (None, None), (None, None), (None, None), _unsharded,
        ("each device multiplies A by B; nothing moves",),
        "0", lambda mesh, extents: 0,
    ),
    "matched_inner": Policy(
        "k of A and k of B are cut over tp; the partial products are summed",
        ("tp",), (None, "tp"), ("tp", None), (None, None), _matched_inner,
        ("each device multiplies its columns of A by its rows of B: a partial C",
         "all_reduce over tp sums the partial Cs"),
        "2 (tp - 1) x bytes of C",
        lambda mesh, extents: 2 * (mesh.shape["tp"] - 1) * extents[0] * extents[2] * 8,
    ),
    "outer": Policy(
        "m of A is cut over dp, k of A over tp, k of B over dp; both gathered",
        ("dp", "tp"), ("dp", "tp"), ("dp", None), ("dp", None), _outer,
        ("all_gather over tp makes the rows of A whole", "all_gather over dp makes B whole",
         "each device multiplies its rows of A by B: its rows of C"),
        "(tp - 1) x bytes of A + tp (dp - 1) x bytes of B", _outer_bytes,
    ),
}


def prepare(arguments: argparse.Namespace) -> tuple[Mesh, Policy, Extents]:
    """The words, checked.  Raises `WrongWords`; starts nothing."""
    policy = POLICIES[arguments.policy]
    mesh = _mesh(arguments, arguments.policy, policy)
    if len(arguments.shape) != 3:
        raise WrongWords(f"--shape needs three extents M,K,N; got {len(arguments.shape)}")
    if max(arguments.shape) > 4096:
        raise WrongWords(f"--shape: a demo multiplies extents up to 4096, got {max(arguments.shape)}")
    m, k, n = arguments.shape
    return mesh, policy, (m, k, n)


def show(arguments: argparse.Namespace) -> int:
    """Runs the demo; 0, or 1 where values or bytes are not what they should be."""
    mesh, policy, extents = prepare(arguments)
    name, (m, k, n) = arguments.policy, extents
    screen = Screen()
    screen.line(f"matmul under {name} on {mesh!r}, each device a {arguments.backend}", "bold")
    screen.line(f"  C[{m}, {n}] = A[{m}, {k}] B[{k}, {n}], float64")
    screen.line(f"  {policy.summary}")

    screen.heading("Who holds what")
    for label, dims, cut in (("A[m, k]", "mk", policy.a), ("B[k, n]", "kn", policy.b), ("C[m, n]", "mn", policy.c)):
        cuts = [f"{dim} cut over {axis}" for dim, axis in zip(dims, cut, strict=True) if axis]
        screen.line(f"  {label}  {' and '.join(cuts) if cuts else 'whole on every device'}")
        screen.line(draw(owners(mesh, cut)))

    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape).astype(np.float64) for shape in ((m, k), (k, n)))  # small: sums are exact
    shards_a, shards_b = cut_up(a, mesh, policy.a), cut_up(b, mesh, policy.b)
    from vcluster import PerDevice, VirtualCluster

    with VirtualCluster(mesh, backend=arguments.backend) as cluster:
        run = cluster.run(policy.kernel, PerDevice(shards_a), PerDevice(shards_b))

    screen.heading("What happens")
    for number, step in enumerate(policy.steps, 1):
        screen.line(f"  {number}. {step}")
    screen.line()
    rows = [
        (f"r{rank}", _shape(shards_a[rank]), _shape(shards_b[rank]), _shape(run[rank]),
         f"{run.trace.filter(rank=rank).flops():,.0f}", f"{run.trace.bytes_received(rank=rank):,}")
        for rank in range(mesh.size)
    ]
    shown = rows if len(rows) <= 16 else [*rows[:8], ("...", "", "", "", "", ""), *rows[-4:]]
    screen.table(("device", "A", "B", "C", "flops", "bytes received"), shown)

    screen.heading("Verdict")
    wanted = cut_up(a @ b, mesh, policy.c)
    equal = all(np.array_equal(out, want) for out, want in zip(run.outputs, wanted, strict=True))
    screen.verdict(equal, "C equals NumPy's product on every device" if equal else "C differs from NumPy's product")
    moved, predicted = run.trace.bytes_received(), policy.bytes_received(mesh, extents)
    word = "equal" if moved == predicted else "NOT equal"
    screen.verdict(moved == predicted, f"{moved:,} bytes moved; {word} to the closed form's {predicted:,}")
    screen.line(f"       closed form: {policy.formula}")
    return 0 if equal and moved == predicted else 1


def _mesh(arguments: argparse.Namespace, name: str, policy: Policy) -> Mesh:
    asked = any(getattr(arguments, word) is not None for word in ("mesh", "dp", "tp"))
    mesh = mesh_of(arguments, "tp") if asked else Mesh(**({"tp": 4} if policy.axes == ("tp",) else {"dp": 2, "tp": 2}))
    if set(mesh.axes) != set(policy.axes):
        words = " ".join(f"--{axis} 2" for axis in policy.axes)
        raise WrongWords(f"policy {name} is over {' and '.join(policy.axes)}, as in {words}; the mesh is {mesh!r}")
    return mesh


def cut_up(x: np.ndarray, mesh: Mesh, cut: Sequence[str | None]) -> list[np.ndarray]:
    """The part of ``x`` that each rank holds, where dim i is cut over axis ``cut[i]`` by `numpy.array_split`."""
    parts = []
    for index in mesh:
        part = x
        for dim, axis in enumerate(cut):
            if axis is not None:
                part = np.array_split(part, mesh.shape[axis], axis=dim)[index[axis]]
        parts.append(part)
    return parts


def owners(mesh: Mesh, cut: Sequence[str | None]) -> list[list[list[int]]]:
    """Which ranks hold each block of a matrix, by row and column of blocks."""
    down, across = (mesh.shape[axis] if axis else 1 for axis in cut)
    blocks: list[list[list[int]]] = [[[] for _ in range(across)] for _ in range(down)]
    for rank, index in enumerate(mesh):
        i, j = (index[axis] if axis else 0 for axis in cut)
        blocks[i][j].append(rank)
    return blocks


def draw(blocks: Sequence[Sequence[Sequence[int]]], most: int = 8) -> str:
    """A matrix as a grid of blocks, each with the ranks that hold it; the middle of a long row is left out."""
    cells = [_elided([_ranks(ranks) for ranks in row], most) for row in blocks]
    if len(cells) > most:
        cells = [*cells[: most - 2], ["..."] * len(cells[0]), cells[-1]]
    width = max(len(cell) for row in cells for cell in row)
    width = max(width, 20 // len(cells[0]))
    top, between, bottom = (
        left + middle.join("─" * (width + 2) for _ in cells[0]) + right for left, middle, right in ("┌┬┐", "├┼┤", "└┴┘")
    )
    rows = ["│" + "│".join(f" {cell:^{width}} " for cell in row) + "│" for row in cells]
    picture = f"\n{between}\n".join(rows)
    return "\n".join("    " + line for line in (top, *picture.splitlines(), bottom))


def _elided(cells: list[str], most: int) -> list[str]:
    return cells if len(cells) <= most else [*cells[: most - 2], "...", cells[-1]]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) <= 4:
        return " ".join(f"r{rank}" for rank in ranks)
    return f"r{ranks[0]} to r{ranks[-1]}, {len(ranks)} in all"


def _shape(x: Any) -> str:
    return " x ".join(map(str, np.shape(x)))
