"""Arenas, heaps, and values written into blocks."""

import gc
import re
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st

from vcluster.memory import LINE, PAGE, Arena, Heap, Layout, arena
from vcluster.memory.arena import CACHED_BYTES_LIMIT, LARGE_BYTES
from vcluster.memory.layout import WAKE
from vcluster.messages import encode_message
from vcluster.messages.encoding import HEADER_BYTES, decode, encode

REGION = 1 << 32


@pytest.fixture
def heap():
    arena = Arena(PAGE + REGION)
    yield Heap(arena, PAGE, REGION)
    arena.close_descriptor()


def test_blocks_do_not_overlap_and_are_aligned(heap):
    blocks = [(heap.allocate(n), n) for n in (1, 63, 64, 65, 1000, 4096, 4097, 100_000, 1 << 20)]
    for offset, nbytes in blocks:
        assert offset % (PAGE if nbytes >= PAGE else LINE) == 0
    ends = sorted((offset, offset + nbytes) for offset, nbytes in blocks)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_a_block_is_used_again_when_its_last_array_has_gone(heap):
    first = heap.empty((100, 100), np.dtype(np.float64))
    place = heap.arena.offset_of(first)
    view = first[3:].T
    del first
    assert heap.arena.offset_of(heap.empty((100, 100), np.dtype(np.float64))) != place
    del view
    gc.collect()
    assert heap.arena.offset_of(heap.empty((100, 100), np.dtype(np.float64))) == place


def test_a_lent_block_is_used_again_when_it_is_released(heap):
    released = memoryview(bytearray(8)).cast("q")
    place = heap.allocate(5000)
    heap.lend(place, released)
    assert heap.allocate(5000) != place
    released[0] = 1
    assert heap.allocate(5000) == place


def test_of_large_blocks_the_one_released_last_is_used_next(heap):
    released = [memoryview(bytearray(8)).cast("q") for _ in range(3)]
    places = []
    for word in released:
        places.append(heap.allocate(LARGE_BYTES))
        heap.lend(places[-1], word)
    for word in released[:2]:
        word[0] = 1
    assert heap.allocate(LARGE_BYTES) == places[1]
    released[2][0] = 1
    assert heap.allocate(LARGE_BYTES) == places[2]  # and not the first, which has long been free


def test_a_region_that_is_full_says_how_large_it_is():
    arena = Arena(4 * PAGE)
    with pytest.raises(MemoryError, match="999999 bytes"):
        Heap(arena, PAGE, 3 * PAGE).allocate(999_999)
    arena.close_descriptor()


def test_what_is_cached_beyond_the_limit_goes_back_to_the_system(heap, monkeypatch):
    limit = 16 << 20
    monkeypatch.setattr(arena, "CACHED_BYTES_LIMIT", limit)
    large = heap.empty((limit + (1 << 20),), np.dtype(np.uint8))
    large[:] = 1
    del large
    again = heap.empty((limit + (1 << 20),), np.dtype(np.uint8))
    assert not again.any()  # fresh pages: the old ones were given back


