"""Seconds of the steps of a resharding plan on a hardware."""

from collections.abc import Callable

from parallelism.cost import Costs
from parallelism.resharding.plan import ReshardingStep


def move_seconds(costs: Costs, step: ReshardingStep) -> float:
    """Seconds of a step: those of its slowest group.  ``partial(move_seconds, costs)`` is a ``cost`` of a plan."""
    if step.kind == "slice":
        return 0.0
    received = step.bytes_received
    if step.kind == "permute":
        moved = [(donor, rank) for rank, donor in enumerate(step.donors) if donor != rank]
        return max((costs.message_seconds(received[rank], donor, rank) for donor, rank in moved), default=0.0)
    longest = 0.0
    for group in step.mesh.groups(step.axes):
        most, size = max(received[rank] for rank in group), len(group)
        if size > 1:
            collective, share = _MOVES[step.kind]
            longest = max(longest, costs.collective(collective, most / share(size), group).seconds)
    return longest


def _others(size: int) -> float:
    return (size - 1) / size


_MOVES: dict[str, tuple[str, Callable[[int], float]]] = {
    "all_gather": ("all_gather", _others), "all_to_all": ("all_to_all", _others),
    "reduce_scatter": ("reduce_scatter", _others), "exchange": ("all_to_all", _others),
    "all_reduce": ("all_reduce", lambda size: 2 * _others(size)),
}
"""The collective that a step runs, and the part of the payload that each member of a group receives."""
