"""The playground: its script computes what Python computes, and its tables are the library's."""

import json
import math
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallelism.algorithms import closed_form
from parallelism.algorithms.algorithms import algorithm
from parallelism.cost import Costs
from parallelism.hardware import Hardware, HostLink, Link
from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline
from parallelism.resharding import plan_resharding
from parallelism.sharding import TensorSharding
from vcluster.__main__ import main
from vcluster.report.playground import collectives, layouts, plans, products, schedules, serving

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed; it runs the script of the page")


SMALL: dict[str, Any] = {
    "RANKS": (2, 3, 4, 5, 7), "PIPELINE_RANKS": (2, 4), "MICROBATCHES": (2, 4, 16), "MESHES": (
        Mesh(x=2), Mesh(x=2, y=3)), "EXTENTS": (1, 256, 16384)}
"""Fewer sizes than the page has."""


@pytest.fixture(scope="module", params=["small", pytest.param("all", marks=pytest.mark.slow)], autouse=True)
def sizes(request: pytest.FixtureRequest) -> Iterator[None]:
    """The sizes that the tables have: by day a few."""
    module = import_module("vcluster.report.playground")
    with pytest.MonkeyPatch.context() as patch:
        for name, values in SMALL.items() if request.param == "small" else ():
            patch.setattr(module, name, values)
        yield


@pytest.fixture(scope="module", name="tables")
def _tables(sizes: None) -> dict[str, Any]:
    return {"collectives": collectives(), "schedules": schedules(), "layouts": layouts(), "products": products()}


def in_node(cases: list[Any], body: str, tables: Any = None) -> list[Any]:
    """What ``body``, the expression of ``c``, is for each case, in one process; ``tables`` are those of a section.

    The script may show numbers as the page does: by ``bytes``, ``seconds`` and ``digits``.
    """
    assert NODE is not None
    page = 'const document = {getElementById: () => ({textContent: "{}"})};'
    scripts = [(files("vcluster.report") / name).read_text() for name in ("drawing.js", "playground_sums.js")]
    program = "\n".join([page, *scripts, 'const [tables, cases] = JSON.parse(require("fs").readFileSync(0));',
                         f"console.log(JSON.stringify(cases.map(c => {body})));"])
    done = subprocess.run([NODE, "-e", program], input=json.dumps([tables, cases]), capture_output=True, text=True,
                          check=True, timeout=100)
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_tables_have_every_message_of_the_algorithms(tables: dict[str, Any]) -> None:
    seen = 0
    for kind, by_name in tables["collectives"].items():
        for name, by_size in by_name.items():
            for size, (pieces, steps, _) in by_size.items():
                if size > 6:
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


@pytest.mark.slow
@needs_node
def test_the_page_has_the_bytes_and_seconds_of_python(tables: dict[str, Any]) -> None:
    draw, settings, cases = random.Random(25), [], []
    for _ in range(40):
        kind = draw.choice(list(tables["collectives"]))
        name = draw.choice(list(tables["collectives"][kind]))
        size = draw.choice(list(tables["collectives"][kind][name]))
        nbytes, latency, rate = 2 ** draw.randint(6, 32), draw.randint(1, 100) * 1e-6, draw.randint(1, 400) * 1e9
        settings.append((kind, name, size, nbytes, latency, rate))
        cases.append([tables["collectives"][kind][name][size], size, nbytes, latency, 1 / rate])
        hardware = Hardware("one level", {"float32": 1e12}, 1e9, 1e12, (Link("all", (size,), latency, rate),),
                            HostLink(0.0, 1e9))
        cases[-1] += [list(map(float, closed_form(kind, name, size).bytes_received(nbytes))),
                      Costs(hardware).collective(kind, nbytes, range(size), algorithm=name).seconds]
    found = in_node(cases, "((got, time) => [got, time, got.map(bytes), c[5].map(bytes), seconds(time), seconds(c[6])])"
                           "(received(c[0], c[1], c[0][1].length, c[2]), collectiveSeconds(c[0], c[2], c[3], c[4]))")
    for setting, case, (received, seconds, *shown) in zip(settings, cases, found, strict=True):
        assert received == pytest.approx(case[5], rel=1e-12), setting
        assert seconds == pytest.approx(case[6], rel=1e-11), setting
        assert shown[0] == shown[1] and shown[2] == shown[3], setting


@pytest.mark.slow
@needs_node
def test_the_page_times_schedules_as_python_does(tables: dict[str, Any]) -> None:
    draw, settings, cases = random.Random(7), [], []
    for _ in range(40):
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


