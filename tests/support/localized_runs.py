"""Runs the programs of all devices side by side in this process, collectives in plain NumPy."""

from __future__ import annotations

import numpy as np

from parallelism import TensorSharding
from parallelism.ir.passes.interpreter import run
from parallelism.sharding.partial import combine

COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_slice", "relayout"}


def run_everywhere(localized, arrays):
    """The whole outputs."""
    mesh = localized.mesh
    programs = [localized.program(rank) for rank in range(mesh.size)]
    values = [{} for _ in programs]
    for i, (array, layout) in enumerate(zip(arrays, localized.inputs, strict=True)):
        for program, known, part in zip(programs, values, layout.shard(array, mesh), strict=True):
            assert part.shape == program.inputs[i].type.shape
            known[program.inputs[i].name] = part
    for ops in zip(*(program.ops for program in programs), strict=True):
        assert len({(op.kind, len(op.inputs)) for op in ops}) == 1
        taken = [[known[value.name] for value in op.inputs] for op, known in zip(ops, values, strict=True)]
        if ops[0].kind in COLLECTIVES:
            made = [(array,) for array in together(ops, [x for x, in taken], mesh)]
        else:
            made = [run(op, inputs) for op, inputs in zip(ops, taken, strict=True)]
        for op, known, outputs in zip(ops, values, made, strict=True):
            for value, array in zip(op.outputs, outputs, strict=True):
                assert (array.dtype, array.shape) == (value.type.dtype, value.type.shape), op
                known[value.name] = array
    return [
        layout.unshard([known[p.outputs[i].name] for p, known in zip(programs, values, strict=True)], mesh)
        for i, layout in enumerate(localized.outputs)
    ]


def together(ops, xs, mesh):
    first = ops[0]
    if first.kind == "relayout":
        before, after = (TensorSharding.parse(first[name]) for name in ("before", "after"))
        return after.shard(before.unshard(xs, mesh), mesh)
    found = [None] * len(xs)
    for group in mesh.groups(first["axes"]):
        assert all(ops[rank]["group"] == len(group) for rank in group)
        for rank, y in zip(group, _in_group([ops[r] for r in group], [xs[r] for r in group]), strict=True):
            found[rank] = y
    return found


def _in_group(ops, xs):
    kind = ops[0].kind
    if kind == "all_reduce":
        return [combine(ops[0]["op"], xs)] * len(xs)
    if kind == "all_gather":
        return [np.concatenate(xs, axis=ops[0]["dim"])] * len(xs)
    if kind == "reduce_scatter":
        return _cut(combine(ops[0]["op"], xs), ops, ops[0]["dim"], "extent")
    if kind == "all_slice":
        return [_cut(x, ops, ops[0]["dim"], "extent")[i] for i, x in enumerate(xs)]
    pieces = [_cut(x, ops, ops[0]["split_dim"], "split_extent") for x in xs]
    return [np.concatenate([mine[i] for mine in pieces], axis=ops[0]["concat_dim"]) for i in range(len(xs))]


def _cut(x, ops, dim, name):
    sizes = [op[name] for op in ops]
    assert sum(sizes) == x.shape[dim]
    return np.split(x, np.cumsum(sizes)[:-1], axis=dim)
