"""The attention demo: the keys of each device at each step, and the policies compared by bytes and memory."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from parallelism.kernels import Mask, attend, attend_backward, gather_heads, row_products, spread_heads
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.recorder import record
from parallelism.trace import Trace
from tensor_parallelism.attention import (
    NAMES,
    Attention,
    AttentionPlan,
    AttentionSharding,
    AttentionShardingPolicy,
    Runs,
)
from tensor_parallelism.attention.shares import tiles
from vcluster.cli.command_line import WrongWords, hardware_of, mesh_of
from vcluster.code import Sharded
from vcluster.demo.screen import Screen, fold
from vcluster.demo.traffic import (
    extents_of,
    forward_backward,
    planned_bytes,
    run_here,
    show_elsewhere,
    show_plan,
    verdict_of_bytes,
    verdict_of_values,
    whole_outputs,
)
from vcluster.mpi import device_of

MOST_SCORES = 1 << 22
MOST_DRAWN = 8
LETTERS = "ABCDEFGH"


@dataclass(frozen=True)
class Policy:
    """A named policy: the axes that it needs besides dp, which splits the batch, and its layouts."""

    summary: str
    axes: tuple[str, ...]
    sharding: Callable[[tuple[str, ...]], AttentionSharding]


POLICIES = {
    "unsharded": Policy("only the batch is split", (), AttentionSharding.unsharded),
    "megatron": Policy(
        "heads over tp; the result is summed", ("tp",), lambda dp: AttentionSharding.megatron("tp", dp)
    ),
    "sequence": Policy(
        "like megatron, and x and y are split along the sequence",
        ("tp",),
        lambda dp: AttentionSharding.sequence("tp", dp),
    ),
    "ring": Policy(
        "rows over cp; keys and values travel round a ring",
        ("cp",),
        lambda dp: AttentionSharding.ring("cp", dp),
    ),
    "ulysses": Policy(
        "rows over cp, exchanged for heads and back", ("cp",), lambda dp: AttentionSharding.ring("cp", dp)
    ),
    "megatron_ring": Policy(
        "a ring over cp of heads over tp",
        ("cp", "tp"),
        lambda dp: AttentionSharding.megatron_ring("tp", "cp", dp),
    ),
}
RINGS = ("ring", "megatron_ring")
Shapes = tuple[tuple[int, ...], ...]


def prepare(arguments: argparse.Namespace) -> tuple[Mesh, Attention, Shapes]:
    """The checked arguments. Raises `WrongWords`. Starts nothing."""
    name, policy = arguments.policy, POLICIES[arguments.policy]
    usual = {axis: 4 // len(policy.axes) for axis in policy.axes} or {"dp": 2}
    mesh = mesh_of(arguments, Mesh(**usual))
    if {*mesh.axes} - {"dp"} != {*policy.axes}:
        flags = " ".join(f"--{axis} {size}" for axis, size in usual.items())
        raise WrongWords(
            f"policy {name} needs {' and '.join(policy.axes) or 'no axis'} and dp, as in {flags}; the "
            f"mesh is {mesh!r}"
        )
    batch, sequence, heads, head_dim = extents_of(arguments, "BATCH,SEQUENCE,HEADS,HEAD_DIM", most=None)
    if batch * heads * sequence * sequence > MOST_SCORES or batch * sequence * heads * head_dim > MOST_SCORES:
        raise WrongWords(f"--shape: a demo takes up to {MOST_SCORES:,} scores, or elements of x")
    model = heads * head_dim
    keys = (model, arguments.kv_heads or heads, head_dim)
    shapes = (batch, sequence, model), (model, heads, head_dim), keys, keys, (heads, head_dim, model)
    try:
        operation = Attention(
            policy.sharding(tuple({"dp"}.intersection(mesh.axes))),
            AttentionShardingPolicy(name),
            causal=not arguments.full,
            zigzag=arguments.zigzag,
        )
        operation.plan(shapes, mesh)
    except ValueError as error:
        raise WrongWords(str(error).partition("; whole_keys")[0]) from None
    return mesh, operation, shapes


def run_demo(arguments: argparse.Namespace, screen: Screen) -> None:
    """Run the demo. A verdict is bad if values, bytes or memory differ from what is expected."""
    mesh, operation, shapes = prepare(arguments)
    hardware = hardware_of(arguments.hardware, mesh.size)
    plan, sharding = operation.plan(shapes, mesh), operation.sharding
    screen.line(
        f"attention under {arguments.policy} on {mesh!r}, each device a {device_of(arguments.backend)}",
        "bold",
    )
    screen.line(
        f"  x{list(shapes[0])}, {plan.shapes.heads} heads of {plan.shapes.head_dim}, "
        f"{plan.shapes.kv_heads} key-value heads{', causal' * operation.causal}{', zigzag' * operation.zigzag}"
    )
    screen.line(f"  {POLICIES[arguments.policy].summary}")
    screen.heading("Keys by device and step")
    _show_steps(screen, plan)

    rng = np.random.default_rng(0)
    *values, grad = (rng.standard_normal(shape) for shape in (*shapes, plan.shapes.out))
    order = np.array([place for runs in plan.runs for run in runs for place in run], np.intp)
    layouts = [getattr(sharding, name) for name in ("out", *NAMES)]
    run = run_here(
        arguments,
        mesh,
        forward_backward,
        operation,
        *map(Sharded, (grad[:, order], values[0][:, order], *values[1:]), layouts),
    )

    screen.heading("Plan")
    show_plan(screen, plan)
    screen.heading("All policies compared")
    _show_policies(screen, operation, shapes, mesh)

    screen.heading("Verdict")
    results = whole_outputs(run, layouts, mesh)
    results[:2] = [x[:, np.argsort(order)] for x in results[:2]]
    verdict_of_values(screen, results, in_one_process(values, grad, operation.mask))
    verdict_of_bytes(
        screen,
        run.trace,
        planned_bytes(plan),
        "as planned, above; AttentionShardingPolicy has it as a formula",
    )
    if screen.good and plan.policy.value in RINGS:
        _verdict_of_blocks(screen, plan, run.trace)
    show_elsewhere(screen, run.trace, mesh, hardware)


def in_one_process(values: list[Any], grad: Any, mask: Mask) -> list[Any]:
    """y and the gradients of x, Wq, Wk, Wv and Wo."""
    x, wq, wk, wv, wo = values
    q, k, v = (np.einsum("bsm,mhd->bshd", x, weights) for weights in (wq, wk, wv))
    rows = np.arange(x.shape[1])
    allowed = mask.allowed(rows, rows)
    heads, groups = wq.shape[1], wk.shape[1]
    serves = [head // (heads // groups) for head in range(heads)]
    k, v = spread_heads(k, serves), spread_heads(v, serves)
    out, lse = attend(q, k, v, allowed)
    of_out = np.einsum("bsm,hdm->bshd", grad, wo)
    of_q, *of_keys = attend_backward(q, k, v, lse, row_products(out, of_out), of_out, allowed)
    projected = [of_q, *(gather_heads(of_key, serves, groups) for of_key in of_keys)]
    of_x = sum(np.einsum("bshd,mhd->bsm", g, w) for g, w in zip(projected, (wq, wk, wv), strict=True))
    of_weights = [np.einsum("bsm,bshd->mhd", x, g) for g in projected]
    of_wo = np.einsum("bshd,bsm->hdm", out, grad)
    y = np.einsum("bshd,hdm->bsm", out, wo)
    return [y, of_x, *of_weights, of_wo]


def _show_steps(screen: Screen, plan: AttentionPlan) -> None:
    """Write one row for each device: its rows and heads, its keys at each step, and the number of its scores."""
    size, ulysses = len(plan.runs), plan.is_ulysses
    steps = 1 if ulysses else size
    whole = (range(plan.shapes.x[1]),)
    if max(size, plan.mesh.size) > MOST_DRAWN:
        screen.line(f"  {plan.mesh.size} devices, {steps} steps: only drawn for up to {MOST_DRAWN}")
        return
    table = []
    for rank in range(plan.mesh.size):
        place = plan.mesh.group(rank, plan.sharding.split.rows).index(rank)
        rows, heads = (whole, plan.exchanged[place]) if ulysses else (plan.runs[place], plan.heads[rank])
        cells, scores = [], 0
        for step in range(steps):
            at = (place - step) % size
            cell, computed = _seen(
                rows, whole if ulysses else plan.runs[at], "all" if steps == 1 else LETTERS[at], plan.mask
            )
            cells.append(cell)
            scores += computed
        spans = map(_spans, (rows, (heads.queries,), (heads.keys,)))
        table.append((f"r{rank}", *spans, *cells, f"{scores:,}"))
    screen.table(("device", "rows", "heads", "keys", "step 0", *map(str, range(1, steps)), "scores"), table)
    if steps > 1:
        screen.line("  keys and values of these rows; a small letter if some are masked, - if all:")
        screen.line(
            fold([f"{LETTERS[i]}: {_spans(runs)}" for i, runs in enumerate(plan.runs)], indent="    ")
        )
        screen.line("  in the backward pass they travel back with their gradients")
    screen.line("  keys: key-value heads; scores: number per head and sequence")


def _seen(rows: Runs, columns: Runs, name: str, mask: Mask) -> tuple[str, int]:
    """The name of some columns, in small letters if rows attend only to some, and the number of scores computed."""
    blocks = list(tiles(rows, columns, mask))
    scores = sum(
        (block.rows.stop - block.rows.start) * (block.columns.stop - block.columns.start) for block in blocks
    )
    whole = scores == sum(map(len, rows)) * sum(map(len, columns)) and not any(
        block.masked for block in blocks
    )
    if not blocks:
        return "-", 0
    return (name if whole else name.lower()), scores


def _spans(runs: Runs) -> str:
    return " ".join(f"{run.start}:{run.stop}" for run in runs if run) or "none"


def _show_policies(screen: Screen, operation: Attention, shapes: Shapes, mesh: Mesh) -> None:
    """Write forward and backward of each policy on the same number of devices, counted by the recorder."""
    replicas = {axis: size for axis, size in mesh.shape.items() if axis == "dp"}
    devices = mesh.size // prod(replicas.values())
    rows: list[tuple[str, ...]] = []
    for name, policy in POLICIES.items():
        if devices % 2 and len(policy.axes) == 2:
            continue
        sizes = (
            {"cp": devices // 2, "tp": 2} if len(policy.axes) == 2 else dict.fromkeys(policy.axes, devices)
        )
        on = Mesh(**replicas, **sizes) if replicas or sizes else Mesh(dp=1)
        for zigzag in (False, True) if operation.causal and name in RINGS else (False,):
            other = Attention(
                policy.sharding(tuple(replicas)),
                AttentionShardingPolicy(name),
                causal=operation.causal,
                zigzag=zigzag,
            )
            head = (
                "  zigzag" if zigzag else name,
                ",".join(f"{axis}={size}" for axis, size in sizes.items()),
            )
            try:
                plan = other.plan(shapes, on)
            except ValueError:
                rows.append((*head, *["-"] * 4, "heads do not fit"))
                continue
            trace = _recorded(other, shapes, on)
            numbers = (
                sum(plan.bytes_received),
                sum(plan.backward_bytes_received),
                max(trace.peaks().values()),
                max(trace.peaks("scores").values(), default=0),
            )
            rows.append((*head, *map(_short, numbers), f"{max(plan.flops) / max(1, min(plan.flops)):.1f}"))
    screen.table(("policy", "over", "forward", "backward", "peak", "scores", "work"), rows)
    screen.line("  bytes received by all devices; peak bytes of one device, and of its scores;")
    screen.line("  work: attention flops of the busiest device relative to the least busy one")


def _short(nbytes: int) -> str:
    return f"{nbytes:,}" if nbytes < 1e6 else f"{nbytes / 1e6:,.1f} M"


def _recorded(operation: Attention, shapes: Shapes, mesh: Mesh) -> Trace:
    def both(device: Device, *shards: Any) -> None:
        out, saved = operation.forward(device, *shards)
        operation.backward(device, saved, out)

    return record(both, mesh, inputs=operation.inputs(mesh, *map(np.zeros, shapes))).trace


def _verdict_of_blocks(screen: Screen, plan: AttentionPlan, trace: Trace) -> None:
    """Say whether a ring never held more than two blocks of keys and values."""
    longest = max(sum(map(len, runs)) for runs in plan.runs)
    largest = max(
        2
        * plan.dtype.itemsize
        * plan.sharding.x.local_shape(plan.shapes.x, plan.mesh, rank)[0]
        * longest
        * plan.sharding.wk.local_shape(plan.shapes.wk, plan.mesh, rank)[1]
        * plan.shapes.head_dim
        for rank in range(plan.mesh.size)
    )
    peak = max(trace.peaks("keys and values").values())
    screen.verdict(
        peak <= 2 * largest,
        f"at most {_short(peak)} bytes of keys and values held; two blocks are {_short(2 * largest)}",
    )
