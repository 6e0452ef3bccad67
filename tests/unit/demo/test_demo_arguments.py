"""The words of the command line: what they mean, and what is said when they are wrong.  No process is started."""

from __future__ import annotations

import os
import shlex

import numpy as np
import pytest

import parallelism.mesh
from parallelism.mesh import Mesh
from parallelism.pipelining.generators import SCHEDULES
from vcluster import __main__ as top
from vcluster.cli.command_line import Parser, WrongWords, mesh_arguments, mesh_of, nearest, serve, writable
from vcluster.demo import (
    __main__ as command,
    attention,
    collectives,
    data as texts,
    ffn,
    generate,
    gpt,
    matmul,
    mlp,
    moe,
    reshard,
    training as pipelines,
)
from vcluster.demo.data import DataError
from vcluster.demo.options import parser_of


def words(text: str) -> list[str]:
    return text.split()


def said(capsys: pytest.CaptureFixture[str], text: str) -> str:
    """The one line that wrong words are answered with; their exit status is 2 and nothing is on stdout."""
    assert serve(command.PROGRAM, command.main, words(text)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.strip()


def mesh(text: str) -> Mesh:
    parser = Parser(mesh_arguments(pp="", dp="", tp=""))
    return mesh_of(parser.parse(words(text)), Mesh(pp=1))


@pytest.mark.parametrize("text", ["--pp 2 --dp 3 --tp 4", "--tp 4 --pp 2 --dp 3", "--dp 3 --tp 4 --pp 2"])
def test_flags_in_any_order_give_pp_outermost_then_dp_then_tp(text):
    assert mesh(text).axes == ("pp", "dp", "tp")
    assert dict(mesh(text).shape) == {"pp": 2, "dp": 3, "tp": 4}


def test_a_mesh_said_outright_keeps_its_order_and_nothing_said_is_one_device():
    assert mesh("--mesh tp=2,pp=3").axes == ("tp", "pp")
    assert mesh("") == Mesh(pp=1)
    assert mesh("--dp 2") == Mesh(dp=2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("--mesh pp2", "needs axis=size pairs, as in --mesh pp=2,dp=2; got 'pp2'"),
        ("--mesh qq=2", "no axis 'qq'"),
        ("--mesh pp=2,pp=3", "names axis 'pp' twice"),
        ("--mesh pp=0", "a whole number of at least 1, got 0"),
        ("--mesh pp=2 --dp 2", "leave out --dp"),
        ("--pp 100 --dp 100", "10000 devices; at most 256 are run here"),
    ],
)
def test_a_wrong_mesh_is_refused_with_the_reason(text, reason):
    with pytest.raises(WrongWords) as caught:
        mesh(text)
    assert reason in str(caught.value)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mpl", "there is no demo 'mpl'; did you mean mlp?"),
        ("--pp 4", "name the demo first: mlp, gpt, generate, collectives, matmul, ffn, attention, moe, plan, reshard"),
        ("mlp --pp 0", "mlp: --pp: needs a whole number of at least 1, got 0"),
        ("mlp --pp -1", "--pp: needs a whole number of at least 1, got -1"),
        ("mlp --pp four", "--pp: needs a whole number of at least 1, got 'four'"),
        ("mlp --pp", "--pp: expected one argument"),
        ("mlp --pp 5", "--pp 5: the perceptron has 4 layers, so at most 4 stages"),
        ("mlp --pp 5", "for more stages: --hidden 96,96,96,96"),
        ("mlp --pp 4 --schedule 1f1c", "--schedule: unknown schedule '1f1c'; did you mean '1f1b'?"),
        ("mlp --pp 2 --schedule inference", "--schedule: inference has only forwards and cannot train"),
        ("mlp --pp 2 --schedule zbv --chunks 3", "--chunks 3: zero_bubble_v puts 2 stages on each device"),
        ("mlp --pp 2 --chunks 2", "--chunks 2: 1f1b puts one stage on each device"),
        (
            "mlp --pp 2 --schedule looped_bfs --hidden 9,8",
            "--pp 2 with 2 stages on each: the perceptron has 3 layers",
        ),
        ("mlp --schedul gpipe", "there is no option --schedul; did you mean --schedule?"),
        ("mlp --micro 4", "there is no option --micro"),
        ("mlp --microbatches 0", "--microbatches: needs a whole number of at least 1, got 0"),
        ("mlp --microbatches 5000", "--microbatches 5000: there are 1438 rows to train on"),
        ("mlp --steps 0", "--steps: needs a whole number of at least 1, got 0"),
        ("mlp --learning-rate 0", "--learning-rate: needs a number above 0, got '0'"),
        ("mlp --learning-rate nan", "--learning-rate: needs a number above 0, got 'nan'"),
        ("mlp --hidden 3,x", "--hidden: needs a whole number of at least 1, got 'x'"),
        ("mlp --tp 2", "there is no option --tp"),
        ("mlp --backend processes", "--backend: there is no 'processes'; did you mean process?"),
        ("mlp --data /nonexistent/file.npz", "--data: /nonexistent/file.npz does not exist"),
        ("mlp --trace /nonexistent/trace.json", "/nonexistent/trace.json cannot be written: No such file or directory"),
        ("mlp extra", "nothing is expected here: 'extra'"),
        ("gpt --pp 5", "5 stages: with --blocks 2 there are 4 layers, embedding and head included; for more stages: "),
        ("gpt --heads 5", "--width 48 must be a multiple of 10: each of the 5 heads has an even size"),
        ("gpt --width 1024", "--width: a demo takes widths up to 512, got 1024"),
        ("gpt --microbatches 17", "--microbatches 17: a batch has 16 rows; --rows changes that"),
        ("gpt --dp 3 --rows 2 --microbatches 1", "--dp 3: a batch has 2 rows; --rows changes that"),
        ("gpt --schedule 1f1c", "--schedule: unknown schedule '1f1c'; did you mean '1f1b'?"),
        ("gpt --pp 2 --schedule pipedream", "--schedule: pipedream does not compute the same as one process"),
        ("gpt --pp 2 --schedule local", "--schedule: local does not compute the same as one process"),
        ("gpt --pp 2 --schedule inference", "--schedule: inference has only forwards and cannot train"),
        ("gpt --prompt=", "--prompt: needs at least one character"),
        ("gpt --cp 2", "there is no option --cp"),
        ("gpt --trace /nonexistent/trace.json", "/nonexistent/trace.json cannot be written: No such file or directory"),
        ("collectives --devices 0", "--devices: needs a whole number from 1 to 16, got 0"),
        ("collectives --collective all_reduse", "there is no 'all_reduse'; did you mean all_reduce?"),
        ("collectives --algorithm rings", "all_reduce over 4 has no 'rings'; did you mean ring?"),
        (
            "collectives --devices 3 --algorithm recursive_doubling",
            "all_reduce over 3 has no 'recursive_doubling' (it needs a power of two); there is direct, naive,",
        ),
        ("matmul --policy mached", "--policy: there is no 'mached'; did you mean matched_inner?"),
        ("matmul --policy outer --tp 4", "policy outer needs two axes, as in --dp 2 --tp 2; the mesh is Mesh(tp=4)"),
        ("matmul --policy full --mesh x=2,y=2,z=2", "needs two axes, as in --dp 2 --tp 2; the mesh is Mesh(x=2, y=2"),
        ("matmul --mesh x-y=2", "--mesh: the name of an axis must consist of letters, digits and _, got 'x-y'"),
        ("ffn --policy megatrom", "--policy: there is no 'megatrom'; did you mean megatron?"),
        ("ffn --policy gspmd_2d --tp 4", "policy gspmd_2d needs two axes, as in --mesh x=2,y=2; the mesh is Mesh("),
        ("ffn --shape 3,4", "--shape needs four extents BATCH,SEQUENCE,MODEL,HIDDEN; got 2"),
        ("ffn --shape 3,4,5,100000", "--shape: a demo takes extents up to 4096, got 100000"),
        ("ffn --activation gleu", "--activation: there is no 'gleu'; did you mean gelu?"),
        ("attention --policy rink", "--policy: there is no 'rink'; did you mean ring?"),
        ("attention --policy ring --tp 4", "policy ring needs cp and dp, as in --cp 4; the mesh is Mesh(tp=4)"),
        ("attention --cp 4 --shape 3,4", "--shape needs four extents BATCH,SEQUENCE,HEADS,HEAD_DIM; got 2"),
        ("attention --cp 4 --shape 1,100000,1,1", "--shape: a demo takes up to 4,194,304 scores, or elements of x"),
        ("attention --cp 4 --kv-heads 3", "a multiple of the key-value heads, got wq of shape (32, 4, 8) with 4"),
        ("attention --cp 4 --zigzag --full", "zigzag is an order of the rows of causal ring attention, got"),
        ("attention --policy megatron --kv-heads 2 --tp 4", "4 query heads and 2 key-value heads cannot be shared"),
        ("moe --experts 2 --top-k 3", "--top-k 3: there are 2 experts"),
        ("moe --capacity 0", "--capacity: needs a number above 0, got '0'"),
        ("moe --shape 3,4", "--shape needs four extents BATCH,SEQUENCE,MODEL,HIDDEN; got 2"),
        ("moe --shape 300,400,2,2", "--shape: a demo takes up to 4,096 tokens, got 120,000"),
        ("moe --experts 100", "--experts: a demo takes up to 64 experts, got 100"),
        ("moe --tp 2", "there is no option --tp"),
        ("reshard [x] [y] --mesh x=2", "target: '[y]': TensorSharding('y') names axis 'y', but the axes of Mesh(x=2)"),
        ("reshard [x]", "the following arguments are required: TARGET"),
        ("reshard [x,x] [x]", "source: '[x,x]': axis 'x' is used twice"),
        ("reshard [x [y]", "source: '[x' is not a layout: expected ']'"),
        ("reshard [x,y] [x]", "source [x, y] is of 2 dims, target [x] of 1"),
        ("reshard [x] [y] --shape 8,3", "the source of a resharding: TensorSharding('x') has 1 dim, the tensor has"),
        ("reshard [S(0),R] [R,S(0)]", "one placement for each axis of a mesh, so it needs --mesh, as in --mesh x=2"),
        ("reshard [x] [y] --shape 99999999", "--shape: a demo takes up to 4,194,304 elements, got 99,999,999"),
        ("matmul --shape 3,4", "--shape needs three extents M,K,N; got 2"),
        ("matmul --shape 3,4,100000", "--shape: a demo takes extents up to 4096, got 100000"),
    ],
)
def test_wrong_words_are_one_line_that_names_the_right_ones(capsys, text, reason):
    line = said(capsys, text)
    assert line.startswith("python -m vcluster.demo")
    assert reason in line


