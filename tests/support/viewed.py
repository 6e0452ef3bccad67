"""Random models whose weights, data and activations are used through views."""

from __future__ import annotations

import random
from math import prod

import numpy as np

from parallelism import ir
from parallelism.transforms import TensorParallel

WIDTH = 8
FACTORS = {8: [(8,), (2, 4), (4, 2)], 4: [(4,), (2, 2)], 12: [(12,), (3, 4), (2, 6)]}


class Viewed:
    """A random model of some layers: ``loss(rows)`` is its program, for a number of rows or a symbol."""

    def __init__(self, seed):
        rng = self.rng = random.Random(seed)
        self.types = {}
        self.layers = [self._layer(f"l{number}") for number in range(rng.randint(2, 4))]
        self.tied = rng.random() < 0.3
        self.token = self._weight("token", 6, WIDTH)
        self.named = rng.random() < 0.8

    def _weight(self, name, *shape):
        """A weight that is stored in another shape than it is used in, or in two views, or as it is."""
        stored = self.rng.choice([
            shape, (prod(shape),), sum((self.rng.choice(FACTORS.get(n, [(n,)])) for n in shape), ()),
            (1, *shape), (shape[0] * shape[1] // 2, 2) if prod(shape) % 2 == 0 else shape])
        again = self.rng.random() < 0.2
        self.types[name] = stored

        def used(p):
            w = p[name]
            if again:
                w = w.reshape(-1)
            return w.reshape(shape)

        return used

    def _layer(self, name):
        inner = self.rng.choice([4, 8, 12])
        kind = self.rng.choice(["up_down", "two", "stack", "bias"])
        up, down = self._weight(f"{name}.up", WIDTH, inner), self._weight(f"{name}.down", inner, WIDTH)
        if kind == "two":
            gate = self._weight(f"{name}.gate", WIDTH, inner)
            return lambda p, x: x + (np.tanh(x @ up(p)) * (x @ gate(p))) @ down(p) * 0.1
        if kind == "stack":
            other = self._weight(f"{name}.other", WIDTH, WIDTH)
            return lambda p, x: np.sum(np.stack([np.tanh(x @ up(p)) @ down(p), x @ other(p), x], axis=1), axis=1) * 0.3
        if kind == "bias":
            bias = self._weight(f"{name}.bias", 1, inner)
            return lambda p, x: x + np.maximum(x @ up(p) + bias(p).reshape(inner), 0) @ down(p) * 0.2
        return lambda p, x: np.tanh(x.reshape(-1, 2, WIDTH // 2).reshape(-1, WIDTH) @ up(p)) @ down(p)

    def loss(self, rows):
        """The program of the loss."""
        def loss(p, ids, y):
            with ir.region("tables"):
                x = self.token(p)[ids]
            for number, layer in enumerate(self.layers):
                with ir.region(f"block.{number}" if self.named else f"part{number}"):
                    x = layer(p, x)
            with ir.region("head"):
                if self.tied:
                    x = np.tanh(x @ self.token(p).T) @ self.token(p)
                return np.mean((x - y) ** 2)

        return ir.record(loss, {name: ir.TensorType("f64", shape) for name, shape in self.types.items()},
                         ir.TensorType("i64", (rows,)), ir.TensorType("f64", (rows, WIDTH)), name="viewed")

    def splits(self, tp, rows):
        """Whether tensor parallelism on so many devices finds a weight to split."""
        try:
            return tp > 1 and bool(TensorParallel()(self.loss(rows)))
        except ValueError:
            return False
