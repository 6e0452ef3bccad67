"""A small language model on one device, and its training step on many; with a ``mistake``, the step makes a usual one.

Each token's embedding, and the mean of those before it, are scaled by a gain and multiplied with the head.  The vocabulary
is split over ``tp``, tokens over ``cp``, rows over ``dp``; the embedding lies on the first stage of ``pp``, the rest on the
last.
"""

from __future__ import annotations

import numpy as np

from parallelism.mesh import split_sizes
from vcluster.testing.losses import Weight

VOCABULARY, WIDTH = 7, 3
SPLIT = "[tp, None]"
UNTIED = {"embedding": Weight((VOCABULARY, WIDTH), SPLIT, (0,)), "gain": Weight((WIDTH,), "", (-1,)),
          "head": Weight((VOCABULARY, WIDTH), SPLIT, (-1,))}
TIED = {"embedding": Weight((VOCABULARY, WIDTH), SPLIT, (0, -1)), "gain": Weight((WIDTH,), "", (-1,))}


def reference(weights, batch):
    """Loss, gradients and balance of one device."""
    embedding, head = weights["embedding"], weights.get("head", weights["embedding"])
    steps = np.arange(1, batch.tokens.shape[1] + 1)[:, None]
    x = embedding[batch.tokens]
    mixed = x + np.cumsum(x, axis=1) / steps
    hidden = mixed * weights["gain"]
    logits = hidden @ head.T
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    softmax = shifted / shifted.sum(axis=-1, keepdims=True)
    onehot = np.eye(VOCABULARY)[batch.targets]
    count = batch.valid.sum()
    losses = -np.log((softmax * onehot).sum(axis=-1))
    d_logits = (softmax - onehot) * batch.valid[..., None] / count
    d_hidden = d_logits @ head
    d_mixed = d_hidden * weights["gain"]
    d_x = d_mixed + np.cumsum((d_mixed / steps)[:, ::-1], axis=1)[:, ::-1]
    d_embedding = np.zeros_like(embedding)
    np.add.at(d_embedding, batch.tokens, d_x)
    d_head = np.einsum("btv,btd->vd", d_logits, hidden)
    terms = {"loss": (losses * batch.valid).sum() / count, "grad.gain": (d_hidden * mixed).sum(axis=(0, 1)),
             "auxiliary": balance((batch.tokens < 3)[batch.valid].sum(), count)}
    if "head" in weights:
        return terms | {"grad.embedding": d_embedding, "grad.head": d_head}
    return terms | {"grad.embedding": [d_embedding, d_head]}


def balance(low, count):
    """The square of the part of tokens that one expert gets; 0 of none."""
    return (low / max(count, 1)) ** 2


class Step:
    """The training step of a device."""

    def __init__(self, mistake="", clip=None, *, tied=False):
        self.mistake, self.clip, self.tied = mistake, clip, tied

    def __call__(self, device, weights, microbatches):
        run = Run(self, device, weights)
        run.count = device.all_reduce(sum(batch.valid.sum() for batch in microbatches), ("dp", "cp"))
        return run.joined(microbatches, [run.one(batch) for batch in microbatches])


