"""Random programs of a few ops, and the least seconds of a problem by trying everything."""

from __future__ import annotations

from itertools import product

import numpy as np

from parallelism import ir


def random_program(rng, most=6, extents=(1, 3, 4, 8, 16)):
    """A function of matrices: elementwise ops, products, transpositions, sums, reshapes."""
    builder = ir.Builder()
    n, m, k = (int(e) * 64 if e > 3 else int(e) for e in rng.choice(extents, 3))
    values = [builder.input("a", ir.TensorType("f8", (n, k))), builder.input("b", ir.TensorType("f8", (k, m))),
              builder.input("c", ir.TensorType("f8", (n, m)))]
    made = 0
    while made < most:
        x, y = (values[int(i)] for i in rng.integers(0, len(values), 2))
        kind = str(rng.choice(["add", "multiply", "tanh", "negative", "matmul", "transpose", "sum", "scale"]))
        alike = [each for each in values if each.type == x.type]
        y = alike[int(rng.integers(len(alike)))] if kind in ("add", "multiply") else y
        if kind in ("add", "multiply", "tanh", "negative"):
            values += builder.emit(kind, (x, y) if kind in ("add", "multiply") else (x,), {})
        elif kind == "matmul":
            fitting = [(p, q) for p in values for q in values if p.type.ndim == q.type.ndim == 2
                       and p.type.shape[1] == q.type.shape[0]]
            values += builder.emit(kind, fitting[int(rng.integers(len(fitting)))], {})
        elif kind == "transpose" and x.type.ndim == 2:
            values += builder.emit(kind, (x,), {"permutation": (1, 0)})
        elif kind == "sum" and x.type.ndim == 2:
            values += builder.emit(kind, (x,), {"axes": (int(rng.integers(2)),), "keepdims": bool(rng.integers(2))})
        elif kind == "scale" and made + 2 <= most:
            factor, = builder.emit("constant", (), {"value": -2.0, "shape": (), "dtype": np.dtype("f8")})
            values += builder.emit("multiply", (x, factor), {})
            made += 1
        else:
            continue
        made += 1
    outputs = [values[-1], *(each for each in values[3:-1] if rng.random() < 0.3)]
    return builder.function("random", outputs)


def least_by_trying(problem):
    """The least seconds of all choices without ties: every combination of shardings, the best layout of each value."""
    counts = [len(each.shardings) for each in problem.ops]
    total = np.zeros(counts)

    def along(op, numbers):
        return numbers.reshape([-1 if at == op else 1 for at in range(len(counts))])

    for at, each in enumerate(problem.ops):
        total = total + along(at, len(each.ops) * each.seconds)
    for value in problem.values:
        best = np.array(np.inf)
        for at in range(len(value.layouts)):
            seconds = np.zeros([1] * len(counts))
            if value.made_by is not None:
                op, made = value.made_by
                seconds = seconds + along(op, value.first[made, at])
            for layout in range(len(value.needed)):
                is_needed = np.zeros([1] * len(counts), bool)
                for use in value.uses:
                    is_needed = is_needed | along(use.op, use.needed == layout)
                seconds = seconds + np.where(is_needed, value.second[at, layout], 0.0)
            best = np.minimum(best, seconds)
        total = total + len(value.names) * best
    return float(total.min())


def every_choice(problem):
    """The least seconds by `Problem.seconds` of all choices, one after the other: for very small problems."""
    return min(
        problem.seconds(ways, lies)
        for ways in product(*(range(len(each.shardings)) for each in problem.ops))
        for lies in product(*(range(len(each.layouts)) for each in problem.values)))
