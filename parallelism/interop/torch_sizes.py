"""The sizes for which a module of PyTorch is one program: where it asks for a size, ``torch.export`` tells the bounds."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import format_stack
from typing import Any

from parallelism.interop.onnx_models.origins import innermost

_FIX = re.compile(r"^\s*(\w+) = (.+?)\s*$", re.MULTILINE)
_RANGE = re.compile(r"Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)")
_FIXES = "Suggested fixes:"
_VIOLATED = re.compile(r"Constraints violated \(([^)]*)\)")


@dataclass(frozen=True)
class Bounds:
    """The least and the largest value of a symbol for which a program holds; None where there is no such bound."""

    least: int | None
    most: int | None

    def __contains__(self, number: int) -> bool:
        return (self.least or 0) <= number and (self.most is None or number <= self.most)

    def __str__(self) -> str:
        if self.least is None:
            return f"at most {self.most}"
        return f"at least {self.least}" if self.most is None else f"{self.least} to {self.most}"


def within_bounds(
    torch: Any,
    extents: Mapping[str, int],
    own: Mapping[str, int],
    export: Callable[[Mapping[str, Any], Mapping[str, int]], Any],
) -> tuple[Any, dict[str, Bounds]]:
    """What ``export`` makes of dims and numbers of elements, by symbol, and the bounds of those that the module bounds.

    A module asks for a size as ``if x.shape[0] >= 64: x = x.contiguous()`` does.  The program is then that of one answer,
    and is exported once more for the sizes with this answer: that of the numbers that the user's examples have, ``own``,
    where these differ from ``extents``, the numbers for an export without questions.  Where the question is too long for
    PyTorch to say when the answer holds, it may hold for all larger numbers.
    """
    dims = {name: torch.export.Dim(name) for name in extents}
    bounds = dict[str, Bounds]()
    for last in (False, False, True):
        try:
            return export(dims, extents), bounds
        except Exception as error:  # the exporter raises many types
            found = _bounds_in(str(error)) or _at_least(str(error), extents)
            if last or not found:
                raise
        elsewhere = {name: own[name] for name, of in found.items() if name in own and own[name] not in of}
        if elsewhere:
            extents = {**extents, **elsewhere}
            continue
        bounds |= found
        dims |= {name: torch.export.Dim(name, min=of.least, max=of.most) for name, of in found.items()}
    raise AssertionError("the last export returns or raises")


def _bounds_in(told: str) -> dict[str, Bounds]:
    """The bounds that an error of ``torch.export`` suggests; empty if it suggests anything else, too."""
    fixes = suggested(told)
    bounds = {name: found for name, words in fixes.items() if (found := _bounds(words)) is not None}
    return bounds if len(bounds) == len(fixes) else {}


def _at_least(told: str, extents: Mapping[str, int]) -> dict[str, Bounds]:
    """For the symbols of which ``torch.export`` suggests nothing the bounds that only larger numbers are within."""
    if suggested(told):
        return {}
    return {name: Bounds(extents[name], None) for name in violated(told) if name in extents}


def violated(told: str) -> list[str]:
    """The symbols that have constraints which do not hold for all sizes, by an error of ``torch.export``."""
    found = _VIOLATED.search(told)
    return [name.strip() for name in found[1].split(",")] if found else []


def suggested(told: str) -> dict[str, str]:
    """What an error of ``torch.export`` says that symbols should be, by their names; empty if it says nothing."""
    return dict(_FIX.findall(told.partition(_FIXES)[2]))


def _bounds(words: str) -> Bounds | None:
    """The bounds in words as ``Dim('B', max=63)``; None for other words, as a number or ``2*_B``."""
    found = _RANGE.fullmatch(words)
    if not found or found[1] is found[2] is None:
        return None
    return Bounds(*(None if each is None else int(each) for each in found.groups()))


@contextmanager
def lines_that_fix_sizes(torch: Any) -> Iterator[list[str]]:
    """A context that keeps the lines of the model at which a symbol becomes a number, as file and line, in order.

    PyTorch tells them nowhere: they are those from which its table of symbols is changed.  It is empty where it has
    another table than that of 2.13.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    lines = list[str]()
    before = getattr(ShapeEnv, "_set_replacement", None)

    def replaced(env: Any, symbol: Any, value: Any, *why: Any) -> Any:
        assert before is not None
        if getattr(value, "is_number", False) and (found := innermost("".join(format_stack()[:-1]))):
            lines.append(f"{found[0]}:{found[1]}")
        return before(env, symbol, value, *why)

    if before is None:
        yield lines
        return
    ShapeEnv._set_replacement = replaced
    try:
        yield lines
    finally:
        ShapeEnv._set_replacement = before


@contextmanager
def lengths_are_sizes(torch: Any, module: Any, loss: Any) -> Iterator[None]:
    """A context in which ``len(x)`` of a tensor is ``x.shape[0]``, a symbol, in the files of ``module`` and of ``loss``.

    Python wants a number of ``len``, so there it is a function of this name, which comes before that of Python.
    """

    def length(x: Any) -> Any:
        return x.shape[0] if isinstance(x, torch.Tensor) and x.dim() else len(x)

    spaces = [space for space in _namespaces(module, loss) if "len" not in space]
    for space in spaces:
        space["len"] = length
    try:
        yield
    finally:
        for space in spaces:
            del space["len"]


def _namespaces(module: Any, loss: Any) -> list[dict[str, Any]]:
    """The names of the files in which the classes of a module and a loss stand, each once; without those of PyTorch."""
    classes = {base for each in module.modules() for base in type(each).__mro__}
    files = {
        base.__module__ for base in classes if base.__module__.partition(".")[0] not in ("torch", "builtins")
    }
    found = [vars(sys.modules[name]) for name in sorted(files) if name in sys.modules]
    function = inspect.unwrap(loss) if loss is not None else None
    own = getattr(function, "__globals__", None)
    return found if own is None or any(own is each for each in found) else [*found, own]
