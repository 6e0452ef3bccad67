"""Networks of ONNX: read, equal to ONNX's own reference, split over devices, run and simulated."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

import onnx_networks  # noqa: E402
from numpy.testing import assert_allclose  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from parallelism import Mesh, ir  # noqa: E402
from parallelism.execution import Executable  # noqa: E402
from parallelism.interop import from_onnx  # noqa: E402
from parallelism.transforms import Strategy, TensorParallel  # noqa: E402
from vcluster import VirtualCluster  # noqa: E402


def check(model, mesh):
    arrays = onnx_networks.arrays(model)
    expected, = ReferenceEvaluator(model).run(None, arrays)
    program, weights = from_onnx(model)
    scale = np.abs(expected).max()
    whole, = ir.interpret(program, {**weights, **arrays}).outputs
    assert_allclose(whole, expected, rtol=1e-5, atol=1e-5 * scale)
    split = Strategy(TensorParallel("tp"))(program)
    assert any(value.layout is not None and value.layout.axes for value in split.inputs)
    with VirtualCluster(mesh) as cluster:
        run = cluster.run(Executable(split, mesh), {**weights, **arrays})
    assert_allclose(run.result[0], expected, rtol=1e-5, atol=2e-5 * scale)
    assert list(run.trace.filter(kind="collective"))


@pytest.mark.sampled(2)
@pytest.mark.slow_for("gpt2")
@pytest.mark.parametrize("name", onnx_networks.SMALL)
def test_a_small_network_equals_the_reference_and_runs_split(name):
    check(onnx_networks.SMALL[name](), Mesh(tp=2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", onnx_networks.FULL)
def test_a_network_of_full_size_equals_the_reference_and_runs_on_four_processes(name):
    check(onnx_networks.FULL[name](), Mesh(tp=4))


def test_a_batch_without_a_number_stays_a_symbol():
    program, weights = from_onnx(onnx_networks.gpt2(1, 16, 4, 6, 40))
    assert program.symbols == {"batch"}
    assert str(program.inputs[-1]) == "%ids: tensor<(batch)x6xi64>"
    model = onnx_networks.gpt2(1, 16, 4, 6, 40, batch=3)
    arrays = onnx_networks.arrays(model)
    expected, = ReferenceEvaluator(model).run(None, arrays)
    assert_allclose(ir.interpret(program, {**weights, **arrays}).outputs[0], expected, rtol=1e-5, atol=1e-6)


GPT2 = """
import sys, time
from pathlib import Path
from parallelism import Mesh, simulate
from parallelism.interop import from_onnx
from parallelism.transforms import Strategy, TensorParallel
start = time.process_time()
program, weights = from_onnx(sys.argv[1])
split = Strategy(TensorParallel("tp"))(program).specialize(batch=8)
trace = simulate(split, "dgx-a100", mesh=Mesh(tp=8))
peak = Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]     # kB
print(time.process_time() - start, peak, trace.makespan_seconds,
      sum(w.size for w in weights.values()))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gpt2_of_124_million_weights_is_read_split_and_simulated(tmp_path):
    """Below 10 seconds of CPU and 3 GB of memory, in a process of its own."""
    onnx.save(onnx_networks.gpt2(), tmp_path / "gpt2.onnx", save_as_external_data=True, location="weights.bin")
    command = [sys.executable, "-c", GPT2, tmp_path / "gpt2.onnx"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, kilobytes, makespan, count = map(float, done.stdout.split())
    assert 124e6 < count < 125e6
    assert seconds < 10 and kilobytes < 3e6 and makespan > 0
