"""A program from its text: ``parse(str(function)) == function``.

    function   = "func" @name "(" [%value ":" laid, ...] ")" "->" "(" [laid, ...] ")" ["attributes" attributes]
                 "{" op... "return" [%value, ...] "}"
    op         = [%value, ... "="] "kind" "(" [%value, ...] ")" [attributes]
                 ":" "(" [type, ...] ")" "->" laid | "(" [laid, ...] ")" ["region" "=" string]
    attributes = "{" [name "=" attribute, ...] "}"
    attribute  = string | number | extent | "true" | "false" | dtype | "[" [attribute, ...] "]"
    type       = "tensor<" { extent "x" } dtype ">"          an extent in parentheses, or digits, or capitals
    laid       = type [layout]
    layout     = "[" [axes | "...", ...] "]" ["partial" "=" axes] ["," "op" "=" name]
    axes       = "None" | axis | "(" [axis, ...] ")"         an axis is a name, or a string

``//`` begins a comment.  Nothing is evaluated.  Text that cannot be read raises `ParseError` with line and column.  So
does text that is not a valid program: a value that is undefined or defined twice, an operator that is not in the table,
types that differ from those of the operator.
"""

import json
from typing import Any

from parallelism.ir.core import (
    DTYPES,
    Function,
    IRError,
    Op,
    TensorType,
    Value,
    check_path,
    meaning,
    operator,
    print_type,
)
from parallelism.ir.core.lines import Line
from parallelism.ir.text.lexing import Reader, Token
from parallelism.sharding import OPS, TensorSharding


def parse(text: str) -> Function:
    """The function in ``text``.  `ParseError` says at which line and column the text is wrong."""
    if not isinstance(text, str):
        raise TypeError(f"a program is read from text, got {type(text).__name__}")
    return _Parser(text).function()


