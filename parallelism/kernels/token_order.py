"""`TokenOrder`: the order of the tokens along a dim, where context parallelism deals them so that all devices work alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from parallelism.mesh.zigzag import zigzag_order

_TEXT = re.compile(
    r"(?P<dim>[0-9]{1,2}):(?P<over>[A-Za-z0-9_]+(\+[A-Za-z0-9_]+)*)(/(?P<tokens>[0-9]{1,15}))?"
)


@dataclass(frozen=True)
class TokenOrder:
    """The tokens along ``dim`` are in `zigzag_order` over the devices along some ``axes``, outermost first.

    The numbers of these devices, and of the tokens of a sequence, are known when a program is laid out.  Until then the
    order is the plain one: a program computes the same in any order of its tokens.

    >>> str(TokenOrder(1, ("cp",))), TokenOrder.parse("1:2+3/48").devices
    ('1:cp', (2, 3))
    >>> TokenOrder.parse("0:2/8").positions(4, 4).tolist(), TokenOrder.parse("0:cp").positions(4, 4).tolist()
    ([2, 3, 4, 5], [4, 5, 6, 7])
    """

    dim: int
    axes: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    tokens: int = 0

    def positions(self, start: int, count: int) -> npt.NDArray[np.intp]:
        """The places in the sequence of ``count`` tokens, from number ``start`` of this order on."""
        if not self.devices:
            return np.arange(start, start + count)
        return _zigzag(self.tokens, self.devices)[start : start + count]

    def __str__(self) -> str:
        if self.devices:
            return f"{self.dim}:{'+'.join(map(str, self.devices))}/{self.tokens}"
        return f"{self.dim}:{'+'.join(self.axes)}"

    @classmethod
    def parse(cls, text: str) -> TokenOrder:
        """The order that ``text`` says, as ``str`` writes it.  ``ValueError`` for another text."""
        found = _TEXT.fullmatch(text[:200])
        over = found["over"].split("+") if found else []
        are_numbers = [each.isdecimal() and 0 < int(each) < 1 << 31 for each in over]
        if found and found["tokens"] is None and not any(each[0].isdecimal() for each in over):
            return cls(int(found["dim"]), axes=tuple(over))
        if found and found["tokens"] is not None and all(are_numbers):
            return cls(int(found["dim"]), devices=tuple(map(int, over)), tokens=int(found["tokens"]))
        raise ValueError(
            'an order of tokens is a dim and axes, or devices and tokens, as "1:cp" or "1:4/128"; got '
            f"{text[:40]!r}"
        )


@lru_cache(maxsize=64)
def _zigzag(tokens: int, devices: tuple[int, ...]) -> npt.NDArray[np.intp]:
    found = zigzag_order(tokens, devices)
    found.flags.writeable = False
    return found


def positions_of(order: str, dim: int, start: int, count: int) -> npt.NDArray[np.intp]:
    """The positions of ``count`` tokens from number ``start`` on along a dim; the plain ones where ``order`` is of
    another dim, or empty."""
    found = TokenOrder.parse(order) if order else None
    if found is None or found.dim != dim:
        return np.arange(start, start + count)
    return found.positions(start, count)


def part_of(order: str, starts: Sequence[int], shape: Sequence[int]) -> list[slice | npt.NDArray[np.intp]]:
    """The positions of a part of a tensor along each dim, as `parallelism.kernels.dropout_mask` takes them."""
    part: list[slice | npt.NDArray[np.intp]] = [
        slice(start, start + n) for start, n in zip(starts, shape, strict=True)
    ]
    if order and (dim := TokenOrder.parse(order).dim) < len(part):
        part[dim] = positions_of(order, dim, starts[dim], shape[dim])
    return part
