"""A reader of the text of a program, token by token.  Unexpected text raises `ParseError` with line and column."""

import re
from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeVar

from parallelism.ir.core import (
    DTYPES,
    MOST_DIMS,
    RESERVED,
    Extent,
    ParseError,
    TensorType,
    divided,
    largest,
    rounded_up,
    symbol,
)

T = TypeVar("T")

_SPACE = re.compile(r"(?:[ \t\r\n]+|//[^\n]*)*", re.ASCII)
_TOKEN = re.compile(
    r"""(?P<value>%[A-Za-z0-9_.]+)|(?P<function>@[A-Za-z0-9_.]+)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)
      |(?P<float>[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)|(?P<integer>[0-9]+)
      |(?P<string>"[^"\\\n]*(?:\\.[^"\\\n]*)*")|(?P<mark>->|\.\.\.|[][(){},:=+*/<>-])""",
    re.VERBOSE | re.ASCII,
)
_TYPE = re.compile(r"tensor<[^<>\n]{0,2000}>")
_EXTENT = re.compile(r"([0-9]+)x|([A-Z][A-Z0-9_]*)x")
_DTYPE = re.compile(r"([a-z][a-z0-9]*)>")
MOST_DEPTH, MOST_DIGITS, MOST_FACTORS = 32, 20, 2000


class Token(NamedTuple):
    kind: str
    """One of value, function, name, float, integer, string, mark, end, unknown."""
    text: str
    offset: int


