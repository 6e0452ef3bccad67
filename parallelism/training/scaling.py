"""A training run scaled down, so that it can be run here: the same strategy of a small model on few devices."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, lcm, prod

from parallelism.mesh import Mesh
from parallelism.models import Experts, TransformerSpec
from parallelism.pipelining.generators import SCHEDULES
from parallelism.training.sequence_split import HEADS_AXIS
from parallelism.training.training_run import TrainingRun
from parallelism.transforms import ContextParallel, Pipeline, Strategy
from parallelism.transforms.words import REPLICA

MOST_DEVICES = 16


def scaled_down(run: TrainingRun, devices: int = MOST_DEVICES) -> TrainingRun:
    """The run of a small Transformer under the same strategy, on at most so many devices.

    Axes of the mesh keep their order, and stay above one device if they were; the largest is halved until the devices
    are few enough.  The model keeps its kind (norms, positions, activation, dropout, groups of keys and values), but
    has one layer for each stage and widths that are small multiples of the tensor-parallel devices.  The schedule
    keeps its kind; there are twice as many microbatches as ranks of the pipeline, or fewer if there were.  Where some
    layers have experts, all have: few layers might have none.

    ``ValueError`` for a model that is no `TransformerSpec`, and for a mesh that has more than so many devices even with
    two along each axis.
    """
    spec = run.model
    if not isinstance(spec, TransformerSpec):
        raise ValueError("only a TransformerSpec can be scaled down; the sizes of a program are its own")
    mesh = _folded(run.mesh, devices)
    pipeline = run.pipeline
    tp, cp, pp, dp = (mesh.shape.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
    cp *= mesh.shape.get(HEADS_AXIS, 1)
    dp *= mesh.shape.get(REPLICA, 1)
    dealt = prod(
        mesh.shape[each.axis]
        for each in run.strategy.transforms
        if isinstance(each, ContextParallel) and each.exchange == "a2a"
    )
    chunks = pipeline.chunks if pipeline else 1
    layers = pp * min(chunks, 2)
    groups = (tp if spec.groups < spec.heads else 2 * tp) * dealt
    copies = min(spec.key_value_copies, 2)  # as many as divide the devices, which are two at least
    feed_forward = 12 * tp * dp
    small = replace(
        spec,
        experts=spec.experts and _small(spec.experts, feed_forward),
        layers=layers,
        heads=2 * tp * dealt,
        key_value_heads=groups // copies,
        key_value_copies=copies,
        width=8 * lcm(tp * dealt, dp),
        feed_forward=feed_forward,
        vocabulary=8 * tp * dp,
        sequence=4 * tp * cp,
        documents=spec.documents and 2 * tp * cp,  # two of them
        document_variation=0.0,
    )
    transforms = [each for each in run.strategy.transforms if not isinstance(each, Pipeline)]
    count = 1
    if pipeline:
        chunks = min(chunks, 2)
        count = min(pipeline.microbatches, 2 * pp)
        if SCHEDULES[pipeline.schedule].is_interleaved:
            count = ceil(count / pp) * pp
        begin = (
            tuple(f"block.{i * (layers // (pp * chunks))}" for i in range(1, pp * chunks))
            if pipeline.begin
            else ()
        )
        transforms.append(replace(pipeline, microbatches=count, chunks=chunks, begin=begin))
    return TrainingRun(
        small, 2 * dp * count, Strategy(*transforms), mesh, run.optimizer, run.clip, run.loss_scale
    )


def _small(experts: Experts, width: int) -> Experts:
    """As many experts, in every layer, of this width, also where the token takes them all."""
    return replace(
        experts,
        width=experts.width and width,
        shared_width=experts.shared_width and width,
        dense_layers=0,
        every=1,
        layers=None,
    )


def _folded(mesh: Mesh, devices: int) -> Mesh:
    """The mesh with fewer devices along its axes, as even as can be."""
    shape = dict(mesh.shape)
    while prod(shape.values()) > devices:
        axis = max(shape, key=shape.__getitem__)
        if shape[axis] <= 2:
            raise ValueError(f"{mesh!r} cannot be scaled down to {devices} devices: it has {len(shape)} axes")
        shape[axis] = max(2, shape[axis] // 2)
    return Mesh(**shape)
