"""`check_collective`: a collective that a student wrote with messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from parallelism.algorithms import CollectiveKind, kind_of, record_of
from parallelism.display.quantities import plural
from parallelism.trace import Trace
from vcluster.check.answer import Answer
from vcluster.check.cases import Case, agrees, rounded, tagged
from vcluster.check.failures import Finding, each_of, failure_of
from vcluster.check.figures import known, measured, table_of, verdict
from vcluster.check.mistakes import finding_of
from vcluster.check.observed_run import Watch, cluster_of, watch
from vcluster.check.ring import off_the_ring, wrong_step
from vcluster.code import ClusterTimeoutError
from vcluster.runs import VirtualCluster

_SIZES = (4, 3, 2, 5, 1)
"""The most telling first."""
_WAITING_SIZES = (2, 3)


class _Sort(NamedTuple):
    """A sort of case."""

    name: str
    length: Callable[[int], int]
    """The extent of dim 0, by the number of ranks."""
    columns: int = 0
    dtype: str = "float64"
    root: Callable[[int], int] = lambda size: 0


_EVEN = _Sort("lengths that divide by the number of ranks", lambda size: 2 * size)
_SORTS = (
    _EVEN,
    _Sort("lengths that do not divide by the number of ranks", lambda size: 2 * size + 1),
    _Sort("fewer elements than ranks", lambda size: max(1, size - 1)),
    _Sort("empty arrays", lambda size: 0),
    _Sort("arrays of two dims", lambda size: size, 3),
    _Sort("integers", lambda size: size, 0, "int64"),
)
_ROOTED = (_Sort("a root other than 0", lambda size: 2 * size, root=lambda size: size - 1),)


class _Run(NamedTuple):
    """A case that was run."""

    sort: _Sort
    size: int
    case: Case
    watch: Watch

    @property
    def is_right(self) -> bool:
        return self.watch.error is None and all(map(agrees, self.watch.outputs, self.case.expected))

    @property
    def where(self) -> str:
        given = next(each for each in self.case.inputs if each is not None)
        shapes = {each.shape for each in self.case.inputs if each is not None}
        text = " and ".join(map(str, sorted(shapes, reverse=True)))
        dtype = "" if given.dtype == np.float64 else f" of {given.dtype}"
        root = f", root {self.case.root}" if self.case.root else ""
        return f"on {self.size} {'rank' if self.size == 1 else 'ranks'} with shape {text}{dtype}{root}"


class _Exercise(NamedTuple):
    """A function, and the collective that it should be."""

    kind: CollectiveKind
    mine: Callable[..., Any]

    @property
    def takes_root(self) -> bool:
        return self.kind.rooted and "root" in _parameters(self.mine)

    def run(self, cluster: VirtualCluster, sort: _Sort, size: int) -> _Run:
        case = _case(self.kind, sort, size)
        mine = _with_root(self.mine, case.root) if self.takes_root else self.mine
        return _Run(sort, size, case, watch(cluster, mine, [case.inputs]))

    def runs(self, size: int) -> Iterator[_Run]:
        """All sorts of cases on so many ranks; one alone where it fails with an error."""
        with cluster_of(size) as cluster:
            for sort in (*_SORTS, *(_ROOTED if self.takes_root else ())):
                run = self.run(cluster, sort, size)
                yield run
                if run.watch.error is not None and sort is _EVEN:
                    return  # a deadlock takes a tenth of a second


def check_collective(
    kind: str,
    mine: Callable[..., Any],
    *,
    algorithm: str | None = None,
    hop: int | None = None,
    sends_wait: bool = True,
) -> Answer:
    """Check ``mine(device, x)``, a collective of this kind that is written with ``send``, ``recv`` and their like.

    ``kind``
        ``"all_reduce"`` (and other reductions) sums; arrays are cut and joined along dim 0, and cut by
        `numpy.array_split`.  The root is 0; if ``mine`` has a keyword ``root``, other roots are checked, too.  In a
        ``scatter`` only the root has ``x``, others get None.  What ranks return that get no result is ignored.
    ``algorithm``
        the name of one whose bytes, messages and steps ``mine`` must have, such as ``"ring"``.  By default any will do.
    ``hop``
        every message must go to the rank that is so many further on: 1 is the next one on a ring.  By default any will
        do.
    ``sends_wait``
        check also with channels that hold no message, where a send waits until its message is received.

    It runs on 1 to 5 threads, with even, uneven and empty shapes, and answers within seconds: a deadlock is found, not
    waited for.  The `Answer` is true if all runs pass.  A mistake is no exception: the answer tells which rank and
    which element is wrong, and the likely mistake.  Communication is compared with the closed forms of the known
    algorithms, on 4 ranks.

    ``ValueError`` for a kind or an algorithm that there is not, ``TypeError`` if ``mine`` cannot be called.

    >>> def mine(device, x):
    ...     right, left = (device.rank + 1) % device.size, (device.rank - 1) % device.size
    ...     for step in range(device.size - 1):
    ...         device.send(x, right)
    ...         x = x + device.recv(left)
    ...     return x
    >>> answer = check_collective("all_reduce", mine, sends_wait=False)
    >>> bool(answer)
    False
    >>> "a rank passes on its running total" in answer.likely
    True
    """
    record = kind_of(kind)
    if record.paired or not record.moves:
        raise ValueError(f"check_collective has no cases for {kind}")
    if not callable(mine):
        raise TypeError(f"mine must be a function (device, x), got {mine!r}")
    if algorithm is not None:
        record_of(kind, algorithm, 4)
    exercise = _Exercise(record, mine)
    subject = f"{kind} by {getattr(mine, '__name__', 'a function')}"
    failed, passed = _tried(exercise)
    cases = len(failed) + len(passed)
    finding = _explained(failed, passed, algorithm, hop) if failed else None
    if finding is None:
        telling = passed[_EVEN.name, 4]
        assert telling.trace is not None
        finding = _flaw(kind, telling, telling.trace, hop)
        if finding is None and sends_wait:
            runs, finding = _with_waiting_sends(exercise)
            cases += runs
        if finding is None:
            return _costs(record, subject, telling.trace, algorithm, cases, neighbours=hop is not None)
    return Answer(False, subject, finding.sentence, finding.details, finding.likely, cases=cases)


def _tried(exercise: _Exercise) -> tuple[list[_Run], dict[tuple[str, int], Watch]]:
    """The runs that failed, and those that did not."""
    failed: list[_Run] = []
    passed: dict[tuple[str, int], Watch] = {}
    for size in _SIZES:
        for run in exercise.runs(size):
            if run.is_right:
                passed[run.sort.name, size] = run.watch
            else:
                failed.append(run)
        if failed and isinstance(failed[-1].watch.error, ClusterTimeoutError):
            break
    return failed, passed


def _flaw(kind: str, watch: Watch, trace: Trace, hop: int | None) -> Finding | None:
    """What is wrong with a function whose results are right."""
    if itself := _uses_itself(kind, trace):
        return Finding(
            f"the result is right, and {itself} of the device makes it",
            likely=f"the exercise is to write {kind} with messages",
        )
    if watch.changed:
        return Finding(
            f"the result is right, but {each_of(watch.changed)} writes into the argument x, which belongs to the caller",
            likely="+= and [...] = change an array in place: x, or an array that shares its memory",
        )
    elsewhere = None if hop is None else off_the_ring(watch, hop)
    if elsewhere is None:
        return None
    return Finding(f"the result is right, but on 4 ranks {elsewhere.sentence}", likely=elsewhere.likely)


def _with_waiting_sends(exercise: _Exercise) -> tuple[int, Finding | None]:
    """The number of runs where a send waits until its message is received, and what is wrong with the last one."""
    for runs, size in enumerate(_WAITING_SIZES, 1):
        with cluster_of(size, channel_capacity=0) as cluster:
            run = exercise.run(cluster, _EVEN, size)
        if run.watch.error is not None:
            finding = failure_of(run.watch, waits=True)
            sentence = (
                f"the result is right while channels hold messages. With channel_capacity=0, {run.where}: "
                f"{finding.sentence}"
            )
            return runs, finding._replace(sentence=sentence)
    return len(_WAITING_SIZES), None


def _costs(
    kind: CollectiveKind,
    subject: str,
    trace: Trace,
    algorithm: str | None,
    cases: int,
    *,
    neighbours: bool,
) -> Answer:
    """The answer of a function that is right; with ``neighbours`` it is compared with the ring alone."""
    nbytes = (
        sum(each.nbytes for each in _case(kind, _EVEN, 4).inputs if each is not None)
        if kind.in_shards
        else 8 * _EVEN.length(4)
    )
    mine, others = measured(trace), known(kind, 4, nbytes, 0)
    if neighbours and "ring" in others:
        others = {"ring": others["ring"]}
    figures = table_of(mine, others)
    compared = verdict(mine, others)
    if algorithm is not None and mine != others.get(algorithm, mine):
        wanted = others[algorithm]
        names = ("bytes received", "messages sent", "steps")
        different = [
            f"{name}: {got:g}, and {algorithm} has {should:g}"
            for name, got, should in zip(names, mine, wanted, strict=True)
            if got != should
        ]
        return Answer(
            False,
            subject,
            f"the result is right, but it does not send what {algorithm} sends "
            "(on 4 ranks; the rank with the most counts)",
            tuple(different),
            _why_not(mine, wanted, others),
            figures,
            cases,
        )
    return Answer(
        True,
        subject,
        f"right in all {cases} runs. On 4 ranks, with {nbytes} bytes, {compared}",
        (),
        "",
        figures,
        cases,
    )


def _why_not(mine: Any, wanted: Any, others: dict[str, Any]) -> str:
    alike = [name for name, traffic in others.items() if traffic == mine]
    if alike:
        return f"these are the figures of {' and '.join(alike)}"
    if mine.bytes_received > wanted.bytes_received and mine.messages <= wanted.messages:
        return "whole arrays are sent where pieces of them are enough"
    if mine.bytes_received == wanted.bytes_received and mine.steps > wanted.steps:
        return "ranks wait for each other one after the other, where they could send at the same time"
    more = mine.messages - wanted.messages
    if more > 0 and more == mine.steps - wanted.steps:
        return f"{'one step' if more == 1 else f'{more} steps'} too many: what arrives there has been there before"
    if mine.messages > wanted.messages:
        return "some messages are not needed, or are cut into several"
    return ""


def _parameters(mine: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(mine).parameters)
    except (TypeError, ValueError):
        return ()


def _with_root(mine: Callable[..., Any], root: int) -> Callable[..., Any]:
    return lambda device, x: mine(device, x, root=root)


def _uses_itself(kind: str, trace: Trace) -> str:
    names = {event.name for event in trace if event.kind == "collective" and event.parent is None}
    return f"device.{kind}" if kind in names else ""


def _case(kind: CollectiveKind, sort: _Sort, size: int) -> Case:
    length, root = sort.length(size), sort.root(size)
    more = (sort.columns,) if sort.columns else ()
    inputs: list[Any] = []
    parts = np.array_split(np.arange(length), size)
    for rank in range(size):
        shape = (len(parts[rank]) if kind.in_shards else length, *more)
        is_given = kind.gives == "all" or rank == root or not kind.cuts
        inputs.append(tagged(rank, shape, sort.dtype) if is_given else None)
    return Case(kind, root, tuple(inputs), tuple(_expected(kind, inputs, size, root)))


def _expected(kind: CollectiveKind, inputs: list[Any], size: int, root: int) -> Iterator[Any]:
    """By position, from the record of the kind, in NumPy on all arrays."""
    for position in range(size):
        arrays = [inputs[source] for source in kind.sources_of(position, size, root)]
        if not arrays:
            yield None
            continue
        if kind.cuts:
            arrays = [np.array_split(array, size)[position] for array in arrays]
        yield _combined(kind, arrays)


def _combined(kind: CollectiveKind, arrays: list[Any]) -> Any:
    if kind.function is not None:
        return kind.function(arrays)
    if kind.reduces:
        return sum(arrays[1:], arrays[0])
    if kind.joins:
        return np.concatenate(arrays)
    return list(arrays) if kind.lists else arrays[0]


def _explained(
    failed: list[_Run],
    passed: dict[tuple[str, int], Watch],
    algorithm: str | None,
    hop: int | None,
) -> Finding:
    """The failure of the case that tells most, and what the cases that fail have in common."""
    first = failed[0]  # sizes and sorts come with the most telling first
    seen = first.watch
    sent = len(seen.sent[0]) if seen.sent else 0
    if seen.error is not None:
        finding = failure_of(seen)
    elif hop is not None and (elsewhere := off_the_ring(seen, hop)) is not None:
        finding = Finding(f"the result is wrong, and {elsewhere.sentence}", likely=elsewhere.likely)
    elif first.size == 1 and sent and passed:
        return Finding(
            f"{first.where}: the result is wrong",
            (),
            f"one step too many: on one rank there is nothing to "
            f"send, and it sends {plural(sent, 'message')} to itself",
        )
    else:
        received = []
        for calls in seen.said:
            received.append(sum(said.verb == "recv" for said in calls))
        finding = finding_of(
            first.case,
            seen.outputs,
            received,
            all_rounded=all(
                each.watch.error is None and rounded(each.case, each.watch.outputs) for each in failed
            ),
        )
        if (
            algorithm == "ring"
            and first.case.kind.name == "all_reduce"
            and (told := wrong_step(first.case, seen))
        ):
            finding = finding._replace(likely=told)
    common = _common(failed, passed)
    likely = finding.likely
    if common:
        likely = f"{common}. {likely[:1].upper()}{likely[1:]}" if likely else common
    details = finding.details
    if seen.error is None:
        details += (
            ("(x1[2] is element 2 of the array of rank 1)",) if any(" x" in line for line in details) else ()
        )
    return Finding(f"{first.where}: {finding.sentence}", details, likely)


def _common(failed: list[_Run], passed: dict[tuple[str, int], Watch]) -> str:
    """Which cases fail, where others pass."""
    sorts = {each.sort.name for each in failed}
    sizes = {each.size for each in failed}
    right_sizes = {size for _, size in passed} - sizes
    right_sorts = {name for name, _ in passed} - sorts
    if len(sorts) < len(_SORTS) and right_sorts and _EVEN.name not in sorts:
        return f"it is right but for {' and for '.join(sorted(sorts))}"
    if right_sizes and sizes == {1}:
        return "it is right but on one rank, which has no neighbour"
    if right_sizes >= {2, 4} and {3, 5} <= sizes:
        return "it is right on 2 and 4 ranks only: it needs a power of two"
    if right_sizes == {4} or right_sizes == {4, 1}:
        return "it is right on 4 ranks only: a number stands in the code in place of device.size"
    if right_sizes and min(sizes - {1}, default=9) >= 3:
        return f"it is right on up to {min(sizes - {1}) - 1} ranks"
    return ""
