"""Several modules of StableHLO in one, with a public function of each, and one of these functions alone again.

The texts are those that JAX prints: each function, and each mesh of Shardy, begins a line of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from parallelism.interop.errors import InteropError
from parallelism.interop.stablehlo import bindings

MAIN = "main"
_HEAD = re.compile(r"(  )(func\.func (?:public |private )?|sdy\.mesh )@([\w.$]+)")
_NAMED = re.compile(r"@([\w.$]+)")


def together(name: str, texts: Mapping[str, str]) -> str:
    """A module of this name with the main function of each text as the public function of its name, verified."""
    head, pieces, meshes = "", list[str](), dict[str, None]()
    for public, text in texts.items():
        head, own = _split(text)
        functions = [piece for piece in own if not piece.startswith("  sdy.mesh")]
        meshes |= dict.fromkeys(piece for piece in own if piece.startswith("  sdy.mesh"))
        names = [_name(piece) for piece in functions]
        renamed = {old: public if old == MAIN else f"{public}.{old}" for old in names}
        pieces += [_renamed(piece, renamed) for piece in functions]
    if len(meshes) > 1:
        raise InteropError("the functions of a module lie on several meshes")
    head = _NAMED.sub(f"@{name}", head, count=1)
    return bindings.verified("\n".join([head, *meshes, *pieces, "}", ""]))


def alone(text: str, public: str) -> str:
    """The module with this public function of a module as its main function, and what that calls.

    `InteropError` if there is none of this name.
    """
    head, pieces = _split(text)
    names = [_name(piece) for piece in pieces]
    kept = [
        piece
        for piece, name in zip(pieces, names, strict=True)
        if piece.startswith("  sdy.mesh") or name == public or name.startswith(f"{public}.")
    ]
    if public not in names:
        raise InteropError(f"the module has no function @{public}")
    return bindings.verified("\n".join([head, *(_renamed(piece, {public: MAIN}) for piece in kept), "}", ""]))


def _split(text: str) -> tuple[str, list[str]]:
    """The first line of a module, and its functions and meshes."""
    lines = text.strip().splitlines()
    pieces: list[list[str]] = []
    for line in lines[1:-1]:
        if _HEAD.match(line):
            pieces.append([])
        pieces[-1].append(line)
    return lines[0], ["\n".join(piece) for piece in pieces]


def _name(piece: str) -> str:
    found = _HEAD.match(piece)
    assert found is not None
    return found[3]


def _renamed(piece: str, names: Mapping[str, str]) -> str:
    return _NAMED.sub(lambda found: f"@{names.get(found[1], found[1])}", piece)
