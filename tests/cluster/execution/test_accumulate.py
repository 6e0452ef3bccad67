"""Sums in a buffer on real devices: the memory that is predicted is held, and the caller's arrays stay."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import Mesh, TensorSharding as S, ir
from parallelism.execution import Executable
from parallelism.layouts import annotate
from parallelism.simulation import simulate


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_devices_add_into_their_own_buffers(cluster_of, backend):
    mesh = Mesh(dp=2)
    cluster = cluster_of(mesh, backend, hardware="dgx-h100", compute="modelled")
    n = 10
    function = ir.record(lambda b, x: ir.apply("accumulate", b, x * 2), *[ir.TensorType("f64", (n,))] * 2)
    executable = Executable(annotate(function, {"b": S("dp")}), mesh)
    buffer, x = np.arange(n, dtype=float), np.ones(n)
    run = cluster.run(executable, [buffer, x])
    assert_array_equal(run.result[0], np.arange(n) + 2.0)
    assert_array_equal(buffer, np.arange(n))
    assert run.trace.peaks() == simulate(executable, "dgx-h100").peaks()
