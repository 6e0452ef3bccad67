"""Whatever comes from outside is read, or refused by the one error of its reader; nothing else ever comes out."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import string
import zipfile
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from parallelism.kernels import SGD, Adam
from parallelism.pipelining import Pipeline, Schedule
from parallelism.planning import SETTINGS, search
from parallelism.trace import Event, Trace
from parallelism.training.stage_layers import balanced_ends
from pipeline_parallelism import MLP, Checkpoint, CheckpointError
from vcluster import __main__ as top
from vcluster.cli import doctor
from vcluster.cli.command_line import serve
from vcluster.demo import __main__ as demos, collectives, data, matmul, mlp, traffic
from vcluster.runs import VirtualCluster

within_a_test = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

numbers = st.integers() | st.integers(-2, 9) | st.floats() | st.sampled_from((10**400, -(2**63), 2**53, 1e308))
words = st.text(max_size=6) | st.sampled_from(("SGD", "Adam", "<f8", "|O", "all_reduce", "\udc80", "__class__"))
plain = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4), max_leaves=8,
)


@pytest.fixture(autouse=True)
def nothing_is_unpickled(monkeypatch):
    import pickle

    def refuse(*_, **__):
        raise AssertionError("foreign bytes were unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)


@st.composite
def damaged(draw, good):
    """Bytes that began as good ones: cut, with pieces changed, doubled or put in."""
    content = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(content)))
        end = draw(st.integers(place, min(len(content), place + 40)))
        kind = draw(st.sampled_from(("flip", "cut", "insert", "remove", "double")))
        if kind == "flip" and place < len(content):
            content[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del content[place:]
        elif kind == "insert":
            content[place:place] = draw(st.binary(max_size=20))
        elif kind == "remove":
            del content[place:end]
        else:
            content[end:end] = content[place:end]
    return bytes(content)


@st.composite
def changed(draw, good):
    """JSON that began as a good one: some values in it are others, missing or more."""
    document = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 3))):
        here = document
        while isinstance(here, (dict, list)) and here:
            key = draw(st.sampled_from(sorted(here) if isinstance(here, dict) else range(len(here))))
            if draw(st.booleans()) or not isinstance(here[key], (dict, list)):
                break
            here = here[key]
        if not isinstance(here, (dict, list)) or not here:
            continue
        if draw(st.integers(0, 4)):
            here[key] = draw(plain)
        else:
            del here[key]
    return document


def read(reader, error, path, content):
    """``content`` is read, or refused by an error of just this type that names the file."""
    path.write_bytes(content)
    refused = None
    try:
        loaded = reader(path)
    except ValueError as caught:
        loaded, refused = None, caught
    if refused is not None:
        assert type(refused) is error
        assert str(path) in str(refused)
        assert len(str(refused)) < 2000
    return loaded


# -- traces ------------------------------------------------------------------------------------------------------------


def a_trace():
    return Trace([
        Event(0, "compute", "work", 0.0, 0.5, cpu_seconds=0.5, stage=0, microbatch=1, phase="F"),
        Event(1, "collective", "shift", 0.5, 0.25, bytes_received=8, group=(0, 1), sequence=0, sources=((0, 8),)),
    ], mesh_shape={"tp": 2})


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    a_trace().save(path)
    return path.read_bytes()


@pytest.mark.slow
@within_a_test
@given(st.data())
def test_traces(tmp_path, trace_file, data):
    content = data.draw(
        st.binary(max_size=200) | damaged(trace_file) | plain.map(json.dumps).map(str.encode)
        | changed(json.loads(trace_file)).map(json.dumps).map(str.encode)
    )
    loaded = read(Trace.load, ValueError, tmp_path / "trace", content)
    if loaded is not None:  # then it is one, to its end
        loaded.summary()
        loaded.save(tmp_path / "again")
        assert Trace.load(tmp_path / "again").events == loaded.events


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[SGD(0.1, momentum=0.5), Adam(0.01)], ids=["SGD", "Adam"])
def checkpoint_file(request, tmp_path_factory):
    model = MLP(layer_sizes=(2, 3, 1), pipeline=Pipeline(1, 1))
    step = model.reference_step(np.ones((2, 2)), np.ones((2, 1)), request.param)
    path = tmp_path_factory.mktemp("checkpoint") / "c"
    Checkpoint(1, step.parameters, request.param, step.optimizer_state).save(path)
    return path.read_bytes()


def with_checksum(first, content):
    return b"\n".join((first, hashlib.sha256(content).hexdigest().encode(), content))


@within_a_test
@given(st.data())
def test_checkpoints(tmp_path, checkpoint_file, data):
    first, _, text, arrays = checkpoint_file.split(b"\n", 3)
    headers = changed(json.loads(text)).map(json.dumps).map(str.encode) | plain.map(json.dumps).map(str.encode)
    forged = st.builds(lambda header, body: with_checksum(first, header + b"\n" + body), headers,
                       st.just(arrays) | damaged(arrays) | st.binary(max_size=64))
    content = data.draw(
        st.binary(max_size=200) | damaged(checkpoint_file) | forged
        | damaged(text + b"\n" + arrays).map(lambda content: with_checksum(first, content))
    )
    loaded = read(Checkpoint.load, CheckpointError, tmp_path / "c", content)
    if loaded is not None:
        assert loaded.step >= 0
        loaded.save(tmp_path / "again")
        assert Checkpoint.load(tmp_path / "again").layer_sizes == loaded.layer_sizes


# -- data files --------------------------------------------------------------------------------------------------------


def an_npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def npy_header(text):
    """An .npy file of this header and eight bytes."""
    encoded = text.encode("utf-8", "replace") + b"\n"
    return b"\x93NUMPY\x01\x00" + len(encoded).to_bytes(2, "little") + encoded + bytes(8)


def zipped(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


headers = st.builds(
    lambda dtype, shape: f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape!r}}}",
    st.sampled_from(("<f8", "|O", "<U1", "<M8[s]", "V8", "no", [("a", "<f4")])),
    plain | st.tuples(st.integers(-2, 2**40)) | st.tuples(st.integers(0, 9), st.integers(0, 2**62)),
) | st.text(max_size=60)
small = st.lists(st.integers(0, 6), max_size=3).flatmap(
    lambda shape: st.sampled_from(("f8", "f4", "i8", "u1", "bool", "c16", "U2", "M8[s]", "f2"))
    .map(lambda dtype: np.ones(shape, dtype) if dtype != "M8[s]" else np.zeros(shape, dtype)))
GOOD_DATA = an_npz(x=np.arange(24.0).reshape(8, 3), y=np.arange(8) % 3)


@within_a_test
@given(
    st.binary(max_size=200) | damaged(GOOD_DATA) | st.builds(an_npz, x=small, y=small)
    | st.builds(zipped, x=headers.map(npy_header), y=headers.map(npy_header))
    | st.builds(zipped, x=st.binary(max_size=40), y=st.just(b""))
    | plain.map(lambda value: an_npz(x=np.array([value, None], dtype=object), y=np.ones(2)))
)
def test_data_files(tmp_path, content):
    loaded = read(data.load_npz, data.DataError, tmp_path / "data.npz", content)
    if loaded is not None:
        assert np.isfinite(loaded.x).all()
        assert np.isfinite(loaded.targets).all()


# -- schedules ---------------------------------------------------------------------------------------------------------

cells = st.one_of(
    st.from_regex(r"-?[0-9]{0,3}([FBIW]|SEND_F|RECV_B)?[0-9]{0,3}", fullmatch=True),
    st.text(max_size=5), st.just("0F0"),
)
rows = st.lists(st.lists(cells, max_size=5).map(",".join), max_size=4).map("\n".join)
GOOD_SCHEDULE = Pipeline(stages=4, microbatches=4, schedule="dual_pipe_v").schedule.with_messages().to_csv()


@within_a_test
@given(
    rows | st.text(max_size=60) | st.text(alphabet=string.digits + "FBIW,\n\"\r\x00", max_size=60)
    | damaged(GOOD_SCHEDULE.encode()).map(lambda content: content.decode("utf-8", "replace"))
)
def test_schedules(text):
    with contextlib.suppress(ValueError):
        schedule = Schedule.from_csv(text)
        schedule.validate()
        str(schedule)
        assert Schedule.from_csv(schedule.to_csv()).actions == schedule.actions


# -- command lines -----------------------------------------------------------------------------------------------------

OPTIONS = (
    "--pp", "--dp", "--tp", "--mesh", "--schedule", "--microbatches", "--steps", "--hidden", "--learning-rate",
    "--data", "--trace", "--seed", "--backend", "--devices", "--collective", "--algorithm", "--policy", "--shape",
    "--help",
)
values = st.integers(-3, 10**20).map(str) | st.text(max_size=8) | st.sampled_from((
    "1f1b", "pp=2,dp=2", "pp=0", "pp=2,pp=2", "tp", "ring", "thread", "nan", "1e999", "1,2,", "-", "--", "=", "\x00",
    "/", "nowhere/file", "broadcast", "outer", "９",
))
joined = st.builds("{}={}".format, st.sampled_from(OPTIONS), values)
spoken = st.lists(st.sampled_from(OPTIONS) | values | joined, max_size=6)
FIRST = ("mlp", "collectives", "matmul", "doctor", "demo", "report", "--version", "-h")


@pytest.fixture
def nothing_starts(monkeypatch, tmp_path):
    """Words that are right are read to their end, and nothing is run."""
    for module in (mlp, collectives, matmul):
        monkeypatch.setattr(module, "run_demo", lambda arguments, screen: None)
    monkeypatch.setattr(doctor, "run_checks", lambda: 0)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("main", [top.main, demos.main], ids=["vcluster", "vcluster.demo"])
@within_a_test
@given(first=st.sampled_from(FIRST) | st.text(max_size=6), rest=spoken)
def test_command_lines(nothing_starts, main, first, rest):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = serve("program", main, [first, *rest])
        except SystemExit as end:  # --help
            status = end.code
    assert status in (0, 2)
    said = err.getvalue()
    if status == 2:
        assert re.match(r"program.*: .+\n\Z", said)
        assert len(said.splitlines()) == 1
    else:
        assert said == ""


def answer(main, words):
    """The status and what a command line prints to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = serve("program", main, words)
        except SystemExit as end:  # --help
            status = end.code
    return status, out.getvalue(), err.getvalue()


