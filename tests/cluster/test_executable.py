"""Programs run on devices, and simulated: interpreted, executed and simulated they agree, to the byte and to the bit."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest

from parallelism import TensorSharding, ir
from parallelism.executable import Executable
from parallelism.ir import models
from parallelism.layouts import annotate, localize, propagate
from parallelism.mesh import Mesh
from parallelism.recorder import record
from parallelism.simulator import equal_devices, simulate
from parallelism.trace import UndeclaredComputeWarning
from tests.unit.local_programs import feed_forward, integers
from vcluster import VirtualCluster

HARDWARE = {"hardware": "dgx-h100", "compute": "modelled", "priced_dtype": "bfloat16"}
SEEN = ("compute", "collective", "memory", "send", "recv", "wait")


def told(trace, rank=None):
    """All that must be the same, whoever tells it."""
    return [
        (e.rank, e.kind, e.name, e.start_seconds, e.duration_seconds, e.bytes_sent, e.bytes_received, e.messages,
         e.flops, e.nbytes, e.axes, e.group, e.peer, e.algorithm, e.stage, e.microbatch, e.phase, e.tag, e.sequence,
         e.sources, e.dtype, e.seconds, e.serial)
        for e in trace if e.kind in SEEN and e.parent is None and (rank is None or e.rank == rank)
    ]


def numbered(events):
    """The same without what goes to and from the host, numbered anew."""
    counts = {}
    out = []
    for event in events:
        counts[event[0]] = counts.get(event[0], -1) + 1
        out.append((*event[:-1], counts[event[0]]))
    return out


def executed(executable, inputs, backend="thread"):
    with VirtualCluster(executable.mesh, backend=backend, **HARDWARE) as cluster:
        run = cluster.run(executable, inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UndeclaredComputeWarning)
            return run.result, run.trace


def agree(executable, inputs, backend="thread"):
    """Interpreted, executed and simulated; the outputs of the first two."""
    wanted = ir.interpret(executable.programs.function, inputs).outputs
    found, trace = executed(executable, inputs, backend)
    simulated = simulate(executable, "dgx-h100", priced_dtype="bfloat16")
    assert told(simulated) == numbered(told(trace))
    for rank in range(executable.mesh.size):
        assert simulated.peak_bytes(rank) == trace.peak_bytes(rank)
    assert simulated.makespan_seconds == trace.makespan_seconds
    return wanted, found


@pytest.mark.parametrize("shape", [(6, 4, 8), (5, 3, 7), (1, 1, 1), (3, 0, 2)], ids=str)
def test_a_program_written_by_hand_runs_as_the_whole_and_as_simulated(shape):
    hand = feed_forward(*shape, Mesh(dp=2, tp=2))
    wanted, found = agree(Executable(hand), integers(hand.function))
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_on_processes_and_under_the_recorder_it_is_the_same():
    mesh = Mesh(dp=2, tp=3)
    hand = feed_forward(5, 4, 7, mesh)
    executable, inputs = Executable(hand, categories={"up": "weights", "down": "weights"}), integers(hand.function)
    wanted, found = agree(executable, inputs, "process")
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(one, other)
    recorded = record(executable, mesh, inputs).trace.on("dgx-h100", priced_dtype="bfloat16")
    simulated = simulate(executable, "dgx-h100", priced_dtype="bfloat16")
    assert told(recorded) == told(simulated)
    assert simulated.peak_bytes(0, "weights") == (4 * 3 + 3 * 4) * 8
    np.testing.assert_array_equal(recorded.communication_matrix(), simulated.communication_matrix())


def mlp(rows=6):
    return models.mlp((5, 8, 6, 3), rows)


def gpt():
    return models.gpt(vocabulary=12, width=8, heads=4, layers=2, sequence=4, batch=4)


def with_gradient(loss):
    floats = [v.name for v in loss.inputs if v.name.startswith("p.")]
    return ir.gradient(loss, floats or [loss.inputs[0].name], keep_outputs=True)


def inputs_of(function, seed=0):
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=v.type.shape) if v.type.dtype.kind == "f" else rng.integers(0, 12, v.type.shape)
        for v in function.inputs
    ]


S = TensorSharding
MLP_DP = {"x": S("dp", None), "targets": S("dp", None)}
MLP_TP = {"p.w0": S(None, "tp"), "p.b0": S("tp"), "p.w1": S("tp", None)}
MLP_ZERO = {f"p.w{i}": S("dp", None) for i in range(3)}
GPT_DP = {"tokens": S("dp", None), "targets": S("dp", None)}
GPT_TP = {f"p.{i}.{name}": layout for i in range(2) for name, layout in {
    "qkv": S(None, "tp"), "out": S("tp", None), "up": S(None, "tp"), "down": S("tp", None)}.items()}
GPT_VOCABULARY = {"p.tokens": S("tp", None)}
GPT_SEQUENCE = {"tokens": S(None, "sp"), "targets": S(None, "sp"), "p.positions": S("sp", None)}

LAYOUTS = [
    ("mlp", Mesh(dp=1), MLP_DP), ("mlp", Mesh(dp=2), MLP_DP), ("mlp", Mesh(dp=4), MLP_DP), ("mlp", Mesh(dp=7), MLP_DP),
    ("mlp", Mesh(tp=2), MLP_TP), ("mlp", Mesh(tp=3), MLP_TP), ("mlp", Mesh(dp=2, tp=2), MLP_DP | MLP_TP),
    ("mlp", Mesh(dp=2), MLP_DP | MLP_ZERO), ("mlp", Mesh(dp=3), MLP_DP | MLP_ZERO),
    ("mlp", Mesh(dp=4, tp=2), MLP_DP | MLP_TP), ("mlp", Mesh(dp=2, tp=4), MLP_DP | MLP_TP),
    ("gpt", Mesh(dp=2), GPT_DP), ("gpt", Mesh(tp=2), GPT_TP), ("gpt", Mesh(dp=2, tp=2), GPT_DP | GPT_TP),
    ("gpt", Mesh(tp=2), GPT_TP | GPT_VOCABULARY), ("gpt", Mesh(sp=2), GPT_SEQUENCE), ("gpt", Mesh(sp=3), GPT_SEQUENCE),
    ("gpt", Mesh(dp=2, tp=4), GPT_DP | GPT_TP | GPT_VOCABULARY),
]
FEW = os.environ.get("VCLUSTER_LAYOUTS") != "all"


@pytest.mark.parametrize(("model", "mesh", "layouts"), LAYOUTS, ids=lambda x: str(x) if not isinstance(x, dict) else "")
def test_models_under_layouts_run_as_interpreted_and_as_simulated(model, mesh, layouts):
    function = with_gradient({"mlp": mlp, "gpt": gpt}[model]())
    localized = localize(propagate(annotate(function, layouts), mesh), mesh)
    wanted, found = agree(Executable(localized), inputs_of(function))
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("model", "mesh", "layouts"), LAYOUTS[::3], ids=lambda x: str(x) if not isinstance(x, dict) else "")
def test_one_of_equal_devices_tells_what_all_of_them_would(model, mesh, layouts):
    function = with_gradient({"mlp": mlp, "gpt": gpt}[model]())
    executable = Executable(localize(propagate(annotate(function, layouts), mesh), mesh))
    whole, folded = simulate(executable, "dgx-h100", priced_dtype="bfloat16"), simulate(
        executable, "dgx-h100", priced_dtype="bfloat16", fold=True)
    lanes = equal_devices(executable, "dgx-h100")
    assert folded.ranks == tuple(lanes.first.tolist()) and sum(lanes.sizes) == mesh.size
    assert told(folded) == [event for rank in folded.ranks for event in told(whole, rank)]
    for rank in range(mesh.size):
        assert [event[1:10] for event in told(whole, rank)] == [
            event[1:10] for event in told(folded, lanes.first[lanes.lane_of[rank]])]
