"""The reference as Markdown with directives for Python, from the sources: nothing is imported to read a docstring."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from docstrings import as_markdown

ROOT = Path(__file__).parents[1]
PACKAGES = ("parallelism", "tensor_parallelism", "pipeline_parallelism", "vcluster")
ROOMS = ("parallelism.models", "parallelism.transforms", "parallelism.training", "parallelism.planning",
         "parallelism.auto_sharding", "parallelism.slicing", "parallelism.interop", "parallelism.recorder",
         "vcluster.check")
"""Rooms whose names the documents import, though the packages do not pass them on."""

_STUB_LINE = re.compile(r"^from \.(\w*)(?:\.\w+)* import (\([^)]*\)|[^\n]*)", re.MULTILINE)


def reference_pages() -> dict[str, str]:
    """The pages by path: one for each package, and one for the rooms."""
    sources = griffe.GriffeLoader(search_paths=[ROOT])
    for package in PACKAGES:
        sources.load(package)
    sources.resolve_aliases(implicit=True, external=False)
    pages = {f"reference/{package}.md": _package_page(sources, package) for package in PACKAGES}
    return pages | {"reference/rooms.md": _rooms_page(sources)}


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


def _package_page(sources: griffe.GriffeLoader, package: str) -> str:
    """Every name of the face of a package, by room."""
    module = importlib.import_module(package)
    parts = [f"# {package}", as_markdown(inspect.getdoc(module) or "")]
    for room, names in names_by_room(package).items():
        parts += [f"## {package}.{room}"] if room else []
        parts += [_named(sources, package, name) for name in names]
    if package == "vcluster":
        parts += ["## Constants", _named(sources, package, "HOST")]
        parts.append("## From parallelism\n\nThese are names of this package, too: " + ", ".join(
            f"{{py:obj}}`{name} <parallelism.{name}>`" for name in importlib.import_module("parallelism").__all__))
    return "\n\n".join(parts) + "\n"


def _rooms_page(sources: griffe.GriffeLoader) -> str:
    """The rooms whose names are imported from them."""
    known = {name for package in PACKAGES for name in importlib.import_module(package).__all__}
    parts = ["# Rooms", "Names that are imported from a room, as in `from parallelism.planning import find_plan`."]
    for room in ROOMS:
        module = importlib.import_module(room)
        parts += [f"## {room}", as_markdown(inspect.getdoc(module) or "")]
        parts += [_named(sources, room, name) for name in module.__all__
                  if name not in known and not name.isupper() and not inspect.ismodule(getattr(module, name))]
    return "\n\n".join(parts) + "\n"


def _named(sources: griffe.GriffeLoader, place: str, name: str) -> str:
    """The entry of a name; of a module, also those of its names."""
    found, module = sources.modules_collection[f"{place}.{name}"], getattr(importlib.import_module(place), name)
    if not inspect.ismodule(module):
        return _entry(f"{place}.{name}", found[name] if found.is_module else found)     # of a module, its namesake
    inside = [_named(sources, found.canonical_path, each) for each in module.__all__
              if not inspect.ismodule(getattr(module, each))]
    anchor = f":::{{py:module}} {place}.{name}\n:::\n\n:::{{py:currentmodule}} None\n:::"    # what follows says its own place
    return "\n\n".join([f"## {place}.{name}", anchor, _docstring(found), *inside])


def _entry(path: str, found: griffe.Object | griffe.Alias, *, member: bool = False) -> str:
    """A directive with signature and docstring; that of a class has its documented members inside."""
    kind = "attribute" if found.is_attribute else "class" if found.is_class else "method" if member else "function"
    options = [f":{label}:" for label in ("staticmethod", "classmethod") if label in found.labels]
    options += [f":type: {found.annotation}"] if found.is_attribute and found.annotation else []
    body = "\n\n".join([_docstring(found), *(_members(path, found) if found.is_class else ())])
    fence = ":" * (3 if member else 4)
    head = f"{fence}{{py:{kind}}} {path}{_signature(found)}"
    return "\n".join([head, *options, "", body, fence])


def _members(path: str, found: griffe.Object | griffe.Alias) -> Iterator[str]:
    for name, each in found.all_members.items():
        if not name.startswith("_") and not each.is_class and not each.is_module and each.has_docstring:
            yield _entry(f"{path}.{name}", each, member=True)


def _signature(found: griffe.Object | griffe.Alias) -> str:
    """The arguments in brackets, as they stand in the sources."""
    if found.is_attribute:
        return ""
    function = found.all_members.get("__init__") if found.is_class else found
    if function is None or not function.is_function:
        return ""
    text = str(function.signature()).replace("\n", " ")
    arguments = text[text.index("("):]
    return re.sub(r"^\((?:self|cls)(?:, )?", "(", arguments) if found.is_class or "." in found.path else arguments


def _docstring(found: griffe.Object | griffe.Alias) -> str:
    return as_markdown(found.docstring.value) if found.docstring else ""
