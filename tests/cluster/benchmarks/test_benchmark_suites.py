"""Each benchmark suite really runs, in its tiniest form; it leaves valid figures and nothing else.  No time judged."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing, redirect_stderr, redirect_stdout
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from benchmarks import fresh, installed, systems
from benchmarks.cases import MEMORIES, OPERATIONS, Case, WrongAnswerError
from benchmarks.command import PROGRAM, main
from benchmarks.copying import cases as copies, name_of
from benchmarks.installed import PEERS, start_queue_pair
from benchmarks.plan import MIB, Plan
from benchmarks.products import PRODUCTS, QUICK_EXTENTS
from benchmarks.remote import RemoteSystem
from benchmarks.results import Results
from benchmarks.suites import peers, startup
from benchmarks.systems import OurCluster, SystemFailedError
from benchmarks.targets import Standing
from vcluster.cli.command_line import serve

TINY = ["--quick", "--passes", "1", "--devices", "2", "--sizes", "8,4096"]
COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier"}


def benchmarks(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with a folder for temporary files."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words], cwd=ROOT, env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )


def here(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in this process, with a folder for temporary files."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TMPDIR", str(folder))
        status = serve(PROGRAM, main, words)
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def figures(folder: Path, *words: str, run: Callable[..., Any] = benchmarks) -> dict[str, Any]:
    """The document that suites write, after a look at how it ended."""
    temporary = folder / "tmp"
    temporary.mkdir()
    done = run(temporary, *words, *TINY, "--json", str(folder / "figures.json"))
    assert done.stderr == ""
    assert done.returncode == 0
    assert list(temporary.iterdir()) == []
    assert "\x1b" not in done.stdout
    told = [line for line in done.stdout.splitlines() if "figures.json" not in line]
    assert max(map(len, told)) <= 80
    document: dict[str, Any] = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    assert document["machine"]["cores"] >= 1
    assert document["versions"]["numpy"]
    assert document["command"][: 3 + len(words)] == ["python", "-m", "benchmarks", *words]
    assert {measurement["suite"] for measurement in document["measurements"]} <= set(words)
    for measurement in document["measurements"]:
        assert measurement["seconds"]["rounds"] >= 1
        if measurement["operation"] != "cold minus numpy":
            assert measurement["seconds"]["minimum"] > 0
    return document


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the suites without peers write in one go."""
    suites = ("run", "collectives", "messages", "step", "block", "tracing")
    return figures(tmp_path_factory.mktemp("figures"), *suites)


def of(document: dict[str, Any], suite: str) -> list[dict[str, Any]]:
    return [measurement for measurement in document["measurements"] if measurement["suite"] == suite]


def cells(measurements: list[dict[str, Any]], system: str = "vcluster") -> set[tuple[str, int, int]]:
    return {(m["operation"], m["devices"], m["nbytes"]) for m in measurements if m["system"] == system}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="there is no mpi4py")
def test_mpi(tmp_path):
    document = figures(tmp_path, "mpi")
    sizes = {(operation, nbytes) for operation in COLLECTIVES - {"barrier"} for nbytes in (8, 4096)} | {("barrier", 0)}
    found = [(m["system"], m["operation"], m["nbytes"]) for m in of(document, "mpi")]
    assert sorted(found) == sorted((name, *size) for size in sizes for name in ("vcluster", "library", "mpi4py"))
    assert document["versions"]["mpi4py"]


IMPORTS = {(f"import {what}", 0, 0) for what in ("numpy", "vcluster", "VirtualCluster")}
STARTS = {(what, 2, 0) for what in ("cold", "cold minus numpy", "warm", "first_run", "shutdown", "script")}


