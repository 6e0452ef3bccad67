"""The error of programs from elsewhere."""


class InteropError(ValueError):
    """A program from elsewhere is broken, or has something that is not supported.

    ``node`` is the name of the op or node; ``place`` says where it stands, as far as the program says so.  The
    message has both.
    """

    def __init__(self, message: str, node: str = "", place: str = "") -> None:
        where = " at ".join(part for part in (node, place) if part)
        super().__init__(f"{where}: {message}" if where else message)
        self.message, self.node, self.place = message, node, place

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return InteropError, (self.message, self.node, self.place)


class UnsupportedError(InteropError):
    """A valid program has something that is not supported; the message names it."""
