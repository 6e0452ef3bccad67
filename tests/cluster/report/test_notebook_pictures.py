"""What a cell of a notebook shows: every object has a picture, and in a browser it can be read."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from measured_page import JUPYTERLAB, MEASURE, UNFOLD
from paths import ROOT
from pictures import pictures

PLANTED = """<div class="vcluster"><p style="color:#aaa">pale</p>
<div style="overflow:hidden;width:40px;white-space:nowrap">hidden behind an edge</div>
<div style="white-space:nowrap">long words that overflow the page, """ + "and more of them " * 12 + """</div>
<svg width="200" height="60"><text x="180" y="20">beyond</text><text x="9" y="20">one</text><text x="12" y="22">another
</text><text x="120" y="50" style="font-size:8px">tiny</text>
<g><rect x="9" y="30" width="30" height="20" fill="#eee"/><text x="10" y="45">far too long</text></g></svg>
<table><tr><td style="text-align:right">words</td><td style="text-align:right">1.50 ms</td></tr></table>
<div style="width:40px">1234 MiB</div></div>"""
"""What the measure must find."""
VOID = {"meta", "input", "br", "rect", "path"}


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    return pictures()


class Tags(HTMLParser):
    """Fails at a tag that is closed before one inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open and self.open.pop() == tag, tag


@pytest.mark.slow
def test_every_object_has_a_picture_that_asks_for_nothing_from_elsewhere(objects: dict[str, Any]) -> None:
    for name, one in objects.items():
        page = one._repr_html_()
        tags = Tags()
        tags.feed(page)
        assert not tags.open, name
        assert page.startswith('<div class="vcluster">') and page.count("<style>") == 1, name
        assert len(page) < 450_000, (name, len(page))
        assert not re.findall(r"(?:src|href)=|@import|https?://(?!www\.w3\.org/2000/svg)|<script", page), name


def executed(names: list[str], folder: Path) -> dict[str, str]:
    """The HTML of each object, as the last line of a cell of a notebook that runs."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook()
    first = (f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'tests/support')]!r}\n"
             "from pictures import pictures\nobjects = pictures()")
    notebook.cells = [nbformat.v4.new_code_cell(code) for code in
                      (first, *(f"objects[{name!r}]" for name in names))]
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    return {name: cell.outputs[-1]["data"]["text/html"]
            for name, cell in zip(names, notebook.cells[1:], strict=True)}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH, as Debian's package has it")
def test_in_a_browser_nothing_overflows_no_label_is_cut_and_all_can_be_read(
    objects: dict[str, Any], tmp_path: Path,
) -> None:
    shown = executed(list(objects), tmp_path)
    page = tmp_path / "notebook.html"
    page.write_text('<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
                    f'<style>{JUPYTERLAB}</style><body><div class="jp-RenderedHTMLCommon">{"".join(shown.values())}'
                    '</div></body>', encoding="utf-8")
    browser = Browser()
    try:
        for width in (1100, 420):
            for dark in (False, True):
                browser.open(page, width=width, dark=dark)
                browser.value(UNFOLD)
                found = browser.value(MEASURE)
                assert not found["bad"], (width, dark, found)
                assert found["seen"] > 1500
                assert not browser.problems
        browser.open(page)
        steps = "document.querySelector('.player').querySelectorAll('[data-step]')"
        slide = ("(() => {{ const s = document.querySelector('.player input'); s.value = {}; "
                 "s.dispatchEvent(new Event('input')); }})()")
        browser.value(slide.format(5))
        assert browser.value(f"[...{steps}].findIndex(e => !e.hidden)") == 5
        page.write_text('<meta charset="utf-8">' + PLANTED, encoding="utf-8")
        browser.open(page, width=600)
        found = "; ".join(browser.value(MEASURE)["bad"])
        for fault in ('"pale" has a contrast of', '"hidden behind an edge" is cut', '"beyond" is cut by its picture',
                      '"one" and "another" lie on each other', '"far too long" is wider than its bar', "overflows",
                      '"tiny" has 8.0 px',
                      '"words" is text, and flush right', '"4 MiB" is broken from its unit in "1234 MiB"'):
            assert fault in found, (fault, found)
        assert '"1.50 ms" is text' not in found
    finally:
        browser.close()