@pytest.mark.slow
def test_the_startup_suite_measures_imports_devices_their_memory_and_a_script(monkeypatch):
    """One fresh interpreter stands for all imports, and this process for the one that starts devices."""
    started = []

    def python(*words: str) -> str:
        started.append(words[2:])
        if words[2] == "import":
            return imported(words[:2])
        return json.dumps(fresh.devices(*map(int, words[3:])))

    @cache
    def imported(module: tuple[str, ...]) -> str:
        return startup._run(sys.executable, *module, "import", "vcluster", "VirtualCluster")

    monkeypatch.setattr(startup, "_python", python)
    monkeypatch.setattr(startup, "missing", lambda python: {"gloo": "not here"})
    results = Results()
    startup.measure(Plan(devices=(2,), passes=1, quick=True), results, lambda text: None)
    numpy = "import", "numpy"
    assert started == [numpy, ("import", "vcluster"), ("import", "vcluster", "VirtualCluster"), ("devices", "2", "2"),
                       numpy]
    assert results.skipped == {"gloo": "not here"}
    found = {(m.operation, m.devices, m.nbytes) for m in results.of("startup") if m.system == "vcluster"}
    assert found == IMPORTS | STARTS
    for m in results.of("startup"):
        assert m.seconds.rounds >= 1 and (m.operation == "cold minus numpy" or m.seconds.minimum > 0)
    (memory,) = results.amounts_of("startup")
    assert (memory.unit, memory.devices, memory.amount.rounds) == ("bytes", 2, 2)
    assert memory.amount.minimum > 1 << 20
    assert "2 devices, cold, less numpy" in startup.report(results)


@pytest.mark.slow
def test_startup(tmp_path):
    document = figures(tmp_path, "startup")
    assert cells(of(document, "startup")) == IMPORTS | STARTS
    (memory,) = (quantity for quantity in document["quantities"] if quantity["suite"] == "startup")
    assert (memory["unit"], memory["devices"], memory["amount"]["rounds"]) == ("bytes", 2, 2)
    assert memory["amount"]["minimum"] > 1 << 20


@pytest.mark.slow
def test_cliffs(tmp_path):
    document = figures(tmp_path, "cliffs")
    found = {(m["operation"], m["devices"]) for m in of(document, "cliffs")}
    assert {("a float", 2), ("64 KiB + 4 B", 2), ("transposed", 2), ("1100 shapes", 2), ("100,000 numbers", 2),
            ("recorded", 64), ("recorded, ring", 16)} <= found


@pytest.mark.slow
def test_a_suite_writes_its_figures(tmp_path):
    document = figures(tmp_path, "collectives", "--operations", "barrier", run=here)
    (barrier,) = of(document, "collectives")
    assert cells([barrier]) == {("barrier", 2, 0)}
    assert barrier["from_first_start"]["median"] >= barrier["seconds"]["median"]


@pytest.mark.slow
def test_run(document):
    large = {(what, 2, nbytes) for what in ("arguments", "results", "both", "copy") for nbytes in (8, 4096)}
    assert cells(of(document, "run")) == {("empty", 2, 0)} | large


@pytest.mark.slow
def test_collectives(document):
    measurements = of(document, "collectives")
    expected = {(operation, 2, nbytes) for operation in COLLECTIVES - {"barrier"} for nbytes in (8, 4096)}
    assert cells(measurements) == expected | {("barrier", 2, 0)}
    memories = {(m["operation"], m["memory"]) for m in measurements}
    assert {("all_to_all", "private"), ("all_to_all", "shared")} <= memories
    assert all(m["from_first_start"]["median"] >= m["seconds"]["median"] for m in measurements)


@pytest.mark.slow
def test_messages(document):
    measurements = of(document, "messages")
    expected = {("round_trip", 2, 8), ("round_trip", 2, 4096), ("stream", 2, 4096)}
    assert cells(measurements) == expected
    assert cells(measurements, "queue") == expected


@pytest.mark.slow
def test_step(document):
    measurements = of(document, "step")
    for system in ("vcluster", "one process"):
        assert {(what, devices) for what, devices, _ in cells(measurements, system)} == {("wide", 2), ("narrow", 2)}


@pytest.mark.slow
def test_block(document):
    for system in ("vcluster", "one process"):
        found = cells(of(document, "block"), system)
        assert {(policy, devices) for policy, devices, _ in found} == {
            (policy, 2) for policy in ("megatron", "sequence", "ring", "ulysses", "megatron_ring")}


