"""A tokenizer of short texts.  Its ``ValueError`` says what was expected, at which position, and what was found."""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

_TOKEN = re.compile(
    r"""\s*(?:(?P<dots>\.\.\.)|(?P<name>[^\W\d]\w*)|(?P<number>\d+)|(?P<quoted>'[^'\\]+'|"[^"\\]+")|(?P<mark>[][(){},=:-]))"""
)


class Token(NamedTuple):
    kind: str
    """dots, name, number, quoted (with its quotes), mark, or end."""
    text: str
    place: int


class Tokens:
    """A reader of a text, token by token."""

    def __init__(self, text: str, subject: str) -> None:
        """``subject`` names in errors what the text should be, for example "layout"."""
        self.text = text
        self._subject = subject
        self.tokens = self._split()
        """All tokens; the last two have the kind "end"."""
        self.at = 0

    def _split(self) -> list[Token]:
        tokens = []
        place = 0
        end = len(self.text.rstrip())
        while place < end:
            match = _TOKEN.match(self.text, place)
            if match is None:
                bad = place + len(self.text[place:]) - len(self.text[place:].lstrip())
                raise ValueError(self._message("a name or a bracket", repr(self.text[bad]), bad))
            kind = match.lastgroup or ""
            if not match[kind].isprintable():
                at = match.start(kind)
                raise ValueError(self._message("a name that can be printed", repr(match[kind]), at))
            tokens.append(Token(kind, match[kind], match.start(kind)))
            place = match.end()
        return [*tokens, Token("end", "", end), Token("end", "", end)]

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

    def expect(self, text: str) -> Token:
        """Return the next token, which must have this text, and advance."""
        if self.peek().text != text:
            self.wrong(repr(text))
        return self.take()

    def comma(self, end: str) -> bool:
        """Take a comma, if there is one.  False if the list must end here."""
        if self.peek().text != ",":
            return False
        self.take()
        return not (self.peek().text == end and end != "")

    def wrong(self, wanted: str, token: Token | None = None) -> NoReturn:
        """Raise ``ValueError``: ``wanted`` was expected in place of the next token, or of ``token``."""
        token = token or self.peek()
        actual = "the end" if token.kind == "end" else repr(token.text)
        raise ValueError(self._message(wanted, actual, token.place))

    def _message(self, wanted: str, actual: str, place: int) -> str:
        return f"{self.text!r} is not a {self._subject}: expected {wanted} at position {place}, got {actual}"
