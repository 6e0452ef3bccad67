"""The notations of layouts: axes in brackets, dims with subscripts, placements by mesh axis.

    layout      = axes [options] | "TensorSharding" "(" entries ")" | subscripts [braces] | placements
    axes        = "[" entries "]"                     [x, None, (y, z)]     [x, ...] partial=y, op=max
    subscripts  = [name] "[" dims "]" | dims          A[I_x, J_{y,z}] {U_w}      I_X, J
    placements  = "[" placement, ... "]"              [S(0), R, P(sum)]     one for each axis of the mesh

Nothing is evaluated.  A text that cannot be read raises one ``ValueError`` with the text and the position of the
mistake.  The result is plain: a list of dims as `TensorSharding` takes them, the partial axes, and the operation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import EllipsisType

from parallelism.sharding.tokens import Tokens

Dim = tuple[str, ...] | EllipsisType
Parsed = tuple[list[Dim], tuple[str, ...], str]
"""The dims, the partial axes, and the pending reduction."""

_SUBSCRIPT = re.compile(r"([A-Z])_(\w+)")
_WORDS = {"shard": "S", "s": "S", "replicate": "R", "r": "R", "partial": "P", "p": "P"}
_OPS = {"avg": None, "product": "prod"}


def parse(text: str, mesh_axes: Sequence[str] | None) -> Parsed:
    """Read a layout.  ``mesh_axes`` are the axes of the mesh in order, or None if no mesh is known."""
    if not isinstance(text, str):
        raise TypeError(f"a layout must be given as text, got {text!r}")
    return _Reader(text, mesh_axes).layout()


class _Reader(Tokens):
    def __init__(self, text: str, mesh_axes: Sequence[str] | None) -> None:
        super().__init__(text, "layout")
        self.mesh_axes = mesh_axes

    # -- the whole text ------------------------------------------------------------------------------------------------

    def layout(self) -> Parsed:
        first = self.peek()
        if first.kind == "end":
            self.wrong("a layout, as [x, None]")
        if first.kind == "name" and self.tokens[1].text == "(":
            if first.text != "TensorSharding":
                self.wrong("TensorSharding, or a layout without a name in front", first)
            self.take()
            return self.whole(self.constructor())
        if first.kind == "name" and self.tokens[1].text == "[":
            self.take()
            return self.whole(self.subscripts("]"))
        if self.has_placements():
            return self.whole(self.placements())
        if first.text != "[":
            if self.has_axes():
                return self.whole(self.with_options(self.entries("")))
            return self.whole(self.subscripts(""))
        if self.has_subscripts():
            return self.whole(self.subscripts("]"))
        self.take()
        return self.whole(self.with_options(self.entries("]")))

    def whole(self, layout: Parsed) -> Parsed:
        if self.peek().kind != "end":
            self.wrong("the end")
        return layout

    def has_axes(self) -> bool:
        """Whether a text without brackets lists axes."""
        return any(token.text in ("None", "(", "=") or token.kind == "quoted" for token in self.tokens)

    def has_placements(self) -> bool:
        names = [(token.text, after.text) for token, after in zip(self.tokens, self.tokens[1:], strict=False)]
        if any(name.lower() in _WORDS and mark == "(" for name, mark in names):
            return True
        words = [token.text for token in self.tokens if token.kind == "name"]
        mesh_axes = self.mesh_axes or ()
        return bool(words) and self.mesh_axes is not None and all(
            word in ("R", "P", "Replicate", "Partial") and word not in mesh_axes for word in words
        )

    def has_subscripts(self) -> bool:
        """Whether some word in the brackets is a dim with a subscript, and not an axis."""
        end = next((i for i, token in enumerate(self.tokens) if token.text == "]"), len(self.tokens))
        return any(
            token.kind == "name" and token.text not in (self.mesh_axes or ())
            and (_SUBSCRIPT.fullmatch(token.text) or (token.text.endswith("_") and after.text == "{"))
            for token, after in zip(self.tokens[:end], self.tokens[1:], strict=False)
        )

    # -- axes in brackets ----------------------------------------------------------------------------------------------

    def constructor(self) -> Parsed:
        self.expect("(")
        dims = self.entries(")", inside=True)
        options = self.options(")")
        self.expect(")")
        return dims, *options

    def with_options(self, dims: list[Dim]) -> Parsed:
        if self.peek().text == "{":
            return dims, *self.unreduced()
        return dims, *self.options("")

    def entries(self, end: str, *, inside: bool = False) -> list[Dim]:
        """Read dims up to ``end``, and ``end`` itself unless options follow ``inside``.  "" is the end of the text."""
        dims: list[Dim] = []
        while self.peek().text != end and not self.is_option():
            dims.append(self.entry())
            if not self.comma(end):
                break
        if not inside and end:
            self.expect(end)
        return dims

    def entry(self) -> Dim:
        token = self.peek()
        if token.kind == "dots":
            self.take()
            return ...
        return self.axes("an axis, None, ... or a tuple of axes")

    def axes(self, wanted: str = "an axis or a tuple of axes") -> tuple[str, ...]:
        """Read None, one axis, or several axes in parentheses."""
        token = self.peek()
        if token.text == "(":
            self.take()
            names = []
            while self.peek().text != ")":
                names.append(self.axis("an axis or )"))
                if not self.comma(")"):
                    break
            self.expect(")")
            return tuple(names)
        if token.text == "None" or (token.text == "-" and token.kind == "mark"):
            self.take()
            return ()
        return (self.axis(wanted),)

    def axis(self, wanted: str = "an axis") -> str:
        if self.peek().kind == "quoted":
            return self.take().text[1:-1]
        if self.peek().text == "None":
            self.wrong(wanted)
        return self.name(wanted)

    def is_option(self) -> bool:
        return self.peek().kind == "name" and self.tokens[self.at + 1].text == "="

    def options(self, end: str) -> tuple[tuple[str, ...], str]:
        """Read ``partial=`` and ``op=``, in any order, up to ``end``."""
        partial: tuple[str, ...] = ()
        op = "sum"
        seen: set[str] = set()
        while self.peek().text != end and self.peek().kind != "end":
            token = self.peek()
            name = self.name("partial= or op=")
            if name not in ("partial", "op") or name in seen:
                self.wrong("partial= or op=, each once", token)
            seen.add(name)
            self.expect("=")
            if name == "partial":
                partial = self.axes()
            else:
                op = self.op()
            self.comma(end)
        return partial, op

    def op(self) -> str:
        token = self.peek()
        name = self.axis("sum, prod, max or min")
        op = _OPS.get(name, name)
        if op not in ("sum", "prod", "max", "min"):
            self.wrong("sum, prod, max or min", token)
        return op

    # -- dims with subscripts ------------------------------------------------------------------------------------------

    def subscripts(self, end: str) -> Parsed:
        if end:
            self.expect("[")
        dims: list[Dim] = []
        while self.peek().text not in (end, "{"):
            dims.append(self.dim())
            if not self.comma(end):
                break
        if end:
            self.expect(end)
        return dims, *self.unreduced()

    def dim(self) -> Dim:
        """Read a dim: ``I``, ``I_x`` or ``J_{y,z}``."""
        if self.peek().kind == "dots":
            self.take()
            return ...
        token = self.peek()
        name = self.name("a dim, as I, I_x or J_{y,z}")
        letters, underscore, axis = name.partition("_")
        if not letters or (underscore and not axis and self.peek().text != "{"):
            self.wrong("a dim, as I, I_x or J_{y,z}", token)
        if underscore and not axis:
            return self.braced()
        return self.known(axis) if axis else ()

    def braced(self) -> tuple[str, ...]:
        """Read axes in braces: ``{y,z}``."""
        self.expect("{")
        axes: list[str] = []
        while True:
            axes += self.known(self.name("an axis"))
            if not self.comma("}"):
                break
        self.expect("}")
        return tuple(axes)

    def known(self, word: str) -> tuple[str, ...]:
        """The axes that a subscript names: the axis of this name, or in capitals ``X`` for x, ``XY`` for x and y."""
        if not self.mesh_axes or word in self.mesh_axes:
            return (word,)
        axes = {axis.lower(): axis for axis in self.mesh_axes}
        if word.lower() in axes:
            return (axes[word.lower()],)
        letters = [letter.lower() for letter in word]
        return tuple(axes[letter] for letter in letters) if set(letters) <= set(axes) else (word,)

    def unreduced(self) -> tuple[tuple[str, ...], str]:
        """Read the pending reduction: ``{U_w}``, ``{U_{w,v}}``, ``{U_w: max}``, or nothing."""
        if self.peek().text != "{":
            return (), "sum"
        self.take()
        token = self.peek()
        name = self.name("U_ and an axis")
        if not name.startswith("U_"):
            self.wrong("U_ and an axis", token)
        axes = self.known(name[2:]) if name[2:] else self.braced()
        op = "sum"
        if self.peek().text == ":":
            self.take()
            op = self.op()
        self.expect("}")
        return axes, op

    # -- placements ----------------------------------------------------------------------------------------------------

    def placements(self) -> Parsed:
        """Read placements: entry i of ``[S(0), R, P(sum)]`` belongs to axis i of the mesh."""
        end = {"[": "]", "(": ")"}.get(self.take().text)
        if end is None:
            self.at = 0
            self.wrong("[ or (")
        if self.mesh_axes is None:
            raise ValueError(f"{self.text!r} has one placement for each axis of a mesh, so the mesh is needed to read "
                             f"it: parse(text, mesh)")
        dims: dict[int, list[str]] = {}
        partial: list[str] = []
        ops: set[str] = set()
        count = 0
        while self.peek().text != end:
            if count == len(self.mesh_axes):
                self.wrong(f"{end} after {count} placements, one for each axis of the mesh")
            axis = self.mesh_axes[count]
            count += 1
            token = self.peek()
            kind = _WORDS.get(self.name("S(dim), R or P(op)").lower())
            if kind == "S":
                dims.setdefault(self.placed_dim(), []).append(axis)
            elif kind == "P":
                partial.append(axis)
                ops.add(self.placed_op())
                if len(ops) > 1:
                    self.wrong(f"one operation for all partial axes, not {' and '.join(sorted(ops))}", token)
            elif kind == "R":
                if self.peek().text == "(":
                    self.take()
                    self.expect(")")
            else:
                self.wrong("S(dim), R or P(op)", token)
            if not self.comma(end):
                break
        if count < len(self.mesh_axes):
            self.wrong(f"{len(self.mesh_axes)} placements, one for each axis of the mesh, not {count}")
        self.expect(end)
        entries: list[Dim] = [tuple(dims.get(d, ())) for d in range(max(dims, default=-1) + 1)]
        return [*entries, ...], tuple(partial), ops.pop() if ops else "sum"

    def placed_dim(self) -> int:
        self.expect("(")
        if self.peek().text == "dim":
            self.take()
            self.expect("=")
        token = self.peek()
        if token.kind != "number" or len(token.text) > 2:
            self.wrong("the number of a dim, counted from 0")
        self.take()
        self.expect(")")
        return int(token.text)

    def placed_op(self) -> str:
        if self.peek().text != "(":
            return "sum"
        self.take()
        if self.peek().text == ")":
            self.take()
            return "sum"
        op = self.op()
        self.expect(")")
        return op
