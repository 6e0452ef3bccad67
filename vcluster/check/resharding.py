"""`check_resharding`: a change of layout that a student wrote."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from parallelism.mesh import Mesh
from parallelism.resharding import plan_resharding
from parallelism.sharding import TensorSharding
from vcluster.check.answer import Answer
from vcluster.check.sharded import calls, compare


def check_resharding(
    mine: Callable[..., Any],
    source: TensorSharding | str,
    target: TensorSharding | str,
    *,
    meshes: Iterable[Mesh | Mapping[str, int]] | None = None,
    cheapest: bool = False,
) -> Answer:
    """Check ``mine(device, shard)``, which gets a shard in layout ``source`` and returns the one in layout ``target``.

    Layouts are `TensorSharding` or their text, ``"[x, None]"``.  The cases are those of `vcluster.check_kernel`: 1 to 4
    devices along each axis, even, uneven and empty shards.  If all pass, the `Answer` compares the bytes with those of
    the cheapest known plan (`parallelism.plan_resharding`); with ``cheapest`` it passes only if there are no more.

    ``ValueError`` for layouts that cannot be read, or of different numbers of dims.

    >>> check_resharding(lambda device, x: device.all_gather(x, "x"), "[x, None]", "[None, None]").passed
    True
    """
    source, target = (
        TensorSharding.of(source, name="the source"),
        TensorSharding.of(target, name="the target"),
    )
    if source.ellipsis is not None or target.ellipsis is not None or len(source.dims) != len(target.dims):
        raise ValueError(
            f"source and target must name the same number of dims, got {source.short()} and {target.short()}"
        )
    subject = f"{source.short()} -> {target.short()} by {getattr(mine, '__name__', 'a function')}"
    compared = compare(mine, np.copy, f"{_written(source)} -> {_written(target)}", meshes)
    if compared.finding is not None:
        return Answer(False, subject, *compared.finding, cases=compared.cases)
    case, run = compared.last, compared.run
    assert case is not None
    assert run is not None
    array = case.arguments[0][0]
    plan = plan_resharding(source, target, array.shape, array.dtype, case.cluster.mesh)
    mine_bytes = run.trace.bytes_received()
    least = sum(plan.bytes_received)
    figures = (
        ("", "bytes received, all ranks", "operations"),
        ("yours", str(mine_bytes), calls(run.trace)),
        ("the cheapest known", str(least), plural_steps(len(plan.steps))),
    )
    passed, sentence, likely = False, "", ""
    if "reshard" in {event.name for event in run.trace}:
        sentence = "the result is right, and device.reshard makes it"
        likely = "the exercise is to write the change of layout with collectives or messages"
    elif cheapest and mine_bytes > least:
        sentence = f"the result is right, and its ranks receive {mine_bytes} bytes where {least} are enough, on {case.text}"
        likely = "more is sent than the ranks lack: they throw a part of it away"
    else:
        passed = True
        received = f"the ranks receive {mine_bytes} bytes, {_times(mine_bytes, least)}"
        sentence = f"right in all {compared.cases} cases; on {case.text} {received}"
    return Answer(passed, subject, sentence, (), likely, figures, compared.cases)


def _times(mine_bytes: int, least: int) -> str:
    """How the bytes compare with those of the cheapest known plan."""
    if mine_bytes == least:
        return "as in the cheapest known plan"
    return f"{mine_bytes / least:.3g} times the least known" if least else "where none are needed"


def plural_steps(count: int) -> str:
    """The number of operations of a plan, without their names, which would be the answer."""
    return "1 operation" if count == 1 else f"{count} operations"


def _written(layout: TensorSharding) -> str:
    """The layout as `vcluster.check_kernel` reads it, with letters for dims."""
    names = string.ascii_uppercase.replace("U", "")
    dims = []
    for name, dim in zip(names, layout.dims, strict=False):
        dims.append(f"{name}_{{{','.join(dim.axes)}}}" if dim.axes else name)
    partial = f" {{U_{{{','.join(layout.partial)}}}}}" if layout.partial else ""
    return (", ".join(dims) or "()") + partial
