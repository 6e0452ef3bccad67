"""What the collectives mean, in NumPy: everybody's values in group order go in, everybody's results come out.

Written from the contract alone; nothing of the code under test is used here.
"""

from __future__ import annotations

import numpy as np

FUNCTIONS = {
    "sum": np.add, "mean": np.add, "avg": np.add, "prod": np.multiply, "product": np.multiply, "max": np.maximum,
    "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}


def groups_along(shape, axes):
    """The groups of a mesh whose ``shape`` is {axis: extent}: ranks that differ only along ``axes``, in group order."""
    names = list(shape)
    axes = names if axes is None else [axes] if isinstance(axes, str) else list(axes)
    grid = np.arange(np.prod(list(shape.values()))).reshape(list(shape.values()))
    order = [i for i, name in enumerate(names) if name not in axes] + [names.index(name) for name in axes]
    factors = [shape[name] for name in axes]
    return grid.transpose(order).reshape(-1, int(np.prod(factors))).tolist(), factors


def pieces(x, factors, dim):
    """Split axis by axis, outermost first, each part as `numpy.array_split` does."""
    if not factors:
        return [x]
    return [piece for part in np.array_split(x, factors[0], dim) for piece in pieces(part, factors[1:], dim)]


def fold(op, xs):
    """The terms combined in group order, two at a time."""
    dtype = xs[0].dtype
    if op in ("sum", "prod", "product") and dtype.kind == "b":
        dtype = np.dtype(np.int64)
    if op in ("mean", "avg") and dtype.kind in "bui":
        dtype = np.dtype(np.float64)
    total = xs[0].astype(dtype)
    for x in xs[1:]:
        total = np.asarray(FUNCTIONS.get(op, op)(total, x.astype(dtype)))
    return np.asarray(total / len(xs) if op in ("mean", "avg") else total).astype(dtype)


def results(
    method, xs, factors, *, op="sum", root=0, dim=0, split_dim=0, concat_dim=0, split_sizes=None, pairs=(), by=1
):
    """What each member of a group gets, by position, when they call ``method`` with the arrays ``xs``."""
    g = len(xs)
    at_root = [None] * g
    match method:
        case "all_reduce":
            return [fold(op, xs)] * g
        case "reduce":
            at_root[root] = fold(op, xs)
            return at_root
        case "reduce_scatter":
            return pieces(fold(op, xs), factors, dim)
        case "all_gather":
            return [_join(xs, dim)] * g
        case "gather":
            at_root[root] = _join(xs, dim)
            return at_root
        case "all_scatter":
            return [list(xs)] * g
        case "broadcast":
            return [xs[root]] * g
        case "scatter":
            return pieces(xs[root], factors, dim)
        case "all_to_all":
            cut = [
                pieces(x, factors, split_dim) if sizes is None else np.split(x, np.cumsum(sizes)[:-1], split_dim)
                for x, sizes in zip(xs, split_sizes or [None] * g, strict=True)
            ]
            return [_join([cut[source][target] for source in range(g)], concat_dim) for target in range(g)]
        case "shift":
            return [xs[(position - by) % g] for position in range(g)]
        case "permute":
            source = {target: source for source, target in pairs}
            return [xs[source[p]] if p in source else np.zeros_like(xs[p]) for p in range(g)]
    raise AssertionError(method)


def _join(xs, dim):
    dtype = xs[0].dtype     # with the order of its bytes, which NumPy alone would not keep
    return np.stack(xs, dtype=dtype) if xs[0].ndim == 0 else np.concatenate(xs, dim, dtype=dtype)


def assert_same(found, expected, where=""):
    """The same values of the same types, dtypes and shapes."""
    if isinstance(expected, np.ndarray | np.generic):
        assert type(found) is type(expected), f"{where}: {type(found).__name__}, not {type(expected).__name__}"
        assert found.dtype == expected.dtype, f"{where}: {found.dtype}, not {expected.dtype}"
        assert found.shape == expected.shape, f"{where}: {found.shape}, not {expected.shape}"
        np.testing.assert_array_equal(found, expected, err_msg=where)
    elif isinstance(expected, dict):
        assert type(found) is type(expected), where
        assert list(found) == list(expected), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected), where
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    else:
        assert found == expected, where
