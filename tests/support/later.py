"""Packages that are dear to import and that few tests need: each is imported when a test uses it, not by every worker."""

import sys
from importlib import import_module
from importlib.util import find_spec

import pytest


class Later:
    """Stands for a package until an attribute of it is asked for."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("_") and self._name not in sys.modules:     # pytest looks for tests in all that it sees
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


def later(name):
    """``pytest.importorskip`` that imports later: the module is skipped where the package is not installed."""
    if find_spec(name) is None:
        pytest.skip(f"could not import {name!r}: No module named {name!r}", allow_module_level=True)
    return Later(name)
