"""The modules of a pipeline, run stage by stage with what is sent carried by hand, as its manifest says.

    python staged_modules.py FOLDER       by XLA on 8 host devices: pipeline.json, its modules, inputs.npz; writes outputs.npz

It needs no function of vcluster, only the texts: what runs is what was written.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

GRAD = "grad."


class Staged:
    """One step.  ``call(module, function, arrays)`` runs a function of a module on whole arrays."""

    def __init__(self, manifest, call, given):
        self.manifest, self.call, self.given = manifest, call, given
        self.known, self.totals = {}, {}
        self.gradients = defaultdict(dict)
        """By position and replica: the sums over microbatches and the stages of the position, by the names of weights."""

    def run(self):
        """The results and either new parameters and state or gradients, by name."""
        manifest = self.manifest
        if manifest["beginning"]:
            self.known = self.runs(manifest["beginning"], "beginning", self.given)
        replicas = int(np.prod([*manifest["replicas"].values()], dtype=int))
        for replica in range(replicas):
            for microbatch in range(manifest["pipeline"]["microbatches"]):
                self.microbatch(replica, replica * manifest["pipeline"]["microbatches"] + microbatch)
        found = {**self.known, **self.totals}
        if manifest["ending"]:
            found |= self.runs(manifest["ending"], "ending", found)
        results = {name: found[name] for name in manifest["results"]}
        self.exchange(replicas)
        return results | self.updated(replicas)

    def runs(self, user, function, values):
        """The results of a function of the module of a stage, by the names that the stage has for them."""
        names = user["runs"][function]
        made = self.call(user["module"], function, [values[name] for name in names["inputs"]])
        return dict(zip(names["outputs"], made, strict=True))

    def microbatch(self, replica, part):
        stages, message, kept = self.manifest["stages"], {}, []
        for number, stage in enumerate(stages):
            values = {**self.given, **self.known, **message,
                      **{name: self.rows(name, dim, part) for name, dim in stage["data"].items()}}
            values |= self.runs(stage, "forward", values)
            sent = self.manifest["messages"][number]["sent"] if number < len(stages) - 1 else []
            message = {value["name"]: values[value["name"]] for value in sent}
            assert all(list(message[value["name"]].shape) == value["shape"] for value in sent)
            kept.append(values)
        last = stages[-1]["runs"]["forward"]["outputs"]
        for name in self.results_of_last(last):
            self.totals[name] = kept[-1][name] + self.totals[name] if name in self.totals else kept[-1][name]
        back = {name: np.ones_like(kept[-1][name.removeprefix(GRAD)]) for name in stages[-1]["ones"]}
        for number in reversed(range(len(stages))):
            back = self.backward(number, replica, {**kept[number], **back})

    def results_of_last(self, outputs):
        wanted = {*self.manifest["results"]}
        if self.manifest["ending"]:
            wanted |= {*self.manifest["ending"]["runs"]["ending"]["inputs"]}
        return [name for name in outputs if name in wanted]

    def backward(self, number, replica, values):
        """The gradients that go to the stage before."""
        stage = self.manifest["stages"][number]
        made = {}
        for function in ("recompute", "backward", "backward_input", "backward_weights"):
            if function in stage["runs"]:
                made |= self.runs(stage, function, {**values, **made})
        sums = self.gradients[stage["position"], replica]
        for name, dtype in stage["gradients"].items():
            gradient = made[f"{GRAD}{name}"].astype(dtype)
            sums[name] = sums[name] + gradient if name in sums else gradient
        before = self.manifest["messages"][number - 1]["returned"] if number else []
        return {name: made[name] for name in before}

    def rows(self, name, dim, part):
        x = self.given[name]
        if dim is None:
            return x
        count = x.shape[dim] * self.manifest["rows"]["microbatch"] // self.manifest["rows"]["batch"]
        return np.take(x, range(part * count, (part + 1) * count), dim)

    def exchange(self, replicas):
        """Weights of several stages have the sum of all their gradients."""
        places = {name: sorted({self.manifest["stages"][number]["position"] for number in holders})
                  for name, holders in self.manifest["shared_weights"].items()}
        for replica in range(replicas):
            for name, positions in places.items():
                held = [self.gradients[position, replica] for position in positions]
                if all(name in each for each in held):
                    total = sum(each[name] for each in held)
                    for each in held:
                        each[name] = total

    def updated(self, replicas):
        found = {}
        for number, position in enumerate(self.manifest["positions"]):
            each = [self.gradients[number, replica] for replica in range(replicas)]
            if "update" not in position:
                found |= {f"{GRAD}{name}": sum(one[name] for one in each) for name in each[0]}
                continue
            update = position["update"]
            inputs = self.manifest["modules"][update["module"]]["functions"]["update"]["inputs"]
            values = {**self.given}
            for name, type in zip(update["runs"]["update"]["inputs"], inputs, strict=True):
                if name.startswith(GRAD):
                    values[name] = self.terms(number, name.removeprefix(GRAD), each, type)
            found |= self.runs(update, "update", values)
        return found

    def terms(self, position, weight, each, type):
        """The gradients of the replicas, with a dim for each axis over which the update sums them."""
        sizes = self.manifest["replicas"]
        own = self.own_terms(position, weight)
        x = np.stack([one[weight] for one in each]) if sizes else each[0][weight]
        x = x.reshape([*sizes.values(), *x.shape[bool(sizes):]])
        order = [*sizes, *own]
        for axis in [axis for axis in order if axis not in type["terms"]]:
            assert sizes.get(axis, 1) == 1
            x = x.squeeze(order.index(axis))
            order.remove(axis)
        return x.transpose([*map(order.index, type["terms"]), *range(len(order), x.ndim)])

    def own_terms(self, position, weight):
        for stage in self.manifest["stages"]:
            if stage["position"] == position and weight in stage["gradients"]:
                function = "backward" if "backward" in stage["runs"] else "backward_weights"
                number = stage["runs"][function]["outputs"].index(f"{GRAD}{weight}")
                output = self.manifest["modules"][stage["module"]]["functions"][function]["outputs"][number]
                return output.get("terms", [])
        return []


def main(folder):
    import xla_programs

    manifest = json.loads((folder / "pipeline.json").read_text())
    with np.load(folder / "inputs.npz") as found:
        given = dict(found)
    texts = {path.stem: path.read_text() for path in folder.glob("*.mlir")}
    calls = defaultdict(int)

    def call(module, function, arrays):
        calls[f"{module}.{function}"] += 1
        return xla_programs.run(texts[f"{module}.{function}"], arrays)

    results = Staged(manifest, call, given).run()
    assert {*calls} == {*texts}, "each function of each module is run"
    np.savez(folder / "outputs.npz", **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