@cache
def options_of(main, name):
    """The options that a command tells of."""
    return sorted(set(re.findall("--[a-z][a-z-]*", answer(main, [name, "--help"])[1])))


COMMANDS = [
    *((top.main, name) for name in top.COMMANDS if name not in ("doctor", "calibrate")),
    *((demos.main, name) for name in demos.DEMOS),
]
FILES = ("good.mlir", "good.json", "bad.json", "empty", "directory", "nowhere/file", "/", "", ".", "a" * 300)


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a_trace().save("good.json")
    Path("good.mlir").write_text(
        "func.func @main(%0: tensor<4x6xf32>) -> tensor<4x6xf32> {\n"
        "  %1 = stablehlo.add %0, %0 : tensor<4x6xf32>\n  return %1 : tensor<4x6xf32>\n}\n")
    Path("bad.json").write_text("{\"a\": [")
    Path("empty").touch()
    Path("directory").mkdir()


@pytest.mark.takes_seconds
@pytest.mark.sampled(12)
@pytest.mark.parametrize(("main", "name"), COMMANDS, ids=[name for _, name in COMMANDS])
@within_a_test
@given(draw=st.data())
def test_every_command_refuses_what_it_does_not_take_in_one_line(files, monkeypatch, main, name, draw):
    class Started(BaseException):
        pass

    def start(*_, **__):
        raise Started

    monkeypatch.setattr(VirtualCluster, "__init__", start)
    for module in ("vcluster.cli.plan", "vcluster.demo.plan"):      # nothing was wrong: the search begins
        monkeypatch.setattr(f"{module}.find_plan", start)
    for table in ("collectives", "layouts", "schedules", "products"):       # of a page that is written
        monkeypatch.setattr(import_module("vcluster.report.playground"), table, dict)
    options = options_of(main, name)
    value = st.sampled_from(FILES) | values
    option = st.sampled_from(options)
    word = option | value | st.builds("{}={}".format, option, value)
    words = [name, *draw.draw(st.sampled_from(([], ["good.mlir"], ["good.json"], ["good.json"] * 2))),
             *draw.draw(st.lists(word, max_size=6))]
    try:
        status, _, said = answer(main, words)
    except Started:
        return
    assert status in (0, 2)
    assert (said == "") == (status == 0)
    assert status == 0 or re.fullmatch(r"program.*: .+\n", said)


