"""What `check_loss` gives to a training step: batches with padding, weights in pieces, and how a mesh deals them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Bools
from parallelism.mesh import Mesh, split_sizes
from parallelism.sharding import TensorSharding

Array = npt.NDArray[Any]
Terms = Mapping[str, Any]
"""``loss``, ``grad.NAME`` of weights, ``norm``, ``auxiliary``: a number or an array each."""
Reference = Callable[[Mapping[str, Array], "Batch"], Terms]
Balanced = Literal["microbatch", "batch"]
AXES = ("dp", "cp", "ep", "pp", "tp")
GRADIENT = "grad."
AUXILIARY = "auxiliary"
LEVELS = {"dp": 0, "ep": 1, "cp": 2, "microbatches": 3}
"""What a batch is cut into, and where `LossCase.owner` says it."""


@dataclass(frozen=True)
class Batch:
    """Rows of tokens: of a microbatch on a device, or all of them."""

    tokens: Array
    """[rows, tokens], whole numbers."""
    targets: Array
    """[rows, tokens]: what is to be predicted."""
    valid: Bools
    """[rows, tokens]: whether a token counts in the loss. The others are padding."""
    first: int = 0
    """The place in the sequence of the first token: not 0 on later ranks of ``cp``."""


@dataclass(frozen=True)
class Weight:
    """A weight of the model: its shape, its layout, and the stages that hold it."""

    shape: tuple[int, ...]
    layout: str = ""
    """As ``"[tp, None]"``; "" if every rank holds it whole.  Weights of experts are split over ``ep``."""
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
    auxiliary: Balanced

    @cached_property
    def owner(self) -> Array:
        """[rows, tokens, 4]: the place on ``dp``, ``ep`` and ``cp``, and the microbatch, of each token."""
        rows, length = self.whole.tokens.shape
        sizes = self.mesh.shape
        each = rows // (sizes["dp"] * sizes["ep"] * self.microbatches)
        row = np.arange(rows)[:, None]
        replica = row // (each * self.microbatches)
        places = np.zeros((rows, length, len(LEVELS)), np.int64)
        places[..., LEVELS["dp"]] = replica // sizes["ep"]
        places[..., LEVELS["ep"]] = replica % sizes["ep"]
        places[..., LEVELS["cp"]] = np.repeat(np.arange(sizes["cp"]), split_sizes(length, (sizes["cp"],)))
        places[..., LEVELS["microbatches"]] = row // each % self.microbatches
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
            mine = (self.owner == [index["dp"], index["ep"], index["cp"], number]).all(axis=-1)
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

    def split_over(self, name: str) -> set[str]:
        """The axes over which a weight is split."""
        layout = self.weights[name].layout
        return set(TensorSharding.parse(layout).axes) if layout else set()

    def __str__(self) -> str:
        replica = self.owner[..., LEVELS["dp"]] * self.mesh.shape["ep"] + self.owner[..., LEVELS["ep"]]
        replicas = self.mesh.shape["dp"] * self.mesh.shape["ep"]
        counts = [int((self.whole.valid & (replica == place)).sum()) for place in range(replicas)]
        axes = (
            ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items() if size > 1) or "one device"
        )
        microbatches = f"{self.microbatches} microbatch{'es' * (self.microbatches > 1)}"
        return f"{axes}, {microbatches}, {' and '.join(map(str, counts))} valid tokens"


def drawn_cases(
    mesh: Mesh,
    weights: Mapping[str, Weight],
    vocabulary: int,
    clip: float | None,
    auxiliary: Balanced,
    seed: int,
    microbatches: int | None = None,
) -> Iterator[LossCase]:
    """Three batches, drawn anew for each mesh, of 1 to 3 microbatches or of as many as are given."""
    rng = np.random.default_rng([seed, *mesh.shape.values()])
    numbers = (1, 2, 3) if microbatches is None else (microbatches,) * 3
    for number in numbers:
        values = {name: rng.normal(size=weight.shape) for name, weight in weights.items()}
        rows = 2 * number * mesh.shape["dp"] * mesh.shape["ep"]
        shape = rows, 3 + 2 * mesh.shape["cp"]
        valid = rng.random(shape) < rng.random((rows, 1))
        valid[:2] &= number == 1  # otherwise the first microbatch of the first replica has no token
        valid[-1, -1] = valid[-1, 0] = True
        tokens, targets = rng.integers(vocabulary, size=(2, *shape))
        yield LossCase(mesh, weights, values, Batch(tokens, targets, valid), number, clip, auxiliary)
