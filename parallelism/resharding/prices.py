"""Seconds of the steps of a resharding plan on a hardware."""

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
        most = max(received[rank] for rank in group)
        size = len(group)
        if size > 1:
            share = (2 if step.kind == "all_reduce" else 1) * ((size - 1) / size)
            collective = "all_to_all" if step.kind == "exchange" else step.kind
            longest = max(longest, costs.collective(collective, most / share, group).seconds)
    return longest
