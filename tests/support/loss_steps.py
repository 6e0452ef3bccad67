"""The training step of a small language model on devices; with a ``mistake``, it makes a usual one."""

from __future__ import annotations

import numpy as np
from loss_models import Form, Layers

DATA = ("dp", "ep", "cp")
UNTIED = Form(("mix", "gain"))
TIED = Form(("mix", "gain"), tied=True)
EXPERTS = Form(("mix", "experts", "gain"))


class Step:
    """The training step of a device."""

    def __init__(self, form=UNTIED, mistake="", clip=None):
        self.form, self.mistake, self.clip = form, mistake, clip

    def __call__(self, device, weights, microbatches):
        return Run(self, device, weights).terms(microbatches)


class Run:
    """One step on one device."""

    def __init__(self, step, device, weights):
        self.form, self.mistake, self.clip = step.form, step.mistake, step.clip
        self.device, self.here, self.sizes = device, device.index, device.mesh.shape
        self.layers = Layers(step.form, device, weights)
        self.layouts = {name: layout for name, (_, layout, _) in step.form.shapes.items()}
        self.replicas = self.sizes["dp"] * self.sizes["ep"]

    def terms(self, microbatches):
        """Loss and gradients of all ranks, from the sums over tokens of each microbatch."""
        device, layers = self.device, self.layers
        self.microbatches = microbatches
        self.count = device.all_reduce(sum(batch.valid.sum() for batch in microbatches), DATA)
        ran = [layers.run(batch, self.valid(batch)) for batch in microbatches]
        terms = {"loss": self.mean([loss for loss, _, _ in ran])} if layers.last else {}
        gradients = {name: self.gradient(name, [parts[name] for _, _, parts in ran]) for name in ran[0][2]}
        if self.form.tied:
            self.tie(gradients)
        norm = self.norm(gradients)
        if self.clip is not None:
            gradients = {name: value * min(1.0, self.clip / norm) for name, value in gradients.items()}
        terms |= {f"grad.{name}": value for name, value in gradients.items()} | {"norm": norm}
        if self.form.experts:
            terms["auxiliary"] = device.all_reduce(self.balance([balance for _, balance, _ in ran]), "pp")
        return terms

    def valid(self, batch):
        if self.mistake == "no mask":
            return np.ones_like(batch.valid)
        if self.mistake == "no mask on the last rank" and self.here["dp"] == self.sizes["dp"] - 1:
            return np.ones_like(batch.valid)
        return batch.valid

    def gradient(self, name, sums):
        """Of the mean over tokens, and of the auxiliary loss."""
        over = ("dp", "cp") if "ep" in self.layouts.get(name, "") else DATA
        value = self.mean([each[0] for each in sums], over)
        if not self.form.experts:
            return value
        if self.mistake == "gradient of the auxiliary not averaged":
            return value + self.device.all_reduce(sum(each[1] for each in sums), over)
        return value + self.device.all_reduce(sum(each[1] for each in sums), over) / self.replicas / len(sums)

    def tie(self, gradients):
        whole = sum(gradients.pop(name) for name in ("embedding", "embedding.last") if name in gradients)
        if self.sizes["pp"] > 1 and self.mistake != "tied apart":
            group = (0, self.sizes["pp"] - 1)
            ends = [rank for rank in self.device.group("pp") if self.device.mesh.index(rank)["pp"] in group]
            if self.layers.first or self.layers.last:
                other = ends[0] if self.layers.last else ends[1]
                whole = whole + self.device.sendrecv(whole, other, other)
        if self.layers.first or self.layers.last:
            gradients["embedding"] = whole

    def mean(self, sums, over=DATA):
        """The mean over all valid tokens of what was summed over those of each microbatch here."""
        device, sizes, mistake, number = self.device, self.sizes, self.mistake, len(sums)
        rows = tuple(axis for axis in over if axis != "cp")
        replicas = self.replicas
        counts = [int(device.all_reduce(batch.valid.sum(), "cp")) for batch in self.microbatches]
        if mistake == "last microbatch":
            count = device.all_reduce(self.microbatches[-1].valid.sum(), DATA)
            return device.all_reduce(sums[-1], over) / max(count, 1)
        if mistake == "means of microbatches":
            per = [device.all_reduce(each, over) / max(device.all_reduce(count, ("dp", "ep")), 1)
                   for each, count in zip(sums, counts, strict=True)]
            return sum(per) / number
        if mistake == "means of all":
            per = [device.all_reduce(each, "cp") / max(count, 1) for each, count in zip(sums, counts, strict=True)]
            return device.all_reduce(sum(per), rows) / (number * replicas)
        total, mine = sum(sums), max(sum(counts), 1)
        if mistake == "means of replicas":
            return device.all_reduce(device.all_reduce(total, "cp") / mine, rows) / replicas
        if mistake == "means of cp":
            own = max(int(device.all_reduce(sum(batch.valid.sum() for batch in self.microbatches), ("dp", "ep"))), 1)
            return device.all_reduce(device.all_reduce(total, rows) / own, "cp") / sizes["cp"]
        if mistake == "not over dp":
            return device.all_reduce(total, "cp") / mine
        if mistake == "world":
            return device.all_reduce(device.all_reduce(total, "cp") / mine, rows) / device.size
        value = device.all_reduce(total, over) / self.count
        positions = sum(batch.valid.size for batch in self.microbatches)
        factors = {
            "sum": self.count, "padding": self.count / device.all_reduce(positions, DATA),
            "times microbatches": number, "over microbatches": 1 / number,
            "over tp": sizes["tp"], "over dp": 1 / sizes["dp"], "times dp": sizes["dp"],
        }
        if mistake == "padding of the last rank":
            mine = positions if self.here["dp"] == sizes["dp"] - 1 else sum(batch.valid.sum() for batch in self.microbatches)
            return value * self.count / device.all_reduce(mine, DATA)
        return value * factors.get(mistake, 1)

    def norm(self, gradients):
        device, mistake, square = self.device, self.mistake, 0.0
        for axis in ("tp", "ep", ""):
            own = [value for name, value in gradients.items()
                   if (axis in self.layouts[name] if axis else not self.layouts[name])
                   and not (name == "embedding" and self.form.tied and not self.layers.last
                            and mistake != "norm of the tied weight twice")]
            part = sum(float((value**2).sum()) for value in own)
            whole = mistake in ("norm of own pieces", "norm counts replicated", "norm of all ranks", "sum of norms")
            square += device.all_reduce(part, axis) if axis and not whole else part
        if mistake == "norm of own pieces":
            return np.sqrt(square)
        if mistake == "norm counts replicated":
            return np.sqrt(device.all_reduce(square, ("tp", "pp")))
        if mistake == "norm of all ranks":
            return np.sqrt(device.all_reduce(square))
        if mistake == "sum of norms":
            return device.all_reduce(np.sqrt(square))
        square = device.all_reduce(square, "pp")
        return square if mistake == "no root" else np.sqrt(square)

    def balance(self, values):
        device, total, number = self.device, sum(values), len(values)
        if self.mistake == "auxiliary summed over microbatches":
            return device.all_reduce(total, ("dp", "ep")) / self.replicas
        if self.mistake == "auxiliary not averaged":
            return device.all_reduce(total, ("dp", "ep")) / number
        if self.mistake == "auxiliary own":
            return total / number
        return device.all_reduce(total, ("dp", "ep")) / self.replicas / number
