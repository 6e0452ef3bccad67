"""The notations of layouts: axes in brackets, dims with subscripts, placements by mesh axis.

    layout      = axes [options] | "TensorSharding" "(" entries ")" | subscripts [braces] | placements
    axes        = "[" entries "]"                     [x, None, (y, z)]     [x, ...] partial=y, op=max
    subscripts  = [name] "[" dims "]" | dims          A[I_x, J_{y,z}] {U_w}      I_X, J
    placements  = "[" placement, ... "]"              [S(0), R, P(sum)]     one for each axis of the mesh

Nothing is evaluated.  A text that cannot be read raises one ``ValueError`` with the text and the position of the
mistake.  The result is plain: a list of dims as `TensorSharding` takes them, the partial axes, and the operation.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, NoReturn

from parallelism.display import shortened
from parallelism.sharding.partial import OPS

Dim = tuple[str, ...] | EllipsisType
Pending = tuple[tuple[str, ...], str]
"""The partial axes, and the pending reduction."""
Parsed = tuple[list[Dim], tuple[str, ...], str]
"""The dims, the partial axes, and the pending reduction."""

_TOKEN = re.compile(
    r"""\s*(?:(?P<dots>\.\.\.)|(?P<name>[^\W\d]\w*)|(?P<number>\d+)|(?P<quoted>'[^'\\]+'|"[^"\\]+")"""
    r"""|(?P<mark>[][(){},=:-])|(?P<other>\S))"""
)
_SUBSCRIPT = re.compile(r"([A-Z])_(\w+)")
_WORDS = {"shard": "S", "s": "S", "replicate": "R", "r": "R", "partial": "P", "p": "P"}
_OP_NAMES = {"product": "prod"} | {op: op for op in OPS}


MOST_CHARACTERS = 10_000
"""A longer text is no layout."""


def parse(text: str, mesh_axes: Sequence[str] | None) -> Parsed:
    """Read a layout.  ``mesh_axes`` are the axes of the mesh in order, or None if no mesh is known."""
    if not isinstance(text, str):
        raise TypeError(f"a layout must be given as text, got {text!r}")
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"a layout has at most {MOST_CHARACTERS} characters, got {shortened(text)}")
    reader = _Reader(text, mesh_axes)
    layout = reader.layout()
    if reader.peek().kind != "end":
        reader.wrong("the end")
    return layout


class Token(NamedTuple):
    kind: str
    """dots, name, number, quoted (with its quotes), mark, end, or other."""
    text: str
    place: int


