"""Every algorithm, run in one process by `chunks`, against NumPy on the global arrays."""

from __future__ import annotations

import numpy as np
import pytest
from drawn import up_to
from hypothesis import given, settings, strategies as st

from parallelism.algorithms import Algorithm
from parallelism.algorithms.algorithms import algorithm, algorithms
from parallelism.algorithms.kinds import REDUCING
from parallelism.collectives import buffers as chunks
from parallelism.mesh import split_sizes

SIZES = range(1, 10)


def run(plan: Algorithm, values, *, dim=0, concat_dim=None, sizes=None, op=np.add):
    """What every position ends with, and the bytes that each received."""
    everyone = range(plan.size)
    held = [
        chunks.start(plan, p, values[p], dim=dim, sizes=None if sizes is None else sizes[p]) for p in everyone
    ]
    received = [0] * plan.size
    for step in range(len(plan.steps)):
        messages = [
            (t.target, chunks.Message(t.source, t.chunks, chunks.outgoing(held[p], t), t.reduce))
            for p in everyone for t in plan.sends(p)[step]
        ]
        messages.reverse()                                      # the order of arrival must not matter
        for target, message in messages:
            received[target] += sum(array.nbytes for array in message.arrays)
        held = [chunks.arrive(held[p], [m for target, m in messages if target == p], p, op) for p in everyone]
    joined = dim if concat_dim is None else concat_dim
    return [chunks.finish(plan, p, held[p], values[p], dim=joined) for p in everyone], tuple(received)


def plans(collective, size, roots=(0,)):
    """Every algorithm over so many positions, from each of the roots that there are."""
    return [
        algorithm(collective, name, size, root=root)
        for name in algorithms(collective, size) for root in roots if root < size
    ]


def ident(plan: Algorithm) -> str:
    return f"{plan.collective}-{plan.name}-{plan.size}-{plan.root}"


def whole_numbers(shape, position):
    """Different everywhere, and sums of them exact."""
    return np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape) * (position + 1) + 10 * position


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
cut_shapes = st.lists(st.integers(0, 11), min_size=1, max_size=3).map(tuple)


def check(plan, results, expected):
    """Each position ended with just this array, or with none."""
    for position, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        if wanted is None:
            assert result is None, ident(plan)
        else:
            where = f"{ident(plan)}, position {position}"
            np.testing.assert_array_equal(result, wanted, err_msg=where, strict=True)


def check_bytes(plan, values, received, **cut):
    given_shapes = [None if value is None else value.shape for value in values]
    assert received == plan.bytes_received(chunks.chunk_nbytes(plan, given_shapes, 8, **cut)), ident(plan)


def at_root(plan, value):
    return [value if position == plan.root else None for position in range(plan.size)]


over_every_size = pytest.mark.parametrize("size", [
    size if size in (1, 2, 3, 5, 8) else pytest.param(size, marks=pytest.mark.slow) for size in SIZES])


@pytest.mark.sampled(6)
@over_every_size
@settings(max_examples=12, deadline=None)
@given(shape=shapes)
def test_all_reduce(size, shape):
    values = [whole_numbers(shape, p) for p in range(size)]
    for plan in plans("all_reduce", size):
        results, received = run(plan, values)
        check(plan, results, [np.sum(values, axis=0)] * size)
        check_bytes(plan, values, received)


@pytest.mark.sampled(3)
@over_every_size
@up_to(8)
@given(shape=shapes)
def test_reduce_gives_the_root_alone_the_sum(size, shape):
    values = [whole_numbers(shape, p) for p in range(size)]
    for plan in plans("reduce", size, roots=(0, 1, 2, 6)):
        results, received = run(plan, values)
        check(plan, results, at_root(plan, np.sum(values, axis=0)))
        check_bytes(plan, values, received)


@pytest.mark.sampled(3)
@over_every_size
@up_to(8)
@given(shape=shapes)
def test_broadcast_brings_shape_and_dtype_along(size, shape):
    value = whole_numbers(shape, 3)
    for plan in plans("broadcast", size, roots=(0, 1, 2, 6)):
        values = at_root(plan, value)
        results, received = run(plan, values)
        check(plan, results, [value] * size)
        check_bytes(plan, values, received)


@pytest.mark.sampled(3)
@over_every_size
@up_to(12)
@given(data=st.data(), shape=cut_shapes)
def test_gathers_join_uneven_shards_in_order(size, data, shape):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    values = []
    for position, extent in enumerate(data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))):
        own = list(shape)
        own[dim] = extent
        values.append(whole_numbers(own, position))
    joined = np.concatenate(values, axis=dim)
    for plan in [*plans("all_gather", size), *plans("gather", size, roots=(0, 1, 5))]:
        results, received = run(plan, values, dim=dim)
        check(plan, results, at_root(plan, joined) if plan.collective == "gather" else [joined] * size)
        check_bytes(plan, values, received)


