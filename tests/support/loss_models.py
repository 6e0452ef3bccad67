"""Small language models of any form: as a loss in plain NumPy, and layer by layer on devices, with a backward by hand.

A form is an embedding, some layers, and a head, which may be the embedding.  On devices the vocabulary and the hidden dim
of dense layers are split over ``tp``, rows over ``dp`` and ``ep``, tokens over ``cp``, experts over ``ep``, and layers over
``pp``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parallelism import ir
from parallelism.mesh import split_sizes
from vcluster.testing import Weight

VOCABULARY, WIDTH, HIDDEN, EXPERTS, BALANCE = 7, 3, 5, 4, 0.3
KINDS = ("gain", "mix", "dense", "experts")


@dataclass(frozen=True)
class Form:
    """A model: kinds of layers, whether the head is the embedding, and the layers with which a stage begins.

    It runs on a mesh with so many stages, or with one.
    """

    layers: tuple[str, ...]
    tied: bool = False
    begin: tuple[int, ...] = ()

    @property
    def experts(self):
        return "experts" in self.layers

    def stage_of(self, number):
        return sum(number >= first for first in self.begin)

    @property
    def shapes(self):
        """By name of the weights: their shape, their layout on devices, and their stages."""
        found = {"embedding": ((VOCABULARY, WIDTH), "[tp, None]", (0, -1) if self.tied else (0,))}
        for number, kind in enumerate(self.layers):
            at = (self.stage_of(number),)
            if kind == "gain":
                found[f"{number}.gain"] = (WIDTH,), "", at
            if kind == "dense":
                found[f"{number}.up"] = (WIDTH, HIDDEN), "[None, tp]", at
                found[f"{number}.down"] = (HIDDEN, WIDTH), "[tp, None]", at
            if kind == "experts":
                found[f"{number}.router"] = (WIDTH, EXPERTS), "", at
                found[f"{number}.up"] = (EXPERTS, WIDTH, HIDDEN), "[ep, None, None]", at
                found[f"{number}.down"] = (EXPERTS, HIDDEN, WIDTH), "[ep, None, None]", at
        if not self.tied:
            found["head"] = (VOCABULARY, WIDTH), "[tp, None]", (-1,)
        return found

    @property
    def weights(self):
        """As a step on devices has them."""
        return {name: Weight(*each) for name, each in self.shapes.items()}

    @property
    def whole_weights(self):
        """As a strategy takes them."""
        return {name: Weight(shape) for name, (shape, _, _) in self.shapes.items()}

    def loss(self, weights, batch):
        """The mean over valid tokens, and the loss that balances experts if there are some; in plain NumPy."""
        x, balance = weights["embedding"][batch.tokens], 0.0
        count = np.sum(batch.valid)
        for number, kind in enumerate(self.layers):
            given = {name.partition(".")[2]: weights[name] for name in weights if name.startswith(f"{number}.")}
            if kind == "gain":
                x = x * given["gain"]
            elif kind == "mix":
                x = x + np.cumsum(x, axis=1) / np.arange(1.0, batch.tokens.shape[1] + 1)[:, None]
            elif kind == "dense":
                x = x + np.tanh(x @ given["up"]) @ given["down"]
            else:
                scores = np.exp(x @ given["router"])
                shares = scores / np.sum(scores, axis=-1, keepdims=True)
                chosen = ir.apply("one_hot", np.argmax(shares, axis=-1), extent=EXPERTS, dtype=np.dtype("f8"))
                made = np.einsum("etdh,ehw->etdw", np.tanh(np.einsum("tdw,ewh->etdh", x, given["up"])), given["down"])
                x = x + np.einsum("etdw,tde->tdw", made, shares * chosen)
                counts = batch.valid[..., None]
                parts = [np.sum(np.where(counts, each, 0.0), axis=(0, 1)) / count for each in (chosen, shares)]
                balance = balance + BALANCE * EXPERTS * np.sum(parts[0] * parts[1])
        logits = x @ weights["embedding" if self.tied else "head"].T
        shifted = logits - np.max(logits, axis=-1, keepdims=True)
        logarithms = shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))
        picked = -np.take_along_axis(logarithms, batch.targets[..., None], axis=-1)[..., 0]
        mean = np.sum(np.where(batch.valid, picked, 0.0)) / count
        return (mean, balance) if self.experts else mean


class Layers:
    """The layers of a stage on one device: forward and backward of a microbatch.

    A gradient has a dim in front: that of the sum of the losses of tokens, and that of the auxiliary loss.
    """

    def __init__(self, form, device, weights):
        self.form, self.device, self.weights = form, device, weights
        self.index, self.sizes = device.index, device.mesh.shape
        self.first, self.last = self.index["pp"] == 0, self.index["pp"] == self.sizes["pp"] - 1
        rows = split_sizes(VOCABULARY, (self.sizes["tp"],))
        self.rows, self.start = rows[self.index["tp"]], sum(rows[:self.index["tp"]])
        own = split_sizes(EXPERTS, (self.sizes["ep"],))
        self.own = range(sum(own[:self.index["ep"]]), sum(own[:self.index["ep"] + 1]))
        self.gradients, self.kept = {}, []
        self.loss = self.balance = 0.0

    def run(self, batch, valid):
        """Forward and backward of a microbatch."""
        device, at = self.device, self.sizes["tp"]
        self.batch, self.valid, self.kept, self.loss, self.balance, self.gradients = batch, valid, [], 0.0, 0.0, {}
        x = self.embedded() if self.first else device.recv(device.rank - at)
        numbers = [n for n in range(len(self.form.layers)) if self.form.stage_of(n) % self.sizes["pp"] == self.index["pp"]]
        for number in numbers:
            x = getattr(self, self.form.layers[number])(number, x)
        if not self.last:
            device.send(x, device.rank + at)
            dy = device.recv(device.rank + at)
        else:
            dy = self.head(x)
        for backward in reversed(self.kept):
            dy = backward(dy)
        if not self.first:
            device.send(dy, device.rank - at)
        else:
            table = np.zeros((2, *self.weights["embedding"].shape))
            np.add.at(table, (slice(None), self.mine[self.inside]), dy[:, self.inside])
            self.add("embedding", table)
        return self.loss, self.balance, self.gradients

    def add(self, name, value):
        self.gradients[name] = self.gradients.get(name, 0) + value

    def embedded(self):
        self.mine = self.batch.tokens - self.start
        self.inside = (self.mine >= 0) & (self.mine < self.rows)
        return self.device.all_reduce(self.weights["embedding"][self.mine * self.inside] * self.inside[..., None], "tp")

    def gain(self, number, x):
        gain = self.weights[f"{number}.gain"]

        def backward(dy):
            self.add(f"{number}.gain", (dy * x).sum(axis=(1, 2)))
            return dy * gain

        self.kept.append(backward)
        return x * gain

    def mix(self, number, x):
        steps = (self.batch.first + np.arange(1.0, x.shape[1] + 1))[:, None]
        before = self.device.all_gather(x.sum(axis=1)[None], "cp")[:self.index["cp"]].sum(axis=0)

        def backward(dy):
            part = dy / steps
            after = self.device.all_gather(part.sum(axis=2)[None], "cp")[self.index["cp"] + 1:].sum(axis=0)
            return dy + np.cumsum(part[:, :, ::-1], axis=2)[:, :, ::-1] + after[:, :, None]

        self.kept.append(backward)
        return x + (np.cumsum(x, axis=1) + before[:, None]) / steps

    def dense(self, number, x):
        up, down = self.weights[f"{number}.up"], self.weights[f"{number}.down"]
        hidden = np.tanh(x @ up)

        def backward(dy):
            inner = dy @ down.T * (1 - hidden**2)
            self.add(f"{number}.down", np.einsum("bth,cbtd->chd", hidden, dy))
            self.add(f"{number}.up", np.einsum("btd,cbth->cdh", x, inner))
            return dy + self.device.all_reduce(inner @ up.T, "tp")

        self.kept.append(backward)
        return x + self.device.all_reduce(hidden @ down, "tp")

    def experts(self, number, x):
        device, router, up, down = self.device, *(self.weights[f"{number}.{name}"] for name in ("router", "up", "down"))
        scores = np.exp(x @ router)
        shares = scores / scores.sum(axis=-1, keepdims=True)
        chosen = np.eye(EXPERTS)[shares.argmax(axis=-1)]
        gates = (shares * chosen).sum(axis=-1, keepdims=True)
        everything, choices = device.all_gather(x, "ep"), device.all_gather(chosen, "ep")[..., self.own]
        hidden = np.tanh(np.einsum("btd,edh->ebth", everything, up))
        made = device.reduce_scatter(np.einsum("ebth,ehd,bte->btd", hidden, down, choices), "ep")
        count = max(int(device.all_reduce(self.valid.sum(), "cp")), 1)
        load = device.all_reduce((chosen * self.valid[..., None]).sum(axis=(0, 1)), "cp") / count
        mean = device.all_reduce((shares * self.valid[..., None]).sum(axis=(0, 1)), "cp") / count
        self.balance += BALANCE * EXPERTS * (load * mean).sum()

        def backward(dy):
            d_shares = (dy * made).sum(axis=-1, keepdims=True) * chosen
            d_shares[1] += BALANCE * EXPERTS * load * self.valid[..., None] / count
            d_scores = shares * (d_shares - (d_shares * shares).sum(axis=-1, keepdims=True))
            self.add(f"{number}.router", np.einsum("btd,cbte->cde", x, d_scores))
            outer = np.swapaxes(device.all_gather(np.swapaxes(dy * gates, 0, 1), "ep"), 0, 1)
            routed = np.einsum("cbtd,bte->cebtd", outer, choices)
            inner = np.einsum("cebtd,ehd->cebth", routed, down) * (1 - hidden**2)
            self.add(f"{number}.down", np.einsum("ebth,cebtd->cehd", hidden, routed))
            self.add(f"{number}.up", np.einsum("btd,cebth->cedh", everything, inner))
            back = device.reduce_scatter(np.einsum("cebth,edh->bctd", inner, up), "ep")
            return dy + np.swapaxes(back, 0, 1) + d_scores @ router.T

        self.kept.append(backward)
        return x + made * gates

    def head(self, x):
        device, head = self.device, self.weights["embedding" if self.form.tied else "head"]
        logits = x @ head.T
        largest = device.all_reduce(logits.max(axis=-1), "tp", op="max")
        shifted = np.exp(logits - largest[..., None])
        total = device.all_reduce(shifted.sum(axis=-1), "tp")
        mine = self.batch.targets - self.start
        inside = (mine >= 0) & (mine < self.rows)
        onehot = np.eye(self.rows)[mine * inside] * inside[..., None]
        target = device.all_reduce((logits * onehot).sum(axis=-1), "tp")
        self.loss = ((np.log(total) + largest - target) * self.valid).sum()
        d_logits = (shifted / total[..., None] - onehot) * self.valid[..., None]
        table = np.einsum("btv,btd->vd", d_logits, x)
        self.add("embedding.last" if self.form.tied else "head", np.stack([table, np.zeros_like(table)]))
        dx = device.all_reduce(d_logits @ head, "tp")
        return np.stack([dx, np.zeros_like(dx)])