class _Reader:
    """A reader of a layout, token by token."""

    def __init__(self, text: str, mesh_axes: Sequence[str] | None) -> None:
        self.mesh_axes = mesh_axes
        self.text = text
        self.tokens = self._split()
        """All tokens; the last two have the kind "end"."""
        self.at = 0

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _split(self) -> list[Token]:
        tokens = []
        for match in _TOKEN.finditer(self.text):
            kind = match.lastgroup or ""
            token = Token(kind, match[kind], match.start(kind))
            if kind == "other" or not token.text.isprintable():
                self.wrong("a name or a bracket" if kind == "other" else "a name that can be printed", token)
            tokens.append(token)
        end = Token("end", "", len(self.text.rstrip()))
        return [*tokens, end, end]

    def peek(self) -> Token:
        """The next token."""
        return self.tokens[self.at]

    def take(self) -> Token:
        """Return the next token and advance.  At the end it stays there."""
        token = self.tokens[self.at]
        self.at += token.kind != "end"
        return token

    def name(self, wanted: str) -> str:
        """Return the next token, which must be a name, and advance."""
        if self.peek().kind != "name":
            self.wrong(wanted)
        return self.take().text

    def taken(self, *texts: str) -> bool:
        """Take the next token if it has one of these texts."""
        found = self.peek().text in texts
        self.at += found
        return found

    def expect(self, text: str) -> None:
        """Take the next token, which must have this text."""
        if not self.taken(text):
            self.wrong(repr(text))

    def wrong(self, wanted: str, token: Token | None = None) -> NoReturn:
        """Raise ``ValueError``: ``wanted`` was expected in place of the next token, or of ``token``."""
        token = token or self.peek()
        actual = "the end" if token.kind == "end" else shortened(token.text)
        raise ValueError(
            f"{shortened(self.text)} is not a layout: expected {wanted} at position {token.place}, got {actual}"
        )

    # -- the whole text ------------------------------------------------------------------------------------------------

    def layout(self) -> Parsed:
        first, second = self.tokens[:2]
        if first.kind == "end":
            self.wrong("a layout, as [x, None]")
        if first.kind == "name" and second.text == "(":
            if first.text != "TensorSharding":
                self.wrong("TensorSharding, or a layout without a name in front")
            return self.constructor()
        if first.kind == "name" and second.text == "[":
            self.take()
            return self.subscripts("]")
        if self.has_placements():
            return self.placements()
        if first.text == "[":
            return self.subscripts("]") if self.has_subscripts() else self.in_brackets("]")
        has_axes = any(token.text in ("None", "(", "=") or token.kind == "quoted" for token in self.tokens)
        if has_axes:
            return self.in_brackets("")
        for token in self.tokens:
            if token.text in (self.mesh_axes or ()):  # it would be the name of a dim that is whole
                self.wrong(f"axes in brackets, as [{token.text}], or a dim with an axis behind _", token)
        return self.subscripts("")

    def has_placements(self) -> bool:
        names = [(token.text, after.text) for token, after in zip(self.tokens, self.tokens[1:], strict=False)]
        if any(name.lower() in _WORDS and mark == "(" for name, mark in names):
            return True
        words = [token.text for token in self.tokens if token.kind == "name"]
        return (
            bool(words)
            and self.mesh_axes is not None
            and all(word in {"R", "P", "Replicate", "Partial"} - {*self.mesh_axes} for word in words)
        )

    def has_subscripts(self) -> bool:
        """Whether some word in the brackets is a dim with a subscript, and not an axis."""
        end = next((i for i, token in enumerate(self.tokens) if token.text == "]"), len(self.tokens))
        return any(
            token.kind == "name"
            and token.text not in (self.mesh_axes or ())
            and (_SUBSCRIPT.fullmatch(token.text) or (token.text.endswith("_") and after.text == "{"))
            for token, after in zip(self.tokens[:end], self.tokens[1:], strict=False)
        )

    def items(self, *ends: str) -> Iterator[int]:
        """Go through a list up to one of ``ends``, which is not taken; "" is the end of the text.

        The items are counted from 0.  The caller reads each of them, up to the comma behind it.
        """
        count = 0
        while self.peek().text not in ends:
            yield count
            count += 1
            if not self.taken(","):
                return

    # -- axes in brackets ----------------------------------------------------------------------------------------------

    def constructor(self) -> Parsed:
        self.take()
        self.expect("(")
        dims = self.entries(")")
        pending = self.options(")")
        self.expect(")")
        return dims, *pending

    def in_brackets(self, end: str) -> Parsed:
        dims = self.enclosed(self.entries, end)
        return dims, *(self.unreduced() if self.peek().text == "{" else self.options(""))

    def enclosed(self, read: Callable[[str], list[Dim]], end: str) -> list[Dim]:
        """Read dims in brackets; without brackets if ``end`` is "", the end of the text."""
        if not end:
            return read(end)
        self.expect("[")
        dims = read(end)
        self.expect(end)
        return dims

    def entries(self, end: str) -> list[Dim]:
        """Read dims up to ``end``, or to an option."""
        dims: list[Dim] = []
        for _ in self.items(end):
            if self.peek().kind == "name" and self.tokens[self.at + 1].text == "=":
                break
            dims.append(... if self.taken("...") else self.axes("an axis, None, ... or a tuple of axes"))
        return dims

    def axes(self, wanted: str = "an axis or a tuple of axes") -> tuple[str, ...]:
        """Read None, one axis, or several axes in parentheses."""
        if self.taken("("):
            names = tuple(self.axis("an axis or )") for _ in self.items(")"))
            self.expect(")")
            return names
        return () if self.taken("None", "-") else (self.axis(wanted),)

    def axis(self, wanted: str) -> str:
        if self.peek().kind == "quoted":
            return self.take().text[1:-1]
        if self.peek().text == "None":
            self.wrong(wanted)
        return self.name(wanted)

    def options(self, end: str) -> Pending:
        """Read ``partial=`` and ``op=``, in any order, up to ``end``."""
        given: dict[str, Any] = {}
        while self.peek().text not in (end, ""):
            token = self.peek()
            if self.name("partial= or op=") not in {"partial", "op"} - given.keys():
                self.wrong("partial= or op=, each once", token)
            self.expect("=")
            given[token.text] = self.axes() if token.text == "partial" else self.op()
            self.taken(",")
        return given.get("partial", ()), given.get("op", "sum")

    def op(self) -> str:
        token = self.peek()
        return _OP_NAMES.get(self.axis("sum, prod, max or min")) or self.wrong("sum, prod, max or min", token)

    # -- dims with subscripts ------------------------------------------------------------------------------------------

    def subscripts(self, end: str) -> Parsed:
        dims = self.enclosed(lambda end: [self.dim() for _ in self.items(end, "{")], end)
        return dims, *self.unreduced()

    def dim(self) -> Dim:
        """Read a dim: ``I``, ``I_x`` or ``J_{y,z}``."""
        if self.taken("..."):
            return ...
        token = self.peek()
        letters, underscore, axis = self.name("a dim, as I, I_x or J_{y,z}").partition("_")
        braces = underscore and not axis
        if not letters or (braces and self.peek().text != "{"):
            self.wrong("a dim, as I, I_x or J_{y,z}", token)
        if braces:
            return self.braced()
        return self.known(axis) if axis else ()

    def braced(self) -> tuple[str, ...]:
        """Read axes in braces: ``{y,z}``."""
        self.expect("{")
        axes = [axis for _ in self.items("}") for axis in self.known(self.name("an axis"))]
        if not axes:
            self.wrong("an axis")
        self.expect("}")
        return tuple(axes)

    def known(self, word: str) -> tuple[str, ...]:
        """The axes that a subscript names: the axis of this name, or in capitals ``X`` for x, ``XY`` for x and y."""
        axes = {axis.lower(): axis for axis in self.mesh_axes or ()}
        parts = [word.lower()] if word.lower() in axes else list(word.lower())
        if word in (self.mesh_axes or ()) or not axes.keys() >= set(parts):
            return (word,)
        return tuple(axes[part] for part in parts)

    def unreduced(self) -> Pending:
        """Read the pending reduction: ``{U_w}``, ``{U_{w,v}}``, ``{U_w: max}``, or nothing."""
        if not self.taken("{"):
            return (), "sum"
        token = self.peek()
        name = self.name("U_ and an axis")
        if not name.startswith("U_"):
            self.wrong("U_ and an axis", token)
        axes = self.known(name[2:]) if name[2:] else self.braced()
        op = self.op() if self.taken(":") else "sum"
        self.expect("}")
        return axes, op

    # -- placements ----------------------------------------------------------------------------------------------------

    def placements(self) -> Parsed:
        """Read placements: entry i of ``[S(0), R, P(sum)]`` belongs to axis i of the mesh."""
        first = self.take()
        end = {"[": "]", "(": ")"}.get(first.text) or self.wrong("[ or (", first)
        if self.mesh_axes is None:
            raise ValueError(
                f"{self.text!r} has one placement for each axis of a mesh, so the mesh is needed to read "
                f"it: parse(text, mesh)"
            )
        dims: dict[int, list[str]] = {}
        partial: list[str] = []
        ops: set[str] = set()
        axes = list(self.mesh_axes)
        count = len(axes)
        for number in self.items(end):
            if not axes:
                self.wrong(f"{end} after {number} placements, one for each axis of the mesh")
            axis = axes.pop(0)
            token = self.peek()
            match _WORDS.get(self.name("S(dim), R or P(op)").lower()):
                case "S":
                    dims.setdefault(self.placed_dim(), []).append(axis)
                case "P":
                    partial.append(axis)
                    ops.add(self.placed_op())
                    if len(ops) > 1:
                        self.wrong(
                            f"one operation for all partial axes, not {' and '.join(sorted(ops))}", token
                        )
                case "R":
                    if self.taken("("):
                        self.expect(")")
                case _:
                    self.wrong("S(dim), R or P(op)", token)
        if axes:
            self.wrong(f"{count} placements, one for each axis of the mesh, not {count - len(axes)}")
        self.expect(end)
        entries: list[Dim] = [tuple(dims.get(d, ())) for d in range(max(dims, default=-1) + 1)]
        return [*entries, ...], tuple(partial), ops.pop() if ops else "sum"

    def placed_dim(self) -> int:
        self.expect("(")
        if self.taken("dim"):
            self.expect("=")
        token = self.take()
        if token.kind != "number" or len(token.text) > 2:
            self.wrong("the number of a dim, counted from 0", token)
        self.expect(")")
        return int(token.text)

    def placed_op(self) -> str:
        if not self.taken("("):
            return "sum"
        op = "sum" if self.peek().text == ")" else self.op()
        self.expect(")")
        return op
