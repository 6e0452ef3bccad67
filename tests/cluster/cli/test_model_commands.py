"""``python -m vcluster show``, ``simulate`` and ``run`` on a program in a file: what they print, what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from parallelism import ir, models as programs
from parallelism.hardware import VARIABLE, Hardware
from parallelism.layouts import annotate
from parallelism.simulation import simulate
from parallelism.trace import Trace
from parallelism.transforms import SGD, Adam, Step, Strategy, train_step
from vcluster import __main__ as top
from vcluster.cli import programs as models
from vcluster.cli.command_line import serve

MODEL = """\
func @f(%x: tensor<8x16xf64> [dp, None], %w: tensor<16x32xf64> [None, tp], %v: tensor<32x3xf64>) -> (tensor<f64>) {
  %0 = "matmul"(%x, %w) : (tensor<8x16xf64>, tensor<16x32xf64>) -> tensor<8x32xf64>
  %1 = "relu"(%0) : (tensor<8x32xf64>) -> tensor<8x32xf64>
  %2 = "matmul"(%1, %v) : (tensor<8x32xf64>, tensor<32x3xf64>) -> tensor<8x3xf64>
  %3 = "sum"(%2) {axes = [0, 1], keepdims = false} : (tensor<8x3xf64>) -> tensor<f64>
  return %3
}
"""
WITH_SYMBOL = MODEL.replace("8x16", "Bx16").replace("8x32", "Bx32").replace("8x3x", "Bx3x")
ON = ("--mesh", "dp=2,tp=2", "--hardware", "dgx-h100", "--priced-dtype", "bfloat16")


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.mlir").write_text(MODEL)
    (tmp_path / "B.mlir").write_text(WITH_SYMBOL)

    def run(*words):
        status = serve(top.PROGRAM, top.main, [str(word) for word in words])
        return status, *capsys.readouterr()

    return run


B, = ir.symbols("B")
LOSS = programs.mlp((6, 8, 4), B)


@cache
def training_texts():
    texts = {"loss": str(LOSS), "step": str(train_step(programs.mlp((6, 8, 4), 7), Adam(0.01)))}
    for name, words in (("pipe", "dp zero=1 pp 1f1b:3"), ("meshes", "dp pp 1f1b:2,meshes=dp=2|one=1")):
        texts[name] = str(Strategy.parse(words)(train_step(LOSS, Adam(0.01))))
    return texts


@pytest.fixture
def trained(command, tmp_path):
    """`command`, with the loss of a perceptron in a file, its training step for 7 rows, and that step in a pipeline."""
    for name, text in training_texts().items():
        (tmp_path / f"{name}.mlir").write_text(text)
    return command


@pytest.mark.slow_for("words1", "words3")
@pytest.mark.slow
@pytest.mark.parametrize("words", [
    ("loss.mlir", "--size", "B=7", "--strategy", "dp=2 tp=2"),
    ("step.mlir", "--strategy", "dp=2 tp=2 sp zero=3"),
    ("loss.mlir", "--optimizer", "adam:0.01", "--size", "B=7", "--strategy",
     "pp=2 1f1b:3 dp=2 zero=1 recompute=layer.*"),
    ("pipe.mlir", "--size", "B=7", "--mesh", "pp=2,dp=2"),
    ("loss.mlir", "--optimizer", "adam:0.01", "--size", "B=7", "--strategy",
     "dp tp zero=1 overlap pp 1f1b:2,meshes=dp=2.tp=2|dp=3"),
    ("meshes.mlir", "--size", "B=7"),
])
def test_a_strategy_is_shown_and_simulated_and_run(trained, tmp_path, words):
    status, out, err = trained("run", *words, *ON[2:4], "--backend", "thread", "--save", "t.json")
    assert (status, err) == (0, "") and "the run compared with the simulation: unchanged" in out
    assert max(map(len, out.splitlines())) <= 80
    assert float(unwrapped(out).partition("differ by ")[2].split()[0]) < 1e-10
    run = Trace.load(tmp_path / "t.json")
    status, out, err = trained("simulate", *words, *ON[2:4], "--save", "s.json")
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    assert Trace.load(tmp_path / "s.json").makespan_seconds == pytest.approx(run.makespan_seconds, rel=1e-9)
    status, out, err = trained("show", *words, "--rank", run.size - 1)
    assert (status, err) == (0, "") and f"rank {run.size - 1} of Mesh(" in out
    if "--strategy" in words:
        strategy, mesh = Strategy.parse_on_mesh(words[-1])
        first, _, _ = unwrapped(out).partition(" on Mesh(")
        assert Strategy.parse_on_mesh(first) == (strategy, mesh)


@pytest.mark.slow
def test_show_prints_the_borders_of_nested_strategies(command, tmp_path):
    spec = programs.TransformerSpec(layers=2, width=16, heads=2, vocabulary=8, sequence=4)
    (tmp_path / "gpt.mlir").write_text(str(train_step(spec.function(4), SGD(0.1))))
    (tmp_path / "loss.mlir").write_text(str(spec.function(B)))
    words = "tp@block.*=2 tp:x@embedding,head=2 sp sp:x"
    status, out, err = command("show", "gpt.mlir", "--strategy", words)
    assert (status, err) == (0, "") and "received  count  value  from -> to\n" in out
    assert re.search(r"gradient.block.0 -> gradient.embedding\n +\[None, x, None\] -> ", out)
    assert re.search(r"\na device receives at most .* at borders\n\Z", out)
    status, out, err = command("show", "loss.mlir", "--optimizer", "sgd", "--size", "B=4", "--strategy",
                               f"{words} pp=2 1f1b:2", "--rank", "7")
    assert (status, err) == (0, "") and re.search(r"gradient.head -> gradient.block.1\n +\[None, x, None\] -> ", out)


@pytest.mark.slow
def test_a_step_in_a_pipeline_is_shown_as_text_and_by_its_actions(trained, tmp_path):
    status, out, err = trained("show", "pipe.mlir")
    assert (status, err) == (0, "")
    assert Step.parse(out.rpartition("\n\n")[0] + "\n") == Step.parse((tmp_path / "pipe.mlir").read_text())
    status, out, err = trained("show", "pipe.mlir", "--mesh", "pp=2,dp=2", "--size", "B=7", "--rank", "3")
    assert (status, err) == (0, "")
    assert "rank 3 of Mesh(pp=2, dp=2): stage 1 of 2, replica 1, microbatches of 1 rows" in unwrapped(out)
    assert "actions: 1F0 1B0 1F1 1B1 1F2 1B2\n" in out
    assert out.count("\nfunc @") == 3 and '"reduce_scatter"' in out      # forward, backward, update
    status, out, err = trained("simulate", "pipe.mlir", "--mesh", "pp=2,dp=64", "--size", "B=384", "--hardware",
                               "dgx-h100:16")
    assert (status, err) == (0, "") and "representatives, with the number of equal devices of each: " in out


def unwrapped(text):
    return " ".join(text.split())


@pytest.mark.takes_seconds
def test_show_prints_the_program_and_its_counts(command):
    status, out, err = command("show", "m.mlir")
    assert (status, err) == (0, "") and out.startswith(MODEL)
    assert out.endswith("4 ops, 10008 flops, 9984 bytes at most\n")
    assert command("show", "B.mlir")[1].endswith("bytes at most\n") and "*B" in command("show", "B.mlir")[1]
    assert command("show", "B.mlir", "--size", "B=8")[1] == out


def test_a_program_may_begin_with_a_byte_order_mark(command, tmp_path):
    (tmp_path / "m.mlir").write_text(MODEL, "utf-8-sig")
    assert command("show", "m.mlir")[1].startswith(MODEL)


def test_show_prints_what_a_device_of_a_mesh_does(command):
    status, out, err = command("show", "m.mlir", "--mesh", "dp=2,tp=2", "--rank", "3")
    assert (status, err) == (0, "")
    assert '"matmul"(%x, %w) : (tensor<4x16xf64>, tensor<16x16xf64>) -> tensor<4x16xf64>' in out
    assert "the program of rank 3 of Mesh(dp=2, tp=2):" in out and '"all_reduce"' in out
    assert out.endswith("2 kinds of device\n")    # the sum has one element, which one of each two devices adds up


@pytest.mark.takes_seconds
def test_simulate_prints_the_summary_and_writes_page_and_trace(command, tmp_path):
    status, out, err = command("simulate", "m.mlir", *ON, "--report", "p.html", "--save", "t.json")
    assert (status, err) == (0, "")
    trace = Trace.load(tmp_path / "t.json")
    assert out.startswith(trace.summary()) and f"peak memory: {trace.peak_bytes(0)} bytes on rank 0" in out
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    assert command("report", "t.json")[0] == 0


@pytest.mark.takes_seconds
def test_donated_inputs_are_held_once(command, tmp_path):
    step = ir.record(lambda p, g: {name: p[name] - 0.1 * g[name] for name in p},
                     *[{"w": ir.TensorType("f64", (4, 6)), "v": ir.TensorType("f64", (5,))}] * 2)
    (tmp_path / "step.mlir").write_text(str(step))
    plain = command("simulate", "step.mlir", *ON[2:])[1]
    status, out, err = command("simulate", "step.mlir", *ON[2:], "--donate", "p")
    state = 8 * (24 + 5)
    assert (status, err) == (0, "") and f"inputs {2 * state}, outputs {state})" in unwrapped(plain)
    assert f"inputs {2 * state})" in unwrapped(out)
    status, out, err = command("run", "step.mlir", "--backend", "thread", "--donate", " p.w, p.v")
    assert (status, err) == (0, "")


@pytest.mark.takes_seconds
def test_many_devices_are_folded_unless_somebody_says_otherwise(command):
    words = ("simulate", "m.mlir", "--mesh", "dp=8,tp=16", *ON[2:])
    folded, all_of_them = command(*words)[1], command(*words, "--no-fold")[1]
    assert "2 representatives of 128 devices (dp=8, tp=16)" in folded
    assert "representatives, with the number of equal devices of each: 0 (" in folded
    assert folded.splitlines()[1].split(";")[0] == all_of_them.splitlines()[1].split(";")[0]    # the makespan


@pytest.mark.takes_seconds
def test_where_many_devices_cannot_be_folded_all_are_simulated_unless_somebody_asked(command, monkeypatch):
    def refusing(executable, hardware, *, fold=False, **on):
        if fold:
            raise ValueError("collectives of equal devices share links")
        return simulate(executable, hardware, **on)

    monkeypatch.setattr(models, "simulate", refusing)
    words = ("simulate", "m.mlir", "--mesh", "dp=8,tp=16", *ON[2:])
    status, out, err = command(*words)
    assert (status, err) == (0, "") and "representative" not in out and out == command(*words, "--no-fold")[1]
    status, out, err = command(*words, "--fold")
    assert (status, out) == (2, "") and err.endswith("simulate: collectives of equal devices share links\n")


@pytest.mark.takes_seconds
def test_what_ops_take_here_is_measured_once_and_kept(command, tmp_path):
    words = ("simulate", "m.mlir", *ON, "--profile", "p.json")
    first = command(*words)[1]
    kept = json.loads((tmp_path / "p.json").read_text())
    assert len(kept["seconds"]) == 4 and command(*words)[1] == first


@pytest.mark.takes_seconds
def test_run_agrees_with_one_process_and_with_the_simulation(command, tmp_path):
    status, out, err = command(
        "run", "m.mlir", *ON, "--backend", "thread", "--gradient", "--report", "p.html", "--save", "t.json")
    assert (status, err) == (0, "")
    assert "the results on Mesh(dp=2, tp=2) and in one process differ by " in out
    assert "the run compared with the simulation: unchanged" in out
    page = unescape((tmp_path / "p.html").read_text())
    assert page.count('"bandwidth":3350000000000.0') == 2      # of the roofs
    assert page.count("<iframe") == 2 and "<h2>simulated</h2>" in page and "<h2>run</h2>" in page
    assert Trace.load(tmp_path / "t.json").hardware == "dgx-h100"


def test_run_takes_the_inputs_that_it_is_given(command, tmp_path):
    rng = np.random.default_rng(0)
    given = {"x": rng.integers(-3, 3, (8, 16)) * 1.0, "w": np.ones((16, 32)), "v": np.ones((32, 3))}
    np.savez(tmp_path / "in.npz", **given)
    status, out, err = command("run", "m.mlir", "--mesh", "dp=2,tp=2", "--backend", "thread", "--inputs", "in.npz")
    assert (status, err) == (0, "")
    wanted = (np.maximum(given["x"] @ given["w"], 0) @ given["v"]).sum()
    assert f"%3: tensor<f64> = {wanted:g}" in out.replace(".\n", "\n")
    assert "differ by 0 of the largest number" in unwrapped(out)


@pytest.mark.parametrize("name", ["show", "simulate", "run"])
def test_help_teaches(command, name):
    status, out, err = command(name, "--help")
    assert (status, err) == (0, "")
    assert "in the file, a layout follows the type" in out and f"python -m vcluster {name} model.mlir" in out
    example = out[out.index("    func @f"):].partition("}")[0] + "}"
    assert ir.parse(example).outputs[0].type.shape == (8, 4)
    assert all(len(line) <= 80 for line in out.splitlines() if "usage" not in line)
    lines = out[out.index("a strategy lays out"):].splitlines()
    taught = [found[1] for found in (re.match("    (.{20}\\S*)    *\\S", line) for line in lines) if found]
    words = [text.strip() for text in taught if text.strip()]
    assert [text.split("=")[0] for text in words] == [
        "dp", "dp:outer", "tp@block.*,head", "sp", "zero", "precision", "recompute", "local", "overlap", "fused", "pp"]
    for text in words:
        Strategy.parse_on_mesh(text if "tp" in text else f"dp=2 tp=2 {text}")
    for example in re.findall("--strategy '(.*)'", out):
        Strategy.parse_on_mesh(example)


@pytest.mark.parametrize(("name", "told"), [
    ("hardware", "dgx-h100:8       eight nodes of it"), ("doctor", "what would cause problems"),
])
def test_help_of_what_has_no_options_is_help_too(command, name, told):
    for word in ("-h", "--help"):
        status, out, err = command(name, word)
        assert (status, err) == (0, "") and told in out and out.startswith(f"usage: {top.PROGRAM} {name}")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_one_line():
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*top.PROGRAM.replace("python", sys.executable, 1).split(), "hardware"], stdout=full,
                              stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"{top.PROGRAM}: No space left on device\n")


def test_closed_streams_are_no_failure(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    before = {*Path("/dev/fd").iterdir()}
    assert serve("here", lambda words: int(sys.stdout.isatty()), []) == 0
    assert serve("here", top.main, ["nothing"]) == 2
    for stream in (sys.stdout, sys.stderr):
        stream.close()
    assert {*Path("/dev/fd").iterdir()} == before


def test_a_program_of_bfloat16_runs_on_arrays_from_a_file(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    types = [ir.TensorType("bf16", shape) for shape in ((4, 3), (3, 2))]
    (tmp_path / "narrow.mlir").write_text(str(annotate(ir.record(lambda x, w: x @ w, *types), {"x": "[None, tp]"})))
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=type.shape).astype(type.dtype) for name, type in zip("xw", types, strict=True)}
    np.savez(tmp_path / "narrow.npz", **arrays)         # as bytes: NumPy does not know the dtype
    status, out, err = command(
        "run", "narrow.mlir", "--mesh", "tp=3", "--backend", "thread", "--inputs", "narrow.npz")
    assert (status, err) == (0, "")
    first = (arrays["x"][:1].astype(np.float32) @ arrays["w"].astype(np.float32)).ravel()[0]
    printed = float(out.partition("= [[")[2].split()[0])
    assert abs(printed - first) < 2**-5 * abs(arrays["x"].astype(float)).max()


NO_NPZ = "it is not an .npz file of numpy.savez ("


@pytest.mark.takes_seconds
@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", ["sgd:0.1", "adam:0.01"])
def test_run_takes_a_gradient_that_is_zero_but_for_rounding_for_right(command, tmp_path, optimizer):
    def loss(p, x, y):
        z = np.tanh(x @ p["w"]) + p["shift"]        # the shift of all logits changes nothing
        return ((ir.apply("softmax", z, axis=1) - y) ** 2).mean()

    types = {"w": ir.TensorType("f64", (5, 4)), "shift": ir.TensorType("f64", (1,))}
    (tmp_path / "loss.mlir").write_text(str(ir.record(
        loss, types, ir.TensorType("f64", (9, 5)), ir.TensorType("f64", (9, 4)))))
    for seed in "012":
        status, out, err = command("run", "loss.mlir", "--optimizer", optimizer, "--strategy", "dp=3", "--backend",
                                   "thread", "--seed", seed)
        assert (status, err) == (0, ""), out
    wrong = "run", "loss.mlir", "--gradient", "--backend", "thread"
    assert command(*wrong)[0] == 0


@pytest.mark.takes_seconds
@pytest.mark.filterwarnings("ignore:invalid value")
def test_run_fails_where_a_result_is_nan(command, tmp_path):
    (tmp_path / "nan.mlir").write_text(str(ir.record(lambda x: np.log(x).sum(), ir.TensorType("f64", (8, 2)))))
    status, out, err = command("run", "nan.mlir", "--backend", "thread")
    assert (status, err) == (1, "")
    assert "NaN in " in out and "the inputs are random, --inputs gives others" in unwrapped(out)
    np.savez(tmp_path / "in.npz", x=np.ones((8, 2)))
    status, out, _ = command("run", "nan.mlir", "--backend", "thread", "--inputs", "in.npz")
    assert status == 0 and "NaN" not in out


def test_run_of_many_layers_stays_finite_and_lookups_read_many_rows(command, tmp_path):
    def loss(p, ids):
        h = p["table"][ids]
        for _ in range(100):
            h = h @ p["w"]
        return h.sum(axis=1)

    program = ir.record(loss, {"table": ir.TensorType("f32", (30, 64)), "w": ir.TensorType("f32", (64, 64))},
                        ir.TensorType("i32", (12,)))
    (tmp_path / "deep.mlir").write_text(str(program))
    status, out, err = command("run", "deep.mlir", "--backend", "thread")
    assert (status, err) == (0, "")
    numbers = re.findall(r"-?\d+\.\d+(?:e[+-]\d+)?", out.partition("= [")[2].partition("]")[0])
    assert len(set(numbers)) == len(numbers) > 3 and all(abs(float(number)) < 1e6 for number in numbers)


@pytest.mark.parametrize(("name", "message"), [
    ("one.npy", NO_NPZ), ("empty.npz", NO_NPZ), ("cut.npz", NO_NPZ), ("flipped.npz", NO_NPZ), (".", "Is a directory"),
])
def test_inputs_that_cannot_be_read_are_told_in_one_line(command, tmp_path, name, message):
    np.save(tmp_path / "one.npy", np.ones(3))
    np.savez(tmp_path / "whole.npz", x=np.ones((8, 16)))
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "cut.npz").write_bytes(whole[:len(whole) // 2])
    (tmp_path / "flipped.npz").write_bytes(whole[:400] + bytes([whole[400] ^ 255]) + whole[401:])
    status, out, err = command("run", "m.mlir", "--mesh", "dp=1,tp=1", "--inputs", name)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"{top.PROGRAM} run: --inputs: {name} cannot be read: {message}")


def test_a_program_for_which_there_is_not_the_memory_is_told_in_one_line(command, tmp_path):
    (tmp_path / "big.mlir").write_text(MODEL.replace("8x", f"{10**15}x"))
    status, out, err = command("run", "big.mlir", "--mesh", "dp=1,tp=1")
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"{top.PROGRAM} run: this machine has too little memory for it: Unable to allocate")


@pytest.mark.takes_seconds
def test_this_machine_is_a_hardware_if_it_is_calibrated(command, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "here.json"))
    status, out, err = command("simulate", "m.mlir", "--mesh", "dp=1,tp=1", "--hardware", "host")
    assert (status, out) == (2, "") and err.startswith(f"{top.PROGRAM} simulate: --hardware host: ")
    Hardware.preset("laptop").save(tmp_path / "here.json")
    status, out, err = command("simulate", "m.mlir", "--mesh", "dp=1,tp=1", "--hardware", "host")
    assert (status, err) == (0, "") and "laptop has" in out


WRONG = [
    (["run"], "run: the following arguments are required: MODEL.mlir"),
    (["run", "none.mlir"], "run: none.mlir cannot be read: No such file or directory"),
    (["show", "broken.mlir"], "show: broken.mlir:2:8: there is no operator 'matmull'; did you mean 'matmul'?"),
    (["show", "junk.mlir"], "show: junk.mlir is neither text in UTF-8, nor StableHLO, nor ONNX: 'utf-8' codec can't decode"),
    (["run", "m.mlir", "--mesh", "dp=2"], "run: @f, %w: TensorSharding(None, 'tp') names axis 'tp'"),
    (["run", "m.mlir", "--mesh", "dp=x"], "run: --mesh: axis 'dp' needs a whole number of at least 1, got 'x'"),
    (["run", "m.mlir", "--mesh", "dp=64,tp=8"], "run: Mesh(dp=64, tp=8) has 512 devices; at most 256 are run here"),
    (["run", "m.mlir", "--mesh", "dp=1,tp=1", "--inputs", "m.mlir"], "run: --inputs: m.mlir cannot be read: "),
    (["run", "m.mlir", "--mesh", "dp=1,tp=1", "--inputs", "other.npz"], "run: @f takes the inputs x, w, v; got y"),
    (["run", "m.mlir"], "run: m.mlir is laid out over dp, tp: --mesh must give the number of devices along each, "
     "as --mesh dp=2,tp=2"),
    (["run", "m.mlir", *ON[:2], "--inputs", "one.npy"], "run: --inputs: one.npy cannot be read: it is not an .npz"),
    (["run", "m.mlir", *ON[:2], "--inputs", "cut.npz"], "run: --inputs: cut.npz cannot be read: it is not an .npz"),
    (["run", "m.mlir", *ON[:2], "--inputs", "none.npz"], "run: --inputs: none.npz cannot be read: No such file"),
    (["run", "rows.mlir", "--backend", "thread", "--inputs", "far.npz"], "run: index 5 is out of bounds"),
    (["run", "large.mlir", "--backend", "thread"], "run: this machine has too little memory for it: "),
    (["run", "m.mlir", *ON[:2], "--profile", "."], "run: --profile: . cannot be written: Is a directory"),
    (["show", "m.mlir", "--mesh", "dp=2000000,tp=1"],
     "show: --mesh: Mesh(dp=2000000, tp=1) has 2000000 devices; at most "),
    (["simulate", "m.mlir"], "simulate: the following arguments are required: --hardware"),
    (["simulate", "m.mlir", "--hardware", "dgx-h10"], "simulate: --hardware: no hardware 'dgx-h10'; did you mean "),
    (["simulate", "m.mlir", "--hardware", "pcie-v100", *ON[:2], *ON[4:]],
     "simulate: pcie-v100 has no rate for bfloat16"),
    (["simulate", "m.mlir", *ON, "--donate", "x"], "simulate: @f cannot take the memory of the donated %x: it has"),
    (["simulate", "m.mlir", *ON, "--profile", "m.mlir"], "simulate: m.mlir: expected a vcluster profile"),
    (["simulate", "m.mlir", *ON, "--profile", "no/p.json"], "simulate: --profile: no/p.json cannot be written: "),
    (["simulate", "m.mlir", *ON, "--profile", "."], "simulate: --profile: . cannot be written: Is a directory"),
    (["simulate", "m.mlir", *ON, "--report", "no/p.html"], "simulate: --report: no/p.html cannot be written: "),
    (["simulate", "m.mlir", "--mesh", "dp=2000,tp=1", *ON[2:]], "simulate: dgx-h100 has places for 1016 devices, not "),
    (["simulate", "m.mlir", "--folt", *ON], "simulate: there is no option --folt; did you mean --fold?"),
    (["show", "B.mlir", "--mesh", "dp=1,tp=1"], "show: --size must give a value for B, as B=64"),
    (["run", "step.mlir", "--strategy", "dq=2"], "run: --strategy: no transform is written 'dq'; did you mean 'dp'?"),
    (["run", "step.mlir", "--strategy", "tp=2 zero=1"],
     "run: --strategy: zero=1 needs an axis 'dp', which has no size; the axes with a size are tp=2"),
    (["run", "step.mlir", "--strategy", "sp"], "run: --strategy: the strategy 'sp' names no axis with its size"),
    (["run", "step.mlir", "--strategy", "pp=2 1f1c:4"],
     "run: --strategy: unknown schedule '1f1c'; did you mean '1f1b'?"),
    (["run", "step.mlir", "--strategy", "dp=2 precision=bf17"], "run: --strategy: a dtype must be one of "),
    (["run", "step.mlir", "--strategy", "dp=2 dp=2"], "run: --strategy: DataParallel(axis='dp') is given twice"),
    (["run", "step.mlir", "--strategy", "dp=257"], "run: --strategy: Mesh(dp=257) has 257 devices; at most 256 are"),
    (["run", "step.mlir", "--strategy", "dp=2", "--mesh", "dp=2"], "run: --strategy gives the sizes of all axes; "),
    (["run", "step.mlir", "--strategy", "tp@lair.0=2"],
     "run: tp@lair.0: @mlp.step has no region 'lair.0'; did you mean 'layer.0'"),
    (["run", "step.mlir", "--strategy", "dp=2 pp=2 1f1b:2"],
     "run: pp 1f1b:2: @mlp.step has no symbol B for the rows of the batch: its symbols are none"),
    (["run", "loss.mlir", "--size", "B=7", "--strategy", "dp=2 zero=1"], "run: zero=1: @mlp has no optimizer"),
    (["run", "loss.mlir", "--optimizer", "adm", "--size", "B=7"],
     "run: --optimizer: there is no 'adm'; did you mean adam?"),
    (["run", "loss.mlir", "--optimizer", "sgd:x", "--size", "B=7"], "run: --optimizer needs a name and a rate, as "),
    (["run", "loss.mlir", "--optimizer", "sgd", "--gradient"], "run: --optimizer has the gradients computed, too;"),
    (["run", "pipe.mlir", "--strategy", "dp=2"], "run: --strategy is for programs that are not cut into a pipeline; "),
    (["run", "pipe.mlir", "--mesh", "pp=2,dp=2"], "run: --size must give a value for B, as B=64"),
    (["run", "pipe.mlir", "--size", "B=8"], "run: pipe.mlir is laid out over dp, pp: --mesh must give the number"),
    (["run", "pipe.mlir", "--size", "B=8", "--mesh", "dp=2"], "run: pp 1f1b:3 needs an axis 'pp'; the axes of "),
    (["run", "pipe.mlir", "--size", "B=5", "--mesh", "pp=2,dp=2"],
     "run: a batch of 5 rows cannot be dealt to 2 x 3 microbatches: some would have none"),
    (["simulate", "pipe.mlir", "--size", "B=8", "--mesh", "pp=2,dp=2", *ON[2:], "--donate", "p"],
     "simulate: --donate is for programs that are not cut into a pipeline; leave it out"),
    (["show", "cut.mlir"], "show: cut.mlir:2:1: expected 'func', got '@f'"),
    (["show", "dp.mlir"], "show: dp.mlir: the text of a step begins with its pipeline and what runs again, such as "),
    (["show", "m.mlir", "--size", "B"], "show: --size needs a symbol and a number, as B=64; got 'B'"),
    (["show", "m.mlir", "--size", "B=3"], "show: @f has no symbol B: its symbols are none"),
    (["show", "m.mlir", "--mesh", "dp=2,tp=1", "--rank", "2"],
     "show: --rank: Mesh(dp=2, tp=1) has ranks 0 to 1, got 2"),
]


@pytest.fixture(scope="module")
def wrong_files(tmp_path_factory):
    """A folder with programs and arrays, of which some are broken."""
    folder = tmp_path_factory.mktemp("wrong")
    for name, text in {"m": MODEL, "B": WITH_SYMBOL, **training_texts()}.items():
        (folder / f"{name}.mlir").write_text(text)
    (folder / "cut.mlir").write_text("pp 1f1b:2\n@f")
    (folder / "dp.mlir").write_text("pp 1f1b:2 dp\n" + MODEL)
    (folder / "broken.mlir").write_text(MODEL.replace('"matmul"', '"matmull"', 1))
    (folder / "junk.mlir").write_bytes(b"\xff\xfe" * 100)
    np.savez(folder / "other.npz", y=np.ones(3))
    np.save(folder / "one.npy", np.ones(3))
    (folder / "cut.npz").write_bytes((folder / "other.npz").read_bytes()[:-30])
    (folder / "large.mlir").write_text("""func @f(%x: tensor<999999x99999999xf64>) -> (tensor<999999x99999999xf64>) {
  return %x
}
""")
    np.savez(folder / "far.npz", x=np.ones((5, 2)), i=np.array([5]))
    (folder / "rows.mlir").write_text(str(ir.record(
        lambda x, i: x[i], ir.TensorType("f64", (5, 2)), ir.TensorType("i64", (1,)))))
    return folder


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("words", "message"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_what_is_wrong_is_one_line_and_status_2(command, wrong_files, monkeypatch, words, message):
    monkeypatch.chdir(wrong_files)
    status, out, err = command(*words)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"{top.PROGRAM} {message}")


@pytest.mark.takes_seconds
@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["dp=2", "dp=2 zero=1", "pp=1 1f1b:2", "pp=1 dp=2 1f1b:2"])
def test_run_takes_the_rows_of_the_arrays_that_it_is_given(command, tmp_path, strategy):
    rows, = ir.symbols("B")
    loss = ir.record(lambda p, x: ((x @ p["w"]) ** 2).mean(), {"w": ir.TensorType("f64", (5, 3))},
                     ir.TensorType("f64", (rows, 5)))
    (tmp_path / "free.mlir").write_text(str(loss))
    np.savez(tmp_path / "in.npz", **{"p.w": np.ones((5, 3)), "x": np.ones((8, 5))})
    words = "run", "free.mlir", "--optimizer", "sgd", "--strategy", strategy, "--backend", "thread"
    status, out, err = command(*words, "--inputs", "in.npz")
    assert (status, err) == (0, "") and "= 25" in out
    status, _, err = command(*words)
    assert status == 2 and "--size must give a value for B, as B=64" in err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("words", "told"), [
    ("show m.mlir --rank 3", None), ("show plain.mlir --rank 3", "--rank is about one device of a mesh"),
    ("show plain.mlir --hardware dgx-h100", "--hardware is about one device of a mesh"),
    ("run m.mlir --mesh dp=1,tp=1 --priced-dtype bfloat16", "--priced-dtype is about prices"),
    ("run m.mlir --mesh dp=1,tp=1 --inputs in.npz --seed 3", "--seed is of random arrays; leave it out with --inputs"),
    *((f"simulate free.mlir --optimizer sgd --strategy dp=2 --size B=8 --hardware dgx-h100 --json {more}",
       f"{more.split()[0]} has no effect on the figures of a training step; leave it out with --json")
      for more in ("--report r.html", "--save s.json", "--donate p", "--fold", "--priced-dtype bf16", "--gradient")),
])
def test_an_option_that_would_be_ignored_is_refused(command, tmp_path, words, told):
    rows, = ir.symbols("B")
    (tmp_path / "plain.mlir").write_text(str(ir.record(lambda x: x + 1, ir.TensorType("f64", (5,)))))
    (tmp_path / "free.mlir").write_text(str(ir.record(
        lambda p, x: (x @ p["w"]).sum(), {"w": ir.TensorType("f64", (5, 3))}, ir.TensorType("f64", (rows, 5)))))
    status, out, err = command(*words.split())
    assert (status, out) == (2, "") and err.count("\n") == 1 and (told is None or told in err)


@pytest.mark.takes_seconds
def test_a_hardware_without_a_rate_is_refused_before_anything_is_printed(command):
    status, out, err = command("show", "m.mlir", "--mesh", "dp=2,tp=2", "--hardware", "tpu-v4")
    assert (status, out) == (2, "") and "float64" in err