class Reader:
    """Reads tokens with one token of lookahead, and whole extents and types."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._types: dict[str, TensorType] = {}
        self._depth = 0
        self._factors = 0
        self.next = self._token(0)

    def _token(self, offset: int) -> Token:
        space = _SPACE.match(self.text, offset)
        offset = space.end() if space else offset
        match = _TOKEN.match(self.text, offset)
        if match is None:
            return Token(
                "end" if offset == len(self.text) else "unknown", self.text[offset : offset + 1], offset
            )
        return Token(match.lastgroup or "", match[0], offset)

    def take(self) -> Token:
        """Return the next token and advance."""
        token = self.next
        self.next = self._token(token.offset + len(token.text))
        return token

    def has(self, text: str) -> bool:
        """Whether the next token is this mark or name; if so, advance."""
        if self.next.text != text or self.next.kind == "string":
            return False
        self.take()
        return True

    def expect(self, text: str) -> Token:
        """Return the next token, which must be this mark or name, and advance."""
        token = self.next
        if not self.has(text):
            self.wrong(repr(text))
        return token

    def expect_kind(self, kind: str, wanted: str) -> Token:
        """Return the next token, which must be of this kind, and advance."""
        if self.next.kind != kind:
            self.wrong(wanted)
        return self.take()

    def wrong(self, wanted: str) -> NoReturn:
        """Raise `ParseError`: ``wanted`` was expected in place of the next token."""
        actual = "the end" if self.next.kind == "end" else repr(self.next.text[:60])
        self.fail(f"expected {wanted}, got {actual}", self.next.offset)

    def fail(self, message: str, offset: int) -> NoReturn:
        """Raise `ParseError` at this position of the text."""
        line = self.text.count("\n", 0, offset) + 1
        column = offset - self.text.rfind("\n", 0, offset)
        raise ParseError(message if len(message) < 1000 else message[:1000] + " ...", line, column) from None

    def nested(self, read: Callable[[], T]) -> T:
        """Read what is in brackets, inside those that are open."""
        self._depth += 1
        if self._depth > MOST_DEPTH:
            self.fail(f"brackets are nested more than {MOST_DEPTH} deep", self.next.offset)
        inner = read()
        self._depth -= 1
        return inner

    def listed(self, item: Callable[[], T], end: str) -> list[T]:
        """Read items separated by commas up to ``end``, and ``end`` itself."""
        items: list[T] = []
        if self.has(end):
            return items
        while not items or self.has(","):
            items.append(item())
        if not self.has(end):
            self.wrong(f"',' or {end!r}")
        return items

    def integer(self, wanted: str = "an integer") -> int:
        """Read an integer of at most as many digits as a uint64 needs."""
        token = self.expect_kind("integer", wanted)
        if len(token.text) > MOST_DIGITS:
            self.fail(
                f"a number has at most {MOST_DIGITS} digits, this one has {len(token.text)}", token.offset
            )
        return int(token.text)

    # -- extents -------------------------------------------------------------------------------------------------------

    def extent(self) -> Extent:
        """Read a sum of products, such as ``2*B*D+1``; it may be a fraction."""
        offset = self.next.offset
        try:
            total = -self._product() if self.has("-") else self._product()
            while self.next.text in ("+", "-") and self.next.kind == "mark":
                total = total - self._product() if self.take().text == "-" else total + self._product()
        except ParseError:
            raise
        except (ValueError, ZeroDivisionError) as error:
            self.fail(str(error), offset)
        return total

    def whole_extent(self) -> Extent:
        """Read an extent; a number must be whole."""
        offset = self.next.offset
        self._factors = 0
        extent = self.extent()
        if not isinstance(extent, int) and not extent.symbols:
            self.fail(f"an extent must be whole, got {extent}", offset)
        return extent

    def _product(self) -> Extent:
        result = self._factor()
        while self.next.text in ("*", "/") and self.next.kind == "mark":
            result = result * self._factor() if self.take().text == "*" else divided(result, self._factor())
        return result

    def _factor(self) -> Extent:
        token = self.next
        self._factors += 1
        if self._factors > MOST_FACTORS:
            self.fail(f"an expression has at most {MOST_FACTORS} numbers and names", token.offset)
        if token.kind == "integer":
            return self.integer()
        if token.text in ("max", "ceil") and token.kind == "name":
            self.take()
            self.expect("(")
            parts = [self.nested(self.extent)]
            while token.text == "max" and self.has(","):
                parts.append(self.nested(self.extent))
            self.expect(")")
            return largest(*parts) if token.text == "max" else rounded_up(parts[0])
        if token.kind == "name":
            if RESERVED.fullmatch(token.text):
                self.wrong("a number or the name of an extent")
            self.take()
            return symbol(token.text)
        if token.text == "(":
            self.take()
            inner = self.nested(self.extent)
            self.expect(")")
            return inner
        return self.wrong("a number or the name of an extent")

    # -- types ---------------------------------------------------------------------------------------------------------

    def type(self) -> TensorType:
        """Read a type, such as ``tensor<8xBx(2*D)xf32>``."""
        start = self.next
        match = _TYPE.match(self.text, start.offset) if start.text == "tensor" else None
        if match and match[0] in self._types:
            self.next = self._token(match.end())
            return self._types[match[0]]
        self.expect("tensor")
        shape, offset = self._shape(self.expect("<").offset + 1)
        dtype = _DTYPE.match(self.text, offset)
        if dtype is None or dtype[1] not in DTYPES:
            got = self.text[offset : offset + 12].partition("\n")[0]
            self.fail(
                f"expected an extent and 'x', or a dtype ({', '.join(DTYPES)}) and '>', got {got!r}", offset
            )
        try:
            result = TensorType(DTYPES[dtype[1]], tuple(shape))
        except ValueError as error:
            self.fail(str(error), start.offset)
        self.next = self._token(dtype.end())
        if match and match.end() == dtype.end():
            self._types[match[0]] = result
        return result

    def _shape(self, offset: int) -> tuple[list[Extent], int]:
        """Read extents with an ``x`` behind each, from an offset of the text on; and the offset behind them."""
        shape: list[Extent] = []
        while True:
            if len(shape) > MOST_DIMS:
                self.fail(f"a tensor has at most {MOST_DIMS} dims", offset)
            if self.text.startswith("(", offset):
                extent, offset = self._extent_in_parentheses(offset)
                shape.append(extent)
                continue
            match = _EXTENT.match(self.text, offset)
            if match is None:
                return shape, offset
            if len(match[0]) > MOST_DIGITS + 1 and match[1]:
                self.fail(f"a number has at most {MOST_DIGITS} digits, this one has {len(match[1])}", offset)
            shape.append(int(match[1]) if match[1] else symbol(match[2]))
            offset = match.end()

    def _extent_in_parentheses(self, offset: int) -> tuple[Extent, int]:
        """Read an extent such as ``(2*D)x``; and the offset behind it."""
        self.next = self._token(offset + 1)
        extent = self.nested(self.whole_extent)
        offset = self.next.offset + 1
        if self.next.text != ")":
            self.wrong("')'")
        if not self.text.startswith("x", offset):
            self.fail(f"expected 'x' after an extent, got {self.text[offset : offset + 1]!r}", offset)
        return extent, offset + 1
