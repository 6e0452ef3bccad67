"""`python -m vcluster plan`: what it finds can be had again by the lines that it prints."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallelism import Hardware, ir, models
from parallelism.display import quantities
from parallelism.planning import SETTINGS
from parallelism.planning.plan import Task
from parallelism.planning.settings import checked_settings
from parallelism.planning.trained import TrainedModel
from parallelism.slicing import find_slicing
from parallelism.trace import Trace
from parallelism.training import MegatronFlags
from parallelism.training.training_run import ADAM_W
from parallelism.transforms import SGD
from vcluster.__main__ import PROGRAM, main
from vcluster.cli import plan_document, plan_text as text, sliced
from vcluster.cli.command_line import serve
from vcluster.cli.sweeps.question import fixed_settings, question, settings

SMALL, ON = map(str.split, (
    "gpt --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 100 "
    "--disable-bias-linear --use-flash-attn --normalization RMSNorm",
    "--hardware dgx-a100+plain --devices 4 --global-batch-size 8 --fix schedule=1f1b --fix microbatch=2 --fix sp=0 "
    "--fix recompute=none --fix cp=1"))
SEARCH = [*SMALL, *ON, "--fix", "zero=0,1", "--fix", "pp=1,2", "--fix", "tp=1", "--fix", "order=pp dp cp tp"]
FIELDS = ["plans", "considered", "refused", "timed", "simulated", "elapsed_seconds", "gap"]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = serve(PROGRAM, main, words)
    out, err = capsys.readouterr()
    return status, out, err


ENDS = """
import atexit, os, sys, threading
from vcluster.__main__ import ended
leave = os._exit
os._exit = lambda status: os.write(1, b"left") and leave(status)
atexit.register(print, "at the end")
if sys.argv[1] == "thread":
    threading.Thread(target=lambda: threading.main_thread().join() or print("thread")).start()