PLAN = ["--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8", "--vocab-size",
        "100", "--global-batch-size", "8", "--hardware", "dgx-a100", "--devices", "4"]
NUMBERS = st.sampled_from((0, 1, 2, 3, 8, 97, 10**6, 999999937, 10**9, 10**18 - 11, 2**63, 2**64, 10**30)).map(str)
COUNTS = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--vocab-size", "--devices",
          "--global-batch-size", "--micro-batch-size", "--tensor-model-parallel-size", "--context-parallel-size",
          "--pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage", "--simulations")
a_setting = st.builds("{}={}".format, st.sampled_from(list(SETTINGS)), st.lists(
    NUMBERS | st.sampled_from(("gpipe", "dual_pipe_v", "looped_bfs", "full", "x", "tp-cp-dp-pp")), max_size=3
).map(",".join))
broken = st.one_of(
    st.tuples(st.sampled_from(COUNTS), NUMBERS), st.tuples(st.sampled_from(("--fix", "--why-not")), a_setting),
    st.tuples(st.just("--memory"), st.sampled_from(("1kB", "0", "1e400GB", "nanGB", "72 parsecs", "1e-300"))),
    st.tuples(st.just("--hardware"), st.sampled_from((
        "host", "bad.json", "directory", "dgx-h100:0", f"dgx-h100:{10**18}", "tpu-v4:0x4", "tpu-v4:4x4x4"))),
    st.tuples(st.sampled_from(("--html", "--save", "--load")), st.sampled_from(FILES)),
    st.tuples(st.sampled_from(("--lr", "--seed", "--data-path", "--clip-grad", "--batch", "--size")), values),
    st.tuples(st.sampled_from(("--auto", "--sequence-parallel", "--group-query-attention", "--fp16", "--json"))))


