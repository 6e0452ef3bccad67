"""Failures of several ranks told in one text: what is equal once, what differs in words in a line."""

import pickle
from signal import SIGABRT, SIGKILL, SIGSEGV, SIGUSR2, SIGWINCH, SIGXCPU

import numpy as np
import pytest

from parallelism.collectives import mismatch
from parallelism.mesh import Mesh
from vcluster.code import (
    DeviceFailedError,
    Frame,
    OperationCancelled,
    describe_exception,
    ranks_in_words,
    where_cancelled,
)
from vcluster.memory import LastSeen
from vcluster.processes import Cancelled, Died, Failed
from vcluster.runs.outcome import error_of, memory_kills
from vcluster.testing.body import HostSide
from vcluster.testing.outcomes import failure_of
from vcluster.tracing import Recorder


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((), "no rank"), ((3,), "rank 3"), ((0, 1), "ranks 0 and 1"), ((1, 2, 3), "ranks 1-3"),
        ((0, 2, 3, 4, 5, 7, 8), "ranks 0, 2-5, 7 and 8"), ((4, 3, 2), "ranks 4, 3 and 2"), ((-1,), "the host"),
        ((-1, 0, 1, 2), "ranks 0-2 and the host"),
    ],
)
def test_ranks_in_words(ranks, words):
    assert ranks_in_words(ranks) == words


def failed(raises, *args):
    with pytest.raises(Exception) as caught:
        raises(*args)
    return Failed(describe_exception(caught.value), b"")


def scale(rank):
    weights, text, device = np.arange(2.0 * rank), "x" * 100, object()
    later = [1, 2]
    raise ValueError(
        weights, rank, text, device,
        later,
    )


def test_the_variables_on_the_line_that_failed_are_told_with_their_values():
    error = told({rank: failed(scale, rank) for rank in (3, 4)})
    first, second = str(error).splitlines()[-2:]
    rest = f"text = '{'x' * 56}..., later = list of 2"
    assert first == f"with weights = float64[6] [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], rank = 3, {rest}"
    assert second.startswith("at the same line on rank 4: ValueError: (array([0., 1., ")
    assert second.endswith(f", with weights = float64[8], rank = 4, {rest}")


class Rude:
    def __repr__(self):
        raise AssertionError("nobody asked")


def test_only_what_is_harmless_is_shown():
    def kernel():
        nothing, number, words, items = None, np.float32(2), {"a": 1}, (1, Rude())
        raise ValueError(nothing, number, words, items, Rude(), unbound)  # noqa: F821

    with pytest.raises(NameError) as caught:
        kernel()
    values = describe_exception(caught.value).values
    assert values == "nothing = None, number = 2.0, words = dict of 1, items = tuple of 2"

    def bare():
        raise KeyError

    with pytest.raises(KeyError) as caught:
        bare()
    assert describe_exception(caught.value).values == ""
    assert describe_exception(ValueError("never raised")).values == ""


def test_at_most_some_ranks_are_told_in_their_own_words():
    lines = str(told({rank: failed(divide, rank) for rank in range(10, 60)})).splitlines()
    assert lines[-2] == "at the same line on ranks 42 and 43: ValueError: half of 42, with even = 42"
    assert lines[-1] == "at the same line on ranks 44-59: ValueError, with other messages"


def divide(rank):
    if rank == 3:
        raise KeyError("elsewhere")
    even = rank // 2 * 2
    raise ValueError(f"half of {even}")


def told(replies):
    return error_of(replies, lambda rank: LastSeen(), lambda: None)


def test_equal_failures_are_told_once_and_those_in_other_words_in_a_line():
    error = told({rank: failed(divide, rank) for rank in (1, 0, 2, 3, 4, 5)})
    text = str(error)
    assert text.startswith("rank 0 raised ValueError\n\non ranks 0 and 1:\nTraceback (most recent call last):\n")
    assert "\nValueError: half of 0\nwith even = 0\nat the same line on rank 2: ValueError: half of 2, with " in text
    assert "at the same line on ranks 4 and 5: ValueError: half of 4, with even = 4\n\non rank 3:\nTraceback" in text
    assert text.count("Traceback") == 2
    assert text.endswith("KeyError: 'elsewhere'")
    assert error.ranks == (0, 1, 2, 3, 4, 5)
    assert str(error.__cause__) == "half of 0"


