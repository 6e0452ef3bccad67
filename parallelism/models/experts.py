"""A mixture of experts in plain NumPy, recorded."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelism.ir.core import Extent, Function, TensorType
from parallelism.ir.recording import record
from parallelism.ir.tracing.current import region
from parallelism.ir.tracing.tracing import apply

Parameters = dict[str, Any]


def mixture(
    width: Extent,
    hidden: Extent,
    experts: Extent,
    chosen: int,
    capacity: Extent,
    groups: Extent,
    tokens: Extent,
    balance: float = 0.01,
    dtype: Any = np.float64,
) -> Function:
    """A layer of experts with a residual connection and the mean squared error.

    Batch inputs: ``x`` and ``targets`` of shape ``(groups, tokens, width)``.  Each token goes to the ``chosen`` experts
    of largest probability, with the gates and the order of `parallelism.kernels.choose_experts`.  An expert accepts
    ``capacity`` choices of each group; a choice beyond that adds nothing.  The loss includes ``balance`` times the
    load-balancing loss of Switch Transformer (arXiv:2101.03961, equation 4), averaged over groups.  Dispatch and
    combination are einsums with masks, as in GShard (arXiv:2006.16668, algorithm 2).  If groups and experts are split
    over one axis, rows move from groups to experts and back by all_to_all.
    """
    types = {
        "router": TensorType(dtype, (width, experts)),
        "up": TensorType(dtype, (experts, width, hidden)),
        "down": TensorType(dtype, (experts, hidden, width)),
    }

    def added(terms: list[Any]) -> Any:
        return sum(terms[1:], terms[0])

    def one_hot(places: Any, extent: Extent) -> Any:
        return apply("one_hot", places, extent=extent, dtype=np.dtype(dtype))

    def route(probabilities: Any) -> tuple[Any, Any, Any]:
        """Two arrays of shape (groups, tokens, experts, capacity), and the one-hot first choices.

        The first is 1 where a token has a slot of an expert, the second is the token's gate there.
        """
        choices: list[Any] = []
        slots, gates = [], []
        for rank in range(chosen):
            left = np.where(added(choices) > 0, -1, probabilities) if rank else probabilities
            choice = one_hot(np.argmax(left, axis=2), experts)
            places = np.cumsum(choice, axis=1) - choice
            if rank:
                places = places + np.sum(added(choices), axis=1, keepdims=True)
            choices.append(choice)
            slots.append(one_hot(places.astype(np.int64), capacity) * choice[..., None])
            gates.append(np.sum(probabilities * choice, axis=2)[..., None, None])
        if chosen > 1:
            gates = [gate / added(gates) for gate in gates]
        return added(slots), added([slot * gate for slot, gate in zip(slots, gates, strict=True)]), choices[0]

    def loss(p: Parameters, x: Any, targets: Any) -> Any:
        with region("router"):
            probabilities = apply("softmax", x @ p["router"], axis=2)
            slots, weights, first = route(probabilities)
            shares = np.sum(np.mean(first, axis=1) * np.mean(probabilities, axis=1), axis=1)
        with region("dispatch"):
            rows = np.einsum("gtec,gtd->egcd", slots, x)
        with region("experts"):
            rows = np.einsum(
                "egch,ehd->egcd", np.maximum(np.einsum("egcd,edh->egch", rows, p["up"]), 0), p["down"]
            )
        with region("combine"):
            x = x + np.einsum("gtec,egcd->gtd", weights, rows)
        with region("loss"):
            return np.mean((x - targets) ** 2) + np.mean(shares) * experts * balance

    batch = TensorType(dtype, (groups, tokens, width))
    return record(loss, types, batch, batch, name="mixture")
