"""Each benchmark suite really runs, in its tiniest form; it leaves valid figures and nothing else.  No time judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import systems
from benchmarks.cases import MEMORIES, OPERATIONS, Case, WrongAnswerError
from benchmarks.installed import PEERS
from benchmarks.remote import RemoteSystem
from benchmarks.systems import OurCluster, SystemFailedError

ROOT = Path(__file__).parents[2]
TINY = ["--quick", "--passes", "1", "--devices", "2", "--sizes", "8,4096"]
COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier"}


def benchmarks(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with a folder for temporary files."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words], cwd=ROOT, env={**os.environ, "TMPDIR": str(folder)}, timeout=50,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )


def figures(folder: Path, suite: str, *words: str) -> dict[str, Any]:
    """The document that one suite writes, after a look at how it ended."""
    temporary = folder / "tmp"
    temporary.mkdir()
    done = benchmarks(temporary, suite, *TINY, *words, "--json", str(folder / "figures.json"))
    assert done.stderr == ""
    assert done.returncode == 0
    assert list(temporary.iterdir()) == []
    assert "\x1b" not in done.stdout
    told = [line for line in done.stdout.splitlines() if "figures.json" not in line]
    assert max(map(len, told)) <= 80
    document: dict[str, Any] = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    assert document["machine"]["cores"] >= 1
    assert document["versions"]["numpy"]
    assert document["command"][:4] == ["python", "-m", "benchmarks", suite]
    for measurement in document["measurements"]:
        assert measurement["suite"] == suite
        assert measurement["seconds"]["rounds"] >= 1
        if measurement["operation"] != "cold minus numpy":
            assert measurement["seconds"]["minimum"] > 0
    return document


def cells(document: dict[str, Any], system: str = "vcluster") -> set[tuple[str, int, int]]:
    return {
        (m["operation"], m["devices"], m["nbytes"]) for m in document["measurements"] if m["system"] == system
    }


def test_startup(tmp_path):
    imports = {(f"import {what}", 0, 0) for what in ("numpy", "vcluster", "VirtualCluster")}
    starts = {"cold", "cold minus numpy", "warm", "first_run", "shutdown", "script"}
    assert cells(figures(tmp_path, "startup")) == imports | {(what, 2, 0) for what in starts}


def test_run(tmp_path):
    large = {(what, 2, nbytes) for what in ("arguments", "results", "both") for nbytes in (8, 4096)}
    assert cells(figures(tmp_path, "run")) == {("empty", 2, 0)} | large


def test_collectives(tmp_path):
    document = figures(tmp_path, "collectives")
    expected = {(operation, 2, nbytes) for operation in COLLECTIVES - {"barrier"} for nbytes in (8, 4096)}
    assert cells(document) == expected | {("barrier", 2, 0)}
    memories = {(m["operation"], m["memory"]) for m in document["measurements"]}
    assert {("all_to_all", "private"), ("all_to_all", "shared")} <= memories
    assert all(m["from_first_start"]["median"] >= m["seconds"]["median"] for m in document["measurements"])


def test_messages(tmp_path):
    document = figures(tmp_path, "messages")
    expected = {("round_trip", 2, 8), ("round_trip", 2, 4096), ("stream", 2, 4096)}
    assert cells(document) == expected
    assert cells(document, "queue") == expected


def test_tracing(tmp_path):
    steps = {"record", "merge", "save", "load", "count"}
    each = {(what, 2, 8) for what in ("traced", "untraced")}
    found = cells(figures(tmp_path, "tracing"))
    assert each < found
    assert {(what, devices) for what, devices, _ in found - each} == {
        (what, 4) for step in steps for what in (step, f"{step}, CPU of the host")}


def test_peers_that_are_missing_are_skipped_with_a_reason_and_the_others_are_measured(tmp_path):
    document = figures(tmp_path, "peers", "--operations", "all_reduce")
    for name, module in PEERS.items():
        if find_spec(module) is None:
            assert document["skipped"][name] == f"{module} is not installed"
            assert cells(document, name) == set()
        elif name not in document["skipped"]:
            assert ("all_reduce", 2, 4096) in cells(document, name)


def test_an_interpreter_that_does_not_run_is_one_line_and_status_2(tmp_path):
    done = benchmarks(tmp_path, "peers", "--peers", "/nowhere/python")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "python -m benchmarks: --peers needs a Python interpreter that runs, got '/nowhere/python' "
        "(No such file or directory)\n"
    )


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("nbytes", [8, 100_004])
def test_three_devices_give_the_right_answers_in_every_case(memory, nbytes):
    with closing(OurCluster(3)) as system:
        for operation in OPERATIONS:
            times = system.rounds(Case(operation, nbytes, memory), 2)
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


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ("1 / 0", SystemFailedError, "ZeroDivisionError: division by zero"),
        ("os._exit(7)", SystemFailedError, "a rank ended: a word"),
        ("raise WrongAnswerError('element 3')", WrongAnswerError, "^peer: element 3$"),
    ],
)
def test_a_peer_that_fails_says_why_and_leaves_nothing(body, error, said):
    with closing(worker(body)) as peer:
        peer.connect()
        assert peer.version == "version 1"
        with pytest.raises(error, match=said):
            peer.rounds(Case("barrier", 0), 1)
        assert not peer.folder.exists()


def test_a_peer_answers_case_after_case_in_order():
    with closing(worker("return [(case.nbytes, count)]")) as peer:
        peer.connect()
        assert peer.rounds(Case("all_reduce", 8), 3) == [[(8, 3)]]
        assert peer.rounds(Case("all_reduce", 12), 4) == [[(12, 4)]]


def test_a_peer_that_ends_while_it_starts_says_its_last_words():
    command = [sys.executable, "-c", "print('first'); print('no luck'); raise SystemExit(3)"]
    with closing(RemoteSystem("peer", 1, [command], lines=1)) as peer:
        with pytest.raises(SystemFailedError, match=r"^ended while it started: no luck$"):
            peer.connect()
        assert not peer.folder.exists()
