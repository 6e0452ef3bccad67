"""Functions of JAX with derivatives of their own, which a program of what they compute does not keep."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from parallelism.interop.errors import warn_of_own_derivatives

_RULES = {"custom_vjp_call": "jax.custom_vjp", "custom_jvp_call": "jax.custom_jvp"}
"""What gives a derivative, by the beginning of the name of JAX's primitive."""


def warn_of_lost_derivatives(jax: Any, closed: Any) -> None:
    """Gives `OwnDerivativeWarning` if a jaxpr calls functions with derivatives of their own, not differentiated yet.

    Those of JAX itself are not told of: theirs are the usual derivatives, which the program has, too.
    """
    own = str(Path(jax.__file__).parent)
    instead = "from_jax(jax.value_and_grad(f), ...) has JAX's"
    called = [*_called(closed, own)]
    for rule in _RULES.values():
        names = [name for name, given_by in called if given_by == rule]
        warn_of_own_derivatives(names, rule, instead, stacklevel=4)


def _called(jaxpr: Any, own: str) -> Iterator[tuple[str, str]]:
    """Such functions: name and rule.  ``own`` is the folder of JAX.

    What JAX has differentiated is left out: there a rule itself may call its function.
    """
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if "jvp(" in str(equation.source_info.name_stack):
            continue
        rule = next((r for word, r in _RULES.items() if equation.primitive.name.startswith(word)), None)
        if rule is not None:
            name, source = _origin(equation.params.get("call_jaxpr"))
            if own not in source:
                yield name, rule
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from _called(inner, own)


def _origin(jaxpr: Any) -> tuple[str, str]:
    """The name of a function, and where it was defined."""
    info = getattr(getattr(jaxpr, "jaxpr", jaxpr), "debug_info", None)
    return str(getattr(info, "func_name", None) or "a function"), str(getattr(info, "func_src_info", ""))


_RECTIFIERS = re.compile(r"relu6?(_\d+)?")


def is_rectifier(callees: Sequence[str], place: str) -> bool:
    """Whether an op is one of ``jax.nn.relu`` or ``relu6``, which have no gradient at zero and at six.

    Of its own functions JAX names no line.  A function ``relu`` of a user has one.
    """
    return bool(callees) and _RECTIFIERS.fullmatch(callees[-1]) is not None and ", line " not in place
