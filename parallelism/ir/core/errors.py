"""The errors and warnings of programs.  An error is a ``ValueError`` that says where the program is wrong."""


class IRError(ValueError):
    """The base class of the errors of `parallelism.ir`."""


class VerifyError(IRError):
    """A function is not valid.  The message names the op by its number and its text."""

    reason = ""
    """The end of the message, without the names of the op and of its values."""


class ParseError(IRError):
    """A text is not a program.  ``line`` and ``column`` count from 1."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(f"line {line}, column {column}: {message}")
        self.message, self.line, self.column = message, line, column

    def __reduce__(self) -> tuple[type, tuple[str, int, int]]:
        return ParseError, (self.message, self.line, self.column)


class RecordError(IRError):
    """A call cannot be recorded.  The message names the call and its line."""


class SymbolError(TypeError):
    """A number is needed, and an extent has symbols."""


class PromotionWarning(UserWarning):
    """A recorded array of 16 or 8 bits becomes larger because of a NumPy number; the warning is at the user's line."""


class UnequalExtents(ValueError):
    """Two dims have to be equal and are not.  ``extents`` has both."""

    def __init__(self, message: str, first: object, second: object) -> None:
        super().__init__(message)
        self.extents = first, second

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return UnequalExtents, (str(self), *self.extents)
