"""The moe demo: a mixture of experts, forward and backward: the experts of each token, dropped choices, and traffic."""

import argparse
from math import prod
from typing import Any

import numpy as np

from parallelism.display import WIDTH
from parallelism.kernels import (
    ACTIVATIONS,
    balance_loss,
    choose_experts,
    choose_experts_backward,
    count_choices,
    dense,
    expert_capacity,
    places_before,
)
from parallelism.mesh import Mesh
from parallelism.operation import Device
from parallelism.sharding import TensorSharding
from parallelism.trace import Trace
from tensor_parallelism.experts import (
    MixtureOfExperts,
    MixtureOfExpertsSharding,
    kept_by_expert,
    rows_received,
)
from vcluster.cli.command_line import WrongWords, hardware_of, mesh_of
from vcluster.code import Sharded
from vcluster.demo.screen import Screen, fold
from vcluster.demo.traffic import (
    extents_of,
    planned_bytes,
    run_here,
    show_elsewhere,
    show_layouts,
    verdict_of_bytes,
    verdict_of_values,
    whole_outputs,
)
from vcluster.mpi import device_of

MOST_TOKENS, MOST_EXPERTS = 4096, 64
MOST_NAMED = 48
"""Maximal number of an expert's tokens that are listed."""
ALPHA = 0.01
"""The factor of the load-balance loss, as in Switch Transformer."""


def prepare(arguments: argparse.Namespace) -> tuple[Mesh, MixtureOfExperts, tuple[int, ...]]:
    """The checked arguments. Raises `WrongWords`. Starts nothing."""
    mesh, experts = mesh_of(arguments, Mesh(ep=4)), arguments.experts
    shape = extents_of(arguments, "BATCH,SEQUENCE,MODEL,HIDDEN")
    if prod(shape[:2]) > MOST_TOKENS:
        raise WrongWords(f"--shape: a demo takes up to {MOST_TOKENS:,} tokens, got {prod(shape[:2]):,}")
    if experts > MOST_EXPERTS:
        raise WrongWords(f"--experts: a demo takes up to {MOST_EXPERTS} experts, got {experts}")
    if arguments.top_k > experts:
        raise WrongWords(f"--top-k {arguments.top_k}: there are {experts} experts")
    sharding = MixtureOfExpertsSharding.expert_parallel(
        tuple(axis for axis in mesh.axes if axis == "ep"), tuple(axis for axis in mesh.axes if axis != "ep")
    )
    return mesh, MixtureOfExperts(sharding, top_k=arguments.top_k, capacity_factor=arguments.capacity), shape


def train(device: Device, operation: MixtureOfExperts, grad: Any, *shards: Any) -> tuple[Any, ...]:
    """The kernel: forward, then backward. It also returns the choices of the router for this device's tokens."""
    out, saved = operation.forward(device, *shards)
    grads = operation.backward(device, saved, grad, ALPHA)
    chosen, kept = saved.choice.experts, saved.dispatch.kept
    rows = kept_by_expert(saved.dispatch, chosen, saved.plan.shapes[1][1])
    shape = *out.shape[:-1], operation.top_k
    return out, *grads, chosen.reshape(shape), kept.reshape(shape), rows, saved.balance_loss


def run_demo(arguments: argparse.Namespace, screen: Screen) -> None:
    """Run the demo. A verdict is bad if values or bytes differ from what is expected."""
    mesh, operation, (batch, sequence, model, hidden) = prepare(arguments)
    hardware = hardware_of(arguments.hardware, mesh.size)
    experts, k, sharding = arguments.experts, operation.top_k, operation.sharding
    tokens = batch * sequence
    room = expert_capacity(tokens, experts, k, operation.capacity_factor)
    screen.line(
        f"a mixture of {experts} experts on {mesh!r}, each device a {device_of(arguments.backend)}", "bold"
    )
    screen.line(
        f"  x[{batch}, {sequence}, {model}], so {tokens} tokens with {k} experts each; {hidden} hidden"
    )
    shapes = (
        (batch, sequence, model),
        (model, experts),
        (experts, model, hidden),
        (experts, hidden),
        (experts, hidden, model),
        (experts, model),
    )
    rng = np.random.default_rng(0)
    *values, grad = (rng.standard_normal(shape) for shape in (*shapes, shapes[0]))
    layouts = [getattr(sharding, name) for name in ("out", *operation.NAMES)]

    screen.heading("Layouts")
    show_layouts(
        screen, [("x[b, s, m]", shapes[0], sharding.x), ("W1[e, m, f]", shapes[2], sharding.w1)], mesh
    )

    run = run_here(arguments, mesh, train, operation, *map(Sharded, (grad, *values), layouts))
    choices = TensorSharding(*sharding.x.dims[:-1], None)

    def of_tokens(place: int) -> Any:
        """The whole array of an output, a row for each token."""
        return choices.unshard([out[place] for out in run], mesh).reshape(tokens, k)

    chosen, kept = of_tokens(-4), of_tokens(-3)
    screen.heading("Tokens by expert")
    screen.line(
        f"  an expert takes at most {room} of the {tokens * k} choices; dropped tokens are in brackets"
    )
    _show_experts(screen, chosen, kept, experts, sharding, mesh)

    screen.heading("Traffic of the all_to_alls")
    received = _show_rows(screen, run.trace, np.array([out[-2] for out in run]), operation, mesh, 8 * model)

    screen.heading("Verdict")
    results = [*whole_outputs(run, layouts, mesh), np.array(run[0][-1])]
    verdict_of_values(screen, results, in_one_process(values, grad, k, room))
    dropped = int((~kept).sum())
    alike = dropped == sum(
        max(0, n - room) for n in np.bincount(chosen.reshape(-1), minlength=experts).tolist()
    )
    screen.verdict(
        alike, f"{dropped} of {tokens * k} choices dropped; load-balance loss {run[0][-1]:.4f}, 1 if even"
    )
    others = planned_bytes(operation.plan(shapes, mesh))
    verdict_of_bytes(
        screen,
        run.trace,
        received + others,
        f"rows times {model} x 8 bytes in the all_to_alls, {received:,}; {others:,} for counts of choices, "
        f"probabilities and sums of gradients, as in operation.plan",
    )
    show_elsewhere(screen, run.trace, mesh, hardware)


