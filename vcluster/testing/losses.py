"""Check that a training step has one loss, whatever the split: the loss, the gradients and their norm of one device.

check_loss(train_step, reference, {"head": Weight((V, D), "[tp, None]")}, meshes=[dict(dp=2, tp=2)])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from parallelism.ir import Function
from parallelism.mesh import Mesh
from parallelism.operation import ranks_in_words
from parallelism.transforms import Strategy
from vcluster.code import ClusterError, PerDevice
from vcluster.losses import (
    AUXILIARY,
    AXES,
    GRADIENT,
    Array,
    Balanced,
    Batch,
    Facts,
    LossCase,
    SplitLoss,
    Terms,
    Weight,
    cause_of,
    drawn_cases,
    near,
    with_gradients,
)
from vcluster.runs import VirtualCluster

PROBABLY = "probably: "
_MOST_DEVICES = 6


def check_loss(
    train_step: Callable[..., Any] | Function,
    reference: Callable[[Any, Any], Any],
    weights: Mapping[str, Weight] | None = None,
    *,
    strategy: str | Strategy | None = None,
    meshes: Iterable[Mapping[str, int]] | None = None,
    vocabulary: int = 7,
    clip: float | None = None,
    auxiliary: Balanced | None = None,
    rtol: float = 1e-6,
    seed: int = 0,
    backend: Literal["process", "thread"] = "thread",
    deadline_seconds: float | None = None,
) -> int:
    """Fail unless a training step on many devices has the loss and the gradients of one.  The number of cases.

    ``train_step(device, weights, microbatches)``
        is called on each device with its pieces of the weights, by name, and its microbatches, a `Batch` each.  It
        returns a dict with ``loss``, which every rank that returns one must have whole, ``grad.NAME`` of the weights that
        it holds, and if it has them ``norm``, the norm of all gradients, and ``auxiliary``.
    ``strategy``
        With it ``train_step(weights, batch)`` is a loss in plain NumPy, for whole weights and any `Batch`; it is recorded,
        differentiated, and split by this strategy, as ``"dp tp pp 1f1b:2"``.  It may be a recorded program with the inputs
        ``p.NAME`` and any of ``tokens``, ``targets`` and ``valid``.  It returns the loss, or the loss and the auxiliary loss,
        which are added.  Layouts and stages of ``weights`` are those of the strategy, so they are not given.
    ``reference(weights, batch)``
        returns the same terms of whole weights and any `Batch` on one device.  Its ``loss`` is a mean over the tokens that
        are valid, its ``auxiliary`` is of the batch that it gets, and ``auxiliary.grad.NAME`` are the gradients of that, if
        they are added to ``grad.NAME``.  A gradient of a tied weight may be a list: the part of each of its stages.
        Or it returns the loss alone, or the loss and the auxiliary loss, in plain NumPy; gradients are derived then.
    ``weights``
        the weights by name, a `Weight` each.  By default one, ``w``, with a number for each word.
    ``meshes``
        sizes of ``dp``, ``cp``, ``ep``, ``pp`` and ``tp``; rows are split over ``dp`` and ``ep``, tokens of a row over
        ``cp``, weights as their layouts say.  By default those over ``dp`` and ``tp``, or over the axes of the strategy,
        with at most 6 devices.
    ``vocabulary``
        tokens and targets are below this.
    ``clip``
        the gradients that ``train_step`` returns are clipped to this global norm.  None: they are not.
    ``auxiliary``
        whose auxiliary loss is right: the mean of those of the microbatches of all replicas (``"microbatch"``), or that of
        the whole batch (``"batch"``, the default with a strategy).
    ``deadline_seconds``
        of each case: a step that computes for longer ends with `ClusterTimeoutError`.  By default there is no limit.

    Batches are drawn: 1 to 3 microbatches, whose numbers of valid tokens differ; some have none.  The loss is the mean over
    all valid tokens, and the gradients are those of this mean and of the auxiliary loss.

    ``AssertionError`` says which term is wrong on which ranks, and the usual mistake that explains it on all of them, if
    there is one.  It never shows the right value.  Errors of the step leave as they are.

    **Communication**: that of ``train_step``; a cluster is started for each mesh.
    """
    __tracebackhide__ = True
    weights = {"w": Weight((vocabulary,))} if weights is None else weights
    for name, weight in weights.items():
        if not isinstance(weight, Weight):
            raise TypeError(
                f"the weight {name!r} must be a Weight, as Weight({weight!r}), got {type(weight).__name__}"
            )
    split = None if strategy is None else SplitLoss(train_step, strategy, weights, clip)
    balanced: Balanced = auxiliary or ("microbatch" if split is None else "batch")
    right = with_gradients(reference, weights)
    cases = 0
    found = _Findings(rtol)
    used = AXES if split is None else split.axes
    for mesh in _meshes(meshes, ("dp", "tp") if split is None else split.axes, used):
        with VirtualCluster(mesh, backend=backend, deadline_seconds=deadline_seconds) as cluster:
            number = None if split is None else split.microbatches
            for case in drawn_cases(mesh, weights, vocabulary, clip, balanced, seed, number):
                run = _run(cluster, case, train_step if split is None else split, found.failed)
                if run is not None:
                    found.add(case, right, run)
                cases += 1
    if found.failed:
        raise AssertionError(found.text)
    return cases


def _meshes(
    meshes: Iterable[Mapping[str, int]] | None, usual: Sequence[str], used: Sequence[str]
) -> Iterator[Mesh]:
    for sizes in _usual_meshes(usual) if meshes is None else meshes:
        if unknown := set(sizes) - set(AXES):
            raise ValueError(f"check_loss splits over {', '.join(AXES)}, got an axis {sorted(unknown)[0]!r}")
        if idle := [axis for axis, size in sizes.items() if size > 1 and axis not in used]:
            raise ValueError(
                f"the strategy splits nothing over {idle[0]!r}, of which the mesh {dict(sizes)} has {sizes[idle[0]]}"
            )
        yield Mesh(**{axis: sizes.get(axis, 1) for axis in AXES})


def _usual_meshes(axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """One device, each axis alone, and two of them together."""
    yield {"dp": 1}
    for place, axis in enumerate(axes):
        yield {axis: 2}
        if axis == "dp":
            yield {axis: 3}
        for other in axes[place + 1 :]:
            yield {axis: 2, other: 2}
            yield {axis: 2, other: _MOST_DEVICES // 2}


def _run(cluster: VirtualCluster, case: LossCase, step: Any, failed: bool) -> list[Terms] | None:
    """What each rank returns; None if the step raised after a term was wrong, which ends no check."""
    try:
        return _outputs(cluster, case, step)
    except ClusterError as error:
        if failed:
            return None
        error.add_note(f"in check_loss on {case}")
        raise


def _outputs(cluster: VirtualCluster, case: LossCase, step: Any) -> list[Terms]:
    if isinstance(step, SplitLoss):
        return step.outputs(cluster, case)
    given = [case.given(rank) for rank in range(cluster.size)]
    weights, microbatches = (PerDevice(list(each)) for each in zip(*given, strict=True))
    outputs: list[Terms] = cluster.run(step, weights, microbatches).outputs
    for rank, terms in enumerate(outputs):
        if not isinstance(terms, Mapping):
            raise TypeError(
                f"train_step must return a dict of terms, got {type(terms).__name__} from rank {rank}"
            )
    return outputs


class _Findings:
    """The first term that is wrong, and all cases, which say more about its mistake."""

    def __init__(self, rtol: float) -> None:
        self._rtol = rtol
        self._text, self._name = "", ""
        self._cases: list[Facts] = []

    @property
    def failed(self) -> bool:
        return bool(self._name)

    @property
    def text(self) -> str:
        """The message of the first failure."""
        cause = cause_of(self._name, self._cases, self._rtol)
        return self._text + (f"\n{PROBABLY}{cause}" if cause else "")

    def add(self, case: LossCase, reference: Callable[..., Terms], outputs: Sequence[Terms]) -> None:
        """Compare what was returned in a case."""
        facts = Facts(case, reference, outputs)
        self._cases.append(facts)
        names = _names(outputs, facts)
        for name in () if self.failed else names:
            got = facts.got(name)
            rtol = facts.tolerance(name, self._rtol)
            wrong = [rank for rank, value in got.items() if not near(value, facts.right(name, rank), rtol)]
            lacking = _lacking(case, name, got, outputs)
            if wrong or lacking:
                self._name = name
                told = (
                    f"{ranks_in_words(lacking)} returned no {name!r}"
                    if lacking
                    else _told(facts, name, got, wrong)
                )
                self._text = f"on {case}: {told}"
                return


def _names(outputs: Sequence[Terms], facts: Facts) -> list[str]:
    """The terms to compare: what the reference has, and what any rank returned; the loss first."""
    names = dict.fromkeys(["loss", *facts.names])
    returned = dict.fromkeys(name for terms in outputs for name in terms)
    unknown = [name for name in returned if name not in names and name != "norm"]
    if unknown:
        raise ValueError(
            f"train_step returns {unknown[0]!r}, which the reference does not have: {', '.join(names)}"
        )
    always = [name for name in names if name == "loss" or name.startswith(GRADIENT) or name in returned]
    return [*always, *["norm"] * ("norm" in returned and "norm" not in always)]


def _lacking(case: LossCase, name: str, got: Mapping[int, Array], outputs: Sequence[Terms]) -> list[int]:
    """The ranks that should have returned a term and did not."""
    if name.startswith(GRADIENT):
        return [
            rank
            for rank in range(len(outputs))
            if case.holds(name.removeprefix(GRADIENT), rank) and rank not in got
        ]
    return [] if got else list(range(len(outputs)))


def _told(facts: Facts, name: str, got: Mapping[int, Array], wrong: Sequence[int]) -> str:
    """Which term is wrong, and where."""
    what = f"the gradient of {name.removeprefix(GRADIENT)!r}" if name.startswith(GRADIENT) else f"the {name}"
    what = "the auxiliary loss" if name == AUXILIARY else what
    value, right = got[wrong[0]], facts.right(name, wrong[0])
    if value.shape != right.shape:
        return f"{what} has shape {value.shape} on rank {wrong[0]}, expected {right.shape}"
    if not np.isfinite(value).all():
        return f"{what} is not finite on {ranks_in_words(wrong)}: a microbatch has no valid token"
    alike = len({got[rank].tobytes() for rank in got}) == 1
    where = "" if alike else f" on {ranks_in_words(wrong)}"
    return f"{what} differs{where} from that of one device"


__all__ = ["Batch", "Weight", "check_loss"]