def test_what_was_freed_longest_ago_goes_back_first(heap):
    def use(size):
        block = heap.empty((size,), np.dtype(np.uint8))
        before = int(block[-1])
        block[-1] = 7
        return before

    often = 2 * LARGE_BYTES
    assert use(often) == 0
    for size in (CACHED_BYTES_LIMIT // 4, CACHED_BYTES_LIMIT // 4 * 3) * 2:
        assert use(size) == 0  # the other one was freed since, and both are too much
        assert use(often) == 7
    for _ in range(CACHED_BYTES_LIMIT // often):  # what is used again does not count twice
        assert use(often) == 7


def test_where_an_array_lies(heap):
    array = heap.empty((7, 3), np.dtype(np.int32))
    place = heap.arena.offset_of(array)
    array[...] = np.arange(21).reshape(7, 3)
    np.testing.assert_array_equal(heap.arena.array(place, (7, 3), np.int32), array)
    assert heap.arena.offset_of(np.zeros(3)) is None
    assert heap.empty((0, 5), np.dtype(np.int8)).shape == (0, 5)


def test_parts_of_the_layout_do_not_overlap():
    layout = Layout(3, 16 * PAGE)
    places = [
        (0, 2 * LINE),
        *((layout.word(e, WAKE), 4 * LINE) for e in range(4)),
        *((layout.status(r), 8 * PAGE) for r in range(3)),
        *((layout.held_word(a, b), 8) for a in range(4) for b in range(4)),
        *((layout.directory(e), 16 * 4096) for e in range(4)),
        *((layout.ring(a, b), PAGE) for a in range(4) for b in range(4)),
        *((layout.region(e), 16 * PAGE) for e in range(4)),
    ]
    places.sort()
    assert all(a + n <= b for (a, n), (b, _) in pairwise(places))
    assert places[-1][0] + places[-1][1] <= layout.nbytes


def through_memory(encoded):
    block = np.zeros(encoded.block_nbytes, np.uint8)
    encoded.write(block)
    return decode(block)


DTYPES = st.sampled_from(["?", "i1", "<i4", "<i8", "<u2", "<f2", "<f4", "<f8", "<c16", ">f8"])


@given(DTYPES, st.lists(st.integers(0, 4), max_size=4), st.booleans())
def test_any_array_arrives_as_it_was_sent(dtype, shape, fortran):
    array = np.arange(int(np.prod(shape, dtype=int))).reshape(shape).astype(dtype)
    array = np.asfortranarray(array) if fortran else array
    for sent in (array, array.T, {"a": [array, (array.T, 3)]}):
        encoded = encode_message(sent)
        arrived = through_memory(encoded)
        np.testing.assert_equal(arrived, sent)
    assert encode_message(array).nbytes == array.nbytes
    assert through_memory(encode_message(array)).dtype == array.dtype


def test_an_array_in_a_block_lies_there():
    block = np.zeros(encode_message(np.arange(5.0)).block_nbytes, np.uint8)
    encode_message(np.arange(5.0)).write(block)
    arrived = decode(block)
    arrived[2] = 99.0
    assert decode(block)[2] == 99.0
    assert not block[:HEADER_BYTES].any()


def test_functions_travel_with_the_arrays_they_close_over():
    weights = np.arange(10_000.0).reshape(100, 100)[:, ::2]
    encoded = encode(lambda x: weights @ x, "a function")
    assert encoded.nbytes == weights.nbytes
    np.testing.assert_array_equal(through_memory(encoded)(np.ones(50)), weights.sum(1))


@pytest.mark.parametrize("value", [
    [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), None],
    {"step": 3, "loss": (0.5, True, "mean", b"x"), 7: {}}, (), [[]], ([np.zeros((0, 2), "f2")],), [np.array(4, ">i4")],
], ids=str)
def test_few_plain_parts_need_no_pickler_of_ours(value, monkeypatch):
    monkeypatch.setattr("vcluster.messages.encoding.dump", None)
    np.testing.assert_equal(through_memory(encode(value, "a result")), value)


class Pair(NamedTuple):
    first: int
    second: int


@pytest.mark.parametrize("value", [
    [np.arange(12.0)[::3]], [np.array(["a", None], object)], [np.zeros(2, [("a", "i4")])], [np.float32(1.5)], [True] * 99,
    (Pair(1, 2),), {"kinds": (int, Pair)},
], ids=str)
def test_other_parts_travel_as_ever(value):
    arrived = through_memory(encode(value, "a result"))
    np.testing.assert_equal(arrived, value)
    assert [type(part) for part in arrived] == [type(part) for part in value]


def test_a_list_that_has_itself_in_it_arrives():
    value: list = [1]
    value.append(value)
    arrived = through_memory(encode(value, "a result"))
    assert arrived[0] == 1 and arrived[1] is arrived


def test_arrays_that_hold_no_numbers_are_refused_by_name():
    for wrong in (np.array(["a"]), np.array([object()]), np.zeros(2, [("a", "i4")])):
        with pytest.raises(TypeError, match=re.escape(str(wrong.dtype))):
            encode_message([np.ones(1), wrong])
