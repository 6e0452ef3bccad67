"""What needs a number is refused, by one sentence, for an expression with symbols."""

from collections.abc import Callable
from numbers import Number
from typing import Any, NoReturn, TypeVar

from parallelism.ir.core.errors import SymbolError

T = TypeVar("T", bound=type)

_FORMS = {
    "__lt__": "{0} < {1}",
    "__le__": "{0} <= {1}",
    "__gt__": "{0} > {1}",
    "__ge__": "{0} >= {1}",
    "__rpow__": "{1}**{0}",
    "__mod__": "{0} % {1}",
    "__rmod__": "{1} % {0}",
    "__abs__": "abs({0})",
    "__round__": "round({0})",
    **{
        name: f"numpy.{name}({{0}})"
        for name in (  # NumPy calls these methods of an object
            "sqrt",
            "cbrt",
            "exp",
            "exp2",
            "expm1",
            "log",
            "log2",
            "log10",
            "log1p",
            "sin",
            "cos",
            "tan",
            "tanh",
            "rint",
        )
    },
}


def refusing_numbers(expression: T) -> T:
    """A decorator for a class with ``symbols``: its operations and functions that need a number raise `SymbolError`."""
    for name, form in _FORMS.items():
        setattr(expression, name, _refusal(form))
    return expression


def _refusal(form: str) -> Callable[..., Any]:
    def refuse(self: Any, *others: Any) -> Any:
        return no_extent(form, self, *others, kinds=(Number, type(self)))

    return refuse


def no_extent(form: str, expression: Any, *others: Any, kinds: Any = float) -> Any:
    """Raise `SymbolError` for an operation with numbers of these kinds; else ``NotImplemented``."""
    if not all(isinstance(other, kinds) for other in others):
        return NotImplemented
    texts = []
    for x in (expression, *others):
        is_sum = others and not isinstance(x, Number) and not str(x).isidentifier()
        texts.append(f"({x})" if is_sum else str(x))
    raise SymbolError(
        f"{form.format(*texts)} needs a number, and {expression} has symbols: {_remedy(expression)}"
    )


def no_number(expression: Any) -> NoReturn:
    """Raise the error for an expression that is used as a number."""
    raise SymbolError(f"{expression} has symbols and is not a number: {_remedy(expression)}")


def _remedy(expression: Any) -> str:
    example = ", ".join(f"{name}=..." for name in sorted(expression.symbols))
    return f"give them values with specialize({example})"
