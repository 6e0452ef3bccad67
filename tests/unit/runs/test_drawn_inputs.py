"""Random inputs of a program: no number grows from layer to layer, and indices are everywhere in their range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parallelism import ir
from parallelism.ir import TensorType
from vcluster.runs.drawn import drawn


def floats(*shape: int) -> TensorType:
    return TensorType("f32", shape)


def ints(*shape: int, dtype: str = "i32") -> TensorType:
    return TensorType(dtype, shape)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ["rows", "columns", "einsum", "turned"])
def test_sixty_products_of_a_width_neither_overflow_nor_vanish(how: str) -> None:
    def product(x: Any, w: Any) -> Any:
        if how == "columns":
            return w @ x
        return np.einsum("bi,io->bo", x, w) if how == "einsum" else x @ (w.T if how == "turned" else w)

    def deep(p: Any, x: Any) -> Any:
        for layer in range(60):
            x = product(x, p[f"w{layer}"])
        return x

    width, rows = 200, 7
    x = floats(width, rows) if how == "columns" else floats(rows, width)
    program = ir.record(deep, {f"w{layer}": floats(width, width) for layer in range(60)}, x)
    for trained in ([], [value.name for value in program.inputs if value.name != "x"]):
        arrays = drawn(program, 0, trained)
        assert 0.7 < arrays["x"].std() < 1.3 or (how == "columns" and not trained)
        assert 0.9 < arrays["p.w3"].std() * np.sqrt(width) < 1.1
        result, = ir.interpret(program, arrays).outputs
        assert 0.01 < result.std() < 100


LOOKUPS = {
    "take": lambda ids, t: t[ids],
    "reshaped": lambda ids, t: t[ids.reshape(-1)],
    "second dim": lambda ids, t: np.take(t, ids, axis=1),
    "along": lambda ids, t: np.take_along_axis(t, ids[:, None] if ids.ndim == 1 else ids, axis=0),
    "one hot": lambda ids, t: ir.apply("one_hot", ids, extent=11, dtype=np.dtype("f4")) @ t,
    "converted": lambda ids, t: t[ids.astype("int64")],
    "clipped": lambda ids, t: t[np.minimum(ids, 6)],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["i8", "ui8", "i32", "i64"])
@pytest.mark.parametrize("name", LOOKUPS)
def test_indices_are_in_range_and_everywhere(name: str, dtype: str) -> None:
    table = floats(40, 11) if name == "second dim" else floats(11, 5 if name == "along" else 6)
    shape = (40, 5) if name == "along" else (40,)
    program = ir.record(LOOKUPS[name], ints(*shape, dtype=dtype), table)
    arrays = drawn(program, 3)
    found = np.unique(arrays["ids"])
    assert found.min() == 0 and found.max() == 10 and len(found) == 11
    ir.interpret(program, arrays)


def test_classes_of_a_loss_are_among_its_logits() -> None:
    program = ir.record(lambda logits, classes: ir.apply("softmax_cross_entropy", logits, classes, rows=50),
                        floats(50, 7), ints(50))
    assert set(drawn(program, 0)["classes"].tolist()) == set(range(7))


def test_other_integers_are_small_and_masks_have_no_empty_row() -> None:
    program = ir.record(lambda n, mask, x: np.where(mask, x, -np.inf).max(axis=1) + n,
                        ints(50), TensorType("bool", (50, 3)), floats(50, 3))
    arrays = drawn(program, 0)
    assert set(arrays["n"].tolist()) == {0, 1}
    assert arrays["mask"].any(axis=1).all() and not arrays["mask"].all(axis=1).any()
    assert np.isfinite(ir.interpret(program, arrays).outputs[0]).all()


def test_a_seed_says_all() -> None:
    program = ir.record(lambda x, w: x @ w, floats(3, 4), floats(4, 5))
    first, again, other = drawn(program, 0), drawn(program, 0), drawn(program, 1)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["x"], other["x"])


def test_one_row_of_a_table_and_empty_arrays_are_drawn() -> None:
    program = ir.record(lambda ids, t: t[ids], ints(4), floats(1, 3))
    assert drawn(program, 0)["ids"].tolist() == [0] * 4
    program = ir.record(lambda x, w: x @ w, floats(0, 4), floats(4, 0))
    assert drawn(program, 0)["w"].shape == (4, 0)
