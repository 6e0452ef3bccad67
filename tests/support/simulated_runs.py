"""Programs run on devices and simulated: what both traces must agree on."""

import warnings

import numpy as np

from parallelism import TensorSharding
from parallelism.trace import UndeclaredComputeWarning
from vcluster import VirtualCluster

ON = {"hardware": "dgx-h100", "compute": "modelled", "priced_dtype": "bfloat16"}


def told(trace, rank=None):
    """All that must be the same in both; only a run has what goes to and from the host."""
    found, serials = [], {}
    for e in trace:
        if e.kind in ("h2d", "d2h") or e.parent is not None or rank not in (None, e.rank):
            continue
        serial = serials[e.rank] = serials.get(e.rank, -1) + 1
        found.append((
            e.rank, e.kind, e.name, e.start_seconds, e.duration_seconds, e.bytes_sent, e.bytes_received, e.messages,
            e.flops, e.nbytes, e.axes, e.group, e.peer, e.algorithm, e.stage, e.microbatch, e.phase, e.tag, e.sequence,
            e.sources, e.dtype, e.seconds, e.shape, serial))
    return found


def run(program, mesh, inputs, backend="thread"):
    """The result of a run, and its trace in virtual time."""
    with VirtualCluster(mesh, backend=backend, **ON) as cluster:
        done = cluster.run(program, inputs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UndeclaredComputeWarning)
            return done.result, done.trace


def assert_simulated(simulated, trace):
    assert told(simulated) == told(trace)
    assert simulated.peaks() == trace.peaks()
    assert simulated.makespan_seconds == trace.makespan_seconds
    np.testing.assert_array_equal(simulated.communication_matrix(), trace.communication_matrix())


S = TensorSharding
TENSOR = {
    "mlp": {"p.w0": S(None, "tp"), "p.b0": S("tp"), "p.w1": S("tp", None)},
    "gpt": {f"p.{i}.{name}": layout for i in range(2) for name, layout in {
        "qkv": S(None, "tp"), "out": S("tp", None), "up": S(None, "tp"), "down": S("tp", None)}.items()},
}
"""The layouts of Megatron for the recorded models, over axis ``tp``."""
