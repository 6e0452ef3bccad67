"""What a check answers: a frozen value, true if the function passes, with a sentence, the reason, and figures."""

from __future__ import annotations

from dataclasses import dataclass

from parallelism.display import WIDTH, in_columns
from parallelism.display.markup import Markup, figure, inside, note, table, text_of


@dataclass(frozen=True)
class Answer:
    """The answer of a check.  ``print`` it, or display it in a notebook; ``bool(answer)`` says whether it passes.

    >>> Answer(False, "all_reduce by mine", "the result is wrong on 2 ranks", likely="the own array is missing")
    NOT YET: all_reduce by mine
    The result is wrong on 2 ranks.
    Likely mistake: the own array is missing.
    """

    passed: bool
    subject: str
    """What was checked."""
    sentence: str
    """What was found."""
    details: tuple[str, ...] = ()
    """Which rank, which piece, what it should hold: one line each."""
    likely: str = ""
    """The likely mistake; empty if none of those known explains what was found."""
    figures: tuple[tuple[str, ...], ...] = ()
    """A table of figures, the first row has the names of the columns."""
    cases: int = 0
    """How many runs were compared."""
    picture: str = ""
    """HTML that stands below the text in a notebook, in place of the details."""

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        lines = [self._head, *_wrapped(_sentence(self.sentence)), *(f"  {line}" for line in self.details)]
        if self.likely:
            lines += _wrapped(f"Likely mistake: {_ended(self.likely)}")
        if self.figures:
            lines += ["", *in_columns(self.figures, 1)]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [
            Markup(f'<div class="{"quiet" if self.passed else ""}">{note(_sentence(self.sentence))}</div>')
        ]
        parts += [inside(self.picture)] if self.picture else [note(line) for line in self.details]
        if self.likely:
            parts.append(Markup(f"<div><b>Likely mistake:</b> {text_of(_ended(self.likely))}</div>"))
        if self.figures:
            parts.append(table(self.figures[1:], self.figures[0]))
        return figure(self._verdict, *parts)

    @property
    def _verdict(self) -> Markup:
        """The head with a mark, in blue or in orange: eyes that see no red or green tell them apart, too."""
        mark, word, colour = (
            ("&#10004;", "PASSED", "#0550ae") if self.passed else ("&#10008;", "NOT YET", "#9a4a00")
        )
        badge = f"background:{colour};color:#fff;border-radius:4px;padding:1px 8px;margin-right:8px"
        return Markup(
            f'<div class="title"><span style="{badge}">{mark} {word}</span>{text_of(self.subject)}</div>'
        )

    @property
    def _head(self) -> str:
        return f"{'PASSED' if self.passed else 'NOT YET'}: {self.subject}"


def _ended(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _sentence(text: str) -> str:
    return _ended(text[:1].upper() + text[1:])


def _wrapped(text: str) -> list[str]:
    """Lines of at most `WIDTH` characters."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines
