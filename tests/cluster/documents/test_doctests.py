"""The examples in the docstrings of every module run and print what stands below them."""

from __future__ import annotations

import doctest
import importlib

import pytest
from paths import ROOT

import parallelism

PACKAGES = ("parallelism", "tensor_parallelism", "pipeline_parallelism", "vcluster")
MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for package in PACKAGES for file in (ROOT / package).rglob("*.py")
    if file.stem != "__init__" and ">>> " in file.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_print_what_they_say(name):
    module = importlib.import_module(name)
    tried = doctest.testmod(module, extraglobs={"Pipeline": parallelism.Pipeline})
    assert tried.attempted
    assert not tried.failed
