"""What calls, loops and branches mean."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelism.interop.folding import elementwise as ew, known, same_everywhere
from parallelism.interop.stablehlo.linear_algebra import (
    CUSTOM_CALLS,
    DIMS,
    GROUPED,
    Grouped,
    grouped_product,
    lapack,
)
from parallelism.interop.stablehlo.manual import MANUAL, gspmd_sharded
from parallelism.interop.stablehlo.module import Node
from parallelism.interop.stablehlo.reading import Reader, meaning
from parallelism.interop.stablehlo.special import of_own_call

MOST_TURNS = 100_000


@meaning("func.call")
def _call(reader: Reader, node: Node, x: list[Any]) -> Any:
    return reader.called(node.attributes["callee"], node, x)


@meaning("mhlo.fusion")
def _fusion(reader: Reader, node: Node, x: list[Any]) -> Any:
    return reader.applied(node.body, x)


@meaning("stablehlo.composite")
def _composite(reader: Reader, node: Node, x: list[Any]) -> Any:
    named = node.attributes.get("composite_attributes")
    if node.attributes.get("name") == "chlo.ragged_dot" and isinstance(named, dict):
        dims = Grouped.of(named.get("ragged_dot_dimension_numbers", ()))
        if dims is not None and x[2].ndim == 1 and isinstance(x[2].shape[0], int):
            return grouped_product(node, x, dims)
    return reader.called(node.attributes["decomposition"], node, x)


@meaning("stablehlo.while")
def _while(reader: Reader, node: Node, x: list[Any]) -> Any:
    """Turn after turn, as long as the condition is known to hold."""
    condition, body = (region[0] for region in node.regions)
    state = list(x)
    for _ in range(MOST_TURNS):
        goes_on = known(reader.applied(condition, state)[0])
        if goes_on is None:
            raise node.unsupported(
                "the number of turns depends on the inputs; only loops with a fixed one are supported"
            )
        if not goes_on:
            return state
        state = reader.applied(body, state)
        if len(reader.builder.ops) > reader.most_ops:
            raise node.unsupported(
                f"the loop unrolled has more than {reader.most_ops} ops; most_ops= sets another limit"
            )
    raise node.unsupported(f"the loop has more than {MOST_TURNS} turns")


@meaning("stablehlo.case")
def _case(reader: Reader, node: Node, x: list[Any]) -> Any:
    """The branch of a known index; else all branches, of which elements are selected.  The last one is the default."""
    index, count = x[0], len(node.regions)
    if (number := same_everywhere(index)) is not None:
        return reader.applied(node.regions[int(number) if 0 <= number < count else count - 1][0])
    results = reader.applied(node.regions[-1][0])
    for i in reversed(range(count - 1)):
        chosen = ew("equal", index, np.asarray(i, index.dtype))
        results = [
            ew("where", chosen, a, b)
            for a, b in zip(reader.applied(node.regions[i][0]), results, strict=True)
        ]
    return results


@meaning("stablehlo.if")
def _if(reader: Reader, node: Node, x: list[Any]) -> Any:
    then, otherwise = (region[0] for region in node.regions)
    if (holds := same_everywhere(x[0])) is not None:
        return reader.applied(then if holds else otherwise)
    return [
        ew("where", x[0], a, b) for a, b in zip(reader.applied(then), reader.applied(otherwise), strict=True)
    ]


@meaning("stablehlo.custom_call")
def _custom_call(reader: Reader, node: Node, x: list[Any]) -> Any:
    target = str(node.attributes.get("call_target_name", ""))
    if target in PASSED_ON:
        return x
    if target == "shape_assertion":  # JAX asserts what its arguments have by their symbols
        return []
    if target == "Sharding":
        return gspmd_sharded(reader, node, x)
    if CUSTOM_CALLS.fullmatch(target):
        return lapack(node, x)
    if target == GROUPED and (dims := Grouped.of(node.attributes.get(DIMS, ()))) is not None:
        return grouped_product(node, x, dims)
    if (found := of_own_call(reader, node, x)) is not None:
        return found
    if target in MANUAL:
        raise node.unsupported(f"a {target} away from the shard_map that it belongs to is not supported")
    if CALLBACK in target and not node.results:  # jax.debug.print, which only looks
        return []
    of_python = ": it calls Python, as jax.pure_callback does; write it in JAX" if CALLBACK in target else ""
    raise node.unsupported(f"the custom call {target!r} is not supported{of_python}")


CALLBACK = "python_cpu_callback"
"""What is in the names of custom calls that call Python."""
PASSED_ON = ("annotate_device_placement", "xla.sdy.FuncResultSharding", "LayoutConstraint")
"""Custom calls that return what they are given."""
