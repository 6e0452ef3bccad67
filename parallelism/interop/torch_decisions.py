"""What a module decides by the numbers of a mask: ``if mask.any():``, ``if len(rows) == 0:``, ``for e in hit.nonzero():``.

Layers of experts pass over an expert that no token chose.  An export has no numbers, so it goes on as if each mask had an
element that is true: an expert without tokens adds nothing anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import currentframe
from types import FrameType
from typing import Any

_COMPARED = {"__gt__": True, "gt": True, "__ne__": True, "ne": True, "__eq__": False, "eq": False}
"""What comparing a count of true elements with 0 gives, by the name of the method, where there are some."""
_COUNTS = "sum", "count_nonzero"
_PLACES = "nonzero", "where", "__getitem__", "masked_select"
"""Functions whose result has as many rows as a mask has true elements."""


class Number(int):
    """The number of an expert, in place of a tensor of one element."""

    def item(self) -> int:
        """The number itself, as of a tensor."""
        return int(self)

    def __getitem__(self, _: Any) -> Number:
        return self


@contextmanager
def decided_masks(torch: Any, has_elements: bool) -> Iterator[list[str]]:
    """A context in which each mask that is asked has an element that is true, or none; gives the lines that ask."""
    from torch.overrides import TorchFunctionMode

    decisions, lines = _Decisions(torch, has_elements), list[str]()

    class Decided(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
        ) -> Any:
            name = getattr(function, "__name__", "")
            of, more = (args[0], tuple(args[1:])) if args else (None, ())
            decided = decisions.answer(name, of, more)
            if decided is not None:
                lines.append(_line(currentframe()))
                return decided
            made = function(*args, **(kwargs or {}))
            decisions.note(name, of, more, made)
            return made

    with Decided():
        yield lines


class _Decisions:
    """What tensors say where masks have elements that are true, or have none.

    Tensors are known by their ids, and kept, so that no other gets the id.
    """

    def __init__(self, torch: Any, has_elements: bool) -> None:
        self.torch, self.has_elements = torch, has_elements
        self.known: dict[int, tuple[Any, bool]] = {}
        self.counts: dict[int, Any] = {}
        """Those that are numbers of true elements."""
        self.hits: dict[int, tuple[Any, int]] = {}
        """The places of masks of one dim, and how many elements these have."""

    def answer(self, name: str, of: Any, more: Sequence[Any]) -> Any:
        """What a function of a tensor gives; None where that is nothing that is decided."""
        if name in ("__bool__", "item") and id(of) in self.known:
            return self.known[id(of)][1]
        if name == "unbind" and id(of) in self.hits and more in ((), (0,)):
            return tuple(map(Number, range(self.hits[id(of)][1])))
        return None

    def note(self, name: str, of: Any, more: Sequence[Any], made: Any) -> None:
        """Keeps what a function made, if it tells of a mask."""
        if not isinstance(of, self.torch.Tensor):  # it was given by name, or is a list
            return
        if name in _PLACES and self.has_elements:
            self._note_places(name, of, made)
        if not isinstance(made, self.torch.Tensor) or made.dim():
            return
        if name == "any":
            self.known[id(made)] = made, self.has_elements
        elif name in _COUNTS and of.dtype == self.torch.bool:
            self.counts[id(made)] = made
        elif name in _COMPARED and id(of) in self.counts and _is_zero(more):
            self.known[id(made)] = made, _COMPARED[name] == self.has_elements

    def _note_places(self, name: str, mask: Any, made: Any) -> None:
        for each in made if isinstance(made, tuple) else (made,):
            for extent in getattr(each, "shape", ()):
                if self._depends_on_numbers(extent):
                    self.torch._check(extent > 0)
        is_list = name == "nonzero" and mask.dim() == 1 and isinstance(mask.shape[0], int)
        if is_list and isinstance(made, self.torch.Tensor):
            self.hits[id(made)] = made, mask.shape[0]

    def _depends_on_numbers(self, extent: Any) -> bool:
        return isinstance(extent, self.torch.SymInt) and not extent.node.has_hint()


def _is_zero(others: Sequence[Any]) -> bool:
    return len(others) == 1 and isinstance(others[0], int) and others[0] == 0


def _line(frame: FrameType | None) -> str:
    """The line of the user's code that asks."""
    while frame is not None and (
        frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
