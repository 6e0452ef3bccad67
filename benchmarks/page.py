"""``python -m benchmarks page FIGURES.json``: all tables and curves of a run's JSON, as a page in Markdown.

The curves go into a folder beside the page that has its name.  Several files make one page, where one run was too
long: of a figure that two of them have, the first counts.  The page is made on demand and not kept in the repository.
"""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import in_a_line
from benchmarks.plan import MIB
from benchmarks.remote import ROOT
from benchmarks.results import Measurement, Quantity, Results, speed_line
from benchmarks.suites import SUITES
from benchmarks.tables import nbytes_text, ratio_text, seconds_text
from benchmarks.targets import Bound, Growth, Standing, Verdict
from vcluster.cli.command_line import Parser, WrongWords, writable

PAGE = ROOT / "build" / "figures.md"
NAMES = {"mpich": "MPICH", "jax": "JAX", "gloo": "gloo", "least": "the least", "with out=": ""}

Draw = Callable[[Results, Path], list[Path]]


def main(words: Sequence[str]) -> int:
    """Write the page; status 0.  Raises `WrongWords` for files that cannot be read or are none of figures."""
    parser = Parser(prog="python -m benchmarks page", description="All tables and curves of a run, as a page.")
    parser.add_argument("figures", nargs="+", type=Path, metavar="FIGURES.json", help="what --json wrote")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE.md", help="where to (build/figures.md)")
    asked = parser.parse(words)
    draw = drawing("page")
    documents = [_read(path) for path in asked.figures]
    results = merged([found for found, _ in documents])
    asked.page.parent.mkdir(parents=True, exist_ok=True)
    writable(asked.page)
    pictures = draw(results, asked.page.parent / asked.page.stem)
    runs = [_provenance(document) for _, document in documents]
    parts = tables(results, [path.relative_to(asked.page.parent).as_posix() for path in pictures])
    asked.page.write_text("\n\n".join(["# Figures", *runs, *parts]) + "\n", encoding="utf-8")
    print(asked.page, *pictures, sep="\n")
    return 0


def drawing(what: str) -> Draw:
    """What draws the curves.  Raises `WrongWords` if matplotlib is missing, which ``what`` needs."""
    try:
        draw: Draw = importlib.import_module("benchmarks.curves").draw
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise WrongWords(f"{what} needs matplotlib, which is not installed: pip install -e '.[bench]'") from None
    return draw


def merged(parts: Sequence[Results]) -> Results:
    """One for all; of what two of them have, the first's."""
    measurements: dict[object, Measurement] = {}
    quantities: dict[object, Quantity] = {}
    whole = Results()
    for part in parts:
        for m in part.measurements:
            key = m.suite, m.system, m.operation, m.devices, m.nbytes, m.memory, m.fresh
            measurements.setdefault(key, m)
        for q in part.quantities:
            quantities.setdefault((q.suite, q.system, q.what, q.devices), q)
        whole.skipped = {**part.skipped, **whole.skipped}
        whole.versions = {**part.versions, **whole.versions}
        whole.additions = {**part.additions, **whole.additions}
    whole.measurements, whole.quantities = list(measurements.values()), list(quantities.values())
    return whole


def tables(results: Results, pictures: Sequence[str]) -> list[str]:
    """The part of the page for each suite that has figures."""
    parts = []
    for name, suite in SUITES.items():
        if any(results.of(name)) or any(results.amounts_of(name)):
            report = suite.report(results)
            title = "Beside the peers" if name == "peers" else suite.title[0].upper() + suite.title[1:]
            parts += [f"## {title}", *(
                _peers(results, pictures, report) if name == "peers" else [f"```text\n{report}\n```"])]
            parts += [line for line in [speed_line(results, name)] if line]
    return parts


def _peers(results: Results, pictures: Sequence[str], report: str) -> list[str]:
    standing = Standing(results)
    verdicts = standing.verdicts()
    growths = [growth for growth in standing.growths() if growth.allowed is not None]
    blocks = [
        f"{sum(verdict.met for verdict in verdicts)} of {len(verdicts)} figures meet their targets. A cell has "
        "vcluster's median; below it that by what the target names, the target, and a mark: ✓ met, ✗ not met. Where "
        "several must be met, the one that decides is shown. A small broadcast is held against the peer's barrier and "
        "broadcast; *the least* is what the least memory traffic takes at the rate at which this machine copied in "
        "the same run. New results (without `out=`) are held against the figures with `out=`."
    ]
    for devices in standing.devices:
        blocks += [f"### {devices} devices", _matrix(standing, verdicts, devices)]
        blocks += [
            f"![{Path(picture).stem.partition('-')[0]} over size on {devices} devices]({picture})"
            for picture in pictures if Path(picture).stem.endswith(f"-{devices}")
        ]
    if growths:
        blocks += ["### Growth with the number of devices", _growth(growths, standing.peers)]
    blocks.append(f"<details><summary>All ratios</summary>\n\n```text\n{report}\n```\n\n</details>")
    return blocks


def _matrix(standing: Standing, verdicts: list[Verdict], devices: int) -> str:
    """A row for each operation and memory, a column a size."""
    judged = {
        (v.ours.operation, v.ours.memory, v.ours.fresh, v.ours.nbytes): v
        for v in verdicts if v.ours.devices == devices
    }
    mine = [m for m in standing.ours() if m.devices == devices]
    sizes = sorted({m.nbytes for m in mine if m.nbytes}) or [0]
    rows = [["", "arrays", *map(nbytes_text, sizes)]]
    order = list(dict.fromkeys(m.operation for m in mine))
    kinds = {(m.operation, m.memory, m.fresh) for m in mine}
    for operation, memory, fresh in sorted(kinds, key=lambda kind: (order.index(kind[0]), kind[1:])):
        cells = []
        for nbytes in sizes if operation != "barrier" else [0, *[-1] * (len(sizes) - 1)]:
            found = standing.own(operation, memory, devices, nbytes, fresh=fresh)
            verdict = judged.get((operation, memory, fresh, nbytes))
            text = "" if found is None else seconds_text(found.seconds.median)
            cells.append(text if verdict is None else f"{text}<br>{_mark(verdict)}")
        rows.append([operation, memory + (", new result" if fresh else ""), *cells])
    return _markdown(rows, labels=2)


def _mark(verdict: Verdict) -> str:
    """``0.31 ≤ 0.7 MPICH ✓``."""
    bound = verdict.tightest
    mark = "✓" if verdict.met else "✗"
    return f"{_of(bound)} {mark}" if not bound.of else f"{ratio_text(verdict.ratio * bound.factor)} {_of(bound)} {mark}"


def _of(bound: Bound) -> str:
    if not bound.of:
        return f"≤ {bound.seconds * 1e6:.0f} us"
    return f"≤ {bound.factor:g} {NAMES[bound.of]}".strip()


def _growth(growths: list[Growth], peers: tuple[str, ...]) -> str:
    rows = [["", "arrays", "bytes", "devices", "vcluster", *(NAMES[peer] for peer in peers), ""]]
    for growth in growths:
        rows.append([
            growth.operation, growth.memory, nbytes_text(growth.nbytes) if growth.nbytes else "",
            f"{growth.devices // 2} → {growth.devices}", ratio_text(growth.ours),
            *(ratio_text(growth.theirs[peer]) if peer in growth.theirs else "" for peer in peers),
            "✓" if growth.met else "✗",
        ])
    return _markdown(rows, labels=2)


def _markdown(rows: list[list[str]], labels: int) -> str:
    head, *body = rows
    rule = ["---"] * labels + ["---:"] * (len(head) - labels)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *body))


def _provenance(document: dict[str, Any]) -> str:
    """Machine, versions, time and command of a run."""
    return (
        f"Measured on {in_a_line(document['machine'], document['versions'])}; {document['started']}, by\n\n"
        f"```sh\n{shlex.join(document['command'])}\n```"
    )


def _read(path: Path) -> tuple[Results, dict[str, Any]]:
    try:
        if path.stat().st_size > 64 * MIB:
            raise WrongWords(f"{path} is too large for figures")
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise WrongWords(f"{path} has no figures: it is no JSON object")
        return Results.from_document(document), document
    except OSError as error:
        raise WrongWords(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise WrongWords(f"{path} has no figures: {error}") from None
