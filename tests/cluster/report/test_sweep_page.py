"""The page of a sweep in a browser: its picture has a point for each cell, and nothing overflows or is hard to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from measured_page import MEASURE_PAGE, SCROLLS, SHOWN_CIRCLES

from parallelism.budgets import Budget, Failures, find_budget
from parallelism.models import TransformerSpec
from vcluster.cli.sweeps.swept import write_sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH, as Debian's package has it"),
]
SPEC = TransformerSpec(layers=2, width=32, heads=2, vocabulary=64, sequence=16)
FEW: dict[str, Any] = {"tp": 1, "pp": 1, "microbatch": 2, "recompute": "none"}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "budget.html"
    budget = Budget(tokens=1e12, days=200, prices={"dgx-a100": 1.5, "dgx-h100": 2.5}, carbon_grams_per_kwh=350.0,
                    failures=Failures(device_seconds=1e8))
    sweep = find_budget(SPEC, budget, hardware=["dgx-a100", "dgx-h100"], devices=[2, 4, 8], batch=64, **FEW)
    write_sweep(sweep, "gpt <small>: 1 T tokens", path)
    return path


@pytest.fixture(scope="module")
def browser() -> Any:
    opened = Browser()
    yield opened
    opened.close()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overflows_and_text_can_be_read(browser: Any, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    found = browser.value(MEASURE_PAGE)
    assert not found["bad"] and found["seen"] > 20 and browser.problems == []
    assert set(browser.value(SCROLLS)) <= {"PRE"}       # only a table and a command; sentences and pictures fit
    assert browser.text("h1") == "gpt <small>: 1 T tokens"


def test_each_cell_is_a_point_that_tells_its_plan(browser: Any, page: Path) -> None:
    browser.open(page, width=1100)
    points = browser.value(SHOWN_CIRCLES + ".map(c => [c.getBoundingClientRect().left, "
                           "c.querySelector('title').textContent])")
    assert len(points) == 6 and all("mb=2" in words for _, words in points)
    by_kind = [[left for left, words in points if kind in words] for kind in ("dgx-a100", "dgx-h100")]
    assert all(lefts == sorted(lefts, reverse=True) and len(lefts) == 3 for lefts in by_kind)     # more devices, fewer days
    deadline = browser.value("document.querySelector('path[stroke-dasharray]').getBoundingClientRect().left")
    table = browser.text("pre")
    assert sum(left <= deadline - 5 for left, _ in points) == table.count("\n*")