@pytest.mark.takes_seconds
@needs_node
def test_the_page_moves_what_python_moves(tables: dict[str, Any]) -> None:
    """Between layouts: the bytes of each rank in all steps together, and what lies on each rank before and after."""
    draw, expected, cases = random.Random(3), [], []
    for _ in range(100):
        mesh_text = draw.choice(list(tables["layouts"]))
        shape_text = draw.choice(list(tables["layouts"][mesh_text]["shapes"]))
        table = tables["layouts"][mesh_text]["shapes"][shape_text]
        source, target = (draw.randrange(table["choices"]) for _ in range(2))
        mesh = Mesh(**{axis: int(n) for axis, n in (each.split("=") for each in mesh_text.split(", "))})
        whole = np.zeros([int(n) for n in shape_text.split("x")], np.float32)
        ends = [TensorSharding.parse(table["layouts"][number]) for number in (source, target)]
        plan = plan_resharding(*ends, whole.shape, whole.dtype, mesh)
        steps = table["steps"][source][target]
        assert (steps[-1][3] if steps else source) == target, (mesh_text, ends)
        shards = [[shard.nbytes for shard in layout.shard(whole, mesh)] for layout in ends]
        for layout, number in zip(ends, (source, target), strict=True):
            for rank, (top, bottom, left, right) in enumerate(table["blocks"][number]):
                assert layout.slices(whole.shape, mesh, rank) == (slice(top, bottom), slice(left, right))
        expected.append([sum(plan.bytes_received), *shards])
        cases.append([steps, table["blocks"][source], table["blocks"][target]])
    assert in_node(cases, "[moved(c[0]), c[1].map(held), c[2].map(held)]") == expected


@pytest.mark.takes_seconds
@needs_node
def test_the_page_has_the_products_of_the_cost_model(tables: dict[str, Any]) -> None:
    draw, cases = random.Random(5), []
    for _ in range(40):
        name = draw.choice(list(tables["products"]["hardware"]))
        m, n, k = draw.choices(tables["products"]["extents"], k=3)
        hardware, dtype = Hardware.preset(name), tables["products"]["hardware"][name]["dtype"]
        flops, nbytes = 2 * m * n * k, 2 * (m * k + k * n + m * n)
        seconds = Costs(hardware).compute_seconds(flops, nbytes, dtype=dtype, shape=(1, m, n, k))
        cases.append([name, m, n, k, flops, nbytes, flops / nbytes, seconds, flops / seconds / hardware.peak(dtype)])
    found = in_node(cases, "(p => [[p.flops, p.bytes, p.intensity, p.seconds, p.share], "
                           "[digits(p.intensity) === digits(c[6]), seconds(p.seconds) === seconds(c[7]), "
                           "bytes(p.bytes) === bytes(c[5])]])(productAt(tables, ...c))", tables["products"])
    for case, (numbers, same) in zip(cases, found, strict=True):
        assert numbers == pytest.approx(case[4:], rel=1e-12), case
        assert math.prod(case[1:4]) * 2 == numbers[0]
        assert all(same), case


@needs_node
def test_the_page_has_the_figures_of_a_decode_step() -> None:
    draw, tables, cases, expected = random.Random(7), serving(), [], []
    for _ in range(60):
        name = draw.choice(list(tables))
        asked = tables[name]
        tp, context, batch = (draw.choice(asked[each]) for each in ("tp", "contexts", "batches"))
        at = asked["tp"].index(tp)
        parts = asked["steps"][at][asked["contexts"].index(context)][asked["batches"].index(batch)]
        nbytes = asked["weights_bytes"][at] + asked["token_bytes"][at] * context * batch
        cases.append([name, tp, context, batch])
        if parts is None:
            expected.append([False, nbytes, None, None, None, None])
        else:
            seconds = sum(parts)
            reading = nbytes / asked["memory_bytes_per_second"]
            expected.append([True, nbytes, seconds, 1 / seconds, batch / seconds / tp, reading])
    found = in_node(cases, "(s => [s.fits, s.weights + s.cache, s.seconds ?? null, s.user ?? null, s.device ?? null, "
                           "s.reading ?? null])(decodeStep(tables[c[0]], c[1], c[2], c[3]))", tables)
    assert {each[0] for each in found} == {False, True}
    for numbers, right in zip(found, expected, strict=True):
        assert numbers == (right if right[2] is None else pytest.approx(right, rel=1e-12))


def word(value: object) -> str:
    """A value as JavaScript writes it."""
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.slow
@needs_node
def test_the_page_finds_the_plans_with_the_wanted_settings() -> None:
    draw, tables, cases, expected = random.Random(11), plans(), [], []
    for _ in range(30):
        question = draw.choice(list(tables))
        names, rows = tables[question]["names"], tables[question]["plans"]
        model = draw.choice(rows)
        wanted = {name: word(model[names.index(name)]) for name in draw.sample(names, draw.randint(0, len(names)))}
        places = [place for place, row in enumerate(rows)
                  if all(word(row[names.index(name)]) == value for name, value in wanted.items())]
        cases.append([question, wanted])
        expected.append([places, f"{100 * (rows[places[0]][-2] / rows[0][-2] - 1):.1f}%"])
        assert [row[-2] for row in rows] == sorted(row[-2] for row in rows)
    found = "(at => [at, slower(tables[c[0]].plans, at[0])])(fitting(tables[c[0]].plans, tables[c[0]].names, c[1]))"
    assert in_node(cases, found, tables) == expected


@pytest.mark.takes_seconds
def test_the_command_writes_a_page_without_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "lesson.html"
    assert main(["playground", "--html", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)=.?http|@import|fetch\(", text)
    labelled = set(re.findall(r'<label for="([^"]+)"', text))
    assert labelled == set(re.findall(r'<(?:select|input)[^>]* id="([^"]+)"', text)) != set()
