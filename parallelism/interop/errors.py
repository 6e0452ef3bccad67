"""The errors of programs from elsewhere, and their warning."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

MOST_CHARACTERS = 600
"""The most of a message.  An op and a place, which may be as long as the program, get a quarter of it each."""


class InteropError(ValueError):
    """A program from elsewhere is broken, or has something that is not supported.

    ``node`` is the name of the op or node; ``place`` says where it stands, as far as the program says so.  The
    message has both.
    """

    def __init__(self, message: str, node: str = "", place: str = "") -> None:
        message, node, place = (
            cut(text, most)
            for text, most in (
                (message, MOST_CHARACTERS),
                (node, MOST_CHARACTERS // 4),
                (place, MOST_CHARACTERS // 4),
            )
        )
        where = " at ".join(part for part in (node, place) if part)
        super().__init__(f"{where}: {message}" if where else message)
        self.message, self.node, self.place = message, node, place

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return InteropError, (self.message, self.node, self.place)


def cut(text: str, most: int) -> str:
    """A text, of a longer one its beginning and its end."""
    if len(text) <= most:
        return text
    return f"{text[: most * 2 // 3]}...{text[-most // 3 :]} ({len(text)} characters)"


class UnsupportedError(InteropError):
    """A valid program has something that is not supported; the message names it."""


class OwnDerivativeWarning(UserWarning):
    """A program computes what a function with a derivative of its own computes, and does not know this derivative.

    Such functions are those with ``jax.custom_vjp`` or ``jax.custom_jvp`` of JAX, and ``torch.autograd.Function`` and
    hooks of PyTorch.
    """


class EvaluationWarning(UserWarning):
    """A program is that of a module in evaluation, and the module computes something else in the mode that it is in."""


class SizesWarning(UserWarning):
    """A program is that of a module for some of the sizes that its symbols can have: the module asks for them."""


class ExpertsWarning(UserWarning):
    """Rows stay sorted by expert in a program, over its whole batch, because they are not used row by row."""


NAMED = 3
"""The most functions or modules that a message names."""


def named(names: Sequence[str]) -> str:
    """The first of some names, each once, and how many more there are."""
    different = [*dict.fromkeys(names)]
    more = f" and {len(different) - NAMED} more" if len(different) > NAMED else ""
    return f"{', '.join(different[:NAMED])}{more}"


def warn_of_own_derivatives(names: Sequence[str], rule: str, instead: str, stacklevel: int) -> None:
    """Gives `OwnDerivativeWarning` if there are such functions.

    ``rule`` is what gives their derivatives, and ``instead`` what the user can do.
    """
    if not names:
        return
    warnings.warn(
        f"{named(names)}: the derivative that {rule} gives is not in the program, which is "
        f"differentiated by what it computes; {instead}",
        OwnDerivativeWarning,
        stacklevel=stacklevel + 1,
    )