print("all", end=" ")
ended(3)
"""


@pytest.mark.parametrize(("what", "said"), [("alone", "all at the end\nleft"), ("thread", "all thread\nat the end\n")])
def test_a_command_ends_with_its_status_and_does_not_free_its_objects_one_by_one(what: str, said: str) -> None:
    ran = subprocess.run([sys.executable, "-c", ENDS, what], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, said, "")


@cache
def folder_of_plans(folder: Path) -> Path:
    """A file of plans, saved once."""
    path = folder / "plans.json"
    words = [*SEARCH, "--why-not", "pp=1", "--why-not", "tp=8", "--top", "3", "--save", str(path)]
    assert serve(PROGRAM, main, ["plan", *words]) == 0
    return path


@cache
def figures_of(command: str) -> dict[str, Any]:
    """What a command of a plan prints as JSON; the tests have some of the commands in common."""
    with redirect_stdout(StringIO()) as out:
        assert serve(PROGRAM, main, [*shlex.split(command)[3:], "--json"]) == 0
    return json.loads(out.getvalue())


@pytest.fixture
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of_plans(tmp_path_factory.getbasetemp())


@pytest.mark.slow
def test_the_plans_are_in_the_order_of_their_full_simulations(capsys, monkeypatch):
    row = plan_document._row
    first = json.loads(said(capsys, "plan", *SEARCH, "--json")[1])["plans"]
    monkeypatch.setattr(plan_document, "_row", lambda asked, plan: {
        **(found := row(asked, plan)), "seconds": 1 / found["seconds"]})
    turned = json.loads(said(capsys, "plan", *SEARCH, "--json")[1])["plans"]
    assert len(first) > 2 and len({plan["seconds"] for plan in first}) == len(first)
    assert [plan["command"] for plan in turned] == [plan["command"] for plan in reversed(first)]


@pytest.mark.slow
def test_gradients_in_16_bits_are_assumed_where_a_flag_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SEARCH, "--top", "1", "--fix", "dp=2"]
    wide, narrow = (json.loads(said(capsys, "plan", *words, *more, "--json")[1])["plans"][0]
                    for more in ([], ["--grad-reduce-in-bf16"]))
    assert narrow["memory"][0]["gradients"] < wide["memory"][0]["gradients"]
    assert "--grad-reduce-in-bf16" in narrow["command"] and narrow["strategy"].startswith("precision=bf16,bf16 ")
    again = json.loads(said(capsys, *shlex.split(narrow["command"])[3:], "--json")[1])
    assert (again["seconds"], again["memory"]) == (narrow["seconds"], narrow["memory"])
    text = said(capsys, "plan", *words, "--grad-reduce-in-bf16")[1]
    assert "bfloat16 with main copies in float32, gradients in bfloat16" in " ".join(text.split())


@pytest.mark.slow
def test_every_figure_of_a_plan_can_be_had_by_its_command(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said(capsys, "plan", "--load", str(file), "--json")
    found = json.loads(out)
    assert status == 0 and [*found] == [*FIELDS, "why_not", "assumed", "reserve"]
    assert len(found["plans"]) == 3 and found["considered"] == found["timed"] + sum(found["refused"].values())
    assert [plan["seconds"] for plan in found["plans"]] == sorted(plan["seconds"] for plan in found["plans"])
    for plan in found["plans"]:
        own = {name: value for name, value in plan.items() if name not in ("microbatch", "command")}
        assert plan["command"].startswith("python -m vcluster ") and figures_of(plan["command"]) == own
        assert plan["microbatch"] == 2


@pytest.mark.takes_seconds
def test_the_text_has_80_columns_and_what_was_asked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, "plan", "--load", str(file), "--again")
    lines = out.splitlines()
    assert (status, err) == (0, "") and max(map(len, lines)) <= 80
    assert "; the first is the best of all" in " ".join(out.split())
    assert "parameters, vocabulary 128 (padded from 100): 8 sequences a step on 4 devices" in " ".join(out.split())
    rate = json.loads(file.read_text())["plans"][0]["tokens_per_second"]
    for words in ("dgx-a100, 80.0 GB each", "refused", f" {quantities.count(rate)}  ", "tokens/s", "MFU",
                  "bubble", "no plan is both faster and",
                  "Why the first: the second (", "Why not pp=1: the best plan with pp=1 (dp=4",
                  "Why not tp=8: no plan has tp=8",
                  "python -m vcluster simulate gpt --num-layers 2", "--pipeline-model-parallel-size 2"):
        assert words in out, words
    fewer = said(capsys, "plan", "--load", str(file), "--top", "1")[1]
    assert "Why the first" not in fewer and len(fewer.splitlines()) < len(lines)


@pytest.mark.takes_seconds
def test_the_lines_of_the_table_are_printed_and_those_of_the_front_if_asked_for(
    file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = json.loads(file.read_text())
    first, *others = document["plans"]
    out = said(capsys, "plan", "--load", str(file))[1]
    printed = out[out.index("The first plan again:"):].split("\n\n")[0].splitlines()[1:]
    alone = printed[:next(i for i, line in enumerate(printed, 1) if not line.endswith("\\"))]
    assert words_of(alone) == shlex.split(first["command"])
    told = {plan["split"] for plan in document["plans"]}
    assert len(others) == 2
    assert ("--again" in out) == any(each["split"] not in told for each in document["front"])
    for place, each in enumerate(others, 2):
        assert text._wrapped(each["flags"], f"   {place}  ")[0] in out
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps(document | {"plans": [first], "why_not": []}))
    out, every = (said(capsys, "plan", "--load", str(alone), *more)[1] for more in ((), ("--again",)))
    in_front = {text._wrapped(each["flags"], f"   {letter}  ")[0] for letter, each in zip("abc", (
        each for each in document["front"] if each["split"] != first["split"]), strict=False)}
    assert in_front and "--again prints the commands of the front" in out
    assert in_front.isdisjoint(out.splitlines()) and in_front <= {*every.splitlines()}


@pytest.mark.takes_seconds
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_the_line_of_a_plan_names_blocks_that_the_file_does_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    """The blocks of a program without regions are found by what repeats: by a search, and again for its line."""
    def loss(p: Any, x: Any) -> Any:
        for layer in p["layers"]:
            x = x + np.tanh(x @ layer["up"]) @ layer["down"]
        return np.mean(x * x)

    each = {"up": ir.TensorType("f32", (6, 10)), "down": ir.TensorType("f32", (10, 6))}
    path, found = tmp_path / "loss.vcl", tmp_path / "plans.json"
    path.write_text(str(ir.record(loss, {"layers": [each] * 4}, ir.TensorType("f32", (*ir.symbols("B"), 6)))))
    status, _, err = said(capsys, "plan", str(path), "--batch", "B=16", "--hardware", "dgx-h100", "--devices", "2",
                          "--fix", "pp=2", "--top", "1", "--save", str(found))
    assert (status, err) == (0, "")
    first, = json.loads(found.read_text())["plans"]
    line = shlex.split(first["command"])
    assert "block.2" in first["command"] and line[:3] == ["python", "-m", "vcluster"]
    status, out, err = said(capsys, *line[3:], *words)
    assert (status, err) == (0, "")
    if words:
        assert json.loads(out)["seconds"] == first["seconds"]


@pytest.mark.takes_seconds
@pytest.mark.parametrize("pp", ["1", "2"])
def test_the_line_of_a_plan_is_for_a_file_whose_layers_are_rows_of_stacks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, pp: str
) -> None:
    def loss(p: Any, x: Any) -> Any:
        for layer in range(4):
            x = x + np.tanh(x @ p["up"][layer]) @ p["down"][layer]
        return np.mean(x * x)

    stacks = {"up": ir.TensorType("f32", (4, 6, 10)), "down": ir.TensorType("f32", (4, 10, 6))}
    path, found, arrays = tmp_path / "loss.vcl", tmp_path / "plans.json", tmp_path / "arrays.npz"
    path.write_text(str(ir.record(loss, stacks, ir.TensorType("f32", (*ir.symbols("B"), 6)))))
    status, _, err = said(capsys, "plan", str(path), "--batch", "B=16", "--hardware", "dgx-h100", "--devices", "4",
                          "--fix", f"pp={pp}", "--fix", "zero=1", "--top", "1", "--save", str(found))
    assert (status, err) == (0, "")
    first, = json.loads(found.read_text())["plans"]
    line = shlex.split(first["command"])
    status, out, err = said(capsys, *line[3:], "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["seconds"] == first["seconds"]
    np.savez(arrays, **{"p.up": np.ones((4, 6, 10), "f4"), "p.down": np.ones((4, 10, 6), "f4"), "x": np.ones((16, 6), "f4")})
    sgd = ["--optimizer", "sgd", *line[line.index("--strategy"):], "--inputs", str(arrays)]
    assert said(capsys, "run", str(path), *sgd)[::2] == (0, "")


@pytest.mark.takes_seconds
def test_no_word_of_a_plan_is_cut(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    split = "pp=16 dp=64 cp=2 tp=8 sp zero=1 overlap interleaved_1f1bx10 recompute=selective order=dp-pp-cp-tp mb=128"
    document, other, reason = json.loads(file.read_text()), tmp_path / "other.json", "a reason " * 20 + "with its end"
    document["plans"][1]["split"] = document["front"][-1]["split"] = split
    other.write_text(json.dumps(document | {"refused": {reason: 1}}))
    out = said(capsys, "plan", "--load", str(other))[1]
    assert max(map(len, out.splitlines())) <= 80 and "..." not in out.replace(" ...\n", "\n")
    assert " ".join(out.split()).count(split) == 3 and reason in " ".join(out.split())  # table, front, why the first


@pytest.mark.takes_seconds
def test_plans_that_are_the_same_program_are_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *SMALL, *ON, "--fix", "zero=1,2", "--fix", "pp=1,2", "--fix", "tp=1", "--fix", "order=pp dp cp tp"]
    status, out, err = said(capsys, *words, "--why-not", "zero=2")
    rows = re.findall(r"^(\d) .* (pp=2 dp=2 .*|dp=4 .*)$", out[:out.index("the step by part")], re.MULTILINE)
    assert (status, err, [place for place, _ in rows]) == (0, "", ["1", "2"])
    assert {split.split(" zero")[0] for _, split in rows} == {"pp=2 dp=2", "dp=4"} and "zero=2 mb" not in out
    told = " ".join(out.split())
    assert "zero=1 and zero=2 are the same program" in told and f"the second ({rows[1][1]}) takes " in told
    assert "Why not zero=2: with zero=2 the program is that of the first plan." in told
    assert "the same program" not in said(capsys, *words, "--fix", "zero=1")[1]


def test_the_seconds_of_all_are_told_at_the_end(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, out = json.loads(file.read_text()), said(capsys, "plan", "--load", str(file))[1]
    assert document["all_seconds"] > document["elapsed_seconds"] > 0
    assert out.splitlines()[-1] == (
        f"{document['all_seconds']:.1f} s in all, {document['elapsed_seconds']:.1f} s of them the search")


@pytest.mark.parametrize(("change", "dtype", "told"), [
    ({}, "bfloat16", "bfloat16 with main copies in float32; AdamW; flash attention, a kernel that writes no scores"),
    ({"fused_attention": False}, None, "float32; AdamW; attention that writes its scores (--use-flash-attn: "),
])
def test_what_is_assumed_is_told(change: dict[str, Any], dtype: str | None, told: str) -> None:
    spec = models.TransformerSpec(layers=2, width=8, heads=2, vocabulary=4, sequence=4, **change)
    trained = TrainedModel.of(replace(spec, dtype=dtype or "float32"), ADAM_W)
    plain, stacked = (Hardware.preset(name) for name in ("dgx-h100:1", "dgx-h100:1+megatron-h100"))
    said = plan_document._assumed(spec, Task(trained, 1, plain, 1))
    assert said.startswith(told) and "stack" not in said
    assert ("67 Tflop/s for float32" in said) == (dtype is None)
    named = plan_document._assumed(spec, Task(trained, 1, stacked, 1))
    assert "; the stack megatron-h100" in named
    with_sgd = replace(trained, optimizer=SGD(0.1, 0.9))
    assert "; SGD with momentum 0.9; " in plan_document._assumed(spec, Task(with_sgd, 1, plain, 1))


def test_the_words_of_the_tables_are_explained(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "plan", "--load", str(file))[1]
    assert "(prod products, attn attention, elem other ops, upd update, " in " ".join(out.split())
    assert "mb rows of a microbatch; docs/glossary.md)" in " ".join(out.split()) and "x2 chunks" not in out
    glossary = (Path(__file__).parents[3] / "docs" / "glossary.md").read_text()
    words = {*text.NAMES.values(), *SETTINGS, "MFU", "1F1B", "mb", "zero", "bubble", "front", "gap"} - {"microbatch"}
    assert [word for word in sorted(words) if f"**{word}**" not in glossary] == []


@pytest.mark.slow
def test_the_command_of_a_plan_with_experts_over_tensor_parallelism_is_that_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "mixtral-8x7b", "--num-layers", "4", "--hardware", "dgx-h100", "--devices", "8",
             "--global-batch-size", "8"]
    out = said(capsys, *words, "--fix", "tp=2", "--fix", "experts_over=ep+tp", "--fix", "pp=1", "--top", "2", "--json")[1]
    plans = json.loads(out)["plans"]
    assert [("ep:ep+tp" in plan["strategy"], "--expert-tensor-parallel-size 1" in plan["command"]) for plan in plans] == [
        (True, True)] * 2
    for plan in plans:
        again = figures_of(plan["command"])
        assert again["seconds"] == pytest.approx(plan["seconds"], rel=1e-9) and again["peak_bytes"] == plan["peak_bytes"]


def test_what_a_cap_leaves_unproved_is_told(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(file.read_text()) | {"gap": 0.125}))
    _, out, _ = said(capsys, "plan", "--load", str(other))
    assert "the first may be up to 12.5% slower than the best: --simulations stopped" in " ".join(out.split())


@pytest.mark.slow
def test_every_plan_of_the_front_has_its_words(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    document = json.loads(file.read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(document | {"plans": document["plans"][:1]}))
    out = said(capsys, "plan", "--load", str(other), "--again")[1]
    for each in document["front"]:
        found = figures_of(f"{document['prefix']} {each['flags']}")
        assert found["peak_bytes"] == each["peak_bytes"]
        least = each["seconds"] * (1 - 1e-12)
        assert found["seconds"] == each["seconds"] if each["simulated"] else found["seconds"] >= least
        name = re.search(rf"^  (\w).* GB  {re.escape(each['split'])}$", out, re.MULTILINE)
        assert name is not None and (name[1] == "1" or re.search(rf"^   {name[1]}  --", out, re.MULTILINE))


def words_of(lines: list[str]) -> list[str]:
    """The words that a shell takes lines for; white space in them is single."""
    script = "\n".join(["printf '%s\\n' \\", *lines])
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    return [" ".join(word.split()) for word in said.splitlines()]


def test_the_lines_that_are_printed_are_commands_of_a_shell(file: Path) -> None:
    document = json.loads(file.read_text())
    for plan in document["plans"]:
        assert words_of(text._wrapped(plan["command"], "  ")) == shlex.split(plan["command"])
    regions = ",".join(f"block.{i}" for i in range(1, 40))
    command = shlex.join(["simulate", "gpt", "--strategy", f"zero=2 pp@{regions}=8 1f1b:4", "--devices", "64"])
    lines = text._wrapped(command, "    ")
    assert max(map(len, lines)) <= 80 and len(lines) > 4
    assert words_of(lines) == shlex.split(command)


@pytest.mark.slow
def test_a_plan_that_no_flags_say_has_a_strategy_as_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, *ON, "--fix", "zero=2", "--fix", "pp=2", "--fix", "tp=1", "--fix", "order=dp pp cp tp", "--json"]
    plan, = json.loads(said(capsys, "plan", *words)[1])["plans"]
    assert "--strategy" in plan["command"] and "--mesh dp=2,pp=2" in plan["command"]
    again = json.loads(said(capsys, *shlex.split(plan["command"])[3:], "--json")[1])
    assert again["seconds"] == plan["seconds"] and again["memory"] == plan["memory"]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "more"), [
    pytest.param("B", [], marks=pytest.mark.slow), ("N", ["--fix", "overlap=1"])])
def test_a_program_in_a_file_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, rows: str, more: list[str]
) -> None:
    path = tmp_path / "loss.mlir"
    path.write_text(str(models.mlp((8, 16, 4), ir.symbol(rows), dtype="float32")))
    words = [str(path), "--batch", f"{rows}=8", "--hardware", "dgx-a100", "--devices", "2", "--micro-batch-size", "2",
             "--fix", "zero=0", "--fix", "schedule=1f1b", "--fix", "recompute=none", *more, "--json"]
    status, out, _ = said(capsys, "plan", *words)
    plan = json.loads(out)["plans"][0]
    trace = tmp_path / "trace.json"
    assert status == 0 and plan["tokens_per_second"] is None and f" --size {rows}=8 " in plan["command"]
    assert said(capsys, *shlex.split(plan["command"])[3:], "--save", str(trace))[0] == 0
    loaded = Trace.load(trace)
    assert loaded.makespan_seconds == pytest.approx(plan["seconds"], rel=1e-12)
    assert max(loaded.peaks().values()) == plan["peak_bytes"]
    again = json.loads(said(capsys, *shlex.split(plan["command"])[3:], "--json")[1])
    assert again == {name: value for name, value in plan.items() if name not in ("microbatch", "command")}


@pytest.mark.slow
def test_other_symbols_of_a_program_have_sizes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "loss.mlir"
    rows, inner = ir.symbols("B S")
    path.write_text(str(models.mlp((4, inner, 4), rows, dtype="float32")))
    words = [str(path), "--batch", "B=4", "--hardware", "dgx-a100", "--devices", "1", "--micro-batch-size", "4",
             "--json"]
    assert "--size must give a value for S, as S=64" in said(capsys, "plan", *words)[2]
    plan, *_ = json.loads(said(capsys, "plan", *words, "--size", "S=24")[1])["plans"]
    again = json.loads(said(capsys, *shlex.split(plan["command"])[3:], "--json")[1])
    assert "--size S=24" in plan["command"] and again["memory"] == plan["memory"]


@pytest.mark.slow
def test_a_model_of_onnx_with_its_loss_is_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    steps = [("MatMul", ["x", "w"], "h"), ("Relu", ["h"], "r"), ("MatMul", ["r", "v"], "y"), ("Sub", ["y", "t"], "d"),
             ("Mul", ["d", "d"], "s")]
    nodes = [helper.make_node(kind, given, [result]) for kind, given, result in steps]
    nodes.append(helper.make_node("ReduceSum", ["s"], ["loss"], keepdims=0))
    of = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("batch", size))
          for name, size in (("x", 6), ("t", 4))]
    weights = [numpy_helper.from_array(np.ones(shape, np.float32), name)
               for name, shape in (("w", (6, 10)), ("v", (10, 4)))]
    graph = helper.make_graph(nodes, "net", of, [helper.make_tensor_value_info("loss", TensorProto.FLOAT, ())], weights)
    path = tmp_path / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    words = [str(path), "--hardware", "dgx-a100", "--devices", "2", "--fix", "pp=1", "--fix", "zero=0"]
    status, out, _ = said(capsys, "plan", *words, "--batch", "batch=8", "--micro-batch-size", "4", "--json")
    plans = json.loads(out)["plans"]
    assert status == 0 and {plan["strategy"] for plan in plans} >= {"dp pp 1f1b:1"}
    again = json.loads(said(capsys, *shlex.split(plans[0]["command"])[3:], "--json")[1])
    assert again["seconds"] == plans[0]["seconds"] and again["memory"] == plans[0]["memory"]
    parts = ["--batch", "batch=8", "--micro-batch-size", "2", "--fix", "tp=1"]
    of_half = json.loads(said(capsys, "plan", *words, *parts, "--frozen", "p.w", "--json")[1])["plans"][0]
    assert of_half["memory"][0]["gradients"] == 4 * 40 and of_half["memory"][0]["weights"] == 4 * 100
    assert "has no symbol B for the rows of its batch: its symbols are batch" in said(
        capsys, "plan", *words, "--batch", "B=8")[2]


@pytest.mark.slow
def test_where_nothing_fits_the_need_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--hardware dgx-a100 --devices 2 --global-batch-size 2 --fix schedule=1f1b --fix sp=0 --fix pp=1"
    usual = [*words.split(), "--fix", "recompute=none"]
    status, out, err = said(capsys, "plan", *SMALL, *usual, "--fix", "zero=0", "--fix", "tp=1", "--memory", "9KB")
    assert status == 1 and "none fits" in out and "memory" in out
    assert err.startswith("no plan fits: the smallest (dp=2 mb=1) needs ") and err.count("\n") == 1
    for words in (" of 9 kB on stage 0: ", "optimizer ", "weights ", "; with zero=1: "):
        assert words in err, words


def test_flags_of_megatron_restrict_the_search() -> None:
    spec = models.TransformerSpec(layers=8, width=8, heads=2, vocabulary=4, sequence=4)
    flags = MegatronFlags(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, micro_batch_size=4, sequence_parallel=True,
        use_distributed_optimizer=True, recompute_granularity="full", num_layers_per_virtual_pipeline_stage=2)
    assert fixed_settings(flags, spec, ["order=pp dp cp tp"]) == {
        "tp": 2, "pp": 2, "microbatch": 4, "sp": True, "zero": 1, "recompute": "full", "chunks": 2,
        "schedule": "interleaved_1f1b", "order": "pp dp cp tp"}
    assert settings(["zero=0,1", "sp=1", "schedule=gpipe"]) == {"zero": [0, 1], "sp": True, "schedule": "gpipe"}


@pytest.mark.parametrize(("text", "asked"), [
    ("tp=8", {"tp": 8}), ("zero=0,1 sp=1", {"zero": [0, 1], "sp": True}),
    ("order=dp pp cp tp", {"order": "dp pp cp tp"}),
    ("tensor-model-parallel-size=8", {"tp": 8}), ("--sequence-parallel", {"sp": True}),
    ("sequence-parallel=0 pp=2", {"sp": False, "pp": 2}), ("use-distributed-optimizer=0", {"zero": 0}),
    ("use-distributed-optimizer overlap-grad-reduce", {"zero": 1, "overlap": True}),
    ("recompute-granularity=full micro-batch-size=4", {"recompute": "full", "microbatch": 4}),
    ("pipeline-model-parallel-size=2 num-layers-per-virtual-pipeline-stage=2",
     {"pp": 2, "chunks": 2, "schedule": "interleaved_1f1b"}),
    ("num-layers-per-virtual-pipeline-stage=1", {"pp": 4, "chunks": 2, "schedule": "interleaved_1f1b"}),
])
def test_a_question_has_settings_or_flags(text: str, asked: dict[str, Any]) -> None:
    spec = models.TransformerSpec(layers=8, width=8, heads=2, vocabulary=4, sequence=4)
    assert question(text, spec, {"pp": 4}) == asked


@pytest.mark.parametrize(("text", "error"), [
    ("sequence-parallel=2", "takes no value but 0 and 1, got '2'"), ("recompute-granularity=some", "full, selective"),
    ("hidden-size=8", "a plan has no setting 'hidden-size'"), ("tensor-model-parallel-size=x", "a whole number"),
    ("tp", "a setting is a name and a value"), ("num-layers-per-virtual-pipeline-stage=3", "divide the 8 layers"),
])
def test_a_question_that_cannot_be_is_refused(text: str, error: str) -> None:
    spec = models.TransformerSpec(layers=8, width=8, heads=2, vocabulary=4, sequence=4)
    with pytest.raises(ValueError, match=error):
        checked_settings(question(text, spec, {"pp": 4}), TrainedModel.of(spec, SGD(1.0)))


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("words", "error"), [
    ("gpt2 --hardware dgx-a100 --devices 4", "--global-batch-size must say"),
    ("gpt2 --hardware dgx-a100 --global-batch-size 4", "devices"),
    ("gpt3-13bb --global-batch-size 4 --devices 4", "neither a model nor a file 'gpt3-13bb'; did you mean gpt3-13b?"),
    ("something --devices 4", "there is neither a model nor a file 'something'"),
    (f"{'a' * 300} --devices 4", "there is neither a model nor a file 'aaa"),
    ("gpt2 --devices 4",
     "the following arguments are required: --hardware; see --help; the command `hardware` lists what there is"),
    ("loss.mlir --devices 4", "the following arguments are required: --hardware; see --help"),
    ("--devices 4", "the following arguments are required: model, --hardware; see --help"),
    ("gpt2 --hardware dgx-a100 --gpus 4", "there is no option --gpus; did you mean --devices?"),
    ("gpt2 --hardware dgx-a100 --devices 4 --zero 3", "there is no option --zero; did you mean --fix zero=3?"),
    ("gpt2 --hardware dgx-a100 --devices 4 --tp=2", "there is no option --tp; did you mean --fix tp=2?"),
    ("gpt2 --hardware dgx-a100 --devices 4 --pp", "there is no option --pp; did you mean --fix pp=...?"),
    ("gpt2 --hardware dgx-a10 --devices 4 --global-batch-size 4", "did you mean 'dgx-a100'?"),
    ("gpt2 --hardware dgx-a100:2 --devices 4 --global-batch-size 4", "dgx-a100:2 has 16 devices, and 4 are asked for"),
    ("gpt2 --hardware pcie-v100 --devices 4 --global-batch-size 4", "no rate for bfloat16; give --fp32 or --fp16"),
    ("gpt2 --hardware dgx-a100 --devices 4 --global-batch-size 4 --memory lots", "memory must be a number of bytes"),
    ("gpt2 --hardware dgx-a100 --devices 4 --global-batch-size 4 --memory -5GB", "memory must be above 0 bytes and finite"),
    ("gpt2 --hardware dgx-a100 --devices 4 --global-batch-size 4 --fix ztro=1", "did you mean 'zero'?"),
    ("gpt2 --hardware dgx-a100 --devices 4 --global-batch-size 4 --fix zero", "a setting is a name and a value"),
    ("gpt2 --hardware dgx-a100 --devices 4 --global-batch-size 4 --fix zero=7", "zero must be 0, 1, 2 or 3, got 7"),
    ("gpt2 --hardware dgx-a100 --devices 4 --global-batch-size 4 --fix tp=2 --tensor-model-parallel-size 2", "both"),
    ("gpt2 --hardware dgx-a100 --devices 4 --global-batch-size 4 --recompute-method block", "--recompute-method"),
    ("gpt2 --hardware dgx-a100 --devices 4 --global-batch-size 4 --batch B=3", "--batch is for a program in a file"),
    ("gpt2 --hardware dgx-a100 --devices 4 --global-batch-size 4 --num-layers-per-virtual-pipeline-stage 2", "both"),
    ("gpt2 --hardware dgx-a100 --devices 4 --global-batch-size 4 --tpo 3", "no option --tpo; did you mean --top?"),
    ("gpt2 --hardware dgx-a100 --devices 4 --global-batch-size 4 --fix tp=3",
     "plan: no plan is possible: tp does not divide the devices (1)"),
    ("gpt2 --hardware dgx-a100 --devices 4 --global-batch-size 3 --fix dp=4",
     "no plan is possible: dp is not the one that was asked for ("),
    ("gpt2 --hardware dgx-a100 --devices 4 --global-batch-size 4 --size B=3", "--size is for a program in a file"),
    ("loss.mlir --hardware dgx-a100 --devices 4 --batch B=4 --size S=2", "@mlp has no symbol S"),
    ("loss.mlir --hardware dgx-a100 --devices 4 --batch B=4 --size S=2 --size S=3", "--size gives S twice, 2 and 3"),
    ("loss.mlir --hardware dgx-a100 --devices 4 --batch B", "and a number: B=512, got 'B'"),
    ("loss.mlir --hardware dgx-a100 --devices 4 --batch B=0", "and a number: B=512, got 'B=0'"),
    ("none.mlir --hardware dgx-a100 --devices 4 --batch B=4", "none.mlir cannot be read"),
    ("bytes.mlir --hardware dgx-a100 --devices 4 --batch B=4", "bytes.mlir is neither text in UTF-8, nor StableHLO"),
    ("loss.mlir --hardware dgx-a100 --devices 4", "--batch must give the rows of a step"),
    ("loss.mlir --hardware dgx-a100 --devices 4 --batch N=4", "@mlp has no symbol N for the rows of its batch: its "
     "symbols are B"),
    ("loss.mlir --hardware dgx-a100 --devices 4 --batch B=4 --num-layers 3", "leave out --num-layers"),
    ("fixed.mlir --hardware dgx-a100 --devices 4 --batch B=4", "a fixed number of rows cannot be dealt"),
    ("--load none.json", "none.json cannot be read"),
    ("--load loss.mlir", "loss.mlir cannot be read"),
])
def test_wrong_words_are_one_line(
    capsys: pytest.CaptureFixture[str], words: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loss.mlir").write_text(str(models.mlp((4, 4), ir.symbols("B")[0])))
    Path("fixed.mlir").write_text(str(models.mlp((4, 4), 3)))
    Path("bytes.mlir").write_bytes(bytes(range(256)))
    status, out, err = said(capsys, "plan", *words.split())
    assert (status, out) == (2, "")
    assert error in err and err.count("\n") == 1, err


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("change", "error"), [
    ({"format": "others"}, "not written by plan --save"), ({"version": 2}, "version 2, and versions up to 1 are read"),
    ({"gap": "none"}, "gap of the document must be a number"), ({"plans": [3]}, "plans must be a list of objects"),
    ({"plans": [{}]}, "strategy of a plan must be a text"), ({"refused": {"x": None}}, "x of refused must be a number"),
    ({"front": [{"split": 3}]}, "split of the front must be a text"), ({"batch": 1e999}, "batch of the document"),
    ({"why_not": [{"question": "", "answer": "", "plan": 3}]}, "a plan must be an object"),
])
def test_a_file_that_is_none_of_plans_is_refused(
    change: dict[str, Any], error: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(file.read_text()) | change))
    status, out, err = said(capsys, "plan", "--load", str(other))
    assert (status, out) == (2, "") and error in err


def test_a_file_from_before_overlap_and_words_of_the_front_is_read(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(file.read_text())
    for each in document["front"]:
        del each["flags"], each["simulated"]
    document["all"]["names"].remove("overlap")
    del document["all"]["columns"]["overlap"]
    other, page = tmp_path / "other.json", tmp_path / "page.html"
    other.write_text(json.dumps(document))
    status, out, err = said(capsys, "plan", "--load", str(other), "--html", str(page))
    assert (status, err) == (0, "") and "no plan is both faster and smaller" in out and page.stat().st_size > 10_000


def test_the_page_has_all_plans_and_what_was_asked(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plans.html"
    status, out, _ = said(capsys, "plan", "--load", str(file), "--html", str(page))
    assert status == 0 and out.endswith(f"The page is {page}\n")
    text = page.read_text()
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    document = json.loads(file.read_text())
    assert data["plans"] == document["all"] and len(data["plans"]["seconds"]) == document["timed"]
    assert data["best"]["rows"] == document["plans"] and data["front"][0] == 0
    assert data["verdict"][0].startswith("Best: ") and data["answers"][1][0].startswith("Why not tp=8")
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.slow
def test_stages_of_different_sizes_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "loss.mlir"
    path.write_text(str(models.mlp((8, 16, 32, 4), ir.symbol("B"))))
    once: Any = cache(lambda **asked: find_slicing(asked.pop("model"), **asked))     # the same search for both
    monkeypatch.setattr(sliced, "find_slicing", lambda model, progress, **asked: once(model=model, **asked))
    words = ["plan", str(path), "--batch", "B=4", "--hardware", "dgx-a100", "--devices", "3", "--slices", "2", "--top",
             "2"]
    status, out, err = said(capsys, *words)
    assert (status, err) == (0, "") and "on 3 devices of dgx-a100, 4 rows in 2 microbatches" in out
    found = json.loads(said(capsys, *words, "--json")[1])
    assert [each["simulated"] for each in found["plans"]] == [True, True]
    assert found["plans"][0]["seconds"] <= found["plans"][1]["seconds"]
    for each in found["plans"]:
        assert sum(prod(own["mesh"].values()) for own in each["stages"]) == 3
        assert each["stages"][0]["first_block"] == 0
    assert f"as the text of a strategy:\n  {found['plans'][0]['strategy']}\n" in out


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("more", "status", "told"), [
    (("--slices", "3"), 2, "batch must be a multiple of the 3 microbatches, got 8"),
    (("--slices", "4", "--auto"), 2, "--auto and --slices are two searches; leave one out"),
    (("--slices", "4", "--verify"), 2, "--verify is for plans of strategies; leave it out with --slices"),
    (("--slices", "4", "--tensor-model-parallel-size", "2"), 2, "--slices finds stages and their meshes itself; leave "
                                                                 "out --tensor-model-parallel-size"),
    (("--slices", "4", "--memory", "2kB", "--devices", "1", "--num-layers", "1"), 1,
     "the one that needs least, in 1 stage, needs 119 kB for blocks 0 to 0 on 1 device"),
])
def test_slices_that_cannot_be(
    more: tuple[str, ...], status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", *SMALL, "--hardware", "dgx-a100", "--devices", "4", "--global-batch-size", "8"]
    got, out, err = said(capsys, *words, *more)
    assert (got, out) == (status, "") and told in " ".join(err.split()) and len(err.splitlines()) == 1


@pytest.mark.takes_seconds
def test_json_has_what_was_asked_beside_the_plans(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(said(capsys, "plan", "--load", str(file), "--json", "--again")[1])
    first, second = found["why_not"]
    assert first["question"] == "pp=1" and first["answer"].startswith("the best plan with pp=1 (dp=4")
    assert first["plan"]["seconds"] > found["plans"][0]["seconds"] and "split" not in first["plan"]
    assert second["question"] == "tp=8" and second["answer"].startswith("no plan has tp=8") and "plan" not in second
    assert found["front"] and found["assumed"].startswith("bfloat16 with main copies in float32; AdamW; ")
    text = " ".join(said(capsys, "plan", "--load", str(file))[1].split())
    assert f"Why not pp=1: {first['answer']}." in text and f"Why not tp=8: {second['answer']}." in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("words", "told"), [
    ("gpt2", "leave out gpt2"), ("--hardware dgx-a100", "leave out --hardware"), ("--fix tp=2", "leave out --fix"),
    ("--why-not tp=2", "leave out --why-not"), ("--num-layers 3", "leave out --num-layers"),
    ("--lr 0.1", "leave out --lr"), ("--verify", "leave out --verify"), ("--slices 2", "leave out --slices"),
])
def test_a_load_takes_no_words_of_a_search(
    file: Path, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    status, out, err = said(capsys, "plan", "--load", str(file), *words.split())
    assert (status, out) == (2, "") and err.endswith(f"without a search; {told}\n")


@pytest.mark.parametrize(("words", "told"), [
    ("--fix tp=2 --fix tp=4", "tp is given twice; several values of a setting are one list, as tp=1,2"),
    ("--fix zero=0 --fix zero=0", "zero is given twice"),
    ("--why-not|tp=2 tp=4", "--why-not gives tp twice"),
])
def test_a_setting_that_is_given_twice_is_refused(capsys: pytest.CaptureFixture[str], words: str, told: str) -> None:
    status, out, err = said(capsys, "plan", *SMALL, *ON, *(words.split("|") if "|" in words else words.split()))
    assert (status, out) == (2, "") and told in err and err.count("\n") == 1


@pytest.mark.takes_seconds
@pytest.mark.sampled(6)
@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(("name", "near"), [
    ("qwen9-8b", "did you mean qwen3-8b"), ("someone/no-such-model", "the models are gpt"), ("llama4", "llama3-8b"),
    ("lama2-7", "did you mean llama2-7b or "), ("gpt3.5", " or gpt3-"), ("llama-13", "did you mean llama-13b?"),
])
def test_a_model_that_there_is_not_is_told_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str], command: str, name: str, near: str
) -> None:
    for more in ((), ("--global-batch-size", "64"), ("--hardware", "dgx-h100", "--devices", "8")):
        status, out, err = said(capsys, command, name, *more)
        assert (status, out) == (2, "")
        assert f"there is neither a model nor a file {name!r}" in err and near in err and err.count("\n") == 1


@pytest.mark.takes_seconds
def test_a_file_that_is_missing_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ((), ("--global-batch-size", "64"), ("--hardware", "dgx-h100", "--devices", "8")):
        status, _, err = said(capsys, "plan", "nowhere.mlir", *more)
        assert status == 2 and "nowhere.mlir cannot be read: No such file or directory" in err


@pytest.mark.slow
def test_the_optimizer_of_a_transformer_counts(capsys: pytest.CaptureFixture[str]) -> None:
    def peak(*words: str) -> int:
        status, out, err = said(capsys, "plan", *SEARCH, "--fix", "dp=4", "--json", *words)
        assert status == 0 and "without effect" not in err
        first = json.loads(out)["plans"][0]
        assert figures_of(first["command"]) == {
            name: value for name, value in first.items() if name not in ("microbatch", "command")}
        return int(first["peak_bytes"])

    adam, sgd = peak("--optimizer", "adam"), peak("--optimizer", "sgd")
    assert adam > sgd > peak("--optimizer", "sgd", "--sgd-momentum", "0")
    for command in (["plan", *SEARCH], ["simulate", *SMALL, "--hardware", "dgx-a100", "--devices", "4"]):
        status, _, err = said(capsys, *command, "--optimizer", "lion")
        assert status == 2 and "--optimizer must be one of adam, sgd, got 'lion'" in err
    words = [*SMALL, "--hardware", "dgx-a100", "--devices", "4", "--sgd-momentum", "0.5"]
    status, _, err = said(capsys, "simulate", *words)
    assert status == 0 and "without effect on a simulated step: --sgd-momentum" in err


@pytest.mark.takes_seconds
def test_the_optimizer_of_a_program_has_its_own_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, = ir.symbols("B")
    loss = ir.record(lambda p, x: ((x @ p["w"]) ** 2).sum(), {"w": ir.TensorType("f32", (6, 4))},
                     ir.TensorType("f32", (rows, 6)))
    path = tmp_path / "loss.mlir"
    path.write_text(str(loss))
    words = ["plan", str(path), "--batch", "B=8", "--hardware", "dgx-a100", "--devices", "1", "--json",
             "--fix", "recompute=none", "--fix", "microbatch=8"]
    for more, told in (((), "adamw:0.0001"), (("--optimizer", "sgd:0.5"), "sgd:0.5")):
        status, out, _ = said(capsys, *words, *more)
        assert status == 0 and f"--optimizer {told}" in json.loads(out)["plans"][0]["command"]
    status, _, err = said(capsys, *words, "--optimizer", "lion")
    assert status == 2 and "--optimizer: there is no 'lion'; there is sgd, adam, adamw" in err


@pytest.mark.slow
def test_a_preset_without_a_number_says_how_many_devices_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", *SMALL, "--global-batch-size", "1120"]
    status, out, err = said(capsys, *words, "--hardware", "dgx-a100")
    assert status == 0 and "1120 devices of dgx-a100" in out
    assert err == "without --devices all 1120 devices of dgx-a100 are used\n"
    for more in (("--hardware", "dgx-a100", "--devices", "4"), ("--hardware", "dgx-a100:1")):
        assert said(capsys, *words, *more)[2] == ""


@pytest.mark.takes_seconds
@pytest.mark.sampled(4, 3)
@pytest.mark.parametrize(("words", "context", "told"), [
    ((), 1.07e9, "80.0 GB each, with a reserve of 1.07 GB a process, 300 MB a communicator, 8 % of what tensors hold"),
    (("--reserve", "4GB"), 4e9, "80.0 GB each, with a reserve of 4 GB a process"), (("--memory", "70GB"), 0, "70.0 GB each"),
    (("--memory", "70GB", "--reserve", "1GB"), 1e9, "70.0 GB each, with a reserve of 1 GB a process")])
def test_the_reserve_is_told(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], context: float, told: str
) -> None:
    asked = [*SMALL, *ON, "--fix", "zero=0", "--fix", "pp=1", "--fix", "tp=1", *words]
    status, out, _ = said(capsys, "plan", *asked)
    assert status == 0 and told in " ".join(out.split())
    reserve = json.loads(said(capsys, "plan", *asked, "--json")[1]).get("reserve", {})
    assert reserve.get("context_bytes", 0) == context


@pytest.mark.takes_seconds
def test_weights_of_a_program_in_a_file_are_frozen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "loss.mlir"
    path.write_text(str(models.mlp((64, 32, 16), ir.symbol("B"), dtype="float32")))
    words = ["--batch", "B=8", "--hardware", "dgx-a100", "--devices", "1", "--fix", "recompute=none", "--fix", "microbatch=4"]
    status, out, _ = said(capsys, "plan", str(path), *words, "--frozen", "p.w0,p.b0", "--json")
    plan, *_ = json.loads(out)["plans"]
    assert status == 0 and plan["memory"][0]["gradients"] == 4 * (32 * 16 + 16) and "--frozen p.w0,p.b0" in plan["command"]
    again = json.loads(said(capsys, *shlex.split(plan["command"])[3:], "--json")[1])
    assert again["memory"] == plan["memory"] and again["seconds"] == plan["seconds"]
    for more, told in ((["plan", str(path), *words, "--frozen", "p.w7"], "has no input 'p.w7' to freeze; did you mean 'p.w"),
                       (["plan", str(path), *words, "--frozen", "p"], "has no floating-point input 'p.w' to train; it has"),
                       (["plan", "gpt2", "--global-batch-size", "8", *words[2:], "--frozen", "p"],
                        "a model by its name has --lora-rank"),
                       (["simulate", str(path), "--size", "B=8", "--hardware", "dgx-a100", "--frozen", "p.w0"],
                        "--frozen says what a step does not train: it needs --optimizer")):
        status, _, err = said(capsys, *more)
        assert status == 2 and told in err, err


@pytest.mark.parametrize(("name", "content", "told"), [
    ("model.onnx", b"", "model.onnx is empty"),
    ("model.onnx", b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "`git lfs pull` fetches it"),
    ("train.py", b"import torch\n", "train.py is a script of Python, which is not run here"),
    ("model.pt", b"PK\x03\x04\x00", "model.pt has the format of PyTorch or NumPy, of weights and not of programs"),
    ("model.pkl", b"\x80\x04K\x01.", "model.pkl has the format of Python's pickle, of weights"),
    ("model.safetensors", b"\x08\x00{}", "model.safetensors has weights and no program"),
])
def test_a_file_that_people_take_for_a_program_is_named(
    capsys: pytest.CaptureFixture[str], name: str, content: bytes, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    status, out, err = said(capsys, "plan", name, "--hardware", "dgx-a100", "--devices", "4", "--batch", "B=4")
    assert (status, out) == (2, "") and err.count("\n") == 1 and told in err


def test_a_program_in_a_file_with_the_suffix_of_a_script_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loss.py").write_text(str(models.mlp((4, 4), 3)))
    status, out, err = said(capsys, "show", "loss.py")
    assert (status, err) == (0, "") and "func @mlp" in out