def test_bad_data_is_one_line(capsys, tmp_path):
    x = np.ones((10, 3))
    x[4, 1] = np.nan
    np.savez(tmp_path / "nan.npz", x=x, y=np.arange(10) % 2)
    assert "x[4] holds nan, which is not finite" in said(capsys, f"mlp --data {tmp_path / 'nan.npz'}")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "nan.npz").read_bytes()[:100])
    assert "is not a whole .npz file" in said(capsys, f"mlp --data {tmp_path / 'cut.npz'}")


def test_a_trace_path_is_tried_without_leaving_or_harming_a_file(tmp_path):
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("kept")
    assert writable(new) == new
    assert not new.exists()
    writable(old)
    assert old.read_text() == "kept"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WrongWords, match="it is a pipe"):
        writable(tmp_path / "pipe")
    with pytest.raises(WrongWords, match="Is a directory"):
        writable(tmp_path)


@pytest.mark.parametrize("text", ["", "--help", *(f"{name} --help" for name in command.DEMOS)])
def test_help_is_not_an_error_teaches_by_example_and_fits_80_columns(capsys, monkeypatch, text):
    monkeypatch.setenv("COLUMNS", "80")
    try:
        status = serve(command.PROGRAM, command.main, words(text))
    except SystemExit as stop:  # argparse's way out of --help
        status = stop.code
    assert status == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "python -m vcluster.demo" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_list_has_a_line_for_each_demo(capsys):
    assert command.main([]) == 0
    out = capsys.readouterr().out
    for name in command.DEMOS:
        assert sum(line.split()[:1] == [name] for line in out.splitlines()) == 1


