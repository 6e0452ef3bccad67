"""The page of plans to serve in a browser: the front, requests over time, and nothing overflows or is hard to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from measured_page import MEASURE_PAGE, SCROLLS, SHOWN_CIRCLES

from parallelism import models
from parallelism.serving import ServingPlans, find_serving
from parallelism.serving.picture import SHOWN, pictures
from vcluster.report.plain_page import as_shown, write_plain_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH, as Debian's package has it"),
]


@pytest.fixture(scope="module")
def plans() -> ServingPlans:
    return find_serving(models.transformer("llama3.1-8b"), "dgx-h100", 3, input_tokens=900, output_tokens=30, pp=1,
                        batch=[1, 4, 32], token_seconds=0.02, disaggregate=True)


@pytest.fixture(scope="module")
def page(plans: ServingPlans, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serving") / "serving.html"
    write_plain_page("Serving <llama>", pictures(plans) + as_shown(str(plans)), path)
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
    assert browser.text("h1") == "Serving <llama>"


def test_each_plan_of_the_front_is_a_point_and_each_request_two_bars(browser: Any, page: Path, plans: ServingPlans) -> None:
    browser.open(page, width=1100)
    points = browser.value(SHOWN_CIRCLES + ".map(c => [c.getBoundingClientRect().left, "
                           "c.querySelector('title').textContent])")
    assert len(points) == len(plans.front) > 2
    for plan, (_, words) in zip(plans.front, points, strict=True):
        assert words.startswith(f"{plan.words}: ")
    lefts = [left for left, _ in points]
    assert lefts == sorted(lefts, reverse=True)          # the plan that is fastest for a user is the first, at the right
    bars = browser.value("[...document.querySelectorAll('.broad rect title')].map(t => t.textContent)")
    shown = min(SHOWN, len(plans.best.answered))
    assert len(bars) == 2 * shown
    assert bars[0].startswith("its first token after ") and bars[1].startswith("30 tokens, each in ")
