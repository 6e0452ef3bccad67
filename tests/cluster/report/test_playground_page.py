"""The playground in headless Chromium: nothing is said on its console, the address keeps a choice, nothing is cut."""

import re

import pytest
from browser import CHROMIUM, Browser
from measured_page import MEASURE_PAGE

from vcluster.__main__ import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH, as Debian's package has it"),
]
CHOOSE = """((id, value) => {
  const control = document.getElementById(id);
  control.value = value;
  control.dispatchEvent(new Event("input"));
})"""

SAID = ["#ring-said", "#moves-said", "#race-said", "#product-said", "#plans-said", "#serving-said"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("playground") / "playground.html"
    assert main(["playground", "--html", str(path)]) == 0
    return path


@pytest.fixture
def browser():
    browser = Browser()
    yield browser
    browser.close()


@pytest.mark.timeout(120)
def test_a_choice_is_drawn_and_kept_in_the_address(browser, page):
    browser.open(page, width=1300)
    for control, value in [("kind", "all_gather"), ("ranks", "8"), ("step", "3"), ("first", "gpipe"),
                           ("mesh", "x=2, y=3"), ("tensor", "7x10"), ("target", "[(x, y), None]"), ("m", "1024"),
                           ("question", "gpt3-13b, 512 sequences, 8 x dgx-h100"), ("plan-pp", "4"),
                           ("served", "llama3.1-70b in fp8"), ("serving-tp", "4"), ("batch", "32")]:
        browser.value(f"{CHOOSE}('{control}', '{value}')")
    assert browser.text("#ring-said").startswith("Step 3 of ")
    assert browser.value("document.querySelectorAll('#ring circle').length") == 8
    assert browser.value("document.querySelectorAll('#messages tbody tr').length") == 8
    assert browser.text("#race-said").startswith("gpipe: makespan ")
    assert browser.text("#moves-said").startswith("[x, None] to [(x, y), None]: slice over y")
    assert browser.value("document.querySelectorAll('#shards rect').length") == 6
    assert "bound by compute" in browser.text("#product-said")
    some, plans = map(int, re.findall(r"\d+", browser.text("#plans-said"))[:2])
    assert 0 < some < plans and " plans that fit. " in browser.text("#plans-said")
    assert "pp=4 " in browser.text("#plans-said")
    assert browser.text("#serving-said").startswith("A step makes a token for each of 32 requests and takes ")
    assert browser.value("document.querySelectorAll('#steps rect').length") == 4 * 9
    browser.value(f"{CHOOSE}('serving-tp', '1')")
    told = browser.text("#serving-said").replace("\N{NO-BREAK SPACE}", " ")
    assert told.startswith("It does not fit: of the 80.0 GB of a device the weights take 72.7 GB")
    kept = browser.value("location.hash")
    said = [browser.text(each) for each in SAID]
    assert "kind=all_gather" in kept and "first=gpipe" in kept
    again = page.with_name("again.html")        # the same address with another fragment is not loaded again
    again.write_bytes(page.read_bytes())
    browser.open(again, fragment=kept)
    assert [browser.text(each) for each in SAID] == said
    assert not browser.problems


@pytest.mark.timeout(120)
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_screen_and_all_can_be_read(browser, page, width):
    for dark in (False, True):
        browser.open(page, width=width, dark=dark)
        found = browser.value(MEASURE_PAGE)
        assert not found["bad"] and found["seen"] > 300
        assert browser.value("document.querySelectorAll('#bars rect').length") > 0
        assert not browser.problems
