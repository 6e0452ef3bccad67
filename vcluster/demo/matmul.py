"""The matmul demo: `tensor_parallelism.MatMul` under a named policy, with its traffic compared to the closed form."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding
from tensor_parallelism.products import MatMulSharding, MatMulShardingPolicy, matmul
from vcluster.cli.command_line import WrongWords, hardware_of, mesh_of
from vcluster.demo.screen import Screen
from vcluster.demo.traffic import (
    extents_of,
    run_here,
    show_devices,
    show_elsewhere,
    show_layouts,
    show_plan,
    verdict_of_bytes,
)
from vcluster.mpi import device_of

Extents = tuple[int, int, int]
"""m, k and n of C[m, n] = A[m, k] B[k, n]."""
Axes = tuple[str, ...]
ITEM_BYTES = 8


@dataclass(frozen=True)
class Policy:
    """The layouts over axes X and Y, and the bytes that they need to move."""

    summary: str
    axes: int
    """The number of axes it needs. A policy of one axis takes all axes of the mesh together."""
    layouts: Callable[[Axes, Axes], tuple[tuple[Axes, Axes], tuple[Axes, Axes], tuple[Axes, Axes]]]
    """The axes of the dims of A, B and C."""
    formula: str | None
    elements: Callable[[int, int, Extents], int] | None
    """Elements received by all devices together, for X and Y devices. If both are None, the plan gives the bytes."""


NONE: Axes = ()
POLICIES = {
    "unsharded": Policy(
        "nothing is sharded: every device computes the whole product",
        1,
        lambda x, y: ((NONE, NONE), (NONE, NONE), (NONE, NONE)),
        "0",
        lambda x, y, e: 0,
    ),
    "matched_inner": Policy(
        "k of A and k of B lie over X; the partial products are summed",
        1,
        lambda x, y: ((NONE, x), (x, NONE), (NONE, NONE)),
        "2 (X-1) |C|: all_reduce of C over X",
        lambda x, y, e: 2 * (x - 1) * e[0] * e[2],
    ),
    "unmatched_inner": Policy(
        "k of A lies over X, k of B over Y; both are gathered",
        2,
        lambda x, y: ((NONE, x), (y, NONE), (NONE, NONE)),
        "Y (X-1) |A| + X (Y-1) |B|: all_gathers of A over X, of B over Y",
        lambda x, y, e: y * (x - 1) * e[0] * e[1] + x * (y - 1) * e[1] * e[2],
    ),
    "outer": Policy(
        "m of A lies over X, k of A over Y, k of B over X; both are gathered",
        2,
        lambda x, y: ((x, y), (x, NONE), (x, NONE)),
        "(Y-1) |A| + Y (X-1) |B|: all_gathers of A over Y, of B over X",
        lambda x, y, e: (y - 1) * e[0] * e[1] + y * (x - 1) * e[1] * e[2],
    ),
    "full": Policy(
        "rows of A and of B lie over X, columns over Y; k is gathered",
        2,
        lambda x, y: ((x, y), (x, y), (x, y)),
        "(Y-1) |A| + (X-1) |B|: all_gathers of A over Y, of B over X",
        lambda x, y, e: (y - 1) * e[0] * e[1] + (x - 1) * e[1] * e[2],
    ),
    "general": Policy(
        "m of A, n of B and of C lie over X: the cheapest plan is chosen",
        1,
        lambda x, y: ((x, NONE), (NONE, x), (NONE, x)),
        None,
        None,
    ),
}


def prepare(arguments: argparse.Namespace) -> tuple[Mesh, matmul.MatMul, Extents]:
    """The checked arguments. Raises `WrongWords`. Starts nothing."""
    name, policy = arguments.policy, POLICIES[arguments.policy]
    mesh = mesh_of(arguments, Mesh(tp=4) if policy.axes == 1 else Mesh(dp=2, tp=2), any_axes=True)
    if policy.axes == 2 and len(mesh.axes) != 2:
        raise WrongWords(f"policy {name} needs two axes, as in --dp 2 --tp 2; the mesh is {mesh!r}")
    m, k, n = extents_of(arguments, "M,K,N")
    sharding = MatMulSharding(*(TensorSharding(*dims) for dims in policy.layouts(*_axes(mesh, policy))))
    return mesh, matmul.MatMul(sharding, policy=MatMulShardingPolicy(name)), (m, k, n)


def _axes(mesh: Mesh, policy: Policy) -> tuple[Axes, Axes]:
    """The axes X and Y."""
    return (mesh.axes, NONE) if policy.axes == 1 else (mesh.axes[:1], mesh.axes[1:])


def run_demo(arguments: argparse.Namespace, screen: Screen) -> None:
    """Run the demo. A verdict is bad if values or bytes differ from what is expected."""
    mesh, operation, extents = prepare(arguments)
    hardware = hardware_of(arguments.hardware, mesh.size)
    name, (m, k, n) = arguments.policy, extents
    policy, sharding = POLICIES[name], operation.sharding
    screen.line(f"matmul under {name} on {mesh!r}, each device a {device_of(arguments.backend)}", "bold")
    screen.line(f"  C[{m}, {n}] = A[{m}, {k}] B[{k}, {n}], float64")
    axes = [", ".join(names) for names in _axes(mesh, policy)]
    screen.line(f"  {policy.summary}")
    if name != "unsharded":
        screen.line(f"  X is {axes[0]}{f', Y is {axes[1]}' if axes[1] else ''}")

    screen.heading("Layouts")
    show_layouts(
        screen,
        (
            ("A[m, k]", (m, k), sharding.lhs),
            ("B[k, n]", (k, n), sharding.rhs),
            ("C[m, n]", (m, n), sharding.out),
        ),
        mesh,
    )

    rng = np.random.default_rng(0)
    a, b = (
        rng.integers(-4, 5, shape).astype(np.float64) for shape in ((m, k), (k, n))
    )  # small, so sums are exact
    run = run_here(arguments, mesh, operation, a, b)

    screen.heading("Plan and traffic")
    plan = operation.plan((a.shape, b.shape), mesh)
    show_plan(screen, plan)
    show_devices(
        screen,
        run.trace,
        ("A", "B", "C"),
        zip(sharding.lhs.shard(a, mesh), sharding.rhs.shard(b, mesh), run.outputs, strict=True),
    )

    screen.heading("Verdict")
    equal = all(map(np.array_equal, run.outputs, sharding.out.shard(a @ b, mesh)))
    screen.verdict(
        equal, "C equals NumPy's product on every device" if equal else "C differs from NumPy's product"
    )
    if policy.elements is None:
        predicted = sum(plan.bytes_received)
    else:
        x, y = (prod(map(mesh.shape.__getitem__, names)) for names in _axes(mesh, policy))
        predicted = ITEM_BYTES * policy.elements(x, y, extents)
    verdict_of_bytes(screen, run.trace, predicted, policy.formula)
    show_elsewhere(screen, run.trace, mesh, hardware)