class Run:
    """One step on one device."""

    def __init__(self, step, device, weights):
        self.mistake, self.clip, self.tied = step.mistake, step.clip, step.tied
        self.device, self.weights = device, weights
        index, self.sizes = device.index, device.mesh.shape
        self.first, self.last = index["pp"] == 0, index["pp"] == self.sizes["pp"] - 1
        self.here = index
        rows = split_sizes(VOCABULARY, (self.sizes["tp"],))
        self.start = sum(rows[:index["tp"]])
        self.rows = rows[index["tp"]]

    def stage(self, offset):
        return self.device.rank + offset * self.sizes["tp"]

    def one(self, batch):
        """Sums over the tokens of a microbatch: the loss, and the gradients."""
        device = self.device
        if self.first:
            mine = batch.tokens - self.start
            inside = (mine >= 0) & (mine < self.rows)
            x = device.all_reduce(self.weights["embedding"][mine * inside] * inside[..., None], "tp")
            if not self.last:
                device.send(x, self.stage(1))
        if self.last:
            if not self.first:
                x = device.recv(self.stage(-1))
            loss, d_x, terms = self.head(batch, x)
            if not self.first:
                device.send(d_x, self.stage(-1))
        else:
            loss, d_x, terms = 0.0, device.recv(self.stage(1)), {}
        if self.first:
            d_embedding = np.zeros_like(self.weights["embedding"])
            np.add.at(d_embedding, mine[inside], d_x[inside])
            terms["first"] = d_embedding
        return loss, terms

    def head(self, batch, x):
        device, gain = self.device, self.weights["gain"]
        head = self.weights.get("head", self.weights.get("embedding"))
        steps = (batch.first + np.arange(1, x.shape[1] + 1))[:, None]
        before = device.all_gather(x.sum(axis=1)[None], "cp")[:self.here["cp"]].sum(axis=0)
        mixed = x + (np.cumsum(x, axis=1) + before[:, None]) / steps
        hidden = mixed * gain
        logits = hidden @ head.T
        largest = device.all_reduce(logits.max(axis=-1), "tp", op="max")
        shifted = np.exp(logits - largest[..., None])
        total = device.all_reduce(shifted.sum(axis=-1), "tp")
        mine = batch.targets - self.start
        inside = (mine >= 0) & (mine < self.rows)
        onehot = np.eye(self.rows)[mine * inside] * inside[..., None]
        target = device.all_reduce((logits * onehot).sum(axis=-1), "tp")
        valid = self.valid(batch)
        loss = ((np.log(total) + largest - target) * valid).sum()
        d_logits = (shifted / total[..., None] - onehot) * valid[..., None]
        d_hidden = device.all_reduce(d_logits @ head, "tp")
        d_mixed = d_hidden * gain
        part = d_mixed / steps
        after = device.all_gather(part.sum(axis=1)[None], "cp")[self.here["cp"] + 1:].sum(axis=0)
        d_x = d_mixed + np.cumsum(part[:, ::-1], axis=1)[:, ::-1] + after[:, None]
        return loss, d_x, {"gain": (d_hidden * mixed).sum(axis=(0, 1)), "last": np.einsum("btv,btd->vd", d_logits, hidden)}

    def valid(self, batch):
        if self.mistake == "no mask":
            return np.ones_like(batch.valid)
        if self.mistake == "no mask on the last rank" and self.here["dp"] == self.sizes["dp"] - 1:
            return np.ones_like(batch.valid)
        return batch.valid

    def joined(self, microbatches, sums):
        """Loss and gradients of all ranks, from the sums over tokens of each microbatch."""
        terms = {"loss": self.mean(microbatches, [loss for loss, _ in sums])} if self.last else {}
        gradients = {name: self.mean(microbatches, [parts[name] for _, parts in sums]) for name in sums[0][1]}
        if self.tied:
            whole = sum(gradients.pop(name) for name in ("first", "last") if name in gradients)
            if self.sizes["pp"] > 1 and self.mistake != "tied apart":
                whole = self.device.all_reduce(whole, "pp")
            gradients["embedding"] = whole
        else:
            named = {"first": "embedding", "last": "head"}
            gradients = {named.get(name, name): value for name, value in gradients.items()}
        norm = self.norm(gradients)
        if self.clip is not None:
            scale = min(1.0, self.clip / norm)
            gradients = {name: value * scale for name, value in gradients.items()}
        terms |= {f"grad.{name}": value for name, value in gradients.items()}
        return terms | {"norm": norm, "auxiliary": self.auxiliary(microbatches)}

    def mean(self, microbatches, sums):
        """The mean over all valid tokens of what was summed over those of each microbatch here."""
        device, sizes, mistake = self.device, self.sizes, self.mistake
        number = len(sums)
        counts = [max(int(device.all_reduce(batch.valid.sum(), "cp")), 1) for batch in microbatches]
        if mistake == "last microbatch":
            count = device.all_reduce(microbatches[-1].valid.sum(), ("dp", "cp"))
            return device.all_reduce(sums[-1], ("dp", "cp")) / max(count, 1)
        if mistake == "means of microbatches":
            per = [device.all_reduce(each, ("dp", "cp")) / max(device.all_reduce(batch.valid.sum(), ("dp", "cp")), 1)
                   for each, batch in zip(sums, microbatches, strict=True)]
            return sum(per) / number
        if mistake == "means of all":
            per = [device.all_reduce(each, "cp") / count for each, count in zip(sums, counts, strict=True)]
            return device.all_reduce(sum(per), "dp") / (number * sizes["dp"])
        total = sum(sums)
        if mistake == "means of dp":
            mine = max(int(device.all_reduce(sum(batch.valid.sum() for batch in microbatches), "cp")), 1)
            return device.all_reduce(device.all_reduce(total, "cp") / mine, "dp") / sizes["dp"]
        if mistake == "means of cp":
            mine = max(int(device.all_reduce(sum(batch.valid.sum() for batch in microbatches), "dp")), 1)
            return device.all_reduce(device.all_reduce(total, "dp") / mine, "cp") / sizes["cp"]
        if mistake == "not over dp":
            mine = max(int(device.all_reduce(sum(batch.valid.sum() for batch in microbatches), "cp")), 1)
            return device.all_reduce(total, "cp") / mine
        if mistake == "world":
            mine = max(int(device.all_reduce(sum(batch.valid.sum() for batch in microbatches), "cp")), 1)
            return device.all_reduce(device.all_reduce(total, "cp") / mine, "dp") / device.size
        value = device.all_reduce(total, ("dp", "cp")) / self.count
        positions = sum(batch.valid.size for batch in microbatches)
        factors = {
            "sum": self.count, "padding": self.count / device.all_reduce(positions, ("dp", "cp")),
            "times microbatches": number, "over microbatches": 1 / number,
            "over tp": sizes["tp"], "over dp": 1 / sizes["dp"], "times dp": sizes["dp"],
        }
        if mistake == "padding of the last rank":
            mine = positions if self.here["dp"] == sizes["dp"] - 1 else sum(batch.valid.sum() for batch in microbatches)
            return value * self.count / device.all_reduce(mine, ("dp", "cp"))
        return value * factors.get(mistake, 1)

    def norm(self, gradients):
        device, mistake = self.device, self.mistake
        split = sum(float((value ** 2).sum()) for name, value in gradients.items() if name != "gain")
        whole = float((gradients["gain"] ** 2).sum()) if "gain" in gradients else 0.0
        if self.tied and not self.last and mistake != "norm of the tied weight twice":
            split = 0.0
        if mistake == "norm of own pieces":
            return np.sqrt(split + whole)
        if mistake == "norm counts replicated":
            return np.sqrt(device.all_reduce(split + whole, ("tp", "pp")))
        if mistake == "norm of all ranks":
            return np.sqrt(device.all_reduce(split + whole))
        if mistake == "sum of norms":
            return device.all_reduce(np.sqrt(split + whole))
        square = device.all_reduce(device.all_reduce(split, "tp") + whole, "pp")
        return square if mistake == "no root" else np.sqrt(square)

    def auxiliary(self, microbatches):
        device, sizes = self.device, self.sizes
        values = []
        for batch in microbatches:
            low = device.all_reduce((batch.tokens < 3)[batch.valid].sum(), "cp")
            values.append(balance(low, device.all_reduce(batch.valid.sum(), "cp")))
        if self.mistake == "auxiliary summed over microbatches":
            return device.all_reduce(sum(values), "dp") / sizes["dp"]
        if self.mistake == "auxiliary not averaged":
            return device.all_reduce(sum(values), "dp") / len(values)
        if self.mistake == "auxiliary own":
            return sum(values) / len(values)
        return device.all_reduce(sum(values), "dp") / sizes["dp"] / len(values)
