"""The text of a mismatch: one line for each different call."""

from parallelism.operation import CollectiveMismatchError

CALLS = {0: "barrier()", 1: "barrier()", 2: "barrier()", 3: "all_reduce(float64[4])"}


def lines_at(locations):
    return str(CollectiveMismatchError("they differ", calls=CALLS).at(locations)).splitlines()[1:]


def test_a_rank_that_could_not_say_its_line_stands_with_those_that_called_the_same():
    assert lines_at({1: "k.py:5", 2: "k.py:5", 3: "k.py:9"}) == [
        "  ranks 0-2 called barrier() at k.py:5", "  rank 3 called all_reduce(float64[4]) at k.py:9"]


def test_it_stands_alone_if_they_called_it_at_different_lines():
    assert lines_at({1: "k.py:5", 2: "k.py:6"}) == [
        "  rank 0 called barrier()", "  rank 1 called barrier() at k.py:5", "  rank 2 called barrier() at k.py:6",
        "  rank 3 called all_reduce(float64[4])"]
