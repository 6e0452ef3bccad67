"""Check a kernel against a NumPy reference over many meshes and sizes, in one line.

check_kernel(column_parallel, np.matmul, "M, K; K, N_tp -> M, N_tp")
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from parallelism.display.quantities import plural, shortened
from parallelism.dtypes import as_dtype, is_floating, is_narrow
from parallelism.mesh import Mesh
from parallelism.operation import ranks_in_words
from parallelism.sharding import TensorSharding
from vcluster.code import PerDevice
from vcluster.runs import Run, VirtualCluster
from vcluster.testing.sharded import PROBABLY, VAGUE, VAGUE_ON_TWO, Near, assert_sharded_allclose

_DIM = re.compile(r"\s*([A-Za-z][A-Za-z0-9]*)(_(\{[^}]*\}|[A-Za-z0-9]+))?\s*(,|$)")
_SIZES = (1, 2, 3, 4)
_MOST_DEVICES = 6
_UNEQUAL = (
    "it is right where all ranks hold as much: the mean of the ranks' means is not the mean of the whole, the mean of "
    "an empty shard is NaN, and the offset of a shard is the sum of the sizes before it"
)
"""What is said of a kernel that is right on equal shards and wrong on others."""


class _Tensor(NamedTuple):
    dims: tuple[str, ...]
    layout: TensorSharding


def check_kernel(
    kernel: Callable[..., Any],
    reference: Callable[..., npt.ArrayLike],
    layouts: str,
    *,
    meshes: Iterable[Mesh | Mapping[str, int]] | None = None,
    sizes: Iterable[Mapping[str, int]] | None = None,
    dtype: npt.DTypeLike = np.float64,
    rtol: float = 1e-7,
    atol: float = 0.0,
    seed: int = 0,
    backend: Literal["process", "thread"] = "thread",
    deadline_seconds: float | None = None,
) -> int:
    """Fail unless ``kernel`` computes on shards what ``reference`` computes on whole arrays.  Returns the number of cases.

    >>> import numpy as np
    >>> from vcluster import check_kernel
    >>> def row_parallel(device, x, w):
    ...     return device.all_reduce(x @ w, "tp")
    >>> check_kernel(row_parallel, np.matmul, "M, K_tp; K_tp, N -> M, N")
    15

    ``layouts``
        the dims of each argument, then ``->`` and those of each result.  A dim has a name, and after ``_`` the axis that
        it is split over, ``{a,b}`` for several; dims of one name have one extent.  A scalar is ``()``.  The result of
        ``"M, K_tp; K_tp, N -> M, N {U_tp}"`` is a sum over ``tp`` that is pending.
    ``kernel(device, *shards)``
        returns its shard of the result, or a tuple of shards if there are several results.
    ``reference(*arrays)``
        returns the whole result, or a tuple of them, in NumPy.
    ``meshes``
        by default those with 1 to 4 devices along each axis of the layouts, and at most 6 in all.
    ``sizes``
        extents by the name of a dim.  By default there are four cases: all axes divide the extents; they do not; the
        extents are smaller than the axes, so that shards are empty; all are 1.  The extents of different dims differ.
    ``dtype``, ``seed``
        arrays hold small integers other than 0 in this dtype, drawn anew for each case.  Their sums and products are
        exact: of a narrow float, such as ``"bfloat16"``, the numbers are 1 and -1.
    ``rtol``, ``atol``
        as in `assert_sharded_allclose`, which compares.
    ``backend``
        of the cluster; one is started for each mesh.  Threads start fastest.
    ``deadline_seconds``
        of each case: a kernel that computes for longer ends with `ClusterTimeoutError`.  By default there is no limit.

    ``AssertionError`` names the mesh and the sizes of the first case that fails, and ranks that hold no rows; cases
    come from small to large.  It also names the usual mistake that explains what the kernel returns: each rank works on its
    shards alone, a term that all ranks hold is added on each of them, it is right on equal shards only; of a ring, the
    wrong direction, one step too few, a causal mask without the offset of the shard, a missing rescale.  An
    error of the kernel leaves as it is, with a note that names them.  ``ValueError`` for layouts that cannot be read, for
    a reference whose result has other extents than the layouts say, and if there is no case.
    """
    __tracebackhide__ = True
    options: dict[str, Any] = {
        "meshes": _kept(meshes),
        "sizes": _kept(sizes),
        "dtype": dtype,
        "seed": seed,
        "backend": backend,
        "deadline_seconds": deadline_seconds,
    }
    if ";" in layouts.partition("->")[2]:
        return _check_each_result(kernel, reference, layouts, {**options, "rtol": rtol, "atol": atol})
    count = 0
    for case in kernel_cases(reference, layouts, **options):
        try:
            run = case.run(kernel)
        except Exception as error:
            others = "; sizes=[...] says which extents are checked" if case.empty and sizes is None else ""
            error.add_note(f"in check_kernel on {case.text}{case.empty}{others}")
            raise
        try:
            assert_sharded_allclose(run, case.layout, case.expected, rtol=rtol, atol=atol)
        except AssertionError as error:
            told = str(error).replace(
                f" on {case.cluster.mesh!r}\n", "\n", 1
            )  # the text of the case has the mesh
            head, _, likely = told.partition(f"\n{PROBABLY}")
            vague = (*VAGUE, VAGUE_ON_TWO) if case.cluster.size == 2 else VAGUE
            if not likely or likely.startswith(vague):
                cause = _cause_on_equal_shards(kernel, reference, layouts, dtype, Near(rtol, atol))
                if cause is None and case.has_unequal_shards:
                    cause = _UNEQUAL
                told = f"{head}\n{PROBABLY}{cause}" if cause else told
            raise AssertionError(f"on {case.text}{case.empty}, {told}") from None
        count += 1
    return count


def _check_each_result(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    layouts: str,
    options: Mapping[str, Any],
) -> int:
    """`check_kernel` of a kernel with several results, one after the other."""
    __tracebackhide__ = True
    arguments, arrow, results = layouts.partition("->")
    each_result = results.split(";")
    count = 0
    for place, result in enumerate(each_result):
        mine, whole = (partial(_one_result, each, place, len(each_result)) for each in (kernel, reference))
        try:
            count = check_kernel(mine, whole, f"{arguments}{arrow}{result}", **options)
        except AssertionError as error:
            raise AssertionError(f"result {place + 1}: {error}") from None
    return count


def _one_result(function: Callable[..., Any], place: int, count: int, *arguments: Any) -> Any:
    """One of the results of a kernel or a reference."""
    returned = function(*arguments)
    if not isinstance(returned, tuple | list) or len(returned) != count:
        is_tuple = isinstance(returned, tuple | list)
        came = f"a {type(returned).__name__} of {len(returned)}" if is_tuple else type(returned).__name__
        raise TypeError(
            f"the layouts have {count} results, so a tuple of {count} must be returned; got {came}"
        )
    return returned[place]


class KernelCase(NamedTuple):
    """One mesh and one size of a kernel."""

    text: str
    """The mesh and the sizes, in words."""
    cluster: VirtualCluster
    arguments: tuple[tuple[npt.NDArray[Any], TensorSharding], ...]
    """The whole arrays, and their layouts."""
    layout: TensorSharding
    """The layout of the result."""
    expected: npt.NDArray[Any]
    """The whole result."""

    @property
    def empty(self) -> str:
        """Which ranks hold nothing of an argument, in words behind `text`; empty if all hold something."""
        mesh, told = self.cluster.mesh, []
        for place, (array, layout) in enumerate(self.arguments, 1):
            shapes = [layout.local_shape(array.shape, mesh, rank) for rank in range(mesh.size)]
            if array.size and (ranks := [rank for rank, shape in enumerate(shapes) if 0 in shape]):
                shape = shapes[ranks[0]]
                what = "no rows" if shape[0] == 0 else "nothing"
                told.append(
                    f"{ranks_in_words(ranks)} hold{'s' * (len(ranks) == 1)} {what} of argument {place} (a "
                    f"shard of shape {shape})"
                )
        return f", where {' and '.join(told)}" if told else ""

    @property
    def has_unequal_shards(self) -> bool:
        """Whether some ranks hold more of an argument than others."""
        mesh = self.cluster.mesh
        for array, layout in self.arguments:
            shapes = {layout.local_shape(array.shape, mesh, rank) for rank in range(mesh.size)}
            if len(shapes) > 1:
                return True
        return False

    def run(self, kernel: Callable[..., Any]) -> Run[Any]:
        """Run the kernel on the shards."""
        shards = [PerDevice(layout.shard(array, self.cluster.mesh)) for array, layout in self.arguments]
        return self.cluster.run(kernel, *shards)


def kernel_cases(
    reference: Callable[..., npt.ArrayLike],
    layouts: str,
    *,
    meshes: Iterable[Mesh | Mapping[str, int]] | None = None,
    sizes: Iterable[Mapping[str, int]] | None = None,
    dtype: npt.DTypeLike = np.float64,
    seed: int = 0,
    backend: Literal["process", "thread"] = "thread",
    deadline_seconds: float | None = None,
) -> Iterator[KernelCase]:
    """The cases of `check_kernel`, from small to large, each on a cluster that is open until the next mesh.

    ``deadline_seconds`` is that of the clusters, the rest as in `check_kernel`.
    """
    arguments, result = _tensors(layouts)
    dtype = _checked_dtype(dtype)
    axes = list(
        dict.fromkeys(
            axis for tensor in (*arguments, result) for axis in (*tensor.layout.axes, *tensor.layout.partial)
        )
    )
    names = list(dict.fromkeys(name for tensor in arguments for name in tensor.dims))
    rng = np.random.default_rng(seed)
    _check_lists(meshes, sizes)
    given = None if sizes is None else _some(sizes, "sizes")
    largest = 1 if is_narrow(dtype) else 3  # sums of narrow floats are exact as long as they are small
    signs = (-1, 1) if dtype.kind in "ifc" or is_floating(dtype) else (1,)
    for mesh in _meshes(axes) if meshes is None else map(_mesh, _some(meshes, "meshes")):
        with VirtualCluster(mesh, backend=backend, deadline_seconds=deadline_seconds) as cluster:
            for extents in _sizes(names, mesh) if given is None else given:
                if missing := [name for name in names if name not in extents]:
                    raise ValueError(
                        f"sizes must have the extent of each of {', '.join(names)}; {missing[0]} is missing"
                    )
                shapes = [tuple(extents[name] for name in tensor.dims) for tensor in arguments]
                arrays = [
                    (rng.integers(1, largest + 1, shape) * rng.choice(signs, shape)).astype(dtype)
                    for shape in shapes
                ]
                case = f"{mesh!r} with {', '.join(f'{name}={extents[name]}' for name in names) or 'no dims'}"
                expected = _returned(reference(*arrays), case)
                _check_result(expected.shape, result.dims, extents, case)
                yield KernelCase(
                    case,
                    cluster,
                    tuple((array, tensor.layout) for array, tensor in zip(arrays, arguments, strict=True)),
                    result.layout,
                    expected,
                )


def _returned(value: Any, case: str) -> npt.NDArray[Any]:
    """What the reference has returned, as an array."""
    if value is None:
        raise ValueError(f"the reference returns None on {case}: its return is missing")
    return np.asarray(value)


def _check_result(shape: tuple[int, ...], dims: Sequence[str], extents: Mapping[str, int], case: str) -> None:
    """``ValueError`` for a result of the reference that has other dims, or other extents, than the layouts say."""
    if len(shape) != len(dims):
        raise ValueError(
            f"the layout of the result has {plural(len(dims), 'dim')}, and the reference returns shape {shape} on {case}"
        )
    for name, extent in zip(dims, shape, strict=True):
        if extents.get(name, extent) != extent:
            raise ValueError(
                f"dims of one name have one extent: {name} of the result must be {extents[name]}, and the reference "
                f"returns shape {shape} on {case}; give that dim of the result a name of its own"
            )


def _kept(given: Any) -> Any:
    """A list of what an iterator gives once, for each result anew; anything else as it is."""
    return list(given) if isinstance(given, Iterator) else given


def _some(given: Iterable[Any], name: str) -> list[Any]:
    """A list of what was given.  ``ValueError`` if it is empty: nothing would be checked."""
    if not (some := list(given)):
        raise ValueError(f"{name} must have at least one entry: with none, nothing is checked")
    return some


def _checked_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        return as_dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        raise TypeError(
            "dtype must be one of NumPy's, or the name of a narrow float such as 'bfloat16'; got "
            f"{shortened(dtype)}"
        ) from None


def _check_lists(meshes: Any, sizes: Any) -> None:
    """``TypeError`` for one mesh, or the sizes of one case, in place of a list of them."""
    if isinstance(meshes, Mesh | Mapping | str):
        raise TypeError(f"meshes must be a list of meshes: write meshes=[{shortened(meshes)}]")
    if isinstance(sizes, Mapping):
        raise TypeError(
            f"sizes must be a list with the sizes of each case: write sizes=[{shortened(dict(sizes))}]"
        )
    for each in [] if not isinstance(sizes, list | tuple) else sizes:
        if not isinstance(each, Mapping):
            raise TypeError(
                "sizes must be a list of extents by the name of a dim, such as [{'M': 4, 'K': 6}]; got "
                f"{shortened(each)} in it"
            )


def _cause_on_equal_shards(
    kernel: Callable[..., Any],
    reference: Callable[..., npt.ArrayLike],
    layouts: str,
    dtype: npt.DTypeLike,
    near: Near,
) -> str | None:
    """The mistake that explains what the kernel returns on a few devices along an axis, all of whose shards are equal.

    "" if none of those known does, and None if the kernel is right there.
    """
    from vcluster.testing.even_causes import even_cause
    from vcluster.testing.ring_causes import DEVICES

    tensors, _ = _tensors(layouts)
    axes = dict.fromkeys(axis for tensor in tensors for axis in tensor.layout.axes)
    names = dict.fromkeys(name for tensor in tensors for name in tensor.dims)
    sizes = {name: DEVICES * (place + 2) for place, name in enumerate(names)}  # none is the number of devices
    right = []
    for axis in axes:
        mesh = Mesh(**{each: DEVICES if each == axis else 1 for each in axes})
        cause: str | None = ""
        with suppress(Exception):  # the kernel may not take these sizes, and the hint is optional
            for case in kernel_cases(reference, layouts, meshes=[mesh], sizes=[sizes], dtype=dtype):
                cause = even_cause(kernel, reference, case, axis, near)
        if cause:
            return cause
        right.append(cause is None)
    return None if right and all(right) else ""


def _tensors(text: str) -> tuple[list[_Tensor], _Tensor]:
    parts = text.split("->")
    if len(parts) != 2:
        raise ValueError(f"layouts must be those of the arguments, '->' and that of the result, got {text!r}")
    arguments = [_tensor(each, text) for each in parts[0].split(";")] if parts[0].strip() else []
    return arguments, _tensor(parts[1], text)


def _tensor(part: str, text: str) -> _Tensor:
    body, brace, pending = part.strip().partition(" {")
    if body == "()":
        return _Tensor((), TensorSharding.parse(f"[]{_partial(brace + pending)}"))
    names, at = [], 0
    while at < len(body):
        found = _DIM.match(body, at)
        if found is None:
            raise ValueError(
                f"a dim must be a name, and _axis if it is split, such as M or K_tp; got "
                f"{body[at:].strip()!r} in {text!r}"
            )
        names.append(found[1])
        at = found.end()
    if body.endswith(","):
        raise ValueError(
            f"a comma stands between two dims, and none follows the last of {body!r} in {text!r}"
        )
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"the dims of a tensor must have different names, () for a scalar; got {part.strip()!r}"
        )
    return _Tensor(tuple(names), TensorSharding.parse(body + brace + pending))


def _partial(pending: str) -> str:
    axes = pending.strip(" {}").removeprefix("U_").strip("{}")
    if not axes:
        return ""
    return f" partial=({axes})" if "," in axes else f" partial={axes}"


def _mesh(given: Mesh | Mapping[str, int]) -> Mesh:
    if not isinstance(given, Mesh | Mapping):
        raise TypeError(
            f"meshes must be a list of Mesh(tp=2), or of dicts of their axes; got {shortened(given)} in it"
        )
    return given if isinstance(given, Mesh) else Mesh(**given)


def _meshes(axes: Sequence[str]) -> Iterator[Mesh]:
    """From small to large; of several axes the extents differ, too."""
    sizes = [each for each in product(_SIZES, repeat=len(axes)) if np.prod(each, dtype=int) <= _MOST_DEVICES]
    for each in sorted(sizes, key=lambda each: (int(np.prod(each)), each)):
        yield Mesh(**dict(zip(axes, each, strict=True))) if axes else Mesh(devices=2)


def _sizes(names: Sequence[str], mesh: Mesh) -> Iterator[dict[str, int]]:
    """All 1; smaller than most axes; not divisible; divisible."""
    count = len(names)
    cases = [
        [1] * count,
        [place + 1 for place in range(count)],
        [mesh.size * (place + 1) + 1 + place % 2 for place in range(count)],
        [mesh.size * (place + 1) for place in range(count)],
    ]
    for case in dict.fromkeys(map(tuple, cases)):
        yield dict(zip(names, case, strict=True))
