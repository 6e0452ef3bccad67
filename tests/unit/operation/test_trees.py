"""Trees of values: taken apart, put together again, and encoded as messages."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
from profiled import profiled

from parallelism.operation.trees import leaf_types, leaves, rebuild
from vcluster.messages.encoding import decode_alone, encode_message

Pair = namedtuple("Pair", "left right")
TREE = {"a": [1, (2.0, True)], "b": Pair((), np.float32(3)), "c": OrderedDict(d=4, e=[5j])}


def calls_of(function, *arguments):
    """How many functions a call enters."""
    entered = []
    with profiled(lambda frame, event, argument: entered.append(event) if event in ("call", "c_call") else None):
        function(*arguments)
    return len(entered)


def test_a_tree_is_rebuilt_from_its_leaves():
    assert leaves(TREE) == [1, 2.0, True, np.float32(3), 4, 5j]
    assert leaf_types(TREE) == {int, float, bool, np.float32, complex}
    assert rebuild(TREE, iter("uvwxyz")) == {
        "a": ["u", ("v", "w")], "b": Pair((), "x"), "c": OrderedDict(d="y", e=["z"])}
    assert isinstance(rebuild(TREE, leaves(TREE))["b"], Pair)
    assert leaves(7) == [7]
    assert leaf_types([]) == leaf_types({"a": ()}) == set()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [list, tuple, lambda numbers: [1, [*numbers]], lambda numbers: {"a": tuple(numbers)}])
@pytest.mark.parametrize("function", [leaves, leaf_types, lambda value: rebuild(value, leaves(value)), encode_message])
def test_long_lists_of_numbers_take_no_call_for_each_number(function, make):
    assert calls_of(function, make([1.5] * 3000)) == calls_of(function, make([1.5] * 3))


def test_arrays_inside_a_message_are_sent_contiguous():
    sent = {"a": [1, np.arange(6.0).reshape(2, 3).T], "b": "text"}
    got = decode_alone(encode_message(sent).alone())
    np.testing.assert_array_equal(got["a"][1], sent["a"][1])
    assert got["a"][1].flags.c_contiguous
    assert (got["a"][0], got["b"]) == (1, "text")
    with pytest.raises(TypeError, match="takes numbers"):
        encode_message([1.0, np.array([None])])
