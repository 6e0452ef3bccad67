"""The dynamic program over slices and submeshes, beside every slicing that there is."""

import numpy as np
import pytest
from drawn import up_to
from hypothesis import given, strategies as st
from sliced import every_slicing

from parallelism.slicing import NoSlicingFits, Slices, best_slicing, best_slicings


@st.composite
def cases(draw):
    """Slices with few blocks, and what is asked of them.  Some slices cannot lie on some submeshes."""
    blocks, sizes = draw(st.integers(1, 5)), draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    shape = blocks, blocks + 1, len(sizes)
    seconds = rng.integers(1, 12, shape) if draw(st.booleans()) else rng.uniform(0, 3, shape)
    seconds = np.where(rng.random(shape) < draw(st.sampled_from([0, 0.2])), np.inf, seconds)
    slices = Slices(seconds, tuple(sizes), rng.integers(0, 9, shape), rng.integers(0, 5, shape))
    asked = {"devices": draw(st.integers(1, 8)), "microbatches": draw(st.integers(1, 6)),
             "most_stages": draw(st.integers(1, 5))}
    return slices, asked, draw(st.sampled_from([None, 4, 8, 12, 16, 20, 30]))


@pytest.mark.slow
@up_to(300, by_day=60)
@given(cases())
def test_it_finds_what_all_slicings_together_find(case):
    slices, asked, memory = case
    every = list(every_slicing(slices, **asked))
    fit = [each for each, nbytes in every if memory is None or nbytes <= memory]
    if not fit:
        with pytest.raises(NoSlicingFits) as raised:
            best_slicing(slices, memory_bytes=memory, **asked)
        least = min((nbytes for _, nbytes in every), default=None)
        assert raised.value.least_bytes == least
        assert ("the one that needs least" in str(raised.value)) == bool(every)
        return
    best = best_slicing(slices, memory_bytes=memory, **asked)
    assert best.seconds == pytest.approx(min(each.seconds for each in fit), rel=1e-12)
    assert best in fit
    several = best_slicings(slices, memory_bytes=memory, count=5, **asked)
    assert several[0].seconds == best.seconds and len(set(several)) == len(several) <= 5
    assert set(several) <= set(fit)
    assert [each.seconds for each in several] == sorted(each.seconds for each in several)
    # The best of each number of stages is among many.
    many = best_slicings(slices, memory_bytes=memory, count=10_000, **asked)
    for stages in {len(each.slices) for each in fit}:
        least = min(each.seconds for each in fit if len(each.slices) == stages)
        assert min(each.seconds for each in many if len(each.slices) == stages) == pytest.approx(least, rel=1e-12)


def test_a_slow_block_gets_the_larger_submesh():
    slices = Slices.of_blocks([[1.0, 0.6], [8.0, 4.1], [1.0, 0.6]], (1, 2))
    best = best_slicing(slices, devices=4, microbatches=16)
    assert best.slices == ((0, 0, 0), (1, 1, 1), (2, 2, 0)) and best.stage_seconds == (1.0, 4.1, 1.0)
    assert best.seconds == pytest.approx(6.1 + 15 * 4.1)
    # One microbatch has nobody to wait for: the sum alone counts.
    assert best_slicing(slices, devices=2, microbatches=1).slices == ((0, 2, 1),)


def test_earlier_stages_keep_more_microbatches():
    # Two stages on a device each: the first keeps two microbatches, so its blocks are fewer than the last one's.
    slices = Slices.of_blocks([[1.0]] * 6, (1,), [[0.0]] * 6, [[1.0]] * 6)
    free = best_slicing(slices, devices=2, microbatches=8)
    bound = best_slicing(slices, devices=2, microbatches=8, memory_bytes=4)
    assert free.slices == ((0, 2, 0), (3, 5, 0)) and bound.slices == ((0, 1, 0), (2, 5, 0))
    # A single microbatch is kept once, wherever the stage stands.
    assert best_slicing(slices, devices=2, microbatches=1, memory_bytes=3).slices == free.slices
    with pytest.raises(NoSlicingFits, match=r"with 3 B a device: .* in 2 stages, needs 4 B for blocks [02] to [15] on "
                                            r"1 device, which keep what [12] of the microbatches need"):
        best_slicing(slices, devices=2, microbatches=8, memory_bytes=3)


@pytest.mark.parametrize(("build", "message"), [
    (lambda: Slices(np.ones((2, 3)), (1,)), r"seconds must have the shape .* with 1 submeshes .*; got \(2, 3\)"),
    (lambda: Slices(np.ones((2, 3, 1)), (1,), np.ones((2, 3, 2))), r"held_bytes must have the shape"),
    (lambda: Slices(-np.ones((2, 3, 1)), (1,)), "seconds must be 0 or more; got -1.0"),
    (lambda: Slices(np.ones((2, 3, 1)), (0,)), "devices of a submesh must be an integer of at least 1, got 0"),
    (lambda: Slices.of_blocks([1.0, 2.0], (1,)), r"the shape \(blocks, submeshes\), got \(2,\)"),
    (lambda: best_slicing(Slices.of_blocks([[1.0]], (1,)), devices=0, microbatches=1), "devices must be .*, got 0"),
    (lambda: best_slicing(Slices.of_blocks([[1.0]], (1,)), devices=1, microbatches=2.0), "microbatches must be .* 2.0"),
    (lambda: best_slicing(Slices.of_blocks([[1.0]], (2,)), devices=3, microbatches=1),
     "no slicing has 1 block in at most 1 stage on exactly 3 devices: the submeshes have 2 devices"),
])
def test_what_cannot_be_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
