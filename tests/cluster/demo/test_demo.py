"""The demos as people run them: what is printed, that it fits, and how they end."""

from __future__ import annotations

import dataclasses
import os
import pty
import re
import runpy
import subprocess
import sys
import threading
from contextlib import redirect_stdout, suppress
from io import StringIO

import numpy as np
import pytest
from paths import ROOT

from parallelism.algorithms import COLLECTIVES
from parallelism.trace import Trace
from tensor_parallelism.products import matmul as operators
from vcluster.cli.command_line import serve
from vcluster.demo import __main__ as command, attention, collectives, ffn, gpt, mlp, moe


def demo(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The demo in a process of its own, its output piped."""
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")}
    return subprocess.run(
        [sys.executable, "-m", "vcluster.demo", *words], cwd=ROOT, env={**clean, **environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )


def here(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, str]:
    """The demo in this process: its exit status and what it prints."""
    status = serve(command.PROGRAM, command.main, text.split())
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    return status, out


def difference(out: str) -> float:
    return float(re.search(r" ok  largest difference from the same training in one process: (\S+)", out)[1])


@pytest.fixture(scope="module", params=["16 steps", pytest.param("", marks=pytest.mark.slow)])
def main_demo(request, tmp_path_factory):
    """The main demo: what it prints, and the files of its trace and its page.

    By itself it takes more steps, in a process of its own.
    """
    folder = tmp_path_factory.mktemp("main")
    trace, page = folder / "step.json", folder / "step.html"
    words = ["mlp", "--pp", "4", "--trace", str(trace), "--html", str(page)]
    if not request.param:
        run = demo(*words)
        assert (run.returncode, run.stderr) == (0, "")
        return run.stdout, trace, page
    with redirect_stdout(StringIO()) as out:
        assert serve(command.PROGRAM, command.main, [*words, "--steps", request.param.split()[0]]) == 0
    return out.getvalue(), trace, page


@pytest.mark.slow
def test_the_main_demo_ends_in_the_pipelines_verdict(main_demo):
    out, trace, page = main_demo
    lines = out.splitlines()
    assert "\x1b" not in out
    assert max(map(len, lines)) <= 80 or str(trace) in max(lines, key=len)
    assert difference(out) < 1e-12
    assert float(re.search(r"test accuracy (\S+)%", out)[1]) > 90
    assert "(P-1)/(M+P-1) = 27.3% for equal stages" in out
    assert len(re.findall(r"^  step +\d+/\d+  loss ", out, re.MULTILINE)) == 5
    pids = [line.split()[-1] for line in lines if re.match(r"  r\d +pp=\d", line)]
    assert len(set(pids)) == 4
    rows = [line for line in lines if re.match(r"rank \d  ", line)]
    assert len(rows) == 4
    for row in rows:  # a forward is a digit, a backward a letter: told apart without colour
        assert re.search("[0-7]", row[6:])  # (which of them have a column depends on the machine)
        assert re.search("[a-h]", row[6:])
    for cut in ("r0 -> r1", "r1 -> r0", "r2 -> r3", "r3 -> r2"):
        assert any(line.strip().startswith(cut) for line in lines)
    recorded = Trace.load(trace)
    assert recorded.size == 4
    assert recorded.count("2F0") == recorded.count("0B7") == 1
    assert f"The trace of that step is in {trace}\n\nThe page of that step is in {page}\n" in out
    assert "8 microbatches" in out and '"2F0"' in page.read_text()


@pytest.mark.slow
def test_the_page_of_demos_shows_it_as_it_is(main_demo):
    page = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    shown = page.split("## What the demo prints")[1].split("```text\n")[1].split("```")[0]
    headings = lambda text: [line for line in text.splitlines() if line[:1].isalpha() and ":" not in line[:20]]
    assert [h for h in headings(shown) if not h.startswith("rank")] == [
        h for h in headings(main_demo[0].split("\nThe trace of that step")[0]) if not h.startswith("rank")
    ]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "words",
    [
        "--pp 1", "--pp 4 --microbatches 2 --schedule gpipe", "--pp 2 --dp 2", "--dp 3", "--pp 6 --hidden 9,8,7,6,5",
        "--pp 2 --schedule zero_bubble_v", "--pp 2 --schedule interleaved_zero_bubble --hidden 9,8,7",
        "--pp 3 --schedule interleaved_1f1b --chunks 3", "--pp 2 --schedule local", "--pp 2 --schedule pipedream_2bw",
        "--pp 2 --dp 2 --schedule pipedream",
    ],
)
def test_every_mesh_trains_as_one_process_does(capsys, words):
    status, out = here(capsys, f"mlp {words} --steps 2 --backend thread")
    assert status == 0
    assert difference(out) < 1e-12


def test_the_users_own_data_classes_and_values(capsys, tmp_path):
    x = np.random.default_rng(0).standard_normal((60, 3))
    np.savez(tmp_path / "classes.npz", x=x, y=(x[:, 0] > 0).astype(int))
    status, out = here(capsys, f"mlp --pp 2 --hidden 8,8 --steps 3 --backend thread --data {tmp_path / 'classes.npz'}")
    assert status == 0
    assert "of 12 rows not used for training" in out
    np.savez(tmp_path / "values.npz", x=x, y=x @ [1.0, -2.0, 0.5])
    status, out = here(capsys, f"mlp --pp 2 --hidden 8,8 --steps 3 --backend thread --data {tmp_path / 'values.npz'}")
    assert status == 0
    assert "as a fraction of the variance of y" in out


def test_a_training_that_runs_away_is_exit_status_1(capsys):
    status, out = here(capsys, "mlp --pp 2 --hidden 8,8 --steps 6 --learning-rate 1e9 --backend thread")
    assert status == 1
    assert " NO  the training diverged" in out


def test_a_pipeline_whose_numbers_are_wrong_is_exit_status_1(capsys, monkeypatch):
    honest = mlp.largest_difference
    monkeypatch.setattr(mlp, "largest_difference", lambda a, b: honest(a, b) + 1e-6)
    status, out = here(capsys, "mlp --pp 2 --hidden 8,8 --steps 1 --backend thread")
    assert status == 1
    assert " NO  largest difference" in out


@pytest.fixture
def short_lines(monkeypatch):
    """Texts that a GPT goes on with for a few bytes only."""
    monkeypatch.setattr(gpt, "WIDTH", 66)


PROMPT = "of_a_line_this_long_there_is_not_much_that_is_left_to_be_written"
SMALL_GPT = f"--steps 2 --rows 5 --width 8 --heads 2 --microbatches 2 --prompt {PROMPT}"


@pytest.mark.slow
@pytest.mark.usefixtures("short_lines")
@pytest.mark.parametrize(
    "words",
    [
        "--dp 2 --pp 2 --schedule zbv", pytest.param("--dp 2 --pp 2 --tp 2 --schedule zbv", marks=pytest.mark.slow),
        pytest.param("--tp 2", marks=pytest.mark.slow),
        pytest.param("--dp 2 --pp 2 --schedule gpipe", marks=pytest.mark.slow),
        pytest.param("--dp 3 --pp 2 --tp 2 --blocks 3", marks=pytest.mark.slow),
    ],
)
def test_a_gpt_learns_what_it_learns_in_one_process_by_the_closed_forms_bytes(capsys, words):
    status, out = here(capsys, f"gpt {words} {SMALL_GPT} --backend thread")
    assert status == 0
    assert out.count(" ok ") == 3
    assert float(re.search(r"largest difference from the losses of one process: (\S+)", out)[1]) < 1e-9
    assert [axis for axis in ("dp", "tp") if re.search(rf"all_reduce +{axis}", out)] == [
        axis for axis in ("dp", "tp") if f"--{axis}" in words]


@pytest.mark.slow
@pytest.mark.usefixtures("short_lines")
@pytest.mark.parametrize("dp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_gpt_demo_on_processes_ends_with_a_line_that_it_wrote(capsys, tmp_path, dp):
    trace = tmp_path / "step.json"
    words = f"gpt {f'--dp {dp}' * (dp > 1)} --pp 2 --tp 2 {SMALL_GPT} --trace"
    assert serve(command.PROGRAM, command.main, [*words.split(), str(trace)]) == 0
    out = capsys.readouterr().out
    assert out.count(" ok ") == 3
    rows = re.findall(r"^  r\d +pp=(\d)(?: dp=\d)? tp=\d +(\S.*?) +1 of 2 +([\d,]+) +(\d+)$", out, re.MULTILINE)
    assert [row[:2] for row in rows] == [("0", "embedding, block 1")] * 2 * dp + [("1", "block 2, head")] * 2 * dp
    assert len({row[3] for row in rows}) == 4 * dp
    step = Trace.load(trace)
    sent = 2 * 2 * 5 * 32 * 8 * 8
    assert re.search(rf"messages +pp +{8 * dp} +{sent:,} +activations, gradients back", out)
    assert step.filter(kind="send").bytes_sent() == sent
    assert re.search(r"all_reduce +tp", out)
    assert dp == 1 or re.search(r"all_reduce +dp", out)
    assert out.splitlines()[-1].startswith(f"  {PROMPT[-60:]}|")
    assert max(len(line) for line in out.splitlines() if str(trace) not in line) <= 80


@pytest.mark.slow
@pytest.mark.usefixtures("short_lines")
def test_a_gpt_with_wrong_numbers_or_bytes_is_exit_status_1(capsys, monkeypatch):
    honest, train = gpt.expected_bytes, gpt.train
    monkeypatch.setattr(gpt, "expected_bytes", lambda job: {**honest(job), "tp": 1})
    status, out = here(capsys, f"gpt --tp 2 {SMALL_GPT} --steps 1 --backend thread")
    assert (status, out.count(" NO ")) == (1, 1)
    assert "each axis does NOT equal its closed form" in out
    monkeypatch.setattr(gpt, "expected_bytes", honest)
    other = lambda model, *rest: train(dataclasses.replace(model, seed=model.pipeline.microbatches), *rest)
    monkeypatch.setattr(gpt, "train", other)
    status, out = here(capsys, f"gpt --pp 2 {SMALL_GPT} --steps 1 --backend thread")
    assert status == 1
    assert " NO  largest difference from the losses of one process" in out


@pytest.mark.slow
@pytest.mark.usefixtures("short_lines")
def test_a_gpt_that_runs_away_is_exit_status_1(capsys):
    status, out = here(capsys, f"gpt --pp 2 {SMALL_GPT} --steps 4 --learning-rate 9 --backend thread")
    assert status == 1
    assert " NO  the training diverged" in out


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--tp 2 --pp 2", "--dp 2 --temperature 0", "--tp 4 --prompt A"])
def test_what_devices_generate_is_what_one_process_does(capsys, words):
    status, out = here(capsys, f"generate --backend thread --steps 2 --tokens 5 {words}")
    assert status == 0 and "ok  the tokens are those of one process" in out
    assert "What the devices wrote" in out and "rank 1" in out


@pytest.mark.parametrize(("words", "message"), [
    ("--pp 3", "2 layers cannot be dealt to 3 stages"), ("--tokens 0", "needs a whole number from 1 to 160"),
    ("--temperature -1", "needs a number above 0"), ("--tokens 160 --prompt " + "A" * 40, "at most 192"),
])
def test_wrong_words_of_generate_are_told(words, message, capsys):
    assert serve(command.PROGRAM, command.main, ["generate", *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_gpt_of_the_issue_learns_on_eight_processes():
    run = demo("gpt", "--dp", "2", "--pp", "2", "--tp", "2", "--steps", "30")
    assert (run.returncode, run.stderr) == (0, "")
    assert max(map(len, run.stdout.splitlines())) <= 80
    assert float(re.search(r"(\S+) before the last", run.stdout)[1]) < 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "words",
    [
        ("mlp", "--pp", "0"), ("mlp", "--pp", "5"), ("mlp", "--schedule", "1f1c"), ("mlp", "--data", "missing.npz"),
        ("mlp", "--data", "README.md"), ("mlp", "--trace", "/nonexistent/trace.json"),
        ("mlp", "--html", "/nonexistent/page.html"), ("mlp", "--trace", "no-such", "--html", "no-such"),
        ("matmul", "--tp", "x"),
        ("gpt", "--pp", "9"), ("ffn", "--shape", "1,2"), ("reshard", "[x", "[x]"), ("reshard", "[x]"),
    ],
)
def test_wrong_words_end_with_status_2_and_one_line(capsys, words):
    assert serve(command.PROGRAM, command.main, words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("python -m vcluster.demo")
    assert err.count("\n") == 1


def test_the_program_that_serves_wrong_words_ends_so(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vcluster.demo", "mlp", "--pp", "5"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(command.__file__, run_name="__main__")
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.sampled(18, 1)
@pytest.mark.parametrize("devices", [1, 3, 4])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_every_collective_runs_as_it_is_explained(capsys, kind, devices):
    status, out = here(capsys, f"collectives --collective {kind} --devices {devices} --backend thread")
    assert status == 0
    assert " NO " not in out


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_collectives_demo_says_on_processes_what_was_received(capsys, alone):
    words = "collectives --devices 4 --algorithm ring"
    if alone:
        run = demo(*words.split())
        assert run.stderr == ""
        status, out = run.returncode, run.stdout
    else:
        status, out = here(capsys, words)
    assert status == 0
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= 80
    assert "6 steps" in out
    assert "192 bytes received, on each device as above" in out  # 2 (g - 1) S = 2 x 3 x 32


def test_a_collective_that_moves_other_bytes_is_exit_status_1(capsys, monkeypatch):
    monkeypatch.setattr(collectives, "_run", lambda device, x, collective, name, pairs: device.all_reduce(x))
    status, out = here(capsys, "collectives --algorithm naive --backend thread")
    assert status == 1
    assert "NOT as above" in out


@pytest.mark.slow_for("tp 32")
@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "words",
    ["--policy unsharded --tp 2", "--policy matched_inner --tp 3 --shape 4,7,5", "--policy outer", "--tp 1",
     "--policy outer --dp 3 --tp 2 --shape 4,7,5", "--policy matched_inner --tp 4 --shape 1,2,1",
     "--policy full --mesh x=2,y=4", "--policy unmatched_inner --mesh row=3,column=2 --shape 5,7,4",
     "--policy full --tp 2 --dp 3 --shape 7,5,9", "--policy matched_inner --mesh x=2,y=3 --shape 3,7,5",
     "--policy general --tp 3", "--policy general --mesh x=2,y=2 --shape 9,2,3", "--policy matched_inner --tp 32"],
)
def test_every_policy_gives_numpys_product_and_the_closed_forms_bytes(capsys, words):
    status, out = here(capsys, f"matmul {words} --backend thread")
    assert status == 0
    assert out.count(" ok ") == 2


@pytest.mark.slow
def test_the_matmul_demo_draws_its_tensors_and_says_who_moved_what_on_processes(capsys):
    status, out = here(capsys, "matmul --policy full --mesh x=2,y=4")
    assert status == 0
    assert "across: dim 1 over y" in out
    assert "all_gather  over y  dim 1  48x30 -> 48x120  276480 bytes" in out
    assert re.search(r"r5 +48x30 +60x18 +48x18 +207,360 +43,200 +r1 r4 r6 r7", out)
    assert "(Y-1) |A| + (X-1) |B|" in out


def test_a_wrong_product_is_exit_status_1(capsys, monkeypatch):
    forgets = lambda device, plan, a, b: plan.task.contraction.run(device, a, b)  # the sum is forgotten
    monkeypatch.setattr(operators, "run_product", forgets)
    status, out = here(capsys, "matmul --tp 2 --backend thread")
    assert status == 1
    assert out.count(" NO ") == 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "words",
    ["--policy unsharded --tp 2", "--tp 1", "--policy megatron --tp 3 --activation relu", "--policy sequence",
     "--policy sequence --dp 2 --tp 2 --shape 3,5,7,9", "--policy gspmd_2d --mesh x=3,y=2 --shape 4,3,5,7",
     "--policy megatron --mesh a=2,b=2 --shape 1,1,2,3"],
)
def test_a_feed_forward_block_is_that_of_one_process(capsys, words):
    status, out = here(capsys, f"ffn {words} --backend thread")
    assert status == 0
    assert out.count(" ok ") == 2


def test_a_feed_forward_block_with_wrong_numbers_is_exit_status_1(capsys, monkeypatch):
    honest = ffn.in_one_process
    monkeypatch.setattr(ffn, "in_one_process", lambda *given: [x + 1e-6 for x in honest(*given)])
    status, out = here(capsys, "ffn --tp 2 --backend thread")
    assert status == 1
    assert out.count(" NO ") == 1


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "words", ["", "--ep 1", "--ep 4 --top-k 1 --capacity 0.5", "--dp 2 --ep 3 --experts 7 --shape 3,5,4,3",
              "--ep 8 --experts 3 --shape 1,5,2,2"],
)
def test_a_mixture_of_experts_is_that_of_one_process(capsys, words):
    status, out = here(capsys, f"moe {words} --backend thread")
    assert status == 0
    assert out.count(" ok ") == 3


def test_the_moe_demo_on_processes(capsys):
    status, out = here(capsys, "moe --ep 2 --shape 1,5,3,4")
    assert status == 0
    assert out.count(" ok ") == 3


def test_the_mixture_says_who_goes_where_and_who_finds_no_room(capsys):
    status, out = here(capsys, "moe --ep 3 --experts 3 --top-k 1 --capacity 0.5 --shape 1,7,4,4 --backend thread")
    assert status == 0
    assert "an expert takes at most 2 of the 7 choices" in out
    rows = [line.split() for line in out.splitlines() if re.match(r" +\d +r\d", line)]
    told = [[int(word.strip("()")) for word in row[4:]] for row in rows]
    assert [row[1] for row in rows] == ["r0", "r1", "r2"]
    assert sorted(token for tokens in told for token in tokens) == list(range(7))
    for row, tokens in zip(rows, told, strict=True):
        assert (int(row[2]), int(row[3])) == (min(2, len(tokens)), max(0, len(tokens) - 2))
        assert [word for word in row[4:] if word.startswith("(")] == [f"({token})" for token in tokens[2:]]


def test_a_mixture_of_experts_with_wrong_numbers_is_exit_status_1(capsys, monkeypatch):
    honest = moe.in_one_process
    monkeypatch.setattr(moe, "in_one_process", lambda *given: [x + 1e-6 for x in honest(*given)])
    status, out = here(capsys, "moe --ep 2 --backend thread")
    assert status == 1
    assert out.count(" NO ") == 1


@pytest.mark.sampled(9, 3)      # of a ring there is another below
@pytest.mark.parametrize(
    "words",
    ["--policy unsharded", "--policy megatron --tp 2 --full", "--policy sequence --tp 3 --shape 2,7,6,3",
     "--policy ulysses --cp 3 --shape 1,7,4,3 --kv-heads 1", "--policy megatron_ring --zigzag --kv-heads 2 --dp 2 "
     "--cp 2 --tp 2", "--cp 4 --shape 1,30,2,4", "--cp 9 --shape 1,5,2,2", "--mesh cp=1", "--cp 8 --shape 1,60,2,4"],
)
def test_attention_is_that_of_one_process(capsys, words):
    status, out = here(capsys, f"attention {words} --backend thread")
    assert status == 0
    assert out.count(" ok ") == (3 if "policy" not in words or "ring" in words else 2)


@pytest.mark.slow
def test_the_attention_demo_draws_whose_keys_are_where_and_compares_policies_on_processes(capsys):
    status, out = here(capsys, "attention --policy ring --cp 4 --zigzag")
    assert status == 0
    assert re.search(r"r1 +2:4 12:14 +0:4 +0:4 +b +a +d +c +36\n", out)
    assert "A: 0:2 14:16  B: 2:4 12:14  C: 4:6 10:12  D: 6:8 8:10" in out
    assert re.search(r"zigzag +cp=4 +49,152 +294,912 +\d+,\d+ +512 +1.0\n", out)
    assert "at most 8,192 bytes of keys and values held; two blocks are 8,192" in out


def test_attention_with_wrong_numbers_is_exit_status_1(capsys, monkeypatch):
    honest = attention.in_one_process
    monkeypatch.setattr(attention, "in_one_process", lambda *given, **how: [x + 1e-6 for x in honest(*given, **how)])
    status, out = here(capsys, "attention --cp 2 --backend thread")
    assert status == 1
    assert out.count(" NO ") == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "words",
    [("[x, None]", "[None, x]"), ("[x, y]", "[y, x]", "--mesh", "x=2,y=3", "--shape", "7,5"),
     ("[None, None] partial=x", "[x, None]"), ("[x]", "[x]"), ("[]", "[]"), ("I_x, J", "I, J_x"),
     ("[S(0), R]", "[R, S(1)]", "--mesh", "x=2,y=2", "--shape", "5,4"), ("[(x, y), None]", "[y, x]")],
)
def test_a_tensor_gets_from_one_layout_to_another_as_planned(capsys, words):
    assert command.main(["reshard", *words, "--backend", "thread"]) == 0
    out = capsys.readouterr().out
    assert out.count(" ok ") == 2
    assert max(map(len, out.splitlines())) <= 80


def test_the_reshard_demo_on_processes(capsys):
    assert command.main(["reshard", "[x, None]", "[None, x]"]) == 0
    out = capsys.readouterr().out
    assert "all_to_all  over x  dim 0 -> dim 1  4x6 -> 8x3  192 bytes" in out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_gets_a_bar_and_colour_unless_no_color(monkeypatch, no_color):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    host, terminal = pty.openpty()
    seen = []

    def read():
        with suppress(OSError):     # Linux's way to say that the other end is closed
            while chunk := os.read(host, 65536):
                seen.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    with monkeypatch.context() as patch, os.fdopen(terminal, "w", encoding="utf-8") as screen:
        patch.setattr(sys, "stdout", screen)
        patch.setattr(sys, "stderr", screen)
        words = "mlp --pp 2 --hidden 8,9 --steps 2 --backend thread"
        status = serve(command.PROGRAM, command.main, words.split())
    reader.join()
    os.close(host)
    seen = b"".join(seen)
    assert status == 0
    assert "━".encode() in seen  # the bar
    coloured = re.search(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-7]|9[0-7]|38;[25];[0-9;]+)m", seen)
    assert bool(coloured) != no_color


@pytest.mark.slow
def test_mlp_says_what_a_step_would_take_elsewhere(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out = here(
        capsys, "mlp --pp 3 --dp 3 --hidden 9,8 --steps 1 --backend thread --hardware dgx-h100:2 --trace there.json")
    assert status == 0
    for words in ("on dgx-h100", "step time", "exposed communication", "bubble", "a node is 8 devices joined by nvlink",
                  "axes that leave a node pp (over infiniband), dp (over infiniband)\n"):
        assert words in out
    trace = Trace.load("there.json")
    assert trace.hardware == "dgx-h100" and trace.compute == "modelled" and trace.makespan_seconds > 0
    status, out = here(capsys, "mlp --pp 2 --hidden 8 --steps 1 --backend thread --hardware tpu-v4")
    assert status == 0 and "axes that leave a node none\n" in out and "priced as              bfloat16" in out


@pytest.mark.sampled(6, 1)
@pytest.mark.slow_for("attention")
@pytest.mark.parametrize(("words", "leaving"), [
    ("matmul --policy outer --dp 3 --tp 4", "dp (over infiniband)"), ("ffn --dp 2 --tp 2", "none"),
    ("attention --dp 2 --cp 8", "dp (over infiniband)"), (f"gpt --pp 2 {SMALL_GPT} --steps 1", "none"),
    ("moe --dp 2 --ep 5", "dp (over infiniband), ep (over infiniband)"), ("reshard [x,_] [_,x]", "none"),
])
def test_every_demo_of_a_model_says_what_it_would_take_elsewhere(capsys, words, leaving):
    status, out = here(capsys, f"{words} --backend thread --hardware dgx-h100:2")
    assert status == 0 and "The same on dgx-h100" in out
    shares = re.findall(
        r"^  (compute|exposed communication|bubble) +(\d+\.\d)% of the devices' time$", out, re.MULTILINE)
    assert [name for name, _ in shares] == ["compute", "exposed communication", "bubble"]
    assert sum(float(share) for _, share in shares) == pytest.approx(100, abs=0.2)
    assert re.search(r"^  step time +\d", out, re.MULTILINE) and f"  axes that leave a node {leaving}\n" in out


def test_a_hardware_that_cannot_be_is_a_wrong_word(capsys, tmp_path):
    for words, told in (
        ("dgx-h10", "did you mean 'dgx-h100'"), ("laptop", "laptop has places for 4 devices, not for 6"),
        (str(tmp_path / "none.toml"), "none.toml"),
    ):
        assert serve(command.PROGRAM, command.main, f"mlp --pp 3 --dp 2 --hardware {words}".split()) == 2
        assert told in capsys.readouterr().err


@pytest.mark.slow     # `plan --verify` does the same every day (cli/test_verified_plans.py)
def test_the_demo_of_plans_runs_its_first(capsys):
    status, out = here(capsys, "plan --devices 2 --layers 2 --rows 2 --backend thread")
    assert status == 0 and out.count(" ok  ") == 4
    assert "The best split of a small GPT over 2 devices of dgx-h100" in out and "Why the first: the second (" in out


def test_the_demo_of_plans_refuses_an_unknown_machine(capsys):
    assert serve(command.PROGRAM, command.main, ["plan", "--hardware", "dgx-h10"]) == 2
    assert "did you mean 'dgx-h100'" in capsys.readouterr().err
