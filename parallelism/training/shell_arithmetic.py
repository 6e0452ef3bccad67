"""`arithmetic`: what stands in ``$((...))`` of a launch script: sums, products and quotients of integers."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"[ \t\n]*(?:([0-9]+)|([-+*/%()]))", re.ASCII)
_LARGEST = 1 << 63
_DEEPEST = 20
"""The most parentheses that lie in each other."""


def arithmetic(text: str) -> int:
    """The number that a shell makes of ``text``: integers of 64 bits, ``+ - * / %`` and parentheses.

    Quotients are rounded to zero.  ``ValueError`` for anything else.

    >>> arithmetic("8*(3 - 5)"), arithmetic("-7 / 2"), arithmetic("-7 % 2")
    (-16, -3, -1)
    """
    found = _Expression(text)
    value = found.sum()
    if found.next is not None:
        raise ValueError(f"{found.next!r} is not expected")
    return value


class _Expression:
    """Reads tokens from the left to the right; ``next`` is the one that is looked at, None at the end."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text.rstrip(), 0, 0
        self.next: str | None = None
        self._advance()

    def _advance(self) -> None:
        if self.at == len(self.text):
            self.next = None
            return
        token = _TOKEN.match(self.text, self.at)
        if token is None:
            raise ValueError("it has integers, + - * / % and parentheses only")
        self.at, self.next = token.end(), token[1] or token[2]

    def _taken(self, *which: str) -> str | None:
        """The next token, if it is one of these."""
        if (found := self.next) not in which:
            return None
        self._advance()
        return found

    def sum(self) -> int:
        value = self._product()
        while sign := self._taken("+", "-"):
            other = self._product()
            value = _checked(value + other if sign == "+" else value - other)
        return value

    def _product(self) -> int:
        value = self._factor()
        while sign := self._taken("*", "/", "%"):
            other = self._factor()
            if sign == "*":
                value = _checked(value * other)
                continue
            if other == 0:
                raise ValueError("it divides by 0")
            quotient = abs(value) // abs(other) * (1 if (value < 0) == (other < 0) else -1)
            value = quotient if sign == "/" else value - quotient * other
        return value

    def _factor(self) -> int:
        negative = False
        while sign := self._taken("+", "-"):
            negative ^= sign == "-"
        if self._taken("("):
            self.depth += 1
            if self.depth > _DEEPEST:
                raise ValueError(f"more than {_DEEPEST} parentheses lie in each other")
            value = self.sum()
            if not self._taken(")"):
                raise ValueError("a parenthesis ( is not closed")
            self.depth -= 1
        else:
            value = self._number()
        return -value if negative else value

    def _number(self) -> int:
        token = self.next
        if token is None or not token.isdecimal():
            raise ValueError("a number is missing")
        if len(token) > 19 or (len(token) > 1 and token[0] == "0"):
            raise ValueError("numbers are decimal, and have 64 bits")
        self._advance()
        return _checked(int(token))


def _checked(value: int) -> int:
    if not -_LARGEST <= value < _LARGEST:
        raise ValueError("numbers are decimal, and have 64 bits")
    return value
