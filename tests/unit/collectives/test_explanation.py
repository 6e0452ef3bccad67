"""What `explain` shows: steps, values, results, and a picture that fits a terminal."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

from parallelism.algorithms import COLLECTIVES
from parallelism.algorithms.algorithms import algorithm, algorithms
from parallelism.algorithms.kinds import ROOTED
from parallelism.collectives import explain


def inputs(size, extent=6):
    return [np.arange(float(extent)) + 10 * rank for rank in range(size)]


def every_explanation(sizes=range(1, 10)):
    for size in sizes:
        for collective in COLLECTIVES:
            for name in algorithms(collective, size):
                pairs = [(p, (p + 1) % size) for p in range(size - 1)]
                yield explain(collective, algorithm=name, inputs=inputs(size), root=size // 2, pairs=pairs)


def wanted(collective, values, root, size):
    """The results by NumPy on all inputs."""
    total, cut = np.sum(values, axis=0), [np.array_split(value, size) for value in values]
    nothing: list[object] = [None] * size
    one = lambda value: [value if rank == root else None for rank in range(size)]
    return {
        "all_reduce": [total] * size, "all_gather": [np.concatenate(values)] * size,
        "reduce_scatter": np.array_split(total, size), "barrier": nothing,
        "all_to_all": [np.concatenate([blocks[rank] for blocks in cut]) for rank in range(size)],
        "broadcast": [values[root]] * size, "reduce": one(total), "gather": one(np.concatenate(values)),
        "scatter": cut[root], "all_scatter": [values] * size,
        "permute": [np.zeros(6), *values[:-1]],
    }[collective]


@pytest.mark.parametrize("sizes", [(1, 3, 4), pytest.param((2, 5, 6, 7, 8, 9), marks=pytest.mark.slow)], ids=str)
def test_every_collective_by_every_algorithm(sizes):
    for shown in every_explanation(sizes):
        plan, size = shown.algorithm, shown.algorithm.size
        for result, right in zip(shown.results, wanted(plan.collective, inputs(size), size // 2, size), strict=True):
            if right is None:
                assert result is None
            else:
                np.testing.assert_array_equal(np.asarray(result), np.asarray(right), strict=True)
        assert len(shown) == len(list(shown)) == len(plan.steps)
        assert tuple(len(step.messages) for step in shown) == tuple(map(len, plan.steps))
        assert sum(shown.bytes_sent) == sum(shown.bytes_received)
        assert all(len(line) <= 80 and line == line.rstrip() for line in str(shown).splitlines())
        assert plan.collective in repr(shown) and ("<table" in shown._repr_html_()) == (plan.collective != "barrier")


def test_bytes_are_the_closed_form_for_pieces_of_one_size():
    for size in range(1, 6):
        for collective in COLLECTIVES:
            for name in algorithms(collective, size):
                pairs = [(p, (p + 1) % size) for p in range(size)]
                shown = explain(collective, algorithm=name, inputs=inputs(size, 60), pairs=pairs)
                assert shown.bytes_received == shown.closed_form.bytes_received(shown.buffer_nbytes)
                assert shown.bytes_sent == shown.closed_form.bytes_sent(shown.buffer_nbytes)


def test_ring_over_4_step_by_step():
    shown = explain("all_reduce", algorithm="ring", inputs=[np.arange(4) + rank for rank in range(4)])
    assert len(shown) == 6 and shown.algorithm is algorithm("all_reduce", "ring", 4)
    first, last = shown[0], shown[-1]
    assert [(m.source, m.target, m.chunks, int(m.arrays[0][0]), m.reduce) for m in first.messages] == [
        (0, 1, (3,), 3, True), (1, 2, (0,), 1, True), (2, 3, (1,), 3, True), (3, 0, (2,), 5, True),
    ]
    assert [int(first.held[1][chunk][0]) for chunk in range(4)] == [1, 2, 3, 7]
    assert first.bytes_received == (8,) * 4 and last.bytes_received == (48,) * 4
    for rank in range(4):
        np.testing.assert_array_equal(np.concatenate([last.held[rank][chunk] for chunk in range(4)]), [6, 10, 14, 18])


RING_OVER_2 = """\
all_reduce, ring, over 2 ranks: each rank gets the sum of all. 2 steps. Combined
round the ring: piece j starts at the position after j and ends at j.

