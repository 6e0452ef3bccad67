"""A short text as tokens, and the one error for what does not fit: what was expected, where, and what came."""

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
    """Reads a text token by token."""

    def __init__(self, text: str, subject: str) -> None:
        """``subject`` is what the text should be."""
        self.text = text
        self._subject = subject
        self.tokens = self._split()
        """The last two are the end."""
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
        """The next one."""
        return self.tokens[self.at]

    def take(self) -> Token:
        """The next one, and go on; the end stays."""
        token = self.tokens[self.at]
        self.at += token.kind != "end"
        return token

    def name(self, wanted: str) -> str:
        """A name, and go on."""
        if self.peek().kind != "name":
            self.wrong(wanted)
        return self.take().text

    def expect(self, text: str) -> Token:
        """Just this, and go on."""
        if self.peek().text != text:
            self.wrong(repr(text))
        return self.take()

    def comma(self, end: str) -> bool:
        """Take a comma, if there is one; False if the list must end here."""
        if self.peek().text != ",":
            return False
        self.take()
        return not (self.peek().text == end and end != "")

    def wrong(self, wanted: str, token: Token | None = None) -> NoReturn:
        """Here (or at ``token``) should be something else."""
        token = token or self.peek()
        found = "the end" if token.kind == "end" else repr(token.text)
        raise ValueError(self._message(wanted, found, token.place))

    def _message(self, wanted: str, found: str, place: int) -> str:
        return f"{self.text!r} is no {self._subject}: expected {wanted} at position {place}, got {found}"
