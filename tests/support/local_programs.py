"""Programs of devices written by hand, for tests of what runs and simulates them without a planner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parallelism.ir import Builder, Function, TensorType
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding


class _Builder(Builder):
    def op(self, kind, inputs, **attributes):
        return self.emit(kind, inputs, attributes)[0]


@dataclass(frozen=True)
class ByHand:
    """What `parallelism.layouts.localize` makes, given: the whole, layouts, a program for each class of ranks."""

    function: Function
    mesh: Mesh
    inputs: tuple[TensorSharding, ...]
    outputs: tuple[TensorSharding, ...]
    programs: tuple[Function, ...]
    by_rank: tuple[int, ...]

    @property
    def classes(self):
        return tuple((self.by_rank.index(i), self.by_rank.count(i)) for i in range(len(self.programs)))

    def class_of(self, rank):
        return self.by_rank[rank]

    def program(self, rank):
        return self.programs[self.by_rank[rank]]

    @classmethod
    def of(cls, function, mesh, inputs, outputs, program):
        """``program(rank)``; equal ones are a class."""
        made = [program(rank) for rank in range(mesh.size)]
        different = tuple(dict.fromkeys(made))
        return cls(function, mesh, inputs, outputs, different, tuple(different.index(each) for each in made))


def feed_forward(rows, width, hidden, mesh, dtype=np.float64):
    """``relu(x @ up) @ down`` of x over dp and hidden over tp: an all_reduce, an all_gather, a reduce_scatter."""
    shapes = {"x": (rows, width), "up": (width, hidden), "down": (hidden, width)}
    layouts = {"x": TensorSharding("dp", None), "up": TensorSharding(None, "tp"), "down": TensorSharding("tp", None)}

    whole = _Builder()
    x, up, down = (whole.input(name, TensorType(dtype, shape)) for name, shape in shapes.items())
    h = whole.op("relu", [whole.op("matmul", [x, up])])
    y = whole.op("matmul", [h, down])
    total = whole.op("sum", [y], axes=(0,), keepdims=False)
    function = whole.function("ffn", [y, total, h])

    def program(rank):
        made = _Builder()
        local = {name: layouts[name].local_shape(shape, mesh, rank) for name, shape in shapes.items()}
        x, up, down = (made.input(name, TensorType(dtype, local[name])) for name in shapes)
        h = made.op("relu", [made.op("matmul", [x, up])])
        part = made.op("matmul", [h, down])
        group = {axis: {"axes": (axis,), "group": mesh.shape[axis]} for axis in ("tp", "dp")}
        flat = made.op("reshape", [part], shape=(local["x"][0] * width,))
        summed = made.op("all_reduce", [flat], **group["tp"], op="sum")
        y = made.op("reshape", [summed], shape=(local["x"][0], width))
        gathered = made.op("all_gather", [y], **group["dp"], dim=0, extent=rows)
        total = made.op("sum", [gathered], axes=(0,), keepdims=False)
        extent = TensorSharding("dp").local_shape((width,), mesh, rank)[0]
        alone = made.op("sum", [y], axes=(0,), keepdims=False)
        shard = made.op("reduce_scatter", [alone], **group["dp"], dim=0, extent=extent, op="sum")
        again = made.op("all_gather", [shard], **group["dp"], dim=0, extent=width)
        both = made.op("add", [total, again])
        two = made.op("constant", [], value=0.5, shape=(), dtype=np.dtype(dtype))
        return made.function("ffn", [y, made.op("multiply", [both, two]), h])

    outputs = (TensorSharding("dp", None), TensorSharding(None), TensorSharding("dp", "tp"))
    return ByHand.of(function, mesh, tuple(layouts.values()), outputs, program)


def integers(function, seed=0):
    """Inputs of small integers, so that sums are exact in any order."""
    rng = np.random.default_rng(seed)
    return {value.name: rng.integers(-4, 5, value.type.shape).astype(value.type.dtype) for value in function.inputs}
