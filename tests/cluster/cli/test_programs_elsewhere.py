"""The commands on programs of other formats: ONNX with its weights, modules for a mesh, programs of one device."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("jax")

from parallelism.interop import to_onnx, to_stablehlo  # noqa: E402
from parallelism.ir import parse  # noqa: E402
from parallelism.mesh import Mesh  # noqa: E402
from vcluster import __main__ as top  # noqa: E402
from vcluster.cli.command_line import serve  # noqa: E402

LAYER = parse("""func @layer(%p.w: tensor<4x2xf32>, %x: tensor<6x4xf32> [dp, None]) -> (tensor<6x2xf32>) {
  %0 = "matmul"(%x, %p.w) : (tensor<6x4xf32>, tensor<4x2xf32>) -> tensor<6x2xf32>
  return %0
}""")
CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, use_global_device_ids"
PART = f"""module @part attributes {{mhlo.num_partitions = 4 : i32}} {{
  func.func public @main(%x: tensor<2x3xf32>) -> tensor<2x3xf32> {{
    %0 = "stablehlo.all_gather"(%x) <{{all_gather_dim = 0 : i64, {CHANNEL},
        replica_groups = dense<[[0, 3], [2, 1]]> : tensor<2x2xi64>}}> : (tensor<2x3xf32>) -> tensor<4x3xf32>
    %1 = "stablehlo.reduce_scatter"(%0) <{{scatter_dimension = 0 : i64, {CHANNEL},
        replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>}}> ({{
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %s = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }}) : (tensor<4x3xf32>) -> tensor<2x3xf32>
    return %1 : tensor<2x3xf32>
  }}
}}
"""
W = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(to_onnx(LAYER, {"p.w": W}), "layer.onnx")
    (tmp_path / "whole.program").write_text(to_stablehlo(LAYER, Mesh(dp=3)))
    (tmp_path / "part.program").write_text(PART)

    def run(*words):
        status = serve(top.PROGRAM, top.main, [str(word) for word in words])
        out, err = capsys.readouterr()
        assert status in (0, 2)
        assert bool(err) == (status == 2), err
        return err or out

    return run


def test_a_model_of_onnx_runs_with_its_weights(command, tmp_path):
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    np.savez(tmp_path / "x.npz", x=x)
    out = command("run", "layer.onnx", "--mesh", "dp=2", "--inputs", "x.npz", "--backend", "thread")
    assert np.array2string(x @ W, threshold=8, edgeitems=2) in out
    assert "differ by 0 of the largest number" in out


@pytest.mark.takes_seconds
def test_a_module_with_layouts_is_for_its_own_mesh(command):
    assert "tensor<2x4xf32>" in command("show", "whole.program")
    assert "on Mesh(dp=3) and in one process differ by" in command("run", "whole.program", "--backend", "thread")
    assert command("simulate", "whole.program", "--hardware", "dgx-h100").startswith("3 devices (dp=3)")
    assert command("simulate", "whole.program", "--mesh", "dp=6", "--hardware", "dgx-h100").startswith("6 devices")


@pytest.mark.takes_seconds
def test_a_partitioned_module_is_told_collective_by_collective(command):
    out = command("show", "part.program", "--rank", "1")
    lines = [line.split("  ") for line in out.splitlines() if line.startswith(("all_gather ", "reduce_scatter "))]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    # S and what a rank gets: two arrays of 24 bytes joined, and half of them summed.
    assert [row[:6] for row in rows] == [
        ["all_gather", "-", "0 3 | 2 1", "48 B", "24 B", "ring"],
        ["reduce_scatter", "axis1", "0 1 | 2 3", "48 B", "24 B", "ring"]]
    assert "2 collectives of rank 1, priced on dgx-h100" in out
    slow = command("show", "part.program", "--hardware", "dgx-a100")
    assert "priced on dgx-a100" in slow and slow.splitlines()[-2:] != out.splitlines()[-2:]


@pytest.mark.takes_seconds
def test_the_module_of_the_documents_is_told_as_they_say(command, tmp_path):
    document = (Path(top.__file__).parents[1] / "docs" / "interop.md").read_text()
    part = document[document.index("`part.mlir`"):]
    module, table = (re.search(rf"```{kind}\n(.*?)```", part, re.DOTALL)[1] for kind in ("mlir", "text"))
    (tmp_path / "part.mlir").write_text(module)
    assert command("show", "part.mlir", "--hardware", "dgx-h100").endswith(table)


@pytest.mark.takes_seconds
def test_a_partitioned_module_runs_on_devices_and_is_simulated(command, tmp_path):
    arrays = {f"arg0.{rank}": np.full((2, 3), 10.0 ** rank, np.float32) for rank in range(4)}
    np.savez(tmp_path / "x.npz", **arrays)
    out = command("run", "part.program", "--inputs", "x.npz", "--hardware", "dgx-h100", "--backend", "thread")
    # Ranks 0 and 3 join their arrays, as 2 and 1 do; then 0 sums its first half with that of 1, and so on.
    for rank, number in enumerate([101.0, 1010.0, 101.0, 1010.0]):
        assert f"result 0 of rank {rank} = {np.full((2, 3), number, np.float32)}" in out
    assert "the run compared with the simulation: unchanged" in out
    assert command("simulate", "part.program", "--hardware", "dgx-h100").startswith("4 devices (axis0=2, axis1=2)")
    np.savez(tmp_path / "y.npz", arg0=arrays["arg0.1"], **{"arg0.0": 2 * arrays["arg0.1"]})
    assert "result 0 of rank 1 = [[20. 20. 20.]" in command(
        "run", "part.program", "--inputs", "y.npz", "--backend", "thread")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("words", "message"), [
    (("run", "part.program", "--mesh", "dp=4"), "is the program of one of 4 devices already, with its collectives; "
                                                "leave out --mesh"),
    (("simulate", "part.program", "--optimizer", "adam", "--hardware", "dgx-h100"), "leave out --optimizer"),
    (("plan", "part.program", "--batch", "B=8", "--hardware", "dgx-h100", "--devices", "8"),
     "is the program of one of 4 devices already"),
    (("convert", "part.program", "b.onnx"), "is the program of one device already, which has no other format"),
    (("show", "part.program", "--rank", "4"), "has ranks 0 to 3, got 4"),
    (("run", "part.program", "--inputs", "x.npz"), "--inputs: there is neither arg0 nor arg0.0"),
    (("run", "part.program", "--donate", "x"), "--donate is for programs that are not divided yet"),
], ids=lambda value: value[0] if isinstance(value, tuple) else "")
def test_what_does_not_fit_a_partitioned_module_is_one_line(command, tmp_path, words, message):
    np.savez(tmp_path / "x.npz", other=W)
    out = command(*words)
    assert message in out and out.count("\n") == 1


@pytest.mark.slow
def test_traces_for_chakra_are_written_by_both_kinds_of_simulate(command, tmp_path):
    words = ("--hardware", "dgx-h100", "--chakra", "traces")
    assert command("simulate", "part.program", *words).endswith(
        "The traces for Chakra are traces/trace.0.et to trace.3.et\n")
    gpt = ("gpt", "--num-layers", 1, "--hidden-size", 8, "--num-attention-heads", 2, "--seq-length", 4, "--vocab-size",
           12, "--global-batch-size", 4, "--bf16", "--devices", 2)
    assert "The traces for Chakra are traces/trace.0.et to trace.1.et" in command("simulate", *gpt, *words)
    assert "--chakra writes a file for each device; leave out --fold" in command(
        "simulate", "part.program", *words, "--fold")
    (tmp_path / "file").write_text("")
    assert "--chakra: file/in cannot be written: Not a directory" in command(
        "simulate", "part.program", "--hardware", "dgx-h100", "--chakra", "file/in")