@over_every_size
def test_scalars_are_stacked(size):
    for plan in plans("all_gather", size):
        results, _ = run(plan, [np.array(3.0 * p) for p in range(size)])
        check(plan, results, [3.0 * np.arange(size)] * size)


def draw_sizes(data, extent, parts):
    """Any way to cut an extent, or none said."""
    if data.draw(st.booleans()):
        return None
    cuts = sorted(data.draw(st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1)))
    return tuple(int(n) for n in np.diff([0, *cuts, extent]))


def blocks(x, sizes, dim, parts):
    return np.split(x, np.cumsum(sizes if sizes is not None else split_sizes(x.shape[dim], (parts,)))[:-1], axis=dim)


@over_every_size
@up_to(12)
@given(data=st.data(), shape=cut_shapes)
def test_reduce_scatter(size, data, shape):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    sizes = draw_sizes(data, shape[dim], size)
    values = [whole_numbers(shape, p) for p in range(size)]
    for plan in plans("reduce_scatter", size):
        results, received = run(plan, values, dim=dim, sizes=[sizes] * size)
        check(plan, results, blocks(np.sum(values, axis=0), sizes, dim, size))
        check_bytes(plan, values, received, dim=dim, sizes=sizes)


@over_every_size
@up_to(12)
@given(data=st.data(), shape=cut_shapes)
def test_scatter(size, data, shape):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    sizes = draw_sizes(data, shape[dim], size)
    for plan in plans("scatter", size, roots=(0, 1, 5)):
        values = at_root(plan, whole_numbers(shape, plan.root))
        results, received = run(plan, values, dim=dim, sizes=[sizes] * size)
        check(plan, results, blocks(values[plan.root], sizes, dim, size))
        check_bytes(plan, values, received, dim=dim, sizes=sizes)


@over_every_size
@up_to(12)
@given(data=st.data(), extent=st.integers(0, 11))
def test_all_to_all_between_two_dims(size, data, extent):
    sizes = draw_sizes(data, extent, size)
    extents = [data.draw(st.integers(0, 4)) for _ in range(size)]       # along concat_dim each has its own
    values = [whole_numbers((extent, own), p) for p, own in enumerate(extents)]
    cut = [blocks(value, sizes, 0, size) for value in values]
    for plan in plans("all_to_all", size):
        results, received = run(plan, values, dim=0, concat_dim=1, sizes=[sizes] * size)
        check(plan, results, [np.concatenate(pieces, 1) for pieces in zip(*cut, strict=True)])
        check_bytes(plan, values, received, sizes=sizes)


@pytest.mark.sampled(3)
@over_every_size
@up_to(12)
@given(data=st.data())
def test_all_to_all_with_sizes_of_ones_own(size, data):
    sizes = [data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)) for _ in range(size)]
    values = [whole_numbers((sum(cut), 2), p) for p, cut in enumerate(sizes)]
    cut = [blocks(value, size_of_parts, 0, size) for value, size_of_parts in zip(values, sizes, strict=True)]
    for plan in plans("all_to_all", size):
        results, received = run(plan, values, sizes=sizes)
        check(plan, results, [np.concatenate(pieces) for pieces in zip(*cut, strict=True)])
        expected = plan.bytes_received(chunks.all_to_all_nbytes([v.shape for v in values], 8, 0, sizes))
        assert received == expected, ident(plan)


@over_every_size
def test_all_scatter_keeps_everybodys_shape(size):
    values = [whole_numbers((p, 2)[: p % 3], p) for p in range(size)]
    for plan in plans("all_scatter", size):
        results, received = run(plan, values)
        for result in results:
            check(plan, result, values)
        check_bytes(plan, values, received)


@up_to(60)
@given(data=st.data(), size=st.integers(1, 9))
def test_permute_gives_the_sources_array_or_zeros_like_ones_own(data, size):
    sources = data.draw(st.permutations(range(size)))
    pairs = list(zip(sources, data.draw(st.permutations(range(size))), strict=True))[: data.draw(st.integers(0, size))]
    plan = algorithm("permute", None, size, pairs=pairs)
    values = [whole_numbers((p + 1, 2), p) for p in range(size)]
    results, received = run(plan, values)
    came = {target: source for source, target in pairs}
    for position, result in enumerate(results):
        wanted = values[came[position]] if position in came else np.zeros_like(values[position])
        np.testing.assert_array_equal(result, wanted, strict=True)
    check_bytes(plan, values, received)


