"""The layouts of a published grid: which rows there are, the order of their seconds, and the memory of its code."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.published_layouts import (
    Layout,
    Priced,
    Row,
    groups,
    held_by_code,
    held_by_norms,
    memory_told,
    order,
    priced,
    room,
    rows,
    seconds_told,
)
from parallelism.hardware import Hardware, on_stack, sized_hardware

A100 = sized_hardware("dgx-a100", 64)


def row(seconds=None, kernels="flash 1", **layout):
    given = {"tp": 1, "sp": 0, "pp": 1, "microbatch": 1, "again": 0, **layout}
    return Row("13B", 2048, kernels, Layout(**given), seconds)


def test_each_layout_of_a_model_and_its_kernels_stands_once():
    found = rows()
    assert len(found) == len({(each.model, each.sequence, each.kernels, each.layout) for each in found}) == 222
    assert sum(each.seconds is not None for each in found) == 108
    assert [len(group) for _, group in groups()] == [16, 29, 32, 32, 32, 32, 49]
    assert sum(len(group) for _, group in groups()) == len(found)


def test_the_order_gives_equal_numbers_their_mean_rank():
    assert order([1, 2, 3], [10, 30, 90]) == pytest.approx(1)
    assert order([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert order([1, 1, 2], [5, 6, 7]) == pytest.approx(3**0.5 / 2)


def test_such_code_holds_its_loss_and_what_its_norms_read():
    tokens, width, words = 8 * 2048, 5120, 128_000
    parameters = (40 * (4 * width**2 + 3 * width * 13824) + 2 * words * width) / 2
    layer = tokens * (16 * width + (8 * width + 6 * 13824) / 2)
    again = parameters * (4 + 12 / 32) + 40 * tokens * 2 * width + layer + 18 * tokens * words
    assert held_by_code(row(tp=2, microbatch=8, again=1)) == pytest.approx(again)
    kept, with_norms = (
        held_by_code(row(tp=2, microbatch=8, kernels=kernels)) for kernels in ("flash 2", "flash 2 + norms"))
    assert kept - with_norms == pytest.approx(40 * tokens * 8 * width)
    assert held_by_norms(row(tp=2, microbatch=8, kernels="flash 2 + norms")) == 0
    assert held_by_norms(row(tp=2, microbatch=8, kernels="flash 2")) == pytest.approx(kept - with_norms)
    assert held_by_norms(row(tp=2, sp=1, pp=2, microbatch=8)) == pytest.approx(2 * 20 * tokens * 8 * width / 2)
    assert held_by_norms(row(microbatch=8, again=1)) == pytest.approx(tokens * 8 * width)
    scores = held_by_code(row(tp=2, microbatch=8, kernels="torch")) - kept
    assert scores == pytest.approx(40 * tokens * 9 * 40 * 2048 / 2)


def test_under_sequence_parallelism_only_what_is_gathered_is_whole():
    whole, split = (held_by_code(row(tp=2, pp=2, sp=sp, kernels="flash 2")) for sp in (0, 1))
    assert whole - split == pytest.approx(2 * 20 * 2048 * (16 / 2 - 4) * 5120)


def test_the_first_choice_is_the_fastest_of_those_that_are_told_to_fit():
    group = [row(10.0), row(12.0, microbatch=2), row(None, microbatch=4), row(None, microbatch=8)]
    known = {each.layout: Priced(seconds, 1) for each, seconds in zip(group, (9.0, 8.0, 7.0, 6.0), strict=True)}
    fits = {each.layout: each.layout.microbatch < 8 for each in group}
    counted = Counter()
    told = memory_told(group, known, fits, counted)
    assert told.split() == ["2", "of", "2", "1", "of", "2", "ran", "out"]
    assert counted == {"fit": 2, "ran": 2, "do not fit": 1, "ran out": 2}
    fits[group[2].layout] = False
    assert memory_told(group, known, fits, counted).split()[-1] == "ran"
    assert seconds_told(group[:2], known).split() == ["-1.00", "20.0%", "-21.7%"]


def test_a_device_has_room_for_what_its_reserve_leaves():
    assert room(A100, Layout(1, 0, 1, 1, 0)) == pytest.approx((80e9 - 1.07e9 - 0.3e9) / 1.08)
    assert room(A100, Layout(2, 0, 2, 1, 0)) == pytest.approx((80e9 - 1.07e9 - 0.9e9) / 1.08)


@pytest.mark.slow
def test_a_search_says_of_the_layouts_what_a_simulation_says_and_their_memory_is_that_of_the_closed_form():
    group = [each for each in rows() if each.kernels == "flash 2 + norms" and each.model == "13B"]
    hardware: Hardware = on_stack(A100, "megatron-a100")
    known = priced(group, hardware)
    assert set(known) >= {each.layout for each in group}
    for each in group:
        if each.layout.pp == 2 and each.layout.microbatch < 4:  # where the loss does not count most
            assert known[each.layout].peak_bytes == pytest.approx(held_by_code(each), rel=0.04)
    first = seconds_told(group := [each for each in group if each.seconds], known)
    assert first.split() == ["0.90", "0.0%", "-17.2%"] and len(group) == 8