class _Parser(Reader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.known: dict[str, Value] = {}
        self.counted, self.line = 0, 1
        """How far lines are counted, and the line there."""

    def function(self) -> Function:
        self.expect("func")
        name = self.expect_kind("function", "the name of the function, as @main").text[1:]
        self.expect("(")
        inputs = self.listed(self.input, ")")
        self.expect("->")
        self.expect("(")
        types = self.listed(self.laid_type, ")")
        said = self.attributes() if self.has("attributes") else {}
        self.expect("{")
        ops = []
        while self.next.text != "return":
            if self.next.kind not in ("value", "string"):
                self.wrong("an op, or return")
            ops.append(self.op())
        offset = self.take().offset
        outputs = self.listed(self.used, "}")
        if self.next.kind != "end":
            self.wrong("the end")
        promised = [Value("returned", type, layout) for type, layout in types]
        if len(outputs) != len(promised) or any(
            v.type != p.type or p.layout not in (None, v.layout)
            for v, p in zip(outputs, promised, strict=True)
        ):
            texts = [", ".join(map(print_type, values)) or "nothing" for values in (promised, outputs)]
            self.fail(f"the function must return {texts[0]}, this returns {texts[1]}", offset)
        try:
            return Function(name, tuple(inputs), tuple(ops), tuple(outputs), tuple(said.items()))
        except IRError as error:
            self.fail(str(error), offset)

    def input(self) -> Value:
        token = self.expect_kind("value", "an input, as %x: tensor<8xf32>")
        self.expect(":")
        return self.define(token, *self.laid_type())

    def op(self) -> Op:
        results = (
            self.listed(lambda: self.expect_kind("value", "a value, as %0"), "=")
            if self.next.kind == "value"
            else []
        )
        start = self.expect_kind("string", 'an operator, as "matmul"')
        kind = self.string(start)
        try:
            operator(kind)
        except ValueError as error:
            self.fail(str(error), start.offset)
        self.expect("(")
        inputs = self.listed(self.used, ")")
        attributes = self.attributes() if self.next.text == "{" else {}
        self.expect(":")
        offset = self.expect("(").offset
        types = self.listed(lambda: (self.next.offset, self.type()), ")")
        if len(types) != len(inputs):
            self.fail(
                f"there must be a type for each input: {len(inputs)} inputs, {len(types)} types", offset
            )
        for value, (at, type) in zip(inputs, types, strict=True):
            if value.type != type:
                self.fail(f"%{value.name} is defined as {value.type} and used as {type}", at)
        self.expect("->")
        offset = self.next.offset
        results_laid = self.listed(self.laid_type, ")") if self.has("(") else [self.laid_type()]
        region = self.region() if self.has("region") else None
        frozen = tuple(sorted(attributes.items()))
        try:
            expected = meaning(kind, tuple(value.type for value in inputs), frozen).outputs
        except (ValueError, TypeError) as error:
            self.fail(str(error), start.offset)
        if tuple(type for type, _ in results_laid) != expected:
            self.fail(f"{kind} must return {', '.join(map(str, expected)) or 'nothing'} here", offset)
        if len(results) != len(expected):
            self.fail(f"{kind} returns {len(expected)} values, but {len(results)} are named", start.offset)
        outputs = [self.define(token, *laid) for token, laid in zip(results, results_laid, strict=True)]
        return Op(kind, tuple(inputs), frozen, tuple(outputs), region, self.line_of(start))

    def line_of(self, token: Token) -> Line:
        """The line of a token that comes after those that were asked for before."""
        self.line += self.text.count("\n", self.counted, token.offset)
        self.counted = token.offset
        return Line("", self.line)

    # -- pieces --------------------------------------------------------------------------------------------------------

    def used(self) -> Value:
        token = self.expect_kind("value", "a value, as %0")
        value = self.known.get(token.text[1:])
        if value is None:
            self.fail(f"{token.text[:60]} is not defined", token.offset)
        return value

    def define(self, token: Token, type: TensorType, layout: TensorSharding | None) -> Value:
        name = token.text[1:]
        if name in self.known:
            self.fail(f"{token.text[:60]} is defined already; every value is defined once", token.offset)
        self.known[name] = Value(name, type, layout)
        return self.known[name]

    def string(self, token: Token) -> str:
        try:
            return str(json.loads(token.text))
        except ValueError as error:
            self.fail(f"this string cannot be read: {error}", token.offset)

    def region(self) -> str:
        self.expect("=")
        token = self.expect_kind("string", 'the path of a region, as "block.0"')
        path = self.string(token)
        try:
            return check_path(path)
        except ValueError as error:
            self.fail(str(error), token.offset)

    # -- layouts -------------------------------------------------------------------------------------------------------

    def laid_type(self) -> tuple[TensorType, TensorSharding | None]:
        type = self.type()
        return type, self.layout(type.ndim) if self.next.text == "[" else None

    def layout(self, ndim: int) -> TensorSharding:
        offset = self.expect("[").offset
        dims = self.listed(lambda: ... if self.has("...") else self.axes(), "]")
        partial: tuple[str, ...] = ()
        op = Token("name", "sum", offset)
        if self.has("partial"):
            self.expect("=")
            partial = self.axes()
            after = self._token(self.next.offset + 1) if self.next.text == "," else self.next
            if after.text == "op" and after.kind == "name":
                self.has(",")
                self.take()
                self.expect("=")
                op = self.expect_kind("name", "sum, prod, max or min")
        try:
            return TensorSharding(*dims, partial=partial, op=op.text).over(ndim)
        except ValueError as error:
            self.fail(str(error), op.offset if op.text not in OPS else offset)

    def axes(self) -> tuple[str, ...]:
        if self.has("("):
            return tuple(self.listed(self.axis, ")"))
        return () if self.has("None") else (self.axis(),)

    def axis(self) -> str:
        if self.next.kind == "string":
            return self.string(self.take())
        return self.expect_kind("name", "an axis, several in parentheses, or None").text

    # -- attributes ----------------------------------------------------------------------------------------------------

    def attributes(self) -> dict[str, Any]:
        self.expect("{")
        found: dict[str, Any] = {}
        self.listed(lambda: self.attribute(found), "}")
        return found

    def attribute(self, attributes: dict[str, Any]) -> None:
        token = self.expect_kind("name", "the name of an attribute")
        if token.text in attributes:
            self.fail(f"attribute {token.text[:60]} is given twice", token.offset)
        self.expect("=")
        attributes[token.text] = self.attribute_value()

    def attribute_value(self) -> Any:
        token = self.next
        if token.kind == "string":
            return self.string(self.take())
        if token.text in ("true", "false"):
            return self.take().text == "true"
        if token.text in DTYPES:
            return DTYPES[self.take().text]
        if token.text == "[":
            self.take()
            return tuple(self.nested(lambda: self.listed(self.attribute_value, "]")))
        negative = token.text == "-"
        number = self._token(token.offset + 1) if negative else token
        if number.kind == "float" or number.text == "inf":
            self.next = number
            return -float(self.take().text) if negative else float(self.take().text)
        if token.kind in ("integer", "name") or token.text in ("-", "("):
            return self.whole_extent()
        return self.wrong("the value of an attribute")
