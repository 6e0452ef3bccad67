"""Check that a training step has one loss, whatever the split: the loss, the gradients and their norm of one device.

check_loss(train_step, reference, {"head": Weight((V, D), "[tp, None]")}, meshes=[dict(dp=2, tp=2)])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from parallelism.mesh import Mesh, split_sizes
from parallelism.operation import ranks_in_words
from parallelism.sharding import TensorSharding
from vcluster.code import ClusterError, PerDevice
from vcluster.runs import VirtualCluster

Array = npt.NDArray[Any]
Terms = Mapping[str, Any]
"""``loss``, ``grad.NAME`` of weights, ``norm``, ``auxiliary``: a number or an array each."""
Reference = Callable[[Mapping[str, Array], "Batch"], Terms]
AXES = ("dp", "cp", "pp", "tp")
GRADIENT = "grad."
PROBABLY = "probably: "
_MOST_DEVICES = 8
_USUAL_MESHES = ({"dp": 1}, {"dp": 2}, {"dp": 3}, {"tp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 3})


@dataclass(frozen=True)
class Batch:
    """Rows of tokens: of a microbatch on a device, or all of them."""

    tokens: Array
    """[rows, tokens], whole numbers."""
    targets: Array
    """[rows, tokens]: what is to be predicted."""
    valid: npt.NDArray[np.bool_]
    """[rows, tokens]: whether a token counts in the loss. The others are padding."""
    first: int = 0
    """The place in the sequence of the first token: not 0 on later ranks of ``cp``."""


@dataclass(frozen=True)
class Weight:
    """A weight of the model: its shape, its layout, and the stages that hold it."""

    shape: tuple[int, ...]
    layout: str = ""
    """As ``"[tp, None]"``; "" if every rank holds it whole."""
    stages: tuple[int, ...] | None = None
    """Stages of ``pp``, -1 for the last one; two of a tied weight. None: all."""


@dataclass(frozen=True)
class LossCase:
    """One mesh, and one batch cut into microbatches with unequal numbers of valid tokens."""

    mesh: Mesh
    weights: Mapping[str, Weight]
    values: Mapping[str, Array]
    whole: Batch
    microbatches: int
    clip: float | None

    @cached_property
    def owner(self) -> Array:
        """[rows, tokens, 3]: the place on ``dp`` and on ``cp``, and the microbatch, of each token."""
        rows, length = self.whole.tokens.shape
        dp, cp = self.mesh.shape["dp"], self.mesh.shape["cp"]
        each = rows // (dp * self.microbatches)
        places = np.zeros((rows, length, 3), np.int64)
        places[..., 0] = (np.arange(rows) // (each * self.microbatches))[:, None]
        places[..., 1] = np.repeat(np.arange(cp), split_sizes(length, (cp,)))
        places[..., 2] = (np.arange(rows) // each % self.microbatches)[:, None]
        return places

    def given(self, rank: int) -> tuple[dict[str, Array], list[Batch]]:
        """What a rank gets: its pieces of the weights, and its microbatches."""
        index = self.mesh.index(rank)
        weights = {
            name: value[self.slices(name, rank)]
            for name, value in self.values.items()
            if self.holds(name, rank)
        }
        batches = []
        for number in range(self.microbatches):
            mine = (self.owner == [index["dp"], index["cp"], number]).all(axis=-1)
            rows, columns = np.flatnonzero(mine.any(axis=1)), np.flatnonzero(mine.any(axis=0))
            at = np.ix_(rows, columns)
            first = int(columns[0]) if len(columns) else self.whole.tokens.shape[1]
            batches.append(Batch(self.whole.tokens[at], self.whole.targets[at], self.whole.valid[at], first))
        return weights, batches

    def holds(self, name: str, rank: int) -> bool:
        """Whether a rank holds a weight."""
        stages, pp = self.weights[name].stages, self.mesh.shape["pp"]
        return stages is None or self.mesh.index(rank)["pp"] in {stage % pp for stage in stages}

    def slices(self, name: str, rank: int) -> tuple[slice, ...]:
        """The piece of a weight that a rank holds."""
        weight = self.weights[name]
        if not weight.layout:
            return (slice(None),) * len(weight.shape)
        return TensorSharding.parse(weight.layout).slices(weight.shape, self.mesh, rank)

    def __str__(self) -> str:
        counts = [
            int((self.whole.valid & (self.owner[..., 0] == place)).sum())
            for place in range(self.mesh.shape["dp"])
        ]
        axes = (
            ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items() if size > 1) or "one device"
        )
        microbatches = f"{self.microbatches} microbatch{'es' * (self.microbatches > 1)}"
        return f"{axes}, {microbatches}, {' and '.join(map(str, counts))} valid tokens"


def check_loss(
    train_step: Callable[..., Terms],
    reference: Reference,
    weights: Mapping[str, Weight] | None = None,
    *,
    meshes: Iterable[Mapping[str, int]] | None = None,
    vocabulary: int = 7,
    clip: float | None = None,
    rtol: float = 1e-6,
    seed: int = 0,
    backend: Literal["process", "thread"] = "thread",
) -> int:
    """Fail unless a training step on many devices has the loss and the gradients of one.  The number of cases.

    ``train_step(device, weights, microbatches)``
        is called on each device with its pieces of the weights, by name, and its microbatches, a `Batch` each.  It
        returns a dict with ``loss``, which every rank that returns one must have whole, ``grad.NAME`` of the weights that
        it holds, and if it has them ``norm``, the norm of all gradients, and ``auxiliary``.
    ``reference(weights, batch)``
        returns the same of whole weights and any `Batch` on one device.  Its ``loss`` is a mean over the tokens that are
        valid, its ``auxiliary`` is of the batch that it gets.  A gradient of a tied weight may be a list: the part of each
        of its stages.  ``norm`` need not be there.
    ``weights``
        the weights by name, a `Weight` each.  By default one, ``w``, with a number for each word.
    ``meshes``
        sizes of ``dp``, ``cp``, ``pp`` and ``tp``; rows are split over ``dp``, tokens of a row over ``cp``, weights as their
        layouts say.  By default those over ``dp`` and ``tp`` with at most 6 devices.
    ``vocabulary``
        tokens and targets are below this.
    ``clip``
        the gradients that ``train_step`` returns are clipped to this global norm.  None: they are not.

    Batches are drawn: 1 to 3 microbatches, whose numbers of valid tokens differ; some have none.  The loss is the mean over
    all valid tokens, the gradients are those of this mean, the auxiliary loss is the mean of those of the microbatches of
    all replicas.

    ``AssertionError`` says which term is wrong on which ranks, and the usual mistake that explains it on all of them, if
    there is one.  It never shows the right value.  Errors of the step leave as they are.

    **Communication**: that of ``train_step``; a cluster is started for each mesh.
    """
    __tracebackhide__ = True
    weights = {"w": Weight((vocabulary,))} if weights is None else weights
    cases = 0
    found = _Findings(rtol)
    for mesh in _meshes(meshes):
        with VirtualCluster(mesh, backend=backend) as cluster:
            for case in _cases(mesh, weights, vocabulary, clip, seed):
                found.add(case, reference, *_terms(cluster, case, train_step, found.failed))
                cases += 1
    if found.failed:
        raise AssertionError(found.text)
    return cases


def _meshes(meshes: Iterable[Mapping[str, int]] | None) -> Iterator[Mesh]:
    for sizes in _USUAL_MESHES if meshes is None else meshes:
        if unknown := set(sizes) - set(AXES):
            raise ValueError(f"check_loss splits over {', '.join(AXES)}, got an axis {sorted(unknown)[0]!r}")
        yield Mesh(**{axis: sizes.get(axis, 1) for axis in AXES})


def _cases(
    mesh: Mesh, weights: Mapping[str, Weight], vocabulary: int, clip: float | None, seed: int
) -> Iterator[LossCase]:
    """Batches of 1 to 3 microbatches, drawn anew for each mesh."""
    rng = np.random.default_rng([seed, *mesh.shape.values()])
    for microbatches in (1, 2, 3):
        values = {name: rng.normal(size=weight.shape) for name, weight in weights.items()}
        rows = 2 * microbatches * mesh.shape["dp"]
        shape = rows, 3 + 2 * mesh.shape["cp"]
        valid = rng.random(shape) < rng.random((rows, 1))
        valid[:2] &= microbatches == 1  # otherwise the first microbatch of the first replica has no token
        valid[-1, -1] = valid[-1, 0] = True
        tokens, targets = rng.integers(vocabulary, size=(2, *shape))
        yield LossCase(mesh, weights, values, Batch(tokens, targets, valid), microbatches, clip)


def _terms(
    cluster: VirtualCluster, case: LossCase, train_step: Callable[..., Terms], failed: bool
) -> tuple[list[Terms], bool]:
    """What each rank returns, and whether the step ran; once a term was wrong, an error ends no check."""
    given = [case.given(rank) for rank in range(cluster.size)]
    try:
        run = cluster.run(
            train_step,
            PerDevice([weights for weights, _ in given]),
            PerDevice([batches for _, batches in given]),
        )
    except ClusterError as error:
        if failed:
            return [], False
        error.add_note(f"in check_loss on {case}")
        raise
    return run.outputs, True


class _Findings:
    """The first term that is wrong, and what all cases say about its mistake."""

    def __init__(self, rtol: float) -> None:
        self._rtol = rtol
        self._text = ""
        self._evidence: dict[str, Any] = {}
        self._name = ""

    @property
    def failed(self) -> bool:
        return bool(self._name)

    @property
    def text(self) -> str:
        """The message of the first failure."""
        cause = self._evidence[self._name].cause
        return self._text + (f"\n{PROBABLY}{cause}" if cause else "")

    def add(self, case: LossCase, reference: Reference, outputs: Sequence[Terms], ran: bool) -> None:
        """Compare the outputs of a case."""
        from vcluster.testing.loss_causes import Evidence, Facts

        if not ran:
            return
        facts = Facts(case, reference)
        for name in _names(outputs, facts):
            got = {
                rank: np.asarray(terms[name])
                for rank, terms in enumerate(outputs)
                if terms.get(name) is not None
            }
            wrong = [
                rank for rank, value in got.items() if not near(value, facts.right(name, rank), self._rtol)
            ]
            lacking = _lacking(case, name, got, outputs)
            if (wrong or lacking) and not self.failed:
                self._name = name
                told = (
                    f"{ranks_in_words(lacking)} returned no {name!r}"
                    if lacking
                    else _told(facts, name, got, wrong)
                )
                self._text = f"on {case}: {told}"
            if not self.failed or name == self._name:
                self._evidence.setdefault(name, Evidence(name)).add(facts, got, self._rtol)


def near(value: Array, right: Array, rtol: float) -> bool:
    """Whether two values agree, up to a part of the largest of them."""
    if value.shape != right.shape:
        return False
    size = float(np.max(np.abs(right), initial=0.0))
    return bool(np.allclose(value, right, rtol=rtol, atol=rtol * max(size, 1e-9)))


def _names(outputs: Sequence[Terms], facts: Any) -> list[str]:
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


def _told(facts: Any, name: str, got: Mapping[int, Array], wrong: Sequence[int]) -> str:
    """Which term is wrong, and where."""
    what = f"the gradient of {name.removeprefix(GRADIENT)!r}" if name.startswith(GRADIENT) else f"the {name}"
    value, right = got[wrong[0]], facts.right(name, wrong[0])
    if value.shape != right.shape:
        return f"{what} has shape {value.shape} on rank {wrong[0]}, expected {right.shape}"
    if not np.isfinite(value).all():
        return f"{what} is not finite on {ranks_in_words(wrong)}: a microbatch has no valid token"
    alike = len({got[rank].tobytes() for rank in got}) == 1
    where = "" if alike else f" on {ranks_in_words(wrong)}"
    return f"{what} differs{where} from that of one device"
