"""Answers in a notebook that is as narrow as a phone: text and table are whole, and only pictures scroll."""

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from measured_page import MEASURE

from vcluster.check import check_collective, check_schedule
from vcluster.check.answer import Answer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")


def ring(device, x):
    total = passing = x
    for _ in range(device.size - 1):
        passing = device.sendrecv(passing, (device.rank + 1) % device.size, (device.rank - 1) % device.size)
        total = total + passing
    return total


@pytest.mark.slow
def test_nothing_of_an_answer_is_cut(tmp_path):
    answers = [check_collective("all_reduce", ring), check_collective("all_reduce", ring, algorithm="ring"),
               check_collective("all_gather", lambda device, x: np.zeros(1)),
               check_schedule(lambda rank, stages, microbatches: [f"{kind}{k}" for kind in "FB"
                                                                  for k in range(microbatches)]),
               Answer(False, "a_name_without_an_end_" * 8, "no " * 80, likely="one word after another " * 20)]
    path = tmp_path / "answers.html"
    path.write_text("<!doctype html><body style='margin:0'>" + "<hr>".join(each._repr_html_() for each in answers),
                    encoding="utf-8")
    browser = Browser()
    try:
        browser.open(path, 330, 800)
        assert browser.value("document.documentElement.scrollWidth") <= 330
        assert browser.value("""[...document.querySelectorAll('.wide')].filter(
            each => each.querySelector('table') && each.scrollWidth > each.clientWidth).map(each => each.innerText)"""
                             ) == []
        assert browser.value("document.querySelectorAll('table').length") >= 3
        for dark in (False, True):
            browser.open(path, 330, 800, dark=dark)
            assert not browser.value(MEASURE)["bad"]
    finally:
        browser.close()
