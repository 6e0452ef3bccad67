"""The playground: its script computes what Python computes, and its tables are the library's."""

import json
import random
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from parallelism.algorithms import closed_form
from parallelism.algorithms.algorithms import algorithm
from parallelism.cost import Costs
from parallelism.hardware import Hardware, HostLink, Link
from parallelism.pipelining import Pipeline
from vcluster.__main__ import main
from vcluster.report.playground import collectives, schedules

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed; it runs the script of the page")


@pytest.fixture(scope="module", name="tables")
def _tables() -> dict[str, Any]:
    return {"collectives": collectives(), "schedules": schedules()}


def in_node(cases: list[Any], body: str) -> list[Any]:
    """What ``body``, the expression of ``c``, is for each case, in one process."""
    assert NODE is not None
    sums = (files("vcluster.report") / "playground_sums.js").read_text()
    program = (f'{sums}\nconst cases = JSON.parse(require("fs").readFileSync(0));\n'
               f"console.log(JSON.stringify(cases.map(c => {body})));")
    done = subprocess.run([NODE, "-e", program], input=json.dumps(cases), capture_output=True, text=True, check=True,
                          timeout=100)
    found: list[Any] = json.loads(done.stdout)
    return found


def test_tables_have_every_message_of_the_algorithms(tables: dict[str, Any]) -> None:
    seen = 0
    for kind, by_name in tables["collectives"].items():
        for name, by_size in by_name.items():
            for size, (pieces, steps, _) in by_size.items():
                if size > 8:
                    continue
                plan = algorithm(kind, name, size)
                assert pieces == plan.chunks_of_buffer
                assert [[(m[0], m[1], _chunks(m[3:]), bool(m[2])) for m in step] for step in steps] == [
                    [(t.source, t.target, t.chunks, t.reduce) for t in step] for step in plan.steps]
                seen += 1
    assert seen > 100


def _chunks(runs: list[int]) -> tuple[int, ...]:
    return tuple(chunk for first, count in zip(runs[::2], runs[1::2], strict=True)
                 for chunk in range(first, first + count))


@needs_node
def test_the_page_has_the_bytes_and_seconds_of_python(tables: dict[str, Any]) -> None:
    draw, settings, cases = random.Random(25), [], []
    for _ in range(250):
        kind = draw.choice(list(tables["collectives"]))
        name = draw.choice(list(tables["collectives"][kind]))
        size = draw.choice(list(tables["collectives"][kind][name]))
        nbytes, latency, rate = 2 ** draw.randint(6, 32), draw.randint(1, 100) * 1e-6, draw.randint(1, 400) * 1e9
        settings.append((kind, name, size, nbytes, latency, rate))
        cases.append([tables["collectives"][kind][name][size], size, nbytes, latency, 1 / rate])
    found = in_node(cases, "[received(c[0], c[1], c[0][1].length, c[2]), collectiveSeconds(c[0], c[2], c[3], c[4])]")
    for (kind, name, size, nbytes, latency, rate), (received, seconds) in zip(settings, found, strict=True):
        assert received == pytest.approx(closed_form(kind, name, size).bytes_received(nbytes), rel=1e-12), (kind, name)
        hardware = Hardware("one level", {"float32": 1e12}, 1e9, 1e12, (Link("all", (size,), latency, rate),),
                            HostLink(0.0, 1e9))
        expected = Costs(hardware).collective(kind, nbytes, range(size), algorithm=name).seconds
        assert seconds == pytest.approx(expected, rel=1e-11), (kind, name, size)


@needs_node
def test_the_page_times_schedules_as_python_does(tables: dict[str, Any]) -> None:
    draw, settings, cases = random.Random(7), [], []
    for _ in range(300):
        name = draw.choice(list(tables["schedules"]))
        key = draw.choice([key for key in tables["schedules"][name] if key.split("/")[1] != "16"])
        costs = [draw.randint(0, 16) / 4 for _ in range(4)] + [draw.randint(0, 8) / 4]
        costs[0] += 0.25
        settings.append((name, key, costs))
        cases.append([tables["schedules"][name][key], costs])
    found = in_node(cases, "scheduleTimes(c[0], c[1])")
    for (name, key, costs), times in zip(settings, found, strict=True):
        stages, microbatches, chunks = map(int, key.split("/"))
        timeline = Pipeline(stages, microbatches, name, chunks).schedule.timeline(costs)
        rows = [[["FBIW".index(s.action.kind), s.action.stage, s.action.microbatch, s.start, s.end] for s in row]
                for row in timeline.spans]
        assert times["spans"] == rows, (name, key, costs)
        assert times["makespan"] == timeline.makespan
        assert times["bubble"] == pytest.approx(timeline.bubble_fraction, abs=1e-12)
        assert tuple(times["kept"]) == timeline.peak_live(), (name, key, costs)


def test_the_command_writes_a_page_without_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "lesson.html"
    assert main(["playground", "--html", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)=.?http|@import|fetch\(", text)
    labelled = set(re.findall(r'<label for="([^"]+)"', text))
    assert labelled == set(re.findall(r'<(?:select|input)[^>]* id="([^"]+)"', text)) != set()
