"""What a dump says of one call: what was called, with what, between which ranks, at which line."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import islice, zip_longest
from typing import NamedTuple

import msgspec
import numpy as np

from parallelism.algorithms import KINDS
from parallelism.collectives import difference
from parallelism.collectives.call import MemberCall
from parallelism.dtypes import as_dtype
from parallelism.operation import is_installed
from vcluster.hangs.files import FileFrame

MOST_SIZES = 3
"""More tensors of one call are only counted."""
NUMPY_NAMES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
"""PyTorch's names of dtypes, and NumPy's."""
ALIKE = frozenset(
    (
        "all_reduce",
        "allreduce",
        "reduce",
        "broadcast",
        "_broadcast_oop",
        "_all_gather_base",
        "all_gather_into_tensor",
        "_reduce_scatter_base",
        "reduce_scatter_tensor",
    )
)
"""Collectives of PyTorch whose members all give as many elements."""

_SIZES = msgspec.json.Decoder(list[list[int]] | None)
_DTYPES = msgspec.json.Decoder(list[str] | None)
_FRAMES = msgspec.json.Decoder(list[FileFrame] | None)
_PAIR = re.compile(r"(send|recv) (\d{1,9})\s*(?:->|<-)\s*(\d{1,9})")
_OWN = re.compile(r"(\w+)\((?:(\w+)\[([\d, ]*)\])?(.*)\)", re.DOTALL)
_ARGUMENT = re.compile(r"(\w+)=(.*?)(?=, \w+=|$)", re.DOTALL)


class CallForm(NamedTuple):
    """A call without its place, as many calls are alike."""

    name: str
    """Without the backend: ``all_reduce``, ``send``, ``recv``."""
    text: str
    """As errors show it: ``all_reduce(float32[3])``."""
    is_message: bool = False
    peer: int = -1
    """Of a message: the other rank's place in the group."""
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    is_own: bool = False
    """Whether the text is of a run of this project: it has every argument."""

    @classmethod
    def of(cls, profiling_name: str, sizes: bytes, dtypes: bytes, call: str, tag: int) -> CallForm:
        """What an entry says.  ``msgspec.DecodeError`` if its sizes or dtypes are none."""
        _, _, name = profiling_name.rpartition(":")
        all_sizes = tuple(map(tuple, _SIZES.decode(sizes) or ()))
        all_dtypes = tuple(NUMPY_NAMES.get(dtype, dtype) for dtype in _DTYPES.decode(dtypes) or ())
        pair = _PAIR.fullmatch(name)
        if pair is None:
            text = call or f"{name}({_arrays(all_sizes, all_dtypes)})"
            return cls(name, text, sizes=all_sizes, dtypes=all_dtypes, is_own=bool(call))
        peer = int(pair[3])
        way = "to" if pair[1] == "send" else "from"
        text = call or f"{pair[1]}({way} rank {{peer}}{f', tag {tag}' if tag else ''})"
        return cls(pair[1], text, True, peer, all_sizes, all_dtypes, bool(call))

    def difference(self, other: CallForm) -> str | None:
        """In what two calls differ that the members of a group must call alike; None: in nothing."""
        mine, its = _member_call(self.text), _member_call(other.text)
        if self.is_own and other.is_own and mine is not None and its is not None:
            return difference(mine, its)
        if self.name != other.name:
            return "what they call"
        if self.dtypes and other.dtypes and self.dtypes != other.dtypes:
            return "dtype" if len(self.dtypes) == len(other.dtypes) else "the number of arrays"
        if self.name in ALIKE and _elements(self.sizes) != _elements(other.sizes):
            return "shape"
        return None


class Site(NamedTuple):
    """Where a call was made."""

    location: str
    """``file:line`` of the innermost line that is the user's; "" if nothing is known."""
    callers: tuple[Line, ...] = ()
    """The user's lines that led there, outermost first."""

    @classmethod
    def of(cls, frames: bytes) -> Site:
        """The place of an entry.  ``msgspec.DecodeError`` if its frames are none."""
        found = [Line(frame.name, f"{frame.filename}:{frame.line}") for frame in _FRAMES.decode(frames) or ()]
        users = [line for line in found if not _is_installed(line.place.rpartition(":")[0])]
        chosen = users or [line for line in found if "torch" not in line.place] or found
        return cls(chosen[0].place if chosen else "", tuple(reversed(chosen)))

    def __str__(self) -> str:
        return f" at {self.location}" if self.location else ""


class Line(NamedTuple):
    """A line that was being executed."""

    function: str
    place: str
    """``file:line``."""


def _is_installed(filename: str) -> bool:
    """Whether a file of some machine belongs to Python or to a package of it, and not to the user."""
    return is_installed(filename) or re.search(r"(^|/)lib(64)?/python3|^<frozen ", filename) is not None


def _arrays(sizes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]) -> str:
    first = dtypes[0] if dtypes else ""
    pairs = zip_longest(sizes, dtypes[: len(sizes)], fillvalue=first)
    texts = [f"{dtype}{list(extents)}" for extents, dtype in islice(pairs, MOST_SIZES)]
    more = [f"{len(sizes) - MOST_SIZES} more"] * (len(sizes) > MOST_SIZES)
    return ", ".join([*texts, *more])


def _elements(sizes: tuple[tuple[int, ...], ...]) -> int:
    total = 0
    for extents in sizes:
        count = 1
        for extent in extents:
            count *= extent
        total += count
    return total


@lru_cache(maxsize=4096)
def _member_call(text: str) -> MemberCall | None:
    """The call that `parallelism.collectives.text_of` has written so; None for other texts."""
    found = _OWN.match(text)
    if found is None or found[1] not in KINDS.records:
        return None
    kind, dtype, extents, rest = found.groups()
    given: dict[str, str] = dict(_ARGUMENT.findall(rest))
    return MemberCall(
        kind,
        dtype=None if dtype is None else _dtype(dtype),
        shape=None if dtype is None else tuple(int(each) for each in extents.split(",") if each.strip()),
        dim=_number(given.get("dim") or given.get("split_dim", "")),
        concat_dim=_number(given.get("concat_dim", "")),
        root=_number(given.get("root", "")),
        op=given.get("op"),
        pairs=_pairs(given.get("pairs")),
        algorithm=given.get("algorithm"),
    )


def _dtype(name: str) -> np.dtype[np.generic] | None:
    try:
        return as_dtype(name)
    except (TypeError, ValueError, SyntaxError):
        return None


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"-?\d{1,9}", text) else 0


def _pairs(text: str | None) -> tuple[tuple[int, int], ...] | None:
    if text is None:
        return None
    return tuple((int(a), int(b)) for a, b in re.findall(r"\((\d{1,9}), (\d{1,9})\)", text))
