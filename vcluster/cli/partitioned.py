"""Programs that are of one device already, with their collectives: how commands tell, feed and run them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from parallelism import ir
from parallelism.collectives import CollectiveCall
from parallelism.cost import Costs
from parallelism.display import in_columns
from parallelism.display.quantities import fit, nbytes, plural, seconds
from parallelism.execution import Executable
from parallelism.hardware import Hardware, sized_hardware
from parallelism.interop import Partitioned
from parallelism.simulation import simulate
from vcluster.cli.command_line import WrongWords
from vcluster.cli.program_files import right
from vcluster.runs.drawn import drawn

USUAL_HARDWARE = "dgx-h100"
"""What collectives are priced on if no hardware is named."""
_WIDEST_GROUPS = 24


def told(program: Partitioned, rank: int, hardware: Hardware | None) -> str:
    """The program of a rank, and its collectives with their prices."""
    own = right(program.program, rank)
    received = sum(op.bytes_received for op in own.ops)
    return "\n".join(
        [
            f"the program of rank {rank} of {program.mesh!r}:\n",
            str(own),
            f"{plural(len(own.ops), 'op')}, {own.flops} flops, {ir.peak_bytes(own)} bytes at most, {received} bytes "
            "received\n",
            collectives_told(program, rank, hardware),
        ]
    )


def collectives_told(program: Executable, rank: int, hardware: Hardware | None) -> str:
    """The collectives of a rank in their order: all groups of ranks, bytes, and the cheapest algorithm with its price.

    ``bytes`` are those of the whole buffer, as prices count them; ``received`` are those that the rank receives.
    """
    found = hardware or sized_hardware(USUAL_HARDWARE, program.mesh.size)
    trace = right(simulate, program, found)
    events = list(trace.filter(kind="collective", rank=rank))
    if not events:
        return f"rank {rank} runs no collectives"
    costs = Costs(found)
    of_ranks = _groups_of_ranks(program, rank)
    rows = [("", "along", "groups", "bytes", "received", "algorithm", "price")]
    for event in events:
        groups = next(of_ranks) if event.axes is None else program.mesh.groups(event.axes)
        call = CollectiveCall.of_event(event)
        assert call is not None  # a program has no operation of several collectives
        cost = costs.collective(call.kind, call.nbytes, call.group, root=call.root or 0, pairs=call.pairs)
        rows.append(
            (
                event.name,
                "-" if event.axes is None else ",".join(event.axes),
                _in_words(groups),
                nbytes(call.nbytes),
                nbytes(event.bytes_received),
                cost.algorithm,
                seconds(cost.seconds),
            )
        )
    title = f"{plural(len(events), 'collective')} of rank {rank}, priced on {found.name}"
    return "\n".join([title, "", *in_columns(rows, 3)])


def _groups_of_ranks(program: Executable, rank: int) -> Iterator[Sequence[Sequence[int]]]:
    """The groups of those collectives of a rank whose groups lie along no axes."""
    for op in program.programs.program(rank).ops:
        if op.kind == "group_collective" and any(rank in group and len(group) > 1 for group in op["groups"]):
            yield op["groups"]


def _in_words(groups: Sequence[Sequence[int]]) -> str:
    """``0 1 | 2 3``; of many, their number and size and the first."""
    text = " | ".join(" ".join(map(str, group)) for group in groups)
    if len(text) <= _WIDEST_GROUPS:
        return text
    size = f"{len(groups)} of {len(groups[0])}: "
    return size + fit(" ".join(map(str, groups[0])), _WIDEST_GROUPS - len(size))


def inputs_of(program: Partitioned, arrays: dict[str, Any] | None, seed: int) -> Any:
    """The inputs of a run: whole arrays by name, or a list for each rank where the module has no layouts.

    The array ``x.3`` is the input ``x`` of rank 3; an array ``x`` is that of every rank without one of its own.  With
    ``arrays=None`` the inputs are random.
    """
    function = program.programs.function
    if program.takes_whole:
        return drawn(function, seed) if arrays is None else arrays
    size, by_rank = program.mesh.size, []
    for rank in range(size):
        if arrays is None:
            by_rank.append([*drawn(function, seed * size + rank).values()])
        else:
            by_rank.append([_given(arrays, value.name, rank) for value in function.inputs])
    return by_rank


def _given(arrays: dict[str, Any], name: str, rank: int) -> Any:
    for key in (f"{name}.{rank}", name):
        if key in arrays:
            return arrays[key]
    raise WrongWords(f"--inputs: there is neither {name} nor {name}.{rank}")


def results_told(program: Partitioned, results: Any) -> Iterator[str]:
    """The results, a line or more for each."""

    def shown(array: Any) -> str:
        return np.array2string(array, threshold=8, edgeitems=2, precision=6)

    if program.takes_whole:
        yield from (f"result {i} = {shown(array)}" for i, array in enumerate(results))
        return
    for rank, outputs in enumerate(results):
        yield from (f"result {i} of rank {rank} = {shown(array)}" for i, array in enumerate(outputs))
