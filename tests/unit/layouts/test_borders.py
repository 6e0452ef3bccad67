"""What is resharded where a value leaves one region for another: which value, by which steps, how many bytes."""

from __future__ import annotations

import numpy as np
import pytest
from localized_runs import run_everywhere
from transformed import assert_trained, interpreted, trained, transformer

from parallelism import Mesh, ir
from parallelism.layouts import annotate, borders, localize
from parallelism.transforms import SGD, Strategy, TensorParallel, train_step

T = ir.TensorType


def two_regions(x, w):
    with ir.region("enter.0"):
        a = np.tanh(x)
        a = a + a
    with ir.region("inner.part.deep"):
        b = a @ w
    with ir.region("inner.other"):
        return np.sum(np.exp(b))


def function(rows=8, inner=12):
    return ir.record(two_regions, T("f8", (rows, inner)), T("f8", (inner, 5)))


def test_a_border_says_what_is_moved_and_how():
    localized = localize(annotate(function(), {"x": "[a, None]", "2": "[None, a]"}), Mesh(a=4))
    found = borders(localized)
    row, = found.rows
    assert (str(row), row.value.name, row.steps) == ("enter.0 -> inner", "1", ("all_gather a",))
    assert (row.before.short(), row.after.short()) == ("[a, None]", "[None, None]")
    assert row.bytes_received == found.bytes_received == 8 * 8 * 12 * 3 // 4
    assert str(found).splitlines() == [
        "received  count  value  from -> to",
        "   576 B      1  %1     enter.0 -> inner",
        "                        [a, None] -> [None, None]: all_gather a",
        "a device receives at most 576 B at borders"]
    inner, = borders(localized, ["inner.part", "inner.part.d*", "e*"]).rows
    assert (inner.source, inner.target) == ("enter", "inner.part.deep")


def test_what_does_not_cross_is_no_border():
    laid = annotate(function(), {"x": "[a, None]"})
    assert str(borders(localize(laid, Mesh(a=4)))) == "no value is resharded between regions"
    inside = annotate(function(), {"x": "[a, None]", "1": "[None, a]", "3": "[a, None]"})     # after its own product
    localized = localize(inside, Mesh(a=2))
    assert sum(localized.received(0)) > 0
    assert {(row.source, row.target) for row in borders(localized).rows} <= {("enter.0", "inner")}
    assert borders(localized, ["nothing"]).rows == ()


def test_the_most_that_a_device_receives_counts():
    localized = localize(annotate(function(5, 7), {"x": "[a, None]", "2": "[None, a]"}), Mesh(a=3))
    row, = borders(localized).rows
    assert row.bytes_received == 8 * 7 * (5 - 1)        # ranks have 2, 2 and 1 rows


def test_symbols_have_no_bytes():
    n, = ir.symbols("n")
    localized = localize(annotate(function(), {"x": "[a, None]", "2": "[None, a]"}), {"a": n})
    with pytest.raises(ValueError, match="axis 'a' has n devices: a mesh needs a number"):
        borders(localized)


NESTED = "dp=2 tp@block.*=2 tp:x@embedding,head=2 tp:y@block.1.feed_forward=2 sp sp:x sp:y"


@pytest.mark.slow
def test_nested_strategies_meet_at_borders_that_are_found():
    alone = train_step(transformer(layers=2, sequence=8, vocabulary=12).function(4), SGD(0.1))
    strategy, mesh = Strategy.parse_on_mesh(NESTED)
    step = strategy(alone)
    localized = localize(step, mesh)
    laid = {value.name: value.layout.short() for value in step.inputs if value.layout}
    assert (laid["p.tokens"], laid["p.0.up"], laid["p.1.up"], laid["p.1.qkv"]) == (
        "[x, None]", "[None, tp]", "[None, y]", "[None, tp]")
    patterns = [pattern for each in strategy.transforms if isinstance(each, TensorParallel) for pattern in each.regions]
    rows = borders(localized, patterns).rows
    ends = {(row.source, row.target) for row in rows}
    assert ("gradient.block.0", "gradient.embedding") in ends and ("gradient.block.1", "gradient.block.0") in ends
    assert ("gradient.block.1.feed_forward", "gradient.block.1") in ends
    whole = 8 * 4 // 2 * 8 * 16         # bytes of the activations of a replica
    for row in rows:
        kinds = [step.split()[0] for step in row.steps]
        assert row.bytes_received == whole // 2 * len(kinds), row     # half of it comes from the others, or is theirs
    assert_trained(
        trained(step, lambda inputs: run_everywhere(localized, inputs), steps=1), interpreted(alone, steps=1))
