"""A tokenizer of layouts.  Its ``ValueError`` says what was expected, at which position, and what was found."""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

_TOKEN = re.compile(
    r"""\s*(?:(?P<dots>\.\.\.)|(?P<name>[^\W\d]\w*)|(?P<number>\d+)|(?P<quoted>'[^'\\]+'|"[^"\\]+")|(?P<mark>[][(){},=:-])|(?P<other>\S))"""
)


class Token(NamedTuple):
    kind: str
    """dots, name, number, quoted (with its quotes), mark, end, or other."""
    text: str
    place: int


class Tokens:
    """A reader of a text, token by token."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = self._split()
        """All tokens; the last two have the kind "end"."""
        self.at = 0

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
        actual = "the end" if token.kind == "end" else repr(token.text)
        raise ValueError(
            f"{self.text!r} is not a layout: expected {wanted} at position {token.place}, got {actual}")
