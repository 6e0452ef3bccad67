"""Mixtures of experts without dispatch: every token reaches all experts, and gates add what they make."""

from __future__ import annotations

import numpy as np

from parallelism import ir

FORMS = {
    "in two": ("btd,edf->ebtf", "ebtf,efd->ebtd", "bte,ebtd->btd"),
    "rows first": ("btd,edf->btef", "btef,efd->bted", "bte,bted->btd"),
    "in one": ("btd,edf->btef", "bte,btef,efd->btd", None),
    "another order": ("btd,dfe->ebtf", "ebtf,fde->btde", "bte,btde->btd"),
}
"""The einsums up, down and together, by name."""
SHAPES = {"e": 4, "d": 6, "f": 8}


def gated(form, rows, layers=1):
    """The program of the loss."""
    up, down, together = FORMS[form]

    def loss(p, x, y):
        for i in range(layers):
            with ir.region(f"moe.{i}"):
                gates = ir.apply("softmax", x @ p[f"router{i}"], axis=2)
                h = np.maximum(np.einsum(up, x, p[f"up{i}"]), 0)
                if together is None:
                    x = x + np.einsum(down, gates, h, p[f"down{i}"])
                else:
                    x = x + np.einsum(together, gates, np.einsum(down, h, p[f"down{i}"]))
        return np.mean((x - y) ** 2)

    types = {}
    for i in range(layers):
        for name, text in (("up", up), ("down", down)):
            letters = text.split("->")[0].split(",")[-1]
            types[f"{name}{i}"] = ir.TensorType("f64", tuple(SHAPES[each] for each in letters))
        types[f"router{i}"] = ir.TensorType("f64", (6, 4))
    batch = ir.TensorType("f64", (rows, 3, 6))
    return ir.record(loss, types, batch, batch, name="gated")