def test_every_example_of_the_help_can_be_run():
    for parser, prepare in (
        (parser_of("mlp"), mlp.prepare), (parser_of("gpt"), gpt.prepare),
        (parser_of("collectives"), collectives.prepare), (parser_of("generate"), generate.prepare),
        (parser_of("matmul"), matmul.prepare), (parser_of("ffn"), ffn.prepare),
        (parser_of("attention"), attention.prepare),
        (parser_of("reshard"), reshard.prepare),
        (parser_of("moe"), moe.prepare), (parser_of("reshard"), reshard.prepare),
    ):
        lines = [line.strip() for line in (parser.epilog or "").splitlines()]
        examples = [line.removeprefix(parser.prog) for line in lines if line.startswith(parser.prog)]
        assert examples
        for example in examples:
            if "mine.npz" not in example:
                prepare(parser.parse(shlex.split(example)))


def test_a_job_is_what_the_words_say():
    text = "--dp 2 --pp 3 --schedule GPipe --microbatches 5 --steps 7 --hidden 9,8,7"
    job = mlp.prepare(parser_of("mlp").parse(words(text)))
    assert job.mesh == Mesh(pp=3, dp=2)
    assert job.replicas == 2
    assert job.arguments.steps == 7
    assert job.mlp.layer_sizes == (64, 9, 8, 7, 10)
    assert (job.mlp.pipeline.schedule.name, job.mlp.pipeline.stages, job.mlp.pipeline.microbatches) == ("gpipe", 3, 5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"inference"}))
