"""The page of plans in a browser: its table sorts and filters, its front selects, and nothing overflows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from measured_page import MEASURE_PAGE

from parallelism.trace import Event, Trace
from vcluster.report import plan_html

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH, as Debian's package has it"),
]
COUNT = 10_000
HEADS = "#plans th button"


@pytest.fixture(scope="module")
def browser() -> Any:
    opened = Browser()
    yield opened
    opened.close()


def plans(count: int) -> dict[str, Any]:
    rng = random.Random(0)
    names = ["pp", "tp", "sp", "zero", "overlap", "schedule"]
    words = {"schedule": ["1f1b", "gpipe", "interleaved_1f1b"]}
    columns = {name: [rng.choice([1, 2, 4, 8]) for _ in range(count)] for name in names[:2]}
    columns |= {name: [rng.randrange(2) for _ in range(count)] for name in ("sp", "overlap")}
    columns |= {"zero": [rng.randrange(4) for _ in range(count)],
                "schedule": [rng.randrange(3) for _ in range(count)]}
    times = sorted(rng.uniform(1, 9) for _ in range(count))
    return {"names": names, "columns": columns, "words": words, "seconds": times,
            "peaks": [rng.randrange(10**10, 8 * 10**10) for _ in range(count)], "full": [i < 4 for i in range(count)]}


def written(path: Path, found: dict[str, Any]) -> Path:
    rows = [{"split": f"pp=2 tp={i} </script><b>", "seconds": 2.0 + i, "mfu": 0.4, "peak_bytes": 10**10,
             "parts": {"products": 1.0, "tp": 0.5 + i, "bubble": 0.5}} for i in range(3)]
    trace = Trace([Event(0, "memory", "weights", 0, nbytes=1e6),
                   Event(0, "compute", "0F0", 0, 2, stage=0, microbatch=0, phase="F")], mesh_shape={"pp": 1})
    plan_html(path, title="Plans of <gpt>", verdict=["Best: pp=2", "Why <not>"], facts=[("timed", "10,000")],
              plans=found, front=[0, 1], rows=rows, refused=[("tp does not divide <heads>", 12)],
              answers=[("Why not tp=8?", "line")], notes=["assumed: <much>"], trace=trace)
    return path


def column(browser: Any, number: int) -> list[str]:
    shown: list[str] = browser.value(
        f"[...document.querySelectorAll('#plans tbody tr')].map(row => row.children[{number}].textContent)")
    return shown


def test_the_table_sorts_filters_and_turns_pages(browser: Any, tmp_path: Path) -> None:
    found = plans(COUNT)
    browser.open(written(tmp_path / "page.html", found))
    assert browser.text("#shown") == f"1 to 100 of {COUNT}" and column(browser, 0) == [str(i + 1) for i in range(100)]
    assert column(browser, 1)[3][0] != "\u2265" and column(browser, 1)[4][0] == "\u2265"
    browser.value(f"document.querySelectorAll('{HEADS}')[2].click()")
    by_memory = sorted(range(COUNT), key=lambda i: (found["peaks"][i], i))
    assert column(browser, 0) == [str(i + 1) for i in by_memory[:100]]
    browser.value(f"document.querySelectorAll('{HEADS}')[2].click()")
    downwards = sorted(range(COUNT), key=lambda i: (-found["peaks"][i], i))
    assert column(browser, 0) == [str(i + 1) for i in downwards[:100]]
    browser.value("document.querySelector('#filter').value = 'zero>1 schedule=gpipe sp overlap=no';"
                  "document.querySelector('#filter').dispatchEvent(new Event('input'))")
    columns = found["columns"]
    kept = [i for i in downwards if columns["zero"][i] > 1 and columns["schedule"][i] == 1
            and columns["sp"][i] and not columns["overlap"][i]]
    assert column(browser, 0) == [str(i + 1) for i in kept[:100]] and f"of {len(kept)}" in browser.text("#shown")
    browser.value("document.querySelector('#after').click()")
    assert column(browser, 0) == [str(i + 1) for i in kept[100:200]]
    browser.value("document.querySelector('#filter').value = 'tp=3';"
                  "document.querySelector('#filter').dispatchEvent(new Event('input'))")
    assert browser.text("#shown") == "no plan has this" and browser.problems == []


def test_a_click_on_the_front_selects_a_plan(browser: Any, tmp_path: Path) -> None:
    found = plans(2) | {"seconds": [1.0, 2.0], "peaks": [4 * 10**10, 10**10]}
    browser.open(written(tmp_path / "page.html", found))
    box = browser.value("(() => { const b = document.querySelector('#front').getBoundingClientRect();"
                        "return [b.left, b.top, b.width] })()")
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        browser.mouse(kind, *_place(box), button="left", clickCount=1)
    assert "2.00 s, 10.0 GB" in browser.text("#front-tip")
    assert browser.value("document.querySelector('#plans tr.pick').children[0].textContent") == "2"


def _place(box: list[float]) -> tuple[float, float]:
    """Where the second of the two plans is: at the left and at the top of the chart."""
    from math import log

    left, right, top, bottom = 74, 18, 14, 340
    x = left + log(1.1) / log(4 * 1.1 * 1.1) * (box[2] - left - right)
    y = bottom - log(2 * 1.05) / log(2 * 1.05 * 1.05) * (bottom - top)
    return box[0] + x, box[1] + y


def test_nothing_overflows_and_text_is_text(browser: Any, tmp_path: Path) -> None:
    page = written(tmp_path / "page.html", plans(300))
    for width in (1280, 390):
        for dark in (False, True):
            browser.open(page, width=width, dark=dark)
            assert browser.value("document.documentElement.scrollWidth") == width
            found = browser.value(MEASURE_PAGE)
            assert not found["bad"] and found["seen"] > 1000
            assert browser.problems == []
    place = "document.querySelector('[data-section={}]').getBoundingClientRect().top"
    assert browser.value(f"{place.format('best')} < {place.format('notes')}") is True      # behind the pictures
    assert browser.text("#notes") == "assumed: <much>" and "assumed" not in browser.text("#verdict")
    assert browser.text("h1") == "Plans of <gpt>" and "</script><b>" in browser.text("#parts")
    shown = browser.value("[...document.querySelectorAll('section')].map(s => s.hidden)")
    assert not any(shown)


def test_without_plans_only_what_was_refused_is_shown(browser: Any, tmp_path: Path) -> None:
    plan_html(tmp_path / "page.html", title="t", verdict=["no plan fits"], facts=[], plans=plans(0), front=[], rows=[],
              refused=[("memory", 3)])
    browser.open(tmp_path / "page.html")
    seen = browser.value("[...document.querySelectorAll('section')].filter(s => !s.hidden).map(s => s.dataset.section)")
    assert seen == ["refused"] and browser.problems == []
