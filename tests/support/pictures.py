"""One of each object that a cell of a notebook may end in, by name."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelism import Mesh, Pipeline, TensorSharding, explain, ir, models, plan_resharding
from parallelism.cost import Costs
from parallelism.hardware import Hardware
from parallelism.layouts import annotate
from parallelism.planning import find_plan
from parallelism.trace import Event, Trace
from parallelism.transforms import SGD, Adam, DataParallel, Strategy, TensorParallel, Zero, train_step
from tensor_parallelism import FeedForward, FeedForwardSharding, MatMul, MatMulSharding
from vcluster import VirtualCluster, report


def trace(slow: float = 1.0) -> Trace:
    """A pipeline of two stages with messages, waits, and a collective; one device is slower."""
    events = []
    for k in range(3):
        events += [
            Event(0, "compute", f"0F{k}", k * 1e-3, 1e-3, stage=0, microbatch=k, phase="F", flops=1e9),
            Event(0, "send", "send", (k + 1) * 1e-3, 0, peer=1, bytes_sent=4096, messages=1),
            Event(1, "recv", "recv", k * 2e-3 * slow, 1e-3, peer=0, bytes_received=4096),
            Event(1, "compute", f"1F{k}", 1e-3 + k * 2e-3 * slow, 1e-3 * slow, stage=1, microbatch=k, phase="F"),
        ]
    for rank in (0, 1):
        start = 6e-3 * slow + 1e-3 * rank
        events += [
            Event(rank, "compute", "0B0", start, 1.5e-3, stage=rank, microbatch=0, phase="B", flops=2e9),
            Event(rank, "collective", "all_reduce", start + 1.5e-3, 2.5e-3 - 1e-3 * rank, axes=("pp",), group=(0, 1),
                  bytes_sent=2048, bytes_received=2048, algorithm="ring"),
            Event(rank, "memory", "weights", 0, nbytes=1e6),
        ]
    return Trace(events, mesh_shape={"pp": 2}, hardware="dgx-a100")


def program() -> ir.Function:
    """A program with regions and layouts."""
    def block(x: Any, up: Any, down: Any) -> Any:
        return x + np.maximum(x @ up, 0) @ down

    types = [ir.TensorType("f32", shape) for shape in ((32, 16), (16, 64), (64, 16))]
    return annotate(ir.record(block, *types), {"x": "[dp, None]", "up": "[None, tp]", "down": "[tp, None]"})


def pictures(*, backend: str = "thread") -> dict[str, Any]:
    """The objects.  The cluster is closed when they are returned."""
    mesh, layout = Mesh(dp=2, tp=4), TensorSharding("dp", "tp")
    pipeline = Pipeline(4, 6, "1f1b")
    costs = {"F": 1, "B": 2.5, "message": 0.25}
    small = models.TransformerSpec(layers=4, width=32, heads=2, vocabulary=64, sequence=16)
    tiny = models.TransformerSpec(layers=1, width=8, heads=2, vocabulary=8, sequence=4)
    product = MatMul(MatMulSharding(TensorSharding(None, "x"), TensorSharding("x", None), TensorSharding(None, "y")))
    inputs = [np.arange(16) + rank for rank in range(8)]
    with VirtualCluster(Mesh(dp=2, tp=3), backend=backend, hardware="dgx-a100") as cluster:  # type: ignore[arg-type]
        run = cluster.run(lambda device: device.all_reduce(np.arange(4.0) * device.rank, "tp"))
        _ = run.trace
        found: dict[str, Any] = {"VirtualCluster": cluster, "Run": run}
        found["VirtualCluster"] = _Kept(cluster._repr_html_())
    return found | {
        "Trace": trace(), "Trace of a run": run.trace,
        "Trace of many devices": Trace([Event(rank, "compute", "work", 0, 1 + rank % 3) for rank in range(96)]),
        "Pipeline": pipeline, "Schedule in a V": Pipeline(8, 8, "zero_bubble_v").schedule,
        "Schedule of pairs": Pipeline(8, 8, "dual_pipe_v").schedule,
        "Schedule of chunks": Pipeline(16, 8, "interleaved_1f1b", chunks=4).schedule,
        "Schedule of many": Pipeline(32, 64, "1f1b").schedule,
        "ScheduleTimeline": pipeline.schedule.timeline(costs),
        "two schedules": Pipeline(4, 6, "gpipe").schedule.timeline(costs).beside(pipeline.schedule.timeline(costs)),
        "TensorSharding": TensorSharding("dp", ..., ("tp", "pp"), partial="cp"),
        "a drawn sharding": layout.draw((7, 30), mesh), "Mesh": mesh, "Mesh of three axes": Mesh(pp=2, dp=3, tp=12),
        "MatMul": product, "ProductPlan": product.plan(((12, 8), (8, 30)), Mesh(x=2, y=3)),
        "LayerPlan": FeedForward(FeedForwardSharding.megatron("tp")).plan(((2, 3, 6), (6, 8), (8, 6)), Mesh(tp=2)),
        "ReshardingPlan": plan_resharding(layout, TensorSharding(None, "dp"), (7, 30), np.float32, mesh),
        "Explanation": explain("all_reduce", algorithm="ring", inputs=inputs),
        "Explanation of blocks": explain("all_to_all", inputs=[np.arange(6.0) for _ in range(6)]),
        "Explanation of a barrier": explain("barrier", inputs=[None] * 3),
        "Comparison": report.compare(trace(), trace(1.5)),
        "CollectiveCost": Costs(Hardware.preset("dgx-a100")).collective("all_reduce", 2**26, range(8)),
        "Strategy": Strategy(DataParallel("dp"), TensorParallel("tp"), Zero(1, "dp")),
        "Plans": find_plan(tiny, hardware="dgx-a100", devices=2, batch=4, tp=1, pp=1, zero=[0, 1], recompute="none",
                           optimizer=SGD(0.1), simulations=1),
        "Function": program(), "Function of a model": train_step(small.function(2), Adam(1e-3)),
        "Hardware": Hardware.preset("dgx-h100:4"),
    }


class _Kept:
    """The picture of something that is closed."""

    def __init__(self, html: str) -> None:
        self._html = html

    def _repr_html_(self) -> str:
        return self._html
