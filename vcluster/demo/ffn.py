"""The ffn demo: the feed-forward block of a Transformer, forward and backward, compared with one process."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallelism.kernels import ACTIVATIONS, dense
from parallelism.mesh import Mesh
from tensor_parallelism.feed_forward import NAMES, FeedForward, FeedForwardSharding
from vcluster.cli.command_line import WrongWords, hardware_of, mesh_of
from vcluster.code import Sharded
from vcluster.demo.screen import Screen
from vcluster.demo.traffic import (
    extents_of,
    forward_backward,
    planned_bytes,
    run_here,
    show_devices,
    show_elsewhere,
    show_layouts,
    show_plan,
    verdict_of_bytes,
    verdict_of_values,
    whole_outputs,
)
from vcluster.mpi import device_of


@dataclass(frozen=True)
class Policy:
    """A policy over the last axis X of the mesh, where earlier axes split the batch, or over two axes X and Y."""

    summary: str
    least_axes: int
    sharding: Callable[[Mesh], FeedForwardSharding]


POLICIES = {
    "unsharded": Policy("nothing is sharded", 1, lambda mesh: FeedForwardSharding.unsharded()),
    "megatron": Policy(
        "columns of W1, rows of W2: y is summed",
        1,
        lambda mesh: FeedForwardSharding.megatron(mesh.axes[-1], mesh.axes[:-1]),
    ),
    "sequence": Policy(
        "like megatron, and x and y are split along the sequence",
        1,
        lambda mesh: FeedForwardSharding.sequence(mesh.axes[-1], mesh.axes[:-1]),
    ),
    "gspmd_2d": Policy(
        "batch and model of x over two axes, the weights over both",
        2,
        lambda mesh: FeedForwardSharding.gspmd_2d(mesh.axes[0], mesh.axes[1:]),
    ),
}


def prepare(arguments: argparse.Namespace) -> tuple[Mesh, FeedForward, tuple[int, ...]]:
    """The checked arguments. Raises `WrongWords`. Starts nothing."""
    policy = POLICIES[arguments.policy]
    mesh = mesh_of(arguments, Mesh(tp=4) if policy.least_axes == 1 else Mesh(x=2, y=2), any_axes=True)
    if len(mesh.axes) < policy.least_axes:
        raise WrongWords(
            f"policy {arguments.policy} needs two axes, as in --mesh x=2,y=2; the mesh is {mesh!r}"
        )
    operation = FeedForward(policy.sharding(mesh), activation=arguments.activation)
    return mesh, operation, extents_of(arguments, "BATCH,SEQUENCE,MODEL,HIDDEN")


def run_demo(arguments: argparse.Namespace, screen: Screen) -> None:
    """Run the demo. A verdict is bad if values or bytes differ from what is expected."""
    mesh, operation, (batch, sequence, model, hidden) = prepare(arguments)
    hardware = hardware_of(arguments.hardware, mesh.size)
    sharding = operation.sharding
    device = device_of(arguments.backend)
    screen.line(f"feed-forward under {arguments.policy} on {mesh!r}, each device a {device}", "bold")
    screen.line(
        f"  y = {arguments.activation}(x W1 + b1) W2 + b2, x[{batch}, {sequence}, {model}], {hidden} hidden"
    )
    screen.line(f"  {POLICIES[arguments.policy].summary}")
    shapes = (batch, sequence, model), (model, hidden), (hidden,), (hidden, model), (model,)
    rng = np.random.default_rng(0)
    *values, grad = (rng.standard_normal(shape) for shape in (*shapes, shapes[0]))
    layouts = [getattr(sharding, name) for name in ("out", *NAMES)]

    screen.heading("Layouts")
    show_layouts(
        screen,
        (
            ("x[b, s, m]", shapes[0], sharding.x),
            ("W1[m, f]", shapes[1], sharding.w1),
            ("W2[f, m]", shapes[3], sharding.w2),
        ),
        mesh,
    )
    run = run_here(arguments, mesh, forward_backward, operation, *map(Sharded, (grad, *values), layouts))

    screen.heading("Plan and traffic")
    plan = operation.plan((shapes[0], shapes[1], shapes[3]), mesh)
    show_plan(screen, plan)
    show_devices(screen, run.trace, ("x", "W1", "W2"), [(x, w1, w2) for _, x, w1, _, w2, _ in run.outputs])

    screen.heading("Verdict")
    verdict_of_values(
        screen, whole_outputs(run, layouts, mesh), in_one_process(values, grad, arguments.activation)
    )
    verdict_of_bytes(screen, run.trace, planned_bytes(plan))
    show_elsewhere(screen, run.trace, mesh, hardware)


def in_one_process(values: list[Any], grad: Any, activation: str) -> list[Any]:
    """y and the gradients of x, W1, b1, W2 and b2."""
    (x, w1, b1, w2, b2), act = values, ACTIVATIONS[activation]
    rows = x.reshape(-1, x.shape[-1])
    grads = grad.reshape(-1, grad.shape[-1])
    before = dense(rows, w1, b1)
    back = act.backward(before, grads @ w2.T)
    y = dense(act.forward(before), w2, b2).reshape(grad.shape)
    return [
        y,
        (back @ w1.T).reshape(x.shape),
        rows.T @ back,
        back.sum(axis=0),
        act.forward(before).T @ grads,
        grads.sum(axis=0),
    ]
