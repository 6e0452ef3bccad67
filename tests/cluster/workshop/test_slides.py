"""The slides: a title, page numbers, and pages turned by keys, buttons, clicks and touch."""

import sys

import pytest
from browser import CHROMIUM, Browser
from paths import ROOT

WORKSHOP = ROOT / "workshop"
sys.path.insert(0, str(WORKSHOP))

import make  # noqa: E402

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


@pytest.fixture(scope="module")
def opened():
    browser = Browser()
    yield browser
    browser.close()


def page(browser):
    return browser.value("document.querySelector('#page').textContent")


def swipe(browser, start, end):
    browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": start, "y": 300}])
    browser.call("Input.dispatchTouchEvent", type="touchMove", touchPoints=[{"x": end, "y": 302}])
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.frame()


@pytest.mark.slow
def test_pages_are_turned_and_numbered(opened):
    opened.open(WORKSHOP / "slides.html", 1300, 900)
    count = 1 + sum(1 + sum(block.kind == "slide" for block in source.blocks) for source in make.lessons())
    assert page(opened) == f"1 / {count}"
    assert opened.text("section.on h1") == "A cluster on a laptop"
    assert opened.value("document.querySelectorAll('section.on a').length") == len(make.lessons())
    opened.press("ArrowRight")
    assert page(opened) == f"2 / {count}"
    assert opened.text("#lesson").split() == ["1", *make.lesson(1).title.split()]
    opened.value("document.querySelector('#on').click()")
    assert page(opened) == f"3 / {count}"
    opened.value("document.querySelector('#back').click()")
    opened.press("ArrowLeft", "ArrowLeft")
    assert page(opened) == f"1 / {count}"
    opened.value("document.querySelectorAll('section.on a')[1].click()")
    opened.frame()
    assert opened.text("section.on h1").split() == ["2", *make.lesson(2).title.split()]
    opened.press("End")
    assert page(opened) == f"{count} / {count}"
    assert opened.problems == []


@pytest.mark.slow
def test_a_swipe_turns_one_page_and_nothing_is_cut_on_a_phone(opened):
    opened.open(WORKSHOP / "slides.html", 400, 800)
    first = page(opened)
    swipe(opened, 300, 100)
    assert page(opened).startswith("2 / ")
    swipe(opened, 100, 300)
    assert page(opened) == first
    for _ in range(int(first.split()[-1])):
        assert opened.value("document.documentElement.scrollWidth") <= 400
        opened.press("ArrowRight")
    assert opened.problems == []