@pytest.mark.slow
def test_idle(tmp_path):
    document = figures(tmp_path, "idle")
    assert cells(document["measurements"]) == {("wake", 2, 0)}
    assert [(q["what"], q["devices"], q["unit"]) for q in document["quantities"]] == [
        ("idle", 2, "of a core"), ("waiting", 2, "of a core"),
    ]


@pytest.mark.slow
def test_tracing(document):
    steps = {"record", "merge", "save", "load", "count"}
    each = {(what, 2, 8) for what in ("traced", "untraced")}
    found = cells(of(document, "tracing"))
    assert each < found
    storms = {(what, devices) for what, devices, _ in found if what.startswith("replayed, ")}
    assert len(storms) == 6 and {devices for _, devices in storms} == {8}
    assert {(what, devices) for what, devices, _ in found - each} - storms == {
        (what, 4) for step in steps for what in (step, f"{step}, CPU of the host")}


@pytest.mark.slow
def test_simulate(tmp_path):
    found = cells(figures(tmp_path, "simulate")["measurements"])
    assert {(what, devices) for what, devices, _ in found} == {
        ("op", 8), ("all_reduce", 64), ("all_reduce", 128),
        *((what, devices) for what in ("record", "cut", "lay out", "localize", "step", "whole")
          for devices in (8192, 768)),
        *((what, 102_400) for what in ("record many", "localize many", "folded"))}


@pytest.mark.slow
def test_peers_that_are_missing_are_skipped_with_a_reason_and_the_others_are_measured(tmp_path):
    document = figures(tmp_path, "peers", "--operations", "all_reduce")
    for name, module in PEERS.items():
        if find_spec(module) is None:
            assert document["skipped"][name] == f"{module} is not installed"
            assert cells(of(document, "peers"), name) == set()
        elif name not in document["skipped"]:
            assert ("all_reduce", 2, 4096) in cells(of(document, "peers"), name)


@pytest.mark.slow
def test_the_peers_suite_measures_copies_and_new_results_beside_a_peer(monkeypatch):
    def queues(name: str, python: str, devices: int) -> RemoteSystem:
        peer = start_queue_pair()
        peer.name = name
        return peer

    monkeypatch.setattr(installed, "PEERS", {"mpich": "os", "jax": "no_jax", "gloo": "no_torch"})
    monkeypatch.setattr(installed, "mpiexec", lambda python: "mpiexec")
    monkeypatch.setattr(peers, "start_peer", queues)
    monkeypatch.setattr(Plan, "rounds", lambda plan, nbytes: 2)
    results = Results()
    plan = Plan(devices=(2,), sizes=(8, MIB), operations=("all_gather", "barrier"), passes=1, quick=True)
    peers.measure(plan, results, lambda text: None)
    assert results.skipped == {"jax": "no_jax is not installed", "gloo": "no_torch is not installed"}
    found = {(m.system, m.operation, m.nbytes, m.memory, m.fresh) for m in results.of("peers")}
    assert found == {
        *(("vcluster", "all_gather", nbytes, memory, False) for nbytes in (8, MIB) for memory in MEMORIES),
        *(("vcluster", "all_gather", MIB, memory, True) for memory in MEMORIES),
        ("vcluster", "barrier", 0, "private", False),
        *((system, "round_trip", nbytes, "private", False) for system in ("vcluster", "mpich") for nbytes in (8, MIB)),
        *((name_of(processes), case.operation, case.nbytes, "private", False)
          for processes in (1, 2) for case in copies(2, MIB)),
    }
    standing = Standing(results)
    assert standing.least("all_gather", 2, MIB) is not None
    assert {(v.ours.operation, v.ours.nbytes, v.ours.fresh) for v in standing.verdicts()} == {
        ("all_gather", 8, False), ("all_gather", MIB, True), ("barrier", 0, False), ("round_trip", 8, False),
        ("round_trip", MIB, False),
    }


