"""Adds to docs/*.md what lies elsewhere: README, workshop, reference, playground, and every file that is linked.

Links stay as they are on GitHub (``../examples/x.py``); here each is turned to the page that shows the file.
"""

from __future__ import annotations

import importlib
import inspect
import posixpath
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
         "workshop/INSTRUCTOR.md": "workshop/instructor.md"}
"""Pages that lie outside of docs/: from their paths in the repository to those in the site."""
PACKAGES = ("parallelism", "tensor_parallelism", "pipeline_parallelism", "vcluster")
ROOMS = ("parallelism.models", "parallelism.transforms", "parallelism.training", "parallelism.planning",
         "parallelism.auto_sharding", "parallelism.slicing", "parallelism.interop", "parallelism.recorder",
         "vcluster.check")
"""Rooms whose names the documents import, though the packages do not pass them on."""

_LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_STUB_LINE = re.compile(r"^from \.(\w*)(?:\.\w+)* import (\([^)]*\)|[^\n]*)", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Complete the navigation with what is made: lessons, reference, playground."""
    # Not at the top: MkDocs takes the first path away after it has read this module.
    sys.path[:0] = [str(ROOT), str(ROOT / "workshop")]
    nav = {title: pages for section in config.nav for title, pages in section.items()}
    workshop = next(entry for entry in nav["Tutorial"] if isinstance(entry, dict))["Workshop"]
    workshop[:0] = [f"workshop/{source.name}.md" for source in _workshop().lessons()]
    nav["Reference"][:0] = [f"reference/{package}.md" for package in PACKAGES] + ["reference/rooms.md"]
    config.extra["playground"] = _playground()
    if config.extra["playground"] is not None:
        config.nav.insert(2, {"Playground": "playground-page.md"})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and files that lie outside of docs/."""
    def add(path: str, content: str | bytes) -> None:
        if files.get_file_from_path(path) is None:
            files.append(File.generated(config, path, content=content))

    origins = {f"docs/{file.src_uri}": file.src_uri for file in files.documentation_pages()} | PAGES
    for path, page in PAGES.items():
        add(page, (ROOT / path).read_text(encoding="utf-8"))
    for source in _workshop().lessons():
        add(f"workshop/{source.name}.md", lesson_page(source))
        for kept in (f"{source.name}.ipynb", f"solved/{source.name}.ipynb"):
            add(f"workshop/{kept}", (ROOT / "workshop" / kept).read_bytes())
    for kept in ("slides.html", "lesson.py"):
        add(f"workshop/{kept}", (ROOT / "workshop" / kept).read_bytes())
    for package in PACKAGES:
        add(f"reference/{package}.md", package_page(package))
    add("reference/rooms.md", rooms_page())
    if config.extra["playground"] is not None:
        add("playground.html", config.extra["playground"])
        add("playground-page.md", "# Playground\n\nOne page on which collectives, layouts, schedules and products are "
            "tried out. It needs nothing else.\n\n"
            "[Open the playground](playground.html){ .md-button .md-button--primary }\n")
    for kept in ("site.css", "worker.js"):
        add(kept, (Path(__file__).parent / kept).read_text(encoding="utf-8"))
    for path in origins:
        for target in linked(path):
            if target not in origins and files.get_file_from_path(target.removeprefix("docs/")) is None:
                for shown, text in file_pages(target):
                    add(shown, text)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to files of the repository to their pages here."""
    origin = next((path for path, uri in PAGES.items() if uri == page.file.src_uri), f"docs/{page.file.src_uri}")
    made = page.file.src_uri.startswith(("reference/", "files/", "workshop/", "playground"))
    if made and origin not in PAGES:
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def turned(found: re.Match[str]) -> str:
        if "://" in found[2]:
            return found[0]
        target = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(origin), found[2])))
        return found[1] + posixpath.relpath(target, here or ".") + found[3]

    return outside_code(markdown, lambda text: _LINK.sub(turned, text))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Take the stand-in for a worker from the site, not from the network."""
    return output.replace("https://unpkg.com/iframe-worker/shim", posixpath.relpath(
        "worker.js", posixpath.dirname(page.file.dest_uri) or "."))


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Write no page for a server to show where there is none: its links are those of a site at ``/``."""
    return "" if template_name == "404.html" else output_content


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
        return [(site_path(path), f"# {path}\n\n{listed}\n")] + [
            page for entry in inside for page in file_pages(f"{path}/{entry.name}")]
    text = whole.read_text(encoding="utf-8")
    language = {".py": "python", ".json": "json", ".proto": "protobuf"}.get(whole.suffix, "text")
    return [(site_path(path), f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n``````{language}\n{text}\n``````\n")]


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
            title = ' title="Exercise"' if block.kind == "exercise" else ""
            parts.append(f"```python{title}\n{block.text}\n```")
    return "\n\n".join(parts) + "\n"


def names_by_room(package: str) -> dict[str, list[str]]:
    """The names in the stub of a package, by the room or module that they come from."""
    folder = ROOT.joinpath(*package.split("."))
    stub = folder / ("own_names.pyi" if package == "vcluster" else "__init__.pyi")
    if not stub.exists():
        return {"": importlib.import_module(package).__all__}
    rooms: dict[str, list[str]] = {}
    for room, names in _STUB_LINE.findall(stub.read_text(encoding="utf-8")):
        for name in names.strip("()").split(","):
            if name.strip():
                rooms.setdefault(room, []).append(name.partition(" as ")[0].strip())
    return rooms


def package_page(package: str) -> str:
    """The reference of a package: every name of its face, by room."""
    module = importlib.import_module(package)
    parts = [f"# {package}", inspect.getdoc(module) or ""]
    for room, names in names_by_room(package).items():
        parts += [f"## {package}.{room}"] if room else []
        parts += [_entry(package, name) for name in names]
    if package == "vcluster":
        parts += ["## Constants", _entry(package, "HOST")]
        passed_on = importlib.import_module("parallelism").__all__
        parts.append("## From parallelism\n\nThese are names of this package, too: " + ", ".join(
            f"[`{name}`](parallelism.md#parallelism.{name})" for name in passed_on))
    return "\n\n".join(parts) + "\n"


def _entry(package: str, name: str) -> str:
    kind = "\n    options: {members: true, heading_level: 2}" if inspect.ismodule(
        getattr(importlib.import_module(package), name)) else ""
    return f"::: {package}.{name}{kind}"


def rooms_page() -> str:
    """The reference of the rooms whose names are imported from them."""
    known = {name for package in PACKAGES for name in importlib.import_module(package).__all__}
    parts = ["# Rooms", "Names that are imported from a room, as in `from parallelism.planning import find_plan`."]
    for room in ROOMS:
        module = importlib.import_module(room)
        parts += [f"## {room}", inspect.getdoc(module) or ""]
        parts += [_entry(room, name) for name in module.__all__
                  if name not in known and not name.isupper() and not inspect.ismodule(getattr(module, name))]
    return "\n\n".join(parts) + "\n"


def _playground() -> str | None:
    """The page that ``python -m vcluster playground`` writes; ``None`` where there is no such command."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "playground.html"
        done = subprocess.run([sys.executable, "-m", "vcluster", "playground", "--html", str(page)], cwd=ROOT,
                              capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if page.exists():
            return page.read_text(encoding="utf-8")
        if "playground" not in subprocess.run([sys.executable, "-m", "vcluster", "--help"], cwd=ROOT, text=True,
                                              capture_output=True, check=True).stdout:
            return None
        raise RuntimeError(f"python -m vcluster playground wrote no page: {done.stderr}")
