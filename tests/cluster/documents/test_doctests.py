"""The examples in the docstrings of every module run and print what stands below them."""

from __future__ import annotations

import doctest
import importlib
import inspect
import linecache

import pytest
from paths import ROOT

import parallelism

PACKAGES = ("parallelism", "tensor_parallelism", "pipeline_parallelism", "vcluster")
MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for package in PACKAGES for file in (ROOT / package).rglob("*.py")
    if file.stem != "__init__" and ">>> " in file.read_text(encoding="utf-8")
)


@pytest.mark.sampled(20)
@pytest.mark.slow_for("parallelism.slicing.search")     # long
@pytest.mark.usefixtures("registrations")
@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_print_what_they_say(name, monkeypatch):
    monkeypatch.setattr(linecache, "checkcache", lambda *_: None)   # doctest's debugger looks at every file each time
    module = importlib.import_module(name)
    tried = doctest.testmod(module, extraglobs={"Pipeline": parallelism.Pipeline})
    assert tried.attempted
    assert not tried.failed


def examples_of(thing):
    """The docstrings with an example: of a function, a class and its methods and properties, a module and its names."""
    inside = []
    if inspect.isclass(thing):
        inside = [member for each in thing.__mro__[:-1] for member in vars(each).values()]
    elif inspect.ismodule(thing):
        inside = [getattr(thing, name) for name in thing.__all__]
    return [text for each in (thing, *inside) if ">>> " in (text := inspect.getdoc(each) or "")]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_example(package):
    """A constant is in an example of another name."""
    names = {name: getattr(importlib.import_module(package), name) for name in importlib.import_module(package).__all__}
    shown = {name: examples_of(thing) for name, thing in names.items()}
    everything = "\n".join(text for each in shown.values() for text in each)
    without = [name for name, texts in shown.items() if not texts]
    assert [name for name in without if callable(names[name]) or name not in everything] == []