@over_every_size
def test_everybody_has_heard_of_everybody_after_a_barrier(size):
    for plan in plans("barrier", size):
        heard = [{p} for p in range(size)]
        for step in plan.steps:
            heard = [heard[p].union(*(heard[t.source] for t in step if t.target == p)) for p in range(size)]
        assert all(known == set(range(size)) for known in heard), ident(plan)
        assert run(plan, [None] * size) == ([None] * size, (0,) * size), ident(plan)


class Written:
    """A value that writes down how it was combined: associative, and not commutative."""

    def __init__(self, text):
        self.text = text


def in_parentheses(a, b):
    out = np.empty(a.shape, object)
    for i in np.ndindex(a.shape):
        out[i] = Written(f"({a[i].text} {b[i].text})")
    return out


def written(plan, position):
    extent = plan.size if plan.collective == "reduce_scatter" else 1
    x = np.empty(extent, object)
    x[:] = [Written(str(position))] * extent
    return x


def balanced(positions):
    """((0 1) (2 3)) 4: the largest power of two on the left."""
    if len(positions) == 1:
        return str(positions[0])
    left = 1 << ((len(positions) - 1).bit_length() - 1)
    return f"({balanced(positions[:left])} {balanced(positions[left:])})"


def in_turn(positions):
    return positions[0] if len(positions) == 1 else f"({in_turn(positions[:-1])} {positions[-1]})"


@over_every_size
@pytest.mark.parametrize("collective", REDUCING)
def test_terms_are_combined_in_the_order_that_the_algorithm_tells(collective, size):
    for plan in plans(collective, size, roots=(0, 1, 3) if collective == "reduce" else (0,)):
        results, _ = run(plan, [written(plan, p) for p in range(size)], op=in_parentheses)
        texts = {value.text for result in results if result is not None for value in result.flat}
        if "balanced tree" in plan.order:
            assert texts == {balanced(list(range(size)))}, ident(plan)
        elif plan.order == "in group order":
            assert texts == {str(in_turn(list(range(size))))}, ident(plan)
        else:
            assert plan.name == "ring"
            for text in texts:                                  # every position exactly once
                assert sorted(text.replace("(", "").replace(")", "").split()) == [str(p) for p in range(size)]


@over_every_size
def test_everybody_has_the_same_bits(size):
    rng = np.random.default_rng(size)
    values = [rng.standard_normal(13).astype(np.float32) * 10.0**p for p in range(size)]
    values = [value.astype(np.float32) for value in values]
    for plan in plans("all_reduce", size):
        results, _ = run(plan, values)
        assert len({result.tobytes() for result in results}) == 1, ident(plan)
        total = np.sum(values, axis=0, dtype=np.float64)
        np.testing.assert_allclose(results[0], total, rtol=1e-4, err_msg=ident(plan))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_trees_have_the_same_bits_among_each_other(size):
    values = [np.random.default_rng(p).standard_normal(11) for p in range(size)]
    names = ("recursive_doubling", "halving_doubling", "tree")
    assert len({run(algorithm("all_reduce", name, size), values)[0][0].tobytes() for name in names}) == 1


@pytest.mark.parametrize("name", algorithms("all_reduce", 4))
def test_inputs_stay_untouched(name):
    values = [whole_numbers((5, 3), p).T for p in range(4)]     # not contiguous either
    for value in values:
        value.flags.writeable = False
    results, _ = run(algorithm("all_reduce", name, 4), values)
    np.testing.assert_array_equal(results[3], np.sum(values, axis=0), strict=True)


@pytest.mark.parametrize(("collective", "x", "options", "words"), [
    ("scatter", np.array(1.0), {}, "scatter splits its array along a dim, and a 0-d one has none"),
    ("reduce_scatter", np.array(1.0), {}, "0-d"),
    ("all_to_all", np.array(1.0), {}, "0-d"),
    ("scatter", np.ones((2, 3)), {"dim": 2}, r"of 2 dims has dims -2 to 1, got 2"),
    ("all_to_all", np.ones(5), {"sizes": (1, 2, 1)}, r"3 split_sizes that add up to 5, .* dim 0; got \[1, 2, 1\]"),
    ("all_to_all", np.ones(5), {"sizes": (4, 1)}, r"got \[4, 1\]"),
    ("all_to_all", np.ones(5), {"sizes": (6, -1, 0)}, r"got \[6, -1, 0\]"),
    ("all_reduce", None, {}, "all_reduce needs an array at position 0, got None"),
])
def test_what_cannot_be_cut_is_refused(collective, x, options, words):
    with pytest.raises(ValueError, match=words):
        chunks.start(algorithm(collective, None, 3), 0, x, **options)
