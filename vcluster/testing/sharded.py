"""Assert the outputs of a run against the whole array: which rank, which shard, which place, how far off, and why.

run = cluster.run(kernel, x)
assert_sharded_allclose(run, TensorSharding("tp", None), x @ weights)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Bools
from parallelism.dtypes import is_numeric
from parallelism.mesh import Mesh
from parallelism.operation import ranks_in_words
from parallelism.sharding import DimSharding, TensorSharding

if TYPE_CHECKING:
    from vcluster.runs import Run

Array = npt.NDArray[Any]
_MOST_RANKS = 8
PROBABLY = "probably: "
VAGUE = "the arithmetic of the kernel", "only"
"""How causes begin that give way to a more exact one."""
VAGUE_ON_TWO = "a reduction is missing"
"""On two ranks a ring with one step too few is that, too."""
_MOST_AXES = 4
"""The most axes of a mesh on which exchanged axes are looked for."""


def assert_sharded_allclose(
    run: Run[Any],
    layout: TensorSharding | str,
    expected: npt.ArrayLike,
    *,
    rtol: float = 1e-7,
    atol: float = 0.0,
) -> None:
    """Fail unless the outputs of ``run`` are the shards of ``expected`` in ``layout``.

    >>> import numpy as np
    >>> from vcluster import VirtualCluster, assert_sharded_allclose
    >>> with VirtualCluster(tp=2, backend="thread") as cluster:
    ...     run = cluster.run(lambda device: np.arange(3) + 3 * device.rank)
    >>> assert_sharded_allclose(run, "[tp]", np.arange(6))

    ``expected`` is the whole array; ``layout`` a `TensorSharding` or its text, ``"[tp, None]"``.  An output agrees if
    ``abs(output - shard) <= atol + rtol * abs(shard)`` in all places; NaN agrees with NaN.  Of a partial layout the
    reduced tensor is compared.  Dtypes are not compared.

    ``AssertionError`` names the ranks that differ, the part of the whole array that each of them should hold, the place
    that is farthest off, and a mistake that explains all outputs, if there is one: a reduction that is missing or done
    twice, ranks that return None, axes that are exchanged, shards that are shifted.  ``ValueError`` for a layout that
    the array cannot have.
    """
    __tracebackhide__ = True
    whole, mesh = np.asarray(expected), run.mesh
    sharding = TensorSharding.of(layout, mesh)
    outputs = [np.asarray(output) for output in run.outputs]
    near = Near(rtol, atol)
    if sharding.partial:
        shape_of = TensorSharding(*sharding.over(whole.ndim).dims)
        wrong = _wrong_shapes(outputs, shape_of, whole, mesh)
        if not wrong:
            total = sharding.unshard(outputs, mesh)
            if not near(total, whole):
                how = _farthest(total, whole, near, (0,) * whole.ndim)
                told = [f"reduced over {', '.join(sharding.partial)}: {how}"]
                raise AssertionError(_text(sharding, whole, mesh, told, ""))
            return
    else:
        shards = [whole[sharding.slices(whole.shape, mesh, rank)] for rank in range(mesh.size)]
        if all(map(near, outputs, shards)):
            return
        wrong = []
        for rank, (output, shard) in enumerate(zip(outputs, shards, strict=True)):
            if not near(output, shard):
                place = sharding.slices(whole.shape, mesh, rank)
                how = _farthest(output, shard, near, tuple(piece.start for piece in place))
                wrong.append(f"rank {rank}, which holds {_part(place)}: {how}")
    why = likely_cause(outputs, sharding, whole, mesh, near)
    raise AssertionError(_text(sharding, whole, mesh, wrong, why))


class Near:
    """Whether two arrays agree."""

    def __init__(self, rtol: float, atol: float) -> None:
        self.rtol, self.atol = rtol, atol

    def __call__(self, one: Array, other: Array) -> bool:
        return one.shape == other.shape and bool(np.all(self.places(one, other)))

    def places(self, one: Array, other: Array) -> Bools:
        """By place."""
        if one.dtype.kind in "OSU" or other.dtype.kind in "OSU":
            return np.asarray(one == other, np.bool_)
        return np.isclose(one, other, rtol=self.rtol, atol=self.atol, equal_nan=True)


def _wrong_shapes(outputs: Sequence[Array], layout: TensorSharding, whole: Array, mesh: Mesh) -> list[str]:
    wrong = []
    for rank, output in enumerate(outputs):
        if output.shape != (shape := layout.local_shape(whole.shape, mesh, rank)):
            wrong.append(f"rank {rank}: its shard has shape {shape}, got {output.shape}")
    return wrong


def _text(sharding: TensorSharding, whole: Array, mesh: Mesh, wrong: Sequence[str], why: str) -> str:
    head = (
        f"the outputs are not the shards of {f'the array of shape {whole.shape}' if whole.ndim else 'the scalar'} in "
        f"layout {sharding.short()} on {mesh!r}"
    )
    more = [f"... and {len(wrong) - _MOST_RANKS} more ranks"] if len(wrong) > _MOST_RANKS else []
    lines = [head, *(f"  {line}" for line in [*wrong[:_MOST_RANKS], *more])]
    return "\n".join([*lines, *([f"{PROBABLY}{why}"] if why else [])])


def _farthest(output: Array, shard: Array, near: Near, start: Sequence[int]) -> str:
    """Where an output differs most, in places of the whole array."""
    if _is_none(output):
        return f"it returned None, expected shape {shard.shape}"
    if output.shape != shard.shape:
        return f"shape {output.shape}, expected {shard.shape}"
    wrong = ~near.places(output, shard)
    count = f"{np.count_nonzero(wrong)} of {wrong.size} differ"
    if output.dtype.kind in "OSU" or shard.dtype.kind in "OSU":
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        off = ""
    else:
        with np.errstate(all="ignore"):
            distance = np.abs(output.astype(np.complex128) - shard.astype(np.complex128))
        distance[~np.isfinite(distance) & wrong] = np.inf
        at = tuple(int(i) for i in np.unravel_index(np.argmax(np.where(wrong, distance, -1)), wrong.shape))
        off = f", {distance[at]:.3g} off" if np.isfinite(distance[at]) else ""
    place = ", ".join(str(i + first) for i, first in zip(at, start, strict=True))
    return f"{count}, most at [{place}] of the whole: got {output[at]}, expected {shard[at]}{off}"


def _is_none(output: Array) -> bool:
    return output.dtype == object and output.shape == () and output[()] is None


def _part(place: Sequence[slice]) -> str:
    return f"[{', '.join(f'{piece.start}:{piece.stop}' for piece in place)}]"


@dataclass(frozen=True)
class _Compared:
    """The outputs of all ranks beside the shards that are expected of them."""

    outputs: Sequence[Array]
    layout: TensorSharding
    whole: Array
    mesh: Mesh
    near: Near

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.mesh.size)

    @cached_property
    def shards(self) -> list[Array]:
        """What is expected, by rank."""
        return self.shards_in(self.layout)

    def shards_in(self, layout: TensorSharding) -> list[Array]:
        """The shards of the whole array in a layout, by rank."""
        return [self.whole[layout.slices(self.whole.shape, self.mesh, rank)] for rank in self.ranks]

    def are(self, found: Sequence[Array], expected: Sequence[Array]) -> bool:
        """Whether all of the arrays are those expected."""
        return all(self.near(one, other) for one, other in zip(found, expected, strict=True))


def likely_cause(
    outputs: Sequence[Array], layout: TensorSharding, whole: Array, mesh: Mesh, near: Near
) -> str:
    """The mistake that explains all outputs; empty if none of those known does."""
    compared = _Compared(outputs, layout, whole, mesh, near)
    silent = [rank for rank in compared.ranks if _is_none(outputs[rank])]
    if silent:
        return _of_silent(silent, mesh)
    if layout.partial:
        return ""
    for mistake in _MISTAKES:
        sentence = mistake(compared)
        if sentence:
            return sentence
    return ""


def _of_silent(silent: Sequence[int], mesh: Mesh) -> str:
    if len(silent) == mesh.size:
        return "the kernel returns None on every rank: its return is missing"
    return f"{ranks_in_words(silent)} of {mesh.size} return None, as after a reduce or a gather to one rank"


# -- the mistakes that are known: each is a function that says the sentence if it explains all outputs ------------------


def _not_cut(compared: _Compared) -> str:
    if compared.mesh.size > 1 and all(compared.near(output, compared.whole) for output in compared.outputs):
        return "every rank returns the whole array, which is not cut to its shard"
    return ""


def _wrong_sum(compared: _Compared) -> str:
    """A factor of the number of ranks along some axes, or a reduction that is missing."""
    if not all(is_numeric(array.dtype) for array in (*compared.outputs, compared.whole)):
        return ""
    mesh = compared.mesh
    for axes in [*((axis,) for axis in mesh.axes), mesh.axes]:
        size = len(mesh.groups(axes)[0])
        if size == 1:
            continue
        with np.errstate(all="ignore"):
            sentence = _wrong_factor(compared, axes, size) or _no_reduction(compared, axes)
        if sentence:
            return sentence
    return ""


def _wrong_factor(compared: _Compared, axes: Sequence[str], size: int) -> str:
    if compared.are(compared.outputs, [shard * size for shard in compared.shards]):
        return (
            f"all values are {size} times too large, the number of ranks along {_axes(axes)}: a sum is taken "
            "twice, or stands for a mean"
        )
    if compared.are([output * size for output in compared.outputs], compared.shards):
        return (
            f"all values are {size} times too small, the number of ranks along {_axes(axes)}: a mean stands "
            "for a sum, or a sum of equal terms is missing"
        )
    return ""


def _no_reduction(compared: _Compared, axes: tuple[str, ...]) -> str:
    mesh, outputs = compared.mesh, compared.outputs
    for group in mesh.groups(axes):
        shapes = {outputs[rank].shape for rank in group}
        if len(shapes) != 1:
            return ""
    reductions: tuple[tuple[str, Any], ...] = ("sum", np.sum), ("max", np.max)
    for name, combine in reductions:
        combined = []
        for rank in compared.ranks:
            combined.append(combine([outputs[each] for each in mesh.group(rank, axes)], axis=0))
        if compared.are(combined, compared.shards):
            return (
                f"a reduction is missing: the {name} of the outputs over {_axes(axes)} is what was expected"
            )
    return ""


def _shifted(compared: _Compared) -> str:
    """Each rank has the shard of another one along an axis."""
    mesh = compared.mesh
    for axis in mesh.axes:
        size = mesh.shape[axis]
        for by in range(1, size):
            others = []
            for rank in compared.ranks:
                index = mesh.index(rank)
                others.append(compared.shards[mesh.rank(**{**index, axis: (index[axis] + by) % size})])
            if not compared.are(compared.outputs, others):
                continue
            if size == 2:
                return f"shards are exchanged along {axis!r}: each rank has that of the other"
            nearest = by if by <= size // 2 else by - size
            return (
                f"shards are shifted along {axis!r}: each rank has the shard of the rank that is "
                f"{abs(nearest)} {'after' if nearest > 0 else 'before'} it"
            )
    return ""


def _other_layout(compared: _Compared) -> str:
    for other in _other_layouts(compared.layout, compared.mesh):
        if compared.are(compared.outputs, compared.shards_in(other)):
            return f"the outputs are shards in layout {other.short()}: a wrong axis or dim"
    return ""


def _no_gather(compared: _Compared) -> str:
    layout = compared.layout
    if layout.ellipsis is not None:
        return ""
    for axis in compared.mesh.axes:
        for place, dim in enumerate(layout.dims if axis not in layout.axes else ()):
            dims = [*layout.dims[:place], DimSharding(*dim.axes, axis), *layout.dims[place + 1 :]]
            if compared.are(compared.outputs, compared.shards_in(TensorSharding(*dims))):
                return (
                    f"a gather is missing: the outputs are split along dim {place} over {axis!r}, and "
                    f"all_gather(y, {axis!r}, dim={place}) joins them"
                )
    return ""


def _joined_terms(compared: _Compared) -> str:
    """The terms of a sum, joined along a dim."""
    for axis, size in compared.mesh.shape.items():
        for dim in range(compared.whole.ndim if size > 1 else 0):
            if all(
                output.ndim == compared.whole.ndim and output.shape[dim] % size == 0
                for output in compared.outputs
            ):
                sums = [np.sum(np.split(output, size, axis=dim), axis=0) for output in compared.outputs]
                if compared.are(sums, compared.shards):
                    return (
                        f"the terms of a sum over {axis!r} are joined along dim {dim}, in place of added up: all_reduce "
                        "adds them"
                    )
    return ""


def _transposed(compared: _Compared) -> str:
    turned = [output.T for output in compared.outputs]
    is_turned = compared.whole.ndim > 1 and compared.are(turned, compared.shards)
    return "each output is transposed" if is_turned else ""


def _some_ranks(compared: _Compared) -> str:
    """What can be said of outputs that no mistake explains."""
    size = compared.mesh.size
    if size == 1:
        return f"{VAGUE[0]}: it differs on one device already, where nothing is communicated"
    wrong = [
        rank for rank in compared.ranks if not compared.near(compared.outputs[rank], compared.shards[rank])
    ]
    if not 0 < len(wrong) < size:
        return ""
    return (
        f"{VAGUE[1]} {ranks_in_words(wrong)} of {size} differ: is there code for the first or the last rank?"
    )


_MISTAKES = _not_cut, _wrong_sum, _shifted, _other_layout, _no_gather, _joined_terms, _transposed, _some_ranks
"""In the order in which they are tried: the first that explains the outputs is told."""


def _other_layouts(layout: TensorSharding, mesh: Mesh) -> list[TensorSharding]:
    """The same layout with axes exchanged, and with its dims exchanged."""
    found: list[TensorSharding] = []
    dims = layout.dims
    if layout.ellipsis is not None:
        return found
    if len(mesh.axes) <= _MOST_AXES:
        for order in permutations(mesh.axes):
            to = dict(zip(mesh.axes, order, strict=True))
            renamed = (DimSharding(*map(to.__getitem__, dim.axes)) for dim in dims)
            found.append(TensorSharding(*renamed))
    found += [TensorSharding(*order) for order in permutations(dims)] if len(dims) <= _MOST_AXES else []
    found += [TensorSharding(*(DimSharding(*reversed(dim.axes)) for dim in dims))]
    return [other for other in dict.fromkeys(found) if other != layout]


def _axes(axes: Sequence[str]) -> str:
    return ", ".join(map(repr, axes))