def compare(rank):
    raise AssertionError(f"in words of the user's\nassert {rank} == 0\n +  where 0 = zero()")


def test_ranks_that_failed_at_the_same_line_are_told_by_what_differs():
    error = told({rank: failed(compare, rank) for rank in (1, 2, 3)})
    raised, sections = failure_of(error, Mesh(tp=4), compare.__code__, HostSide())
    assert raised.__notes__ == [
        "on rank 1 of Mesh(tp=4)", "at the same line on rank 2: assert 2 == 0",
        "at the same line on rank 3: assert 3 == 0",
    ]
    assert sections == []


def test_failures_in_the_same_words_everywhere_have_one_heading():
    text = str(told({rank: failed(divide, 3) for rank in range(5)}))
    assert text.startswith("ranks 0-4 raised KeyError\n\non ranks 0-4:\nTraceback")
    assert text.count("Traceback") == 1


def death(code, killed_for_memory=None, seen=None):
    return error_of({2: Died(code, 77)}, lambda rank: seen or LastSeen(), lambda: killed_for_memory)


@pytest.mark.parametrize(
    ("code", "killed_for_memory", "words"),
    [
        (-SIGKILL, None, "was ended by SIGKILL (from outside, or by the system for lack of memory)"),
        (-SIGKILL, True, "was ended by SIGKILL (by the system, which has killed a process for lack of memory)"),
        (-SIGKILL, False, "was ended by SIGKILL (from outside)"),
        (-SIGSEGV, None, "was ended by SIGSEGV (a crash inside compiled code)"),
        (-SIGABRT, None, "was ended by SIGABRT (aborted by compiled code: a failed check, or an allocation refused)"),
        (-SIGUSR2, None, "was ended by SIGUSR2 (sent from outside, or by the kernel or a library that it calls)"),
        (-SIGXCPU, None, "was ended by SIGXCPU (the CPU time limit was reached, see ulimit -t)"),
        (-SIGWINCH, None, "was ended by SIGWINCH"),
        (-99, None, "was ended by signal 99"),
        (3, None, "ended with exit code 3 (os._exit in the kernel or in a library it calls?)"),
    ],
)
def test_a_death_is_told_with_what_usually_causes_it(code, killed_for_memory, words):
    error = death(code, killed_for_memory)
    assert str(error) == f"the process of rank 2 (pid 77) {words}"
    assert (error.exitcode, error.ranks) == (code if code > 0 else None, (2,))


def test_a_death_is_told_with_what_was_called_last():
    error = death(-11, None, LastSeen("recv", "kernel.py:7", "recv(from rank 1, tag 0)"))
    assert str(error).endswith(" compiled code) while it waited in recv(from rank 1, tag 0) at kernel.py:7")
    assert (error.operation, error.locations, error.signal) == ("recv", ("kernel.py:7",), "SIGSEGV")
    error = death(1, None, LastSeen("barrier", "kernel.py:9"))
    assert str(error).endswith("; its last call was barrier at kernel.py:9")


def test_deaths_are_told_a_line_each():
    replies = {2: Died(-SIGKILL, 12), 0: Died(3, 10), 1: Cancelled(b"")}
    error = error_of(replies, lambda rank: LastSeen("send", f"k.py:{rank}"), lambda: False)
    assert str(error).splitlines() == [
        "the process of rank 0 (pid 10) ended with exit code 3 (os._exit in the kernel or in a library it calls?); "
        "its last call was send at k.py:0",
        "the process of rank 2 (pid 12) was ended by SIGKILL (from outside); its last call was send at k.py:2",
    ]
    assert isinstance(error, DeviceFailedError)
    assert (error.ranks, error.exitcode, error.signal) == ((0, 2), 3, None)


def record_of(*events):
    """The record of a device with these events: keywords of each, after its kind and name."""
    recorder = Recorder()
    recorder.start()
    for kind, name, location, values in events:
        recorder.add(kind, name, location, **values)
    return pickle.dumps(recorder.stop())


