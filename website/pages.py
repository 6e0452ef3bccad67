"""Writes the sources of the site: docs/*.md as they stand, README, workshop, reference, playground, and every linked file.

Links stay as they are on GitHub (``../examples/x.py``); here each is turned to the page that shows the file.
"""

from __future__ import annotations

import importlib
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from reference import reference_pages

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
         "workshop/INSTRUCTOR.md": "workshop/instructor.md"}
"""Pages that lie outside of docs/: from their paths in the repository to those in the site."""
SECTIONS = {
    "Tutorial": ["start", "demo", "@lessons", "workshop/instructor", "@playground"],
    "How to": ["coming-from", "testing", "collectives", "adding", "hardware", "which-split", "planning", "found-layouts",
               "tuning", "serving", "budget", "traces", "hangs", "models", "interop", "mpi"],
    "Reference": ["@reference", "glossary", "onnx-operators", "stability"],
    "Explanation": ["sharding", "layouts", "strategies", "attention", "ir", "simulation", "1f1b-or-gpipe", "float8",
                    "accuracy", "accuracy-tables", "performance", "design", "decisions", "rooms"],
    "Project": ["contributing", "changelog"],
}
"""Where a page stands in the site.  A page that is in none is an error of the build."""

_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


def write(folder: Path) -> None:
    """All sources of the site, into an empty folder."""
    pages = {f"{path.stem}.md": f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))}
    pages |= {page: path for path, page in PAGES.items()}
    lessons = {f"workshop/{source.name}.md": lesson_page(source) for source in _workshop().lessons()}
    made = lessons | reference_pages()
    shutil.copytree(ROOT / "docs", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.md"))
    for page, path in pages.items():
        _put(folder, page, turned((ROOT / path).read_text(encoding="utf-8"), path, page))
        for target in linked(path):
            if target not in pages.values() and not target.startswith("docs/"):
                made |= dict(file_pages(target))
    for name in ["lesson.py", "slides.html", *(path.relative_to(ROOT / "workshop") for path in _notebooks())]:
        _put(folder, f"workshop/{name}", (ROOT / "workshop" / name).read_bytes())
    _put(folder, "playground.html", _playground())
    made["playground-page.md"] = (
        "# Playground\n\nOne page on which collectives, layouts, schedules and products are tried out. "
        "It needs nothing else.\n\n"
        "[Open the playground](playground.html)\n")
    for page, text in made.items():
        _put(folder, page, text)
    listed = {"@lessons": [*lessons], "@playground": ["playground-page"],
              "@reference": [page for page in made if page.startswith("reference/")]}
    with (folder / "index.md").open("a", encoding="utf-8") as index:
        for caption, names in SECTIONS.items():
            entries = [entry.removesuffix(".md") for name in names for entry in listed.get(name, [name])]
            index.write("\n```{{toctree}}\n:hidden:\n:caption: {}\n\n{}\n```\n".format(caption, "\n".join(entries)))


def _put(folder: Path, name: str, content: str | bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def _notebooks() -> list[Path]:
    folder = ROOT / "workshop"
    return [folder / kept for source in _workshop().lessons()
            for kept in (f"{source.name}.ipynb", f"solved/{source.name}.ipynb")]


def turned(markdown: str, origin: str, page: str) -> str:
    """A page of the repository with its links to files turned to the pages of the site."""
    def turn(found: re.Match[str]) -> str:
        if "://" in found[2]:
            return found[0]
        target = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(origin), found[2])))
        return found[1] + posixpath.relpath(target, posixpath.dirname(page) or ".") + found[3]

    return outside_code(markdown, lambda text: _LINK.sub(turn, text))


def outside_code(markdown: str, change: Any) -> str:
    """The text with ``change`` made to all but its fenced blocks."""
    parts, at = [], 0
    for block in _FENCED.finditer(markdown):
        parts += [change(markdown[at:block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, change(markdown[at:])])


def linked(path: str) -> list[str]:
    """The files of the repository that a page links, by their paths in it."""
    targets: list[str] = []
    outside_code((ROOT / path).read_text(encoding="utf-8"), lambda text: targets.extend(
        posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2]))
        for found in _LINK.finditer(text) if "://" not in found[2]) or text)
    return targets


def site_path(path: str) -> str:
    """Where the site shows a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}.md"


def file_pages(path: str) -> list[tuple[str, str]]:
    """A page that shows a file, or pages that show a folder."""
    whole = ROOT / path
    if whole.is_dir():
        inside = sorted(entry for entry in whole.iterdir() if entry.is_file() and entry.suffix in (".py", ".txt"))
        listed = "\n".join(f"- [{entry.name}]({whole.name}/{entry.name}.md)" for entry in inside)
        return [(site_path(path), f"---\norphan: true\nnosearch: true\n---\n\n# {path}\n\n{listed}\n")] + [
            page for entry in inside for page in file_pages(f"{path}/{entry.name}")]
    text = whole.read_text(encoding="utf-8")
    language = {".py": "python", ".json": "json", ".proto": "protobuf"}.get(whole.suffix, "text")
    return [(site_path(path), f"---\norphan: true\nnosearch: true\n---\n\n# {path}\n\n``````{language}\n{text}\n``````\n")]


def _workshop() -> ModuleType:
    return importlib.import_module("make")


def lesson_page(source: Any) -> str:
    """A lesson as a page: what the student's notebook has, and both notebooks to download."""
    first, *blocks = [block for block in source.blocks if block.kind in ("text", "python", "exercise", "check")]
    title, _, text = first.text.partition("\n")
    parts = [f"{title.replace('# ', f'# {source.number} ', 1)}\n\nNotebooks: [to work in]({source.name}.ipynb), "
             f"[solved](solved/{source.name}.ipynb). Both need [lesson.py](lesson.py) beside them.\n{text}"]
    for block in blocks:
        if block.kind == "text":
            parts.append(block.text)
        else:
            parts += ["**Exercise**"] if block.kind == "exercise" else []
            parts.append(f"```python\n{block.text}\n```")
    return "\n\n".join(parts) + "\n"


def _playground() -> str:
    """The page that ``python -m vcluster playground`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "playground.html"
        subprocess.run([sys.executable, "-m", "vcluster", "playground", "--html", str(page)], cwd=ROOT, check=True,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        return page.read_text(encoding="utf-8")
