"""The work object of an asynchronous call is not its result: computing with it says what to write."""

from collections.abc import Callable
from typing import Any, NoReturn

_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
_OTHERS = (
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__neg__",
    "__abs__",
    "__float__",
    "__int__",
    "__getitem__",
    "__setitem__",
    "__array_ufunc__",
    "__array_function__",
)


class Unfinished:
    """The base of the work objects: ``TypeError`` for whatever only an array or a number can do."""

    __slots__ = ()


def _refusal() -> Callable[..., NoReturn]:
    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"{self!r} is an asynchronous operation and not its result, so nothing can be computed with "
            "it: write .wait(), which returns the result, as in work.wait() + 1"
        )

    return refuse


for _name in _OPERATORS:
    for _form in ("__{}__", "__r{}__", "__i{}__"):
        setattr(Unfinished, _form.format(_name), _refusal())
for _name in _OTHERS:
    setattr(Unfinished, _name, _refusal())