def test_every_schedule_that_trains_is_a_job(name):
    job = mlp.prepare(parser_of("mlp").parse(words(f"--pp 3 --schedule {name}")))
    assert job.mlp.pipeline.schedule.name == name and job.mlp.pipeline.ranks == 3
    assert name in parser_of("mlp").format_help()


def test_the_largest_difference_finds_the_one_number_and_never_overlooks_nan():
    a = [(np.zeros((2, 3)), np.zeros(3)), (np.zeros((3, 1)), np.zeros(1))]
    b = [(x.copy(), y.copy()) for x, y in a]
    assert pipelines.largest_difference(a, b) == 0
    b[1][0][2, 0] = -0.5
    assert pipelines.largest_difference(a, b) == 0.5
    b[0][1][1] = np.nan
    assert pipelines.largest_difference(a, b) == np.inf


def test_the_gpt_learns_from_text_of_the_package_cut_where_the_seed_says():
    job = gpt.prepare(parser_of("gpt").parse(words("--pp 2 --tp 2 --dp 2 --rows 6 --seed 3")))
    assert job.mesh == Mesh(pp=2, dp=2, tp=2)
    told = texts.docstrings()
    assert (parallelism.mesh.__doc__ or "").strip() in told
    tokens, targets = job.batch(1)
    assert tokens.shape == targets.shape == (6, gpt.SEQUENCE)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    for row in tokens:
        assert bytes(row.tolist()) in told.encode()
    np.testing.assert_array_equal(job.batch(1)[0], tokens)
    assert not np.array_equal(job.batch(2)[0], tokens)


def test_a_package_without_sources_has_no_text(tmp_path, monkeypatch):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="the sources of bare are not installed"):
        texts.docstrings("bare")


def test_what_is_written_is_one_line_of_what_a_terminal_shows():
    assert texts.in_one_line(list("a\n\tb\x1b[1m é\u8c61".encode())) == "a  b?[1m é?"
    assert texts.in_one_line([0xFF, 0x41, 0xC3]) == "?A?"


def test_the_nearest_word_or_all_of_them():
    assert nearest("gpip", ("gpipe", "1f1b")) == "; did you mean gpipe?"
    assert nearest("zzz", ("gpipe", "1f1b")) == "; there is gpipe, 1f1b"


def test_python_m_vcluster_says_what_there_is(capsys):
    assert serve(top.PROGRAM, top.main, []) == 0
    out = capsys.readouterr().out
    assert "python -m vcluster.demo mlp --pp 4" in out
    assert max(map(len, out.splitlines())) <= 80
    assert serve(top.PROGRAM, top.main, ["demos"]) == 2
    assert "did you mean demo?" in capsys.readouterr().err


def test_ctrl_c_is_one_line(capsys):
    def stopped(_: object) -> int:
        raise KeyboardInterrupt

    assert serve("program", stopped, []) == 130
    assert capsys.readouterr().err == "program: stopped\n"
