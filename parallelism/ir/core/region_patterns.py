"""Patterns of regions: ``block.*`` stands for all regions of this form, and ``*`` for any characters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate

from parallelism.ir.core.function import Function, Op
from parallelism.spelling import did_you_mean

_PATTERN = re.compile(r"[A-Za-z0-9_.*?]+")


def patterns(regions: str | Sequence[str] | None, subject: str) -> tuple[str, ...]:
    """The patterns, sorted; none for None.  ``ValueError`` for a text that is no pattern of a region."""
    given = (regions,) if isinstance(regions, str) else tuple(regions or ())
    for pattern in given:
        if not isinstance(pattern, str) or not _PATTERN.fullmatch(pattern):
            raise ValueError(
                f"{subject}: a pattern of regions consists of names, ., * and ?, such as block.*, got "
                f"{pattern!r}"
            )
    return tuple(sorted(dict.fromkeys(given)))


def matching(function: Function, given: Sequence[str], subject: str) -> dict[Op, str]:
    """The ops in regions that match a pattern, each with the path of its outermost region that does.

    Without patterns it is every op, with an empty path.  ``ValueError`` for a pattern that no region matches.
    """
    if not given:
        return dict.fromkeys(function.ops, "")
    for pattern in given:
        if not any(fnmatchcase(path, pattern) for path in function.regions):
            known = function.regions
            hint = did_you_mean(pattern, known) or f"; its regions are {', '.join(known[:12]) or 'none'}"
            raise ValueError(f"{subject}: @{function.name} has no region {pattern!r}{hint}")
    matched = {path for path in function.regions if _matches(path, given)}
    found = {}
    for op in function.ops:
        for path in paths(op):
            if path in matched:
                found[op] = path
                break
    return found


def _matches(path: str, given: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in given)


def paths(op: Op) -> Iterator[str]:
    """The paths of the regions that an op belongs to, outermost first."""
    if op.region is not None:
        yield from accumulate(op.region.split("."), "{}.{}".format)
