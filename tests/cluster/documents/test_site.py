"""The documentation site builds without a warning, has no dead link, needs no network and names all that is public."""

from __future__ import annotations

import importlib.util
import json
import os
import posixpath
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from browser import CHROMIUM, Browser
from paths import ROOT

import parallelism
import pipeline_parallelism
import tensor_parallelism
import vcluster

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(300),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo", "griffe")),
        reason='the site needs the extra "docs"'),
]
PACKAGES = (parallelism, tensor_parallelism, pipeline_parallelism, vcluster)


class Page(HTMLParser):
    """The anchors of a page, what it links, and what it loads."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.loaded, self.tables = set(), [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors |= {values[key] for key in ("id", "name") if values.get(key)}
        self.tables += tag == "table"
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values["href"])
        elif values.get("src"):
            self.loaded.append(values["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, str(ROOT / "website"), str(folder)], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")      # no warning
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_document_and_lesson_is_a_page_with_its_tables(pages):
    for path in (ROOT / "docs").glob("*.md"):
        lines = path.read_text(encoding="utf-8").splitlines()
        rules = [line for line in lines if line.startswith("|") and "--" in line and set(line) <= set("|-: ")]
        assert pages[f"{path.stem}.html"].tables >= len(rules)
    assert {f"workshop/{path.stem}.html" for path in (ROOT / "workshop" / "lessons").glob("*.md")} <= set(pages)


def test_every_link_leads_somewhere(site, pages):
    followed, dead = 0, []
    for name, page in pages.items():
        for link in page.links + page.loaded:
            if link.startswith(("http://", "https://", "mailto:", "data:")):
                continue
            path, _, anchor = unquote(link).partition("#")
            path = path.partition("?")[0]       # the version of a style or a script
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            followed += 1
            there = (site / target).is_file()
            if not there or (anchor and target in pages and anchor not in pages[target].anchors):
                dead.append((name, link))
    assert followed > 1000
    assert not dead


def test_nothing_is_loaded_from_the_network(site, pages):
    assert not [(name, what) for name, page in pages.items() for what in page.loaded if "//" in what]
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert "@import" not in text and "url(http" not in text and "url(//" not in text


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(pages, package):
    own = pages[f"reference/{package.__name__}.html"]
    for name in package.__all__:
        origin = "parallelism" if package is vcluster and name in parallelism.__all__ else package.__name__
        anchor = ({f"{origin}.{name}", f"module-{origin}.{name}"} & pages[f"reference/{origin}.html"].anchors).pop()
        assert origin == package.__name__ or f"{origin}.html#{anchor}" in own.links, name


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_search_works_in_a_page_that_is_read_from_a_file(site):
    browser = Browser()
    try:
        browser.open(site / "search.html", width=1300, fragment="?q=zigzag_order")
        found = browser.value("""new Promise(done => {
            const look = () => {
                const link = document.querySelector("#search-results li a")
                if (link) done(link.getAttribute("href")); else requestAnimationFrame(look)
            }
            look()
        })""")
        assert "reference/tensor_parallelism.html" in found, json.dumps(found)
        assert browser.problems == []
    finally:
        browser.close()