def test_an_interpreter_that_does_not_run_is_one_line_and_status_2(capsys):
    assert serve(PROGRAM, main, ["peers", "--peers", "/nowhere/python"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == (
        "python -m benchmarks: --peers needs a Python interpreter that runs, got '/nowhere/python' "
        "(No such file or directory)\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("nbytes", [8, 100_004])
def test_three_devices_give_the_right_answers_in_every_case(memory, nbytes):
    with closing(OurCluster(3)) as system:
        for operation, fresh in itertools.product(OPERATIONS, (False, True)):
            times = system.rounds(Case(operation, nbytes, memory, fresh), 2)
            assert [len(rounds) for rounds in times] == [2, 2, 2]
            assert all(start <= end for rounds in times for start, end in rounds)


def test_a_wrong_answer_on_a_device_is_told_as_one(monkeypatch):
    def wrong(device: Any, case: Case, count: int) -> None:
        raise WrongAnswerError(f"{case.operation} on rank {device.rank}")

    monkeypatch.setattr(systems, "run_case", wrong)
    with closing(OurCluster(2)) as system, pytest.raises(WrongAnswerError, match=r"^barrier on rank 0$"):
        system.rounds(Case("barrier", 0), 1)


WORKER = """
import os, sys
from benchmarks.cases import WrongAnswerError
from benchmarks.peers.link import serve
def rounds(case, count):
    {body}
print("a word")
serve(sys.argv[1], 0, "version 1", rounds)
"""


def worker(body: str) -> RemoteSystem:
    """A peer of one rank whose rounds are ``body``."""
    command = [sys.executable, "-c", WORKER.format(body=body), "{folder}/line"]
    return RemoteSystem("peer", 1, [command], lines=1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ("1 / 0", SystemFailedError, "ZeroDivisionError: division by zero"),
        ("os._exit(7)", SystemFailedError, "a rank ended: a word"),
    ],
)
def test_a_peer_that_fails_says_why_and_leaves_nothing(body, error, said):
    with closing(worker(body)) as peer:
        peer.connect()
        assert peer.version == "version 1"
        with pytest.raises(error, match=said):
            peer.rounds(Case("barrier", 0), 1)
        assert not peer.folder.exists()


WRONG_AT_LAST = """
    if count == 5:
        raise WrongAnswerError("element 3")
    return [(case.nbytes, count)]
"""


def test_a_peer_answers_case_after_case_in_order_until_one_is_wrong():
    with closing(worker(WRONG_AT_LAST)) as peer:
        peer.connect()
        assert peer.version == "version 1"
        assert peer.rounds(Case("all_reduce", 8), 3) == [[(8, 3)]]
        assert peer.rounds(Case("all_reduce", 12), 4) == [[(12, 4)]]
        with pytest.raises(WrongAnswerError, match=r"^peer: element 3$"):
            peer.rounds(Case("barrier", 0), 5)
        assert not peer.folder.exists()


def test_a_peer_that_ends_while_it_starts_says_its_last_words():
    command = [sys.executable, "-c", "print('first'); print('no luck'); raise SystemExit(3)"]
    with closing(RemoteSystem("peer", 1, [command], lines=1)) as peer:
        with pytest.raises(SystemFailedError, match=r"^ended while it started: no luck$"):
            peer.connect()
        assert not peer.folder.exists()


@pytest.mark.slow
def test_the_products_are_measured_with_flops_and_bytes_beside_their_whole_runs(tmp_path):
    document = figures(tmp_path, "products")
    measured = {m["operation"] for m in of(document, "products") if m["system"] == "vcluster"}
    assert measured >= {what for name in PRODUCTS for what in (name, f"{name}, whole run")}
    assert measured >= {f"2x4 unmatched, by seconds{what}" for what in ("", ", whole run")}
    flops = {q["what"]: q["amount"]["median"] for q in document["quantities"] if q["suite"] == "products"}
    m, k, n = QUICK_EXTENTS
    assert flops["2x4 full"] == flops["unsharded"] == 2 * m * k * n
    assert flops["2x4 unmatched"] == 8 * flops["2x4 unmatched, by seconds"] == 8 * 2 * m * k * n
    received = {m["operation"]: m["nbytes"] for m in of(document, "products") if m["system"] == "vcluster"}
    assert received["unsharded"] == 0
    assert received["2x4 full"] == 4 * (3 * m * k + k * n)
    assert received["2x4 matched"] == 4 * 2 * 2 * 3 * m * n
