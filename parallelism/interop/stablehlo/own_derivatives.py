"""Functions of JAX with derivatives of their own, which a program of what they compute does not keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parallelism.interop.errors import warn_of_own_derivatives


def warn_of_custom_vjp(closed: Any) -> None:
    """Gives `OwnDerivativeWarning` if a jaxpr calls a function with ``jax.custom_vjp`` that is not differentiated yet."""
    instead = "from_jax(jax.value_and_grad(f), ...) has JAX's"
    warn_of_own_derivatives([*_called(closed)], "jax.custom_vjp", instead, stacklevel=4)


def _called(jaxpr: Any) -> Iterator[str]:
    """The names of such functions."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name.startswith("custom_vjp_call"):
            yield _name(equation.params.get("call_jaxpr"))
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from _called(inner)


def _name(jaxpr: Any) -> str:
    told = getattr(getattr(getattr(jaxpr, "jaxpr", jaxpr), "debug_info", None), "func_name", None)
    return str(told or "a function")
