"""Sentences that misled students who tried lessons 2 and 6, and what the checks say now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vcluster.check import check_collective, check_formula, check_schedule, limited


def ring(device: Any, x: Any, *, place: Callable[[int, int], int], back: int = 1) -> Any:
    """A ring all-reduce that puts the complete pieces at a ``place``, and sends them ``back`` ranks on."""
    size, rank = device.size, device.rank
    pieces = [piece.copy() for piece in np.array_split(x, size)]
    for step in range(size - 1):
        device.send(pieces[(rank - step) % size], (rank + 1) % size)
        pieces[(rank - step - 1) % size] += device.recv((rank - 1) % size)
    for step in range(size - 1):
        device.send(pieces[(rank + 1 - step) % size], (rank + back) % size)
        pieces[place(rank, step) % size] = device.recv((rank - back) % size)
    return np.concatenate(pieces)


@pytest.mark.usefixtures("four_ranks_alone")
@pytest.mark.parametrize("place", [lambda rank, step: rank - step - 1, lambda rank, step: rank + 1 - step])
def test_a_complete_piece_at_a_wrong_place_is_not_a_wrong_send(place: Callable[[int, int], int]) -> None:
    answer = check_collective("all_reduce", lambda device, x: ring(device, x, place=place), algorithm="ring", hop=1,
                              sends_wait=False)
    assert "arrives on rank 0, complete, and is not put at place" in answer.likely


@pytest.mark.usefixtures("four_ranks_alone")
def test_neighbours_at_another_distance_are_named() -> None:
    def gather(device: Any, x: Any) -> Any:
        pieces, passing = {device.rank: x}, x
        for step in range(1, device.size):
            device.send(passing, (device.rank + 2) % device.size)
            passing = device.recv((device.rank - 2) % device.size)
            pieces[(device.rank - step) % device.size] = passing
        return np.concatenate([pieces[rank] for rank in range(device.size)])

    assert "each rank sends 2 places on, and its neighbour is rank + 1" in check_collective(
        "all_gather", gather, algorithm="ring", hop=1, sends_wait=False).likely
    assert "ne half goes round the other way" in check_collective("all_reduce", lambda device, x: ring(
        device, x, place=lambda rank, step: rank - step, back=-1), algorithm="ring", hop=1, sends_wait=False).likely


@pytest.mark.usefixtures("four_ranks_alone")
def test_what_is_not_sent_is_said_to_be_not_sent() -> None:
    assert check_collective("all_gather", lambda device, x: x).likely == \
        "nothing is sent: each rank has its own array only"
    assert check_collective("all_reduce", lambda device, x: np.sum(x) + 0 * device.rank).likely == \
        "one number is returned, and an array should be: np.sum needs axis=0"


def forwards(microbatches: int) -> list[str]:
    return [f"F{k}" for k in range(microbatches)]


@pytest.mark.parametrize(("mine", "likely"), [
    (lambda rank, p, m: [f"B{k}" for k in range(m)] + forwards(m), "with GPipe all forwards come first"),
    (lambda rank, p, m: forwards(m + 1) + [f"B{k}" for k in range(m)], "a loop runs a step too far"),
    (lambda rank, p, m: ["F0"] * m + [f"B{k}" for k in range(m)], "does not change in the loop"),
    (lambda rank, p, m: [f"{kind}{k}" for k in range(m) for kind in "FB"], "a backward follows each forward"),
])
def test_gpipe_is_told_in_the_words_of_gpipe(mine: Callable[..., list[str]], likely: str) -> None:
    answer = check_schedule(mine, like="gpipe")
    assert not answer and likely in answer.likely
    assert "warm-up" not in str(answer) and "steady" not in str(answer)


def test_the_answer_of_gpipe_does_not_tell_that_of_the_next_exercise() -> None:
    answer = check_schedule(lambda rank, p, m: forwards(m) + [f"B{k}" for k in range(m)], like="gpipe")
    assert answer and "1f1b" not in str(answer)


def test_a_schedule_that_is_stuck_says_whose_action_is_needed() -> None:
    def mine(rank: int, stages: int, microbatches: int) -> list[str]:
        ahead = min(rank + 1, microbatches)
        return [*forwards(ahead), *(f"{kind}{k + ahead * (kind == 'F')}" for k in range(microbatches) for kind in "BF"
                                    if kind == "B" or k + ahead < microbatches)]

    answer = check_schedule(mine, like="1f1b")
    assert "its B0 needs 1B0" in str(answer) and "your schedule" in str(answer)


def endless(*_: int) -> Any:
    count = 0
    while count < 1:
        pass


@pytest.mark.parametrize("check", [
    lambda: check_schedule(endless), lambda: check_formula(endless, lambda n: n, [(1,)])])
def test_a_function_that_never_ends_is_stopped(check: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "SECONDS", 0.05)
    answer = check()
    assert "does not come to an end" in str(answer) and "a loop that never ends" in answer.likely


@pytest.mark.usefixtures("four_ranks_alone")
def test_a_function_of_other_arguments_has_no_line_of_the_check() -> None:
    def mine() -> None:
        pass

    answer = check_collective("all_reduce", mine)
    assert "takes 0 positional arguments but 2 were given" in answer.sentence
    assert not answer.details and "called as mine(device, x)" in answer.likely
    inside = check_collective("all_reduce", lambda device, x: mine(x))              # type: ignore[call-arg]
    assert "mine(x))" in inside.details[0] and not inside.likely


@pytest.mark.parametrize(("result", "said", "likely"), [
    ("3", "'3', and should return a number", "the function returns a text of a number"), ([3], "[3], and should", ""),
    (None, "None, and should", "the function returns nothing: a return is missing")])
def test_a_formula_returns_a_number(result: Any, said: str, likely: str) -> None:
    answer = check_formula(lambda n: result, lambda n: n, [(3,)])
    assert f"(3) returns {said}" in answer.sentence and answer.likely == likely
    with pytest.raises(ValueError, match="needs at least one case, got none"):
        check_formula(lambda n: n, lambda n: n, [])
    with pytest.raises(TypeError, match=r"each case must be a tuple of arguments, such as \(3,\); got 3"):
        check_formula(lambda n: n, lambda n: n, [3])                                # type: ignore[list-item]


def test_what_a_formula_raises_has_its_line() -> None:
    answer = check_formula(lambda n: undefined, lambda n: n, [(1,)])                            # noqa: F821
    assert "raised NameError" in answer.sentence and "undefined" in answer.details[0]
    assert "1 of 1 cases differs" in str(check_formula(lambda n: 0, lambda n: n, [(1,)]))


def test_what_is_raised_without_words_ends_the_sentence() -> None:
    def leaves(device: Any, x: Any) -> Any:
        raise SystemExit

    assert check_collective("all_reduce", leaves).sentence.endswith("ranks 0-3 raised SystemExit")