start    piece 0   piece 1
rank 0 | 1 2     | 3
rank 1 | 10 20   | 30

step 1   0 -> 1  [piece 1: 3]  sum
         1 -> 0  [piece 0: 10 20]  sum
         piece 0   piece 1
rank 0 | 11 22*  | 3
rank 1 | 10 20   | 33*
         so far 24 bytes received, by rank: 16 8

step 2   0 -> 1  [piece 0: 11 22]
         1 -> 0  [piece 1: 33]
         piece 0   piece 1
rank 0 | 11 22   | 33*
rank 1 | 11 22*  | 33
         so far 48 bytes received, 24 by each rank

result
rank 0 | 11 22 33
rank 1 | 11 22 33

48 bytes received, 24 by each rank.
4 messages sent, 2 by each rank.
Closed form: 2(g-1)/g S, with g = 2 and S = 24 bytes, is 24 by each rank."""


def test_the_picture():
    assert str(explain("all_reduce", algorithm="ring", inputs=[[1, 2, 3], [10, 20, 30]])) == RING_OVER_2


def test_the_film_shows_the_start_and_each_step_for_a_while_and_the_last_without_motion():
    film = explain("all_reduce", algorithm="ring", inputs=[[1, 2, 3], [10, 20, 30]]).to_svg()
    start, *steps = ElementTree.fromstring(film).findall("{http://www.w3.org/2000/svg}g")
    assert [frame.get("class") for frame in (start, *steps)] == ["frame", "frame", "frame last"]
    assert [frame.get("style") for frame in (start, *steps)] == [f"animation-delay:{t}s" for t in ("0", "1.8", "3.6")]
    words = [[text for text in frame.itertext() if text.strip()] for frame in (start, *steps)]
    assert words[0] == ["before the first step", "piece 0", "piece 1", "rank 0", "1 2", "3", "rank 1", "10 20", "30"]
    assert words[1][4:9] == ["11 22", "3", "rank 1", "10 20", "33"]
    assert words[1][-1] == "received so far: 24 bytes by all ranks"
    assert words[2][-3:] == [
        "0 -> 1  [piece 0: 11 22]", "1 -> 0  [piece 1: 33]", "received in all: 24 bytes by each rank"]
    assert ".frame{visibility:hidden}.last{visibility:visible}@media(prefers-reduced-motion:no-preference)" in film
    assert "seen 7.2s" in film and "25.000%" in film and "50.000%" in film     # of four turns the last frame has two
    assert "@keyframes" not in explain("all_reduce", inputs=[1]).to_svg()


def test_a_formula_for_equal_pieces_says_so_where_they_are_not():
    shown = explain("all_reduce", algorithm="ring", inputs=[np.ones(4)] * 3)
    assert "it supposes pieces of one size" in " ".join(str(shown).split())


@pytest.mark.parametrize(("op", "values", "right"), [
    ("mean", [1, 2, 6], 3.0), ("max", [1, 2, 6], 6), ("prod", [1, 2, 6], 12), ("sum", [True, True, False], 2),
    ("xor", [5, 1, 8], 12), ("avg", [1.0, 2.0, 6.0], 3.0), (np.minimum, [4, 2, 6], 2),
])
def test_operations(op, values, right):
    for name in algorithms("all_reduce", 3):
        for result in explain("all_reduce", algorithm=name, inputs=values, op=op).results:
            np.testing.assert_array_equal(result, np.asarray(right), strict=True)


def test_large_arrays_many_ranks_and_every_shape_fit_the_page():
    for values in (
        [np.arange(1000.0) * 1e5 + rank for rank in range(3)],
        [np.arange(24).reshape(2, 3, 4)] * 4,
        [np.float64(rank) for rank in range(5)],
        [np.ones((3, 0))] * 2,
        [np.arange(64) * (1 + 2j)] * 40,
        [np.arange(4) % 2 == 0] * 12,
    ):
        for collective in ("all_reduce", "all_gather", "broadcast", "all_scatter", "barrier"):
            drawn = str(explain(collective, inputs=values))
            assert max(map(len, drawn.splitlines())) <= 80
    assert "more ranks" in drawn or "more messages" in drawn or len(values) <= 24


def test_shift_uneven_all_to_all_and_other_dims():
    np.testing.assert_array_equal(np.concatenate(explain("shift", inputs=[[0], [1], [2]], by=2).results), [1, 2, 0])
    x = np.arange(6).reshape(2, 3)
    results = explain("all_gather", inputs=[x, x[:, :1]], dim=1).results
    np.testing.assert_array_equal(results[1], np.concatenate([x, x[:, :1]], 1))
    results = explain("all_to_all", inputs=[x, x + 10], split_dim=1, concat_dim=0, split_sizes=[1, 2]).results
    np.testing.assert_array_equal(results[1], [[1, 2], [4, 5], [11, 12], [14, 15]])
    results = explain("all_to_all", inputs=[[1, 2, 3], [4]], split_sizes=[[1, 2], [1, 0]]).results
    assert [list(result) for result in results] == [[1, 4], [2, 3]]


def test_inputs_are_copied_and_nothing_can_be_written():
    x = np.zeros(3)
    shown = explain("broadcast", inputs=[x, None], root=0)
    x[:] = 1
    assert shown.results[1].sum() == 0
    for array in (*shown.results, shown[0].messages[0].arrays[0], shown[0].held[1][0], shown.inputs[0]):
        assert not array.flags.writeable


@pytest.mark.parametrize(("collective", "options", "words"), [
    ("all_reduce", {"inputs": []}, "at least one rank"),
    ("all_reduce", {"inputs": [[1, 2], [1, 2, 3]]}, r"rank 0 has \(2,\), rank 1 has \(3,\)"),
    ("all_reduce", {"inputs": [[1, 2], [1.0, 2.0]]}, "rank 0 has int64, rank 1 has float64"),
    ("all_reduce", {"inputs": [1, None]}, "needs an array from rank 1, got None"),
    ("all_reduce", {"inputs": [1, 2], "algorithm": "rings"}, "no algorithm 'rings'.*direct, naive, ring"),
    ("all_reduce", {"inputs": [1, 2], "op": "summ"}, "summ"),
    ("all_gather", {"inputs": [np.ones((2, 3)), np.ones((2, 4))]}, r"more than dim 0: rank 0 has \(2, 3\)"),
    ("all_gather", {"inputs": [[1], [2]], "dim": 1}, "from -1 to 0, got 1"),
    ("scatter", {"inputs": [None, 5], "root": 1}, "0-d"),
    ("broadcast", {"inputs": [1, 2], "root": 2}, "from 0 to 1, got 2"),
    ("permute", {"inputs": [1, 2]}, "needs pairs"),
    ("all_to_all", {"inputs": [[1, 2], [3, 4]], "split_sizes": [[1, 1]]}, "need 2 lists, got 1"),
    ("gather_all", {"inputs": [1]}, "no collective 'gather_all'"),
])
def test_what_does_not_fit_is_refused_with_both_values(collective, options, words):
    with pytest.raises(ValueError, match=words):
        explain(collective, **options)


def test_arrays_of_objects_are_refused():
    with pytest.raises(TypeError, match="rank 0 has dtype object"):
        explain("all_gather", inputs=[np.array([None])])


def test_rooted_collectives_follow_the_root():
    for collective in ROOTED:
        for name in algorithms(collective, 5):
            shown = explain(collective, algorithm=name, inputs=inputs(5), root=3)
            for result, right in zip(shown.results, wanted(collective, inputs(5), 3, 5), strict=True):
                np.testing.assert_array_equal(result, right)


@pytest.mark.parametrize(("function", "name"), [(sum, "sum"), (np.sum, "sum"), (max, "max"), (np.mean, "mean"), (any, "or")])
def test_a_function_of_one_array_is_no_operation(function, name):
    with pytest.raises(ValueError, match=f"op must be a function of two arrays, and .* reduces one; write op='{name}'"):
        explain("all_reduce", inputs=inputs(3), op=function)     # sum(a, b) adds the numbers of a to b
    assert explain("all_reduce", inputs=inputs(3), op=np.add).results[0].tolist() == sum(inputs(3)).tolist()
