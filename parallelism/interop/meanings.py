"""A table of what the ops of a format mean, filled by the functions that say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Meaning = TypeVar("Meaning", bound=Callable[..., object])


class Meanings(dict[str, Meaning]):
    """The functions that give ops of a file format their meaning, by kind."""

    def of(self, *kinds: str) -> Callable[[Meaning], Meaning]:
        """A decorator: the function says what ops of these kinds mean."""

        def register(function: Meaning) -> Meaning:
            self.update(dict.fromkeys(kinds, function))
            return function

        return register
