"""The error of programs from elsewhere."""

MOST_CHARACTERS = 600
"""Of a message, and a quarter of it of an op and of a place, which may be as long as the program itself."""


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
