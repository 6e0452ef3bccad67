"""The order of tokens that context parallelism deals as a zigzag: over how many devices, and of how many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parallelism.ir.core import Function, Op
from parallelism.kernels.token_order import TokenOrder
from parallelism.layouts.propagation import Devices
from parallelism.mesh import Mesh


def with_orders(function: Function, devices: Devices) -> Function:
    """The function in which every order of tokens says the numbers of these devices, and of the tokens.

    Where one of the numbers is a symbol, tokens stay in the plain order.  ``ValueError`` for an axis that there is not.
    """
    if not any(name == "order" for op in function.ops for name, _ in op.attributes):
        return function
    return replace(function, ops=tuple(_with_order(op, devices) for op in function.ops))


def _with_order(op: Op, devices: Devices) -> Op:
    given = dict(op.attributes)
    if "order" not in given:
        return op
    order = TokenOrder.parse(given["order"])
    if lacking := [axis for axis in order.axes if axis not in devices.shape]:
        raise ValueError(f"{op}: tokens are dealt over axis {lacking[0]!r}, which {devices} does not have")
    numbers = [devices.shape[axis] for axis in order.axes]
    tokens = op.outputs[0].type.shape[order.dim]
    known = tuple(n for n in numbers if isinstance(n, int))
    if order.devices or len(known) < len(numbers) or not isinstance(tokens, int):
        return op
    given["order"] = str(TokenOrder(order.dim, devices=known, tokens=tokens))
    return replace(op, attributes=tuple(given.items()))


def check_orders(function: Function, meshes: Sequence[Mesh]) -> None:
    """``ValueError`` if stages on these meshes would have tokens in different orders: they pass them on as they are."""
    orders = {dict(op.attributes).get("order", "") for op in function.ops} - {""}
    for axis in sorted({axis for order in orders for axis in TokenOrder.parse(order).axes}):
        numbers = dict.fromkeys(mesh.shape.get(axis, 1) for mesh in meshes)
        if len(numbers) > 1:
            raise ValueError(
                f"tokens are dealt in one order: stages need equally many devices along {axis}, got "
                f"{', '.join(map(str, numbers))}"
            )
