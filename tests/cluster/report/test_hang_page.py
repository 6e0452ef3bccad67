"""The page of a hang in a browser: a lane for each of a thousand ranks, filtered and listed, and nothing overflows."""

from __future__ import annotations

from typing import Any

import pytest
from browser import CHROMIUM, Browser
from hang_dumps import Job
from measured_page import MEASURE_PAGE

from vcluster.hangs import explain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH, as Debian's package has it"),
]


@pytest.fixture(scope="module")
def browser() -> Any:
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture
def page(tmp_path: Any) -> Any:
    job = Job(1000)
    for line in range(60):
        job.alike("all_reduce", line)
    job.alike("</script><b>bold", 70, ranks=[rank for rank in range(1000) if rank != 421], done=False)
    explain(job.write(tmp_path)).html(tmp_path / "page.html")
    return tmp_path / "page.html"


@pytest.mark.parametrize("width", [1280, 390])
def test_all_can_be_read(browser: Any, page: Any, width: int) -> None:
    for dark in (False, True):
        browser.open(page, width=width, dark=dark)
        found = browser.value(MEASURE_PAGE)
        assert not found["bad"] and found["seen"] > 200


def test_a_thousand_lanes(browser: Any, page: Any) -> None:
    browser.open(page)
    assert browser.value("document.documentElement.dataset.ready") == "yes"
    assert not browser.problems
    assert browser.value("document.getElementById('lanes-shown').textContent") == "1000 of 1000 ranks"
    assert "rank 421 did not come to calling </script><b>bold" in browser.value("document.getElementById('told').textContent")
    assert browser.value("document.getElementById('lane-title').textContent") == "The last calls of rank 421"
    assert browser.value("document.querySelectorAll('#lane-calls tbody tr').length") == 50
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    browser.value("document.getElementById('lane-waiting').click()")
    assert browser.value("document.getElementById('lanes-shown').textContent") == "999 of 1000 ranks"
    browser.value("(() => { const box = document.getElementById('lane-rank'); box.value = '42';"
                  " box.dispatchEvent(new Event('input')); })()")
    assert browser.value("document.getElementById('lanes-shown').textContent") == "10 of 1000 ranks"