def _show_experts(
    screen: Screen, chosen: Any, kept: Any, total: int, sharding: MixtureOfExpertsSharding, mesh: Mesh
) -> None:
    """Write one line for each expert: its devices, the number of tokens it takes and drops, and the tokens in order."""
    experts = TensorSharding(sharding.experts)
    screen.line("  expert  on       takes  drops  tokens: first choices, then second ones, ...", "dim")
    for expert in range(total):
        holders = []
        for rank in range(mesh.size):
            (own,) = experts.slices((total,), mesh, rank)
            if expert in range(*own.indices(total)):
                holders.append(rank)
        places = np.argwhere((chosen == expert).T)[:, ::-1].tolist()  # first choices come first
        taken = sum(bool(kept[token, rank]) for token, rank in places)
        names = []
        for token, rank in places:
            names.append(f"{token}" if kept[token, rank] else f"({token})")
        if len(names) > MOST_NAMED:
            names = [*names[:MOST_NAMED], f"... {len(names) - MOST_NAMED} more"]
        on = " ".join(f"r{rank}" for rank in holders[:2]) + (" .." if len(holders) > 2 else "")
        head = f"  {expert:>6}  {on:<7}  {taken:>5}  {len(places) - taken:>5}  "
        screen.line((head + fold(names, " " * len(head), " ", WIDTH).lstrip()).rstrip())


def _show_rows(
    screen: Screen, trace: Trace, rows: Any, operation: MixtureOfExperts, mesh: Mesh, row_bytes: int
) -> int:
    """Write one line for each device: rows to its experts and back, and the bytes of its all_to_alls."""
    to_experts, back = rows_received(rows, TensorSharding(operation.sharding.experts), mesh)
    moved = trace.filter(name="all_to_all")
    screen.table(
        ("device", "rows to its experts", "rows back", "bytes received", "2 (to + back) row"),
        [
            (
                f"r{rank}",
                to_experts[rank],
                back[rank],
                f"{moved.bytes_received(rank=rank):,}",
                f"{2 * (to_experts[rank] + back[rank]) * row_bytes:,}",
            )
            for rank in range(mesh.size)
        ],
    )
    screen.line(f"  from other devices; a row is {row_bytes} bytes; the backward moves as many again")
    return 2 * (sum(to_experts) + sum(back)) * row_bytes


def in_one_process(values: list[Any], grad: Any, k: int, room: int) -> list[Any]:
    """y, the gradients of x, router, W1, b1, W2 and b2, and the load-balance loss."""
    x, router, w1, b1, w2, b2 = values
    rows = x.reshape(-1, x.shape[-1])
    grads = grad.reshape(-1, grad.shape[-1])
    act = ACTIVATIONS["gelu"]
    choice = choose_experts(rows @ router, k)
    counts, preceding = count_choices(choice.experts, 1, len(w1))
    place = places_before(counts)[0][np.arange(k), choice.experts] + preceding
    balance, slope = balance_loss(counts[0, 0], choice.probabilities.sum(axis=0), len(rows))
    out = np.zeros_like(rows)
    rows_grad = np.zeros_like(rows)
    gates_grad = np.zeros_like(choice.gates)
    w1_grad, b1_grad, w2_grad, b2_grad = (np.zeros_like(w) for w in (w1, b1, w2, b2))
    for e in range(len(w1)):
        token, rank = np.nonzero((choice.experts == e) & (place < room))
        gate, mine = choice.gates[token, rank, None], rows[token]
        z = dense(mine, w1[e], b1[e])
        expert_out = dense(act.forward(z), w2[e], b2[e])
        out[token] += gate * expert_out
        gates_grad[token, rank] = (expert_out * grads[token]).sum(axis=1)
        back = gate * grads[token]
        z_grad = act.backward(z, back @ w2[e].T)
        rows_grad[token] += z_grad @ w1[e].T
        w1_grad[e], b1_grad[e] = mine.T @ z_grad, z_grad.sum(axis=0)
        w2_grad[e], b2_grad[e] = act.forward(z).T @ back, back.sum(axis=0)
    logits_grad = choose_experts_backward(choice, gates_grad, ALPHA * slope)
    rows_grad += logits_grad @ router.T
    return [
        out.reshape(x.shape),
        rows_grad.reshape(x.shape),
        rows.T @ logits_grad,
        w1_grad,
        b1_grad,
        w2_grad,
        b2_grad,
        np.array(balance),
    ]
