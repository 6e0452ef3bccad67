"""`check_sharded`: a computation on shards that a student wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.mesh import Mesh
from parallelism.resharding import plan_resharding
from parallelism.sharding import TensorSharding
from parallelism.trace import Trace
from vcluster.check.answer import Answer
from vcluster.check.failures import LOOP, Finding, failure_of
from vcluster.check.observed_run import DEADLINE_SECONDS, failed, forget, trace_of, watching
from vcluster.code import ClusterError
from vcluster.runs import Run
from vcluster.testing.kernels import KernelCase, kernel_cases
from vcluster.testing.sharded import assert_sharded_allclose


class Compared(NamedTuple):
    """The cases of a kernel: how many there were, and the first that fails or the last, largest one."""

    cases: int
    finding: Finding | None
    """None if all cases pass."""
    last: KernelCase | None
    run: Run[Any] | None


def check_sharded(
    mine: Callable[..., Any],
    layouts: str,
    reference: Callable[..., npt.ArrayLike],
    *,
    meshes: Iterable[Mesh | Mapping[str, int]] | None = None,
) -> Answer:
    """Check ``mine(device, *shards)``, which computes on shards what ``reference(*arrays)`` computes in NumPy.

    ``layouts`` are those of the arguments and of the result, as in `vcluster.check_kernel`, which has the same cases:
    ``"M, K_tp; K_tp, N -> M, N"``.  Each device returns its shard of the result.

    The `Answer` names the smallest mesh with a case that fails, its sizes, the rank, its part of the whole array, the
    place that is farthest off, and the likely mistake.  The dtype must be that of the reference.  If all pass, it
    compares the bytes with those of gathering each argument whole.

    ``ValueError`` for layouts that cannot be read.

    >>> import numpy as np
    >>> check_sharded(lambda device, a, b: a @ b, "M, K_tp; K_tp, N -> M, N", np.matmul).likely
    "a reduction is missing: the sum of the outputs over 'tp' is what was expected"
    """
    compared = compare(mine, reference, layouts, meshes)
    subject = f"{layouts} by {getattr(mine, '__name__', 'a function')}"
    if compared.finding is not None:
        return Answer(False, subject, *compared.finding, cases=compared.cases)
    case, run = compared.last, compared.run
    assert case is not None
    assert run is not None
    mesh = case.cluster.mesh
    gathered = sum(
        sum(
            plan_resharding(
                layout, TensorSharding.replicated(array.ndim), array.shape, array.dtype, mesh
            ).bytes_received
        )
        for array, layout in case.arguments
        if not layout.partial
    )
    figures = (
        ("", "bytes received, all ranks", "collectives"),
        ("yours", str(run.trace.bytes_received()), calls(run.trace)),
        ("each argument gathered whole", str(gathered), "all_gather"),
    )
    return Answer(
        True,
        subject,
        f"right in all {compared.cases} cases. The figures are of the largest: {case.text}",
        (),
        "",
        figures,
        compared.cases,
    )


def compare(
    mine: Callable[..., Any],
    reference: Callable[..., npt.ArrayLike],
    layouts: str,
    meshes: Iterable[Mesh | Mapping[str, int]] | None,
) -> Compared:
    """Run the cases up to the first mesh on which one fails."""
    if not callable(mine):
        raise TypeError(f"mine must be a function (device, *shards), got {mine!r}")
    count, last, run = 0, None, None
    found: list[Finding] = []
    right = 0
    for case in kernel_cases(reference, layouts, meshes=meshes, deadline_seconds=DEADLINE_SECONDS):
        if found and (found[-1].likely == LOOP or (last is not None and case.cluster is not last.cluster)):
            break
        count, last = count + 1, case
        try:
            forget(case.cluster)
            run = case.run(watching(mine))
            trace_of(run)
            assert_sharded_allclose(run, case.layout, case.expected)
            if changed := _changed_dtype(run, case):
                found.append(_on(case, changed))
            right += bool(found) and changed is None
        except ClusterError as error:
            found.append(_on(case, failure_of(failed(case.cluster, error), called=_call(case))))
        except AssertionError as error:
            text, _, likely = str(error).partition("\nprobably: ")
            first, *lines = text.split("\n")
            found.append(_on(case, Finding(first, tuple(line.strip() for line in lines), likely)))
        except (TypeError, ValueError) as error:
            found.append(_on(case, Finding(f"the outputs are no arrays that can be compared: {error}")))
    if not found:
        return Compared(count, None, last, run)
    finding = found[-1]  # of the sizes on one mesh the last one tells most
    if right and not finding.likely:
        finding = finding._replace(likely="it is right where all extents divide by the axes")
    return Compared(count, finding, last, run)


def _changed_dtype(run: Run[Any], case: KernelCase) -> Finding | None:
    """Of results with the right values: whether their dtype is another one."""
    wanted = case.expected.dtype
    dtypes = {rank: np.asarray(output).dtype for rank, output in enumerate(run.outputs)}
    wrong = {rank: dtype for rank, dtype in dtypes.items() if dtype != wanted}
    if not wrong:
        return None
    rank, dtype = next(iter(wrong.items()))
    return Finding(
        f"rank {rank} returns {dtype} and should return {wanted}",
        likely=f"the dtype changes: {dtype} comes out where it should be {wanted}",
    )


def _call(case: KernelCase) -> str:
    """How the function is called."""
    return f"mine({', '.join(['device', *(f'shard{number}' for number in range(len(case.arguments)))])})"


def _on(case: KernelCase, finding: Finding) -> Finding:
    return finding._replace(sentence=f"on {case.text}: {finding.sentence}")


def calls(trace: Trace) -> str:
    """The collectives of a run, with their counts."""
    names = dict.fromkeys(
        event.name for event in trace if event.kind == "collective" and event.parent is None
    )
    messages = sum(event.kind == "send" and event.parent is None for event in trace)
    told = [f"{trace.count(name)} {name}" for name in names] + ([f"{messages} send"] if messages else [])
    return ", ".join(told) or "none"