def differs(calls):
    raise mismatch("barrier", calls, "what they call")


def test_a_member_that_was_stopped_before_it_saw_that_calls_differ_stands_with_the_line_of_its_call():
    calls = {0: "barrier()", 1: "all_reduce(float64[])", 3: "barrier()", 4: "all_gather(float64[1])"}
    group, others = {"group": (0, 1, 3, 4)}, {"group": (1, 2)}
    ended = group | {"wall_start_seconds": 0.5, "wall_duration_seconds": 0.25}
    record = record_of(
        ("collective", "all_reduce", "k.py:1", ended), ("collective", "all_reduce", "k.py:2", others),
        ("send", "message", "k.py:3", {"peer": 2}), ("collective", "all_reduce", "k.py:4", group),
        ("collective", "all_reduce", "k.py:5", group))
    recorded = Cancelled(record, (Frame("k.py", 9, 9, 0, 1, "kernel"),))
    repeats = Cancelled(record_of(("collective", "all_gather", "k.py:6", ended)), (Frame("k.py", 8, 8, 0, 1, "kernel"),))
    error = told({3: failed(differs, calls), 1: recorded, 2: Cancelled(record_of()), 0: failed(differs, calls), 4: repeats})
    line = differs.__code__.co_firstlineno + 1
    assert str(error).splitlines()[1:] == [
        f"  ranks 0 and 3 called barrier() at {__file__}:{line}",
        "  rank 1 called all_reduce(float64[]) at k.py:4",
        "  rank 4 called all_gather(float64[1]) at k.py:8",
    ]
    assert error.locations == (f"{__file__}:{line}", "k.py:4", f"{__file__}:{line}", "k.py:8")


def test_a_member_that_fails_otherwise_stands_with_the_line_of_its_call():
    calls = {0: "barrier()", 1: "all_reduce(float64[])"}
    record = record_of(("collective", "all_reduce", "k.py:4", {"group": (0, 1)}))
    replies = {0: failed(differs, calls), 1: failed(divide, 4)._replace(record=record)}
    assert told(replies).locations[1:] == ("k.py:4",)


def test_the_count_of_kills_for_want_of_memory_is_a_number_or_not_known():
    count = memory_kills()
    assert count is None or count >= 0


def cancelled_in_a_handler():
    try:
        raise OperationCancelled
    finally:
        int("x")


def test_where_a_kernel_was_is_known_whatever_it_made_of_its_cancellation():
    with pytest.raises(ValueError, match="invalid literal") as caught:
        cancelled_in_a_handler()
    first = cancelled_in_a_handler.__code__.co_firstlineno
    (frame,) = where_cancelled(caught.value)
    assert (frame.function, frame.line) == ("cancelled_in_a_handler", first + 2)
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("x")
    assert where_cancelled(caught.value) == ()


OURS = describe_exception.__code__.co_filename


@pytest.fixture
def send():
    """A function as if it stood in a file of ours."""
    namespace = {}
    text = "def send(x):\n    try: int(x)\n    except ValueError as error: raise TypeError('refused') from error"
    exec(compile(text, OURS, "exec"), namespace)
    return namespace["send"]


def test_what_our_own_code_caught_and_tells_in_its_words_is_not_told_twice(send):
    with pytest.raises(TypeError) as caught:
        send("x")
    assert describe_exception(caught.value).cause is None

    def kernel():
        try:
            int("x")
        except ValueError as error:
            raise TypeError("refused") from error

    with pytest.raises(TypeError) as caught:
        kernel()
    assert describe_exception(caught.value).cause.type_name == "ValueError"


def test_a_failure_without_a_line_of_the_users_is_told_at_the_programs_first(send):
    def program():
        pass

    with pytest.raises(TypeError) as caught:
        send("x")
    bare = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # without this test's own frame
    assert describe_exception(bare).location == f"{OURS}:3"
    assert describe_exception(bare, program.__code__).location == f"{__file__}:{program.__code__.co_firstlineno}"