@pytest.mark.takes_seconds
@within_a_test
@given(model=st.sampled_from(("gpt", "gpt", "gpt2-xl", "good.mlir", "empty", "nowhere", "")),
       given=st.lists(broken, min_size=1, max_size=4))
def test_a_broken_question_for_plans_is_refused_before_a_plan_is_timed(files, monkeypatch, model, given):
    """Words that each might be right: sizes, hardware, memory, batches and settings that cannot be together."""
    class Timed(BaseException):
        pass

    def timed(*_, **__):
        raise Timed

    monkeypatch.setattr(search, "price_plans", timed)
    try:
        status, out, said = answer(top.main, ["plan", model, *PLAN, *(word for words in given for word in words)])
    except Timed:
        return
    assert (status, out) == (2, "")
    assert re.fullmatch(r"program plan: .+\n", said)


@pytest.mark.slow
def test_a_head_that_costs_more_than_any_number_of_layers_is_balanced_at_once(files):
    """`--vocab-size` of 30 digits: no loop counts to what the head costs."""
    assert balanced_ends(10_000, 64, 1e28) == balanced_ends(10_000, 64, 10_000.0)
    assert balanced_ends(10_000, 4, 1e28)[1:] == (1, 1, 1)
    status, out, said = answer(top.main, ["plan", "gpt", *PLAN, "--vocab-size", f"{10**30}"])
    assert (status, out) == (2, "") and re.fullmatch(r"program plan: .+\n", said)


@pytest.mark.takes_seconds
def test_a_plan_beyond_what_is_searched_is_refused(files):
    """Nothing of it depends on how large the numbers are: neither a loop over them, nor arithmetic of 64 bits."""
    for words, error in ((["--devices", "2097152"], "devices must be at most 1,048,576"),
                         (["--global-batch-size", f"{10**18}"], "batch must be at most 1,000,000,000"),
                         (["--num-layers", f"{2**63}"], "blocks must be at most 10,000"),
                         (["--fix", f"cp={10**9 - 1}"], "cp must be at most 1,048,576"),
                         (["--fix", "x=1", "--seed", "1"], "a plan has no setting 'x'")):
        status, out, said = answer(top.main, ["plan", "gpt", *PLAN, *words])
        assert (status, out, said.count("\n")) == (2, "", 1)
        assert said.startswith(f"program plan: {error}")


@pytest.mark.takes_seconds
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("words", "error"), [
    (["--vocab-size", f"{10**18 - 11}"], "a model may have at most 72,057,594,037,927,936 parameters, got 16,"),
    (["--seq-length", f"{10**14}", "--position-embedding-type", "rope"],
     "a model may have at most 72,057,594,037,927,936 numbers that the products of a sequence write, got "),
    (["--micro-batch-size", f"{10**17}", "--global-batch-size", f"{4 * 10**17}"],
     "an array must have at most 2**60 bytes, got tensor<100000000000000000x8xi64>"),
])
def test_a_model_whose_bytes_do_not_fit_64_bits_is_refused(files, words, error):
    """Every single extent would fit; a search refuses the batch before."""
    for command in ("plan", "simulate") if "--micro-batch-size" not in words else ("simulate",):
        status, out, said = answer(top.main, [command, "gpt", *PLAN, *words])
        assert (status, out, said.count("\n")) == (2, "", 1)
        assert said.startswith(f"program {command}: {error}")


@pytest.mark.parametrize("words", [["attention", "--policy=--"], ["mlp", "--hardware=--"]])
def test_the_end_of_options_is_no_value(words):
    status, _, said = answer(demos.main, words)
    assert (status, said) == (2, f"program {words[0]}: {words[1][:-3]}: expected one argument\n")


@within_a_test
@given(rest=st.lists(st.sampled_from(OPTIONS[:-1]) | values, max_size=6), name=st.sampled_from(("mlp", "matmul")))
def test_command_lines_are_refused_before_a_device_starts(monkeypatch, tmp_path, rest, name):
    """The demo itself looks further: at the mesh, the file names, what fits the policy."""
    monkeypatch.chdir(tmp_path)

    class Started(Exception):
        pass

    def start(*_, **__):
        raise Started

    for module in (mlp, traffic):
        monkeypatch.setattr(module, "VirtualCluster", start)
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            status = serve("program", demos.main, [name, *rest])
        except Started:
            return
        except SystemExit as end:
            status = end.code
    assert status in (0, 1, 2)
    assert "Traceback" not in err.getvalue()
    assert os.listdir(tmp_path) == []  # noqa: PTH208
