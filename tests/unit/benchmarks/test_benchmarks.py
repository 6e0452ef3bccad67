"""The benchmarks' words, answers, statistics and tables.  Nothing is timed here, and no process is started."""

from __future__ import annotations

import itertools
import json
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from benchmarks import command
from benchmarks.cases import (
    COLLECTIVES,
    OPERATIONS,
    STREAM_MESSAGES,
    Array,
    Case,
    Times,
    Trial,
    WrongAnswerError,
    receive_stream,
    seconds_from_first_start,
    seconds_of,
    timed_rounds,
)
from benchmarks.plan import Plan
from benchmarks.products import PRODUCTS
from benchmarks.results import Results, write_json
from benchmarks.suites import SUITES
from benchmarks.summary import Summary
from benchmarks.systems import SystemFailedError, take_turns
from benchmarks.tables import nbytes_text, rate_text, ratio_text, seconds_text, table
from vcluster.cli.command_line import serve

MIB = 1 << 20


# -- words -------------------------------------------------------------------------------------------------------------


def plan(text: str) -> Plan:
    return command.plan_of(command._parser().parse(text.split()))


def test_the_words_become_a_plan():
    full = plan("")
    assert full == Plan(passes=5, operations=COLLECTIVES)
    assert plan("--quick").passes == 2
    asked = plan("run peers --devices 8,2,8 --sizes 16MiB,8,64KiB --operations Barrier,all-reduce --passes 3")
    assert asked.devices == (2, 8)
    assert asked.sizes == (8, 64 << 10, 16 << 20)
    assert asked.operations == ("barrier", "all_reduce")
    assert asked.passes == 3


def test_what_is_not_said_is_the_suites_own_choice():
    assert plan("").devices_or((2, 4, 8), (4,)) == (2, 4, 8)
    assert plan("--quick").devices_or((2, 4, 8), (4,)) == (4,)
    assert plan("--quick --devices 3").devices_or((2, 4, 8), (4,)) == (3,)
    assert plan("--sizes 12").sizes_or((8,), (8,)) == (12,)
    assert plan("").rounds(8) > plan("").rounds(MIB) > plan("").rounds(64 * MIB) >= 1


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("12B", 12), ("64KiB", 65536), ("16 mib", 1 << 24), ("1GiB", 1 << 30)]
)
def test_sizes_are_read_in_binary_units(text, nbytes):
    assert command.nbytes_of(text) == nbytes


@pytest.mark.parametrize("text", ["", "x", "-8", "7", "0", "2", "64KB", "1.5MiB", "2GiB"])
def test_sizes_that_are_none_are_refused_with_their_text(text):
    with pytest.raises(ArgumentTypeError, match=f"got '{text}'"):
        command.nbytes_of(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("colectives", "SUITE: there is no 'colectives'; did you mean collectives?"),
        ("--quik", "there is no option --quik; did you mean --quick?"),
        ("--devices 1", "--devices needs numbers from 2 to 256, got 1"),
        ("--devices 4,x", "--devices: needs a whole number of at least 1, got 'x'"),
        ("--sizes 8,7", "--sizes: needs sizes from 4 B to 1 GiB, multiples of 4 B, got '7'"),
        ("--operations all_redcue", "--operations: there is no 'all_redcue'; did you mean all_reduce?"),
        ("--passes 0", "--passes: needs a whole number from 1 to 1000, got 0"),
        ("--json /nowhere/at/all.json", "/nowhere/at/all.json cannot be written: No such file or directory"),
        ("--peers nothing", "nothing does not run"),
    ],
)
def test_wrong_words_are_one_line_and_status_2(monkeypatch, capsys, words, said):
    def missing(python: str) -> dict[str, str]:
        raise ValueError(f"{python} does not run")

    monkeypatch.setattr(command, "missing", missing)
    assert serve(command.PROGRAM, command.main, words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"{command.PROGRAM}: {said}\n"


def test_the_list_has_a_line_for_each_suite(capsys):
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(SUITES)
    assert list(SUITES) == [
        "startup", "run", "collectives", "loops", "cliffs", "messages", "checks", "limits", "step", "block", "products",
        "idle", "tracing", "simulate", "plan", "mpi", "peers",
    ]
    assert max(map(len, lines)) <= 80


# -- answers -----------------------------------------------------------------------------------------------------------


def oracle(operation: str, inputs: list[Array]) -> list[Array]:
    """What each rank must get, by NumPy on everybody's input."""
    size = len(inputs)
    if operation == "all_reduce":
        return [np.sum(inputs, axis=0)] * size
    if operation == "all_gather":
        return [np.concatenate(inputs)] * size
    if operation == "reduce_scatter":
        return list(np.split(np.sum(inputs, axis=0), size))
    if operation == "all_to_all":
        pieces = [np.split(x, size) for x in inputs]
        return [np.concatenate([pieces[source][rank] for source in range(size)]) for rank in range(size)]
    return [inputs[0]] * size


SIZES = [(1, 4), (2, 8), (3, 8), (3, 7000), (4, 4), (5, 4 * 70_001)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("operation", "size", "nbytes"),
    [
        (operation, size, nbytes)
        for operation, (size, nbytes) in itertools.product(OPERATIONS, SIZES)
        if operation != "barrier" and (operation in COLLECTIVES or size >= 2)  # a message has two ends
    ],
)
def test_a_trial_accepts_numpys_answer_and_no_other(operation, size, nbytes):
    trials = [Trial(Case(operation, nbytes), rank, size) for rank in range(size)]
    asked = {"round_trip": [0], "stream": [1]}.get(operation, range(size))
    for rank, right in enumerate(oracle(operation, [trial.x for trial in trials])):
        trial = trials[rank]
        trial.check(right)
        if rank not in asked:
            continue
        assert trial.out.shape == right.shape
        trial.spoil()
        with pytest.raises(WrongAnswerError, match=rf"on rank {rank} of {size}: element 0 must be .*, got -1\.0"):
            trial.check(trial.out)
        for place in {0, right.size // 2, right.size - 1}:
            wrong = right.copy()
            wrong[place] += 1
            with pytest.raises(WrongAnswerError, match=f"element {place} must be"):
                trial.check(wrong)
        with pytest.raises(WrongAnswerError, match=f"{right.size} elements were expected, {right.size + 1} came"):
            trial.check(np.append(right, 0))


def test_the_inputs_of_ranks_differ_so_that_an_answer_tells_who_gave_what():
    first, second = (Trial(Case("all_to_all", 40), rank, 2) for rank in range(2))
    np.testing.assert_array_equal(first.x, np.arange(10))
    np.testing.assert_array_equal(second.x, np.arange(10) + 64)
    first.load()
    np.testing.assert_array_equal(first.out, first.x)


@pytest.mark.parametrize(("operation", "given"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 4)])
def test_a_buffer_smaller_than_the_group_has_an_element_for_each_rank_where_it_is_dealt_out(operation, given):
    assert Trial(Case(operation, 8), 0, 4).x.size == given


def test_cases_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"the operation of a case is one of all_reduce, .*, got 'gather'"):
        Case("gather", 8)
    with pytest.raises(ValueError, match="the memory of a case is one of private, shared, got 'device'"):
        Case("all_reduce", 8, "device")
    with pytest.raises(ValueError, match="a case of all_reduce has at least 4 bytes, got 3"):
        Case("all_reduce", 3)
    assert Case("barrier", 0).nbytes == 0


def test_each_round_is_spoiled_then_the_call_stands_between_barriers_and_the_first_is_not_counted():
    trial = Trial(Case("broadcast", 12), 0, 2)
    log: list[str] = []

    def call() -> Array:
        log.append("spoiled" if np.all(trial.out == -1) else "stale")
        np.copyto(trial.out, trial.x)
        return trial.out

    times = timed_rounds(trial, 3, lambda: log.append("barrier"), call)
    assert log == ["barrier", "barrier", "spoiled", "barrier"] * 4
    assert len(times) == 3
    moments = list(itertools.chain.from_iterable(times))
    assert moments == sorted(moments)


def test_a_round_with_a_wrong_answer_ends_the_timing():
    trial = Trial(Case("broadcast", 12), 0, 2)
    with pytest.raises(WrongAnswerError, match="broadcast of 12 bytes"):
        timed_rounds(trial, 3, lambda: None, lambda: trial.out)


def test_a_stream_looks_into_every_message():
    good = Trial(Case("stream", 4 * 3000), 1, 2)
    right = Trial(Case("stream", 4 * 3000), 0, 2).x
    messages = [right.copy() for _ in range(STREAM_MESSAGES)]
    good.check(receive_stream(iter(messages).__next__))
    messages[7][-1] = 0
    with pytest.raises(WrongAnswerError, match="message 7 of a stream"):
        receive_stream(iter(messages).__next__)


# -- statistics --------------------------------------------------------------------------------------------------------


def test_a_collective_takes_from_the_last_start_to_the_last_end():
    times: list[Times] = [[(0.0, 4.0), (10.0, 11.0)], [(1.0, 3.0), (9.0, 12.5)], [(0.5, 3.5), (9.5, 12.0)]]
    assert seconds_of("all_reduce", times) == [3.0, 2.5]
    assert seconds_from_first_start("all_reduce", times) == [4.0, 3.5]
    assert seconds_of("broadcast", times) == [4.0, 3.5]
    assert seconds_of("round_trip", times) == [4.0, 1.0] == seconds_from_first_start("round_trip", times)
    assert seconds_of("stream", times) == [3.0 / STREAM_MESSAGES, 2.5 / STREAM_MESSAGES]


moments = st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(lambda pair: (float(pair[0]), float(sum(pair))))


@given(st.lists(st.lists(moments, min_size=2, max_size=2), min_size=1, max_size=5), st.sampled_from(COLLECTIVES))
def test_the_figure_never_exceeds_its_upper_bound(times, operation):
    for figure, bound in zip(
        seconds_of(operation, times), seconds_from_first_start(operation, times), strict=True
    ):
        assert figure <= bound


def test_a_summary_has_the_inclusive_quartiles():
    assert Summary.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Summary(3.0, 2.0, 4.0, 1.0, 5.0, 5, 3.0, 5.0)
    assert Summary.of([1.0, 2.0]) == Summary(1.5, 1.25, 1.75, 1.0, 2.0, 2, 1.5, 2.0)
    assert Summary.of([7.0]) == Summary(7.0, 7.0, 7.0, 7.0, 7.0, 1, 7.0, 7.0)
    assert Summary.of([float(number) for number in range(1, 201)]).p99 == 198.0
    assert Summary.of([5.0, 1.0, 2.0, 4.0, 3.0]).spread == pytest.approx(2 / 3)
    assert Summary.of([0.0]).spread == 0.0
    with pytest.raises(ValueError, match="at least one figure"):
        Summary.of([])


@given(st.lists(st.integers(-1000, 1000).map(float), min_size=1, max_size=20), st.randoms())
def test_a_summary_is_in_order_whatever_the_order_of_the_figures(figures, random):
    summary = Summary.of(figures)
    points = [summary.minimum, summary.low_quartile, summary.median, summary.high_quartile, summary.maximum]
    assert points == sorted(points)
    random.shuffle(figures)
    assert Summary.of(figures) == summary


# -- turns -------------------------------------------------------------------------------------------------------------


class Pretended:
    """A system whose rounds take ``seconds``, and that fails at its ``fails``-th case."""

    devices = 2

    def __init__(self, name: str, seconds: float, log: list[str], fails: int = -1, unable: Sequence[str] = ()) -> None:
        self.name, self._seconds, self._log, self._unable = name, seconds, log, unable
        self._left = fails

    def supports(self, case: Case) -> bool:
        return case.operation not in self._unable

    def rounds(self, case: Case, count: int) -> list[Times]:
        self._log.append(f"{self.name} {case.operation}")
        if self._left == 0:
            raise SystemFailedError("out of breath")
        self._left -= 1
        return [[(0.0, self._seconds)] * count, [(0.0, self._seconds / 2)] * count]

    def close(self) -> None:
        pass


CASES = [Case("all_reduce", 8), Case("barrier", 0)]


def test_systems_take_turns_case_by_case_and_pass_by_pass():
    log: list[str] = []
    results = Results()
    systems = [Pretended("a", 1.0, log), Pretended("b", 2.0, log, unable=["barrier"])]
    take_turns("suite", systems, CASES, Plan(passes=2), results, lambda text: None)
    assert log == ["a all_reduce", "b all_reduce", "a barrier"] * 2
    assert [(m.system, m.operation, m.seconds.median, m.seconds.rounds) for m in results.of("suite")] == [
        ("a", "all_reduce", 1.0, 60), ("b", "all_reduce", 2.0, 60), ("a", "barrier", 1.0, 60)
    ]
    assert results.skipped == {}


def test_a_system_that_fails_is_left_out_from_there_on_and_keeps_what_it_had_measured():
    log: list[str] = []
    results = Results()
    systems = [Pretended("a", 1.0, log), Pretended("b", 2.0, log, fails=1)]
    take_turns("suite", systems, CASES, Plan(passes=2), results, lambda text: None)
    assert log == ["a all_reduce", "b all_reduce", "a barrier", "b barrier", "a all_reduce", "a barrier"]
    assert results.skipped == {"b on 2": "out of breath"}
    assert [m.operation for m in results.of("suite") if m.system == "b"] == ["all_reduce"]


# -- tables and files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "value", "text"),
    [
        (seconds_text, 1.234e-5, "12.3 us"), (seconds_text, 9.996e-4, "1.00 ms"), (seconds_text, 9.99e-4, "999 us"),
        (seconds_text, 2.0, "2.00 s"), (seconds_text, 0.0, "0.00 us"), (seconds_text, -0.05, "-50.0 ms"),
        (nbytes_text, 8, "8 B"), (nbytes_text, 1536, "1.5 KiB"), (nbytes_text, 64 * MIB, "64 MiB"),
        (nbytes_text, 1 << 31, "2 GiB"),
        (ratio_text, 0.534, "0.53"), (ratio_text, 12.34, "12.3"), (ratio_text, 312.0, "312"),
        (rate_text, 13.04e9, "13.0 GB/s"),
    ],
)  # fmt: skip
def test_figures_have_three_digits_and_a_unit(make: Callable[[float], str], value, text):
    assert make(value) == text


def test_a_table_has_its_labels_on_the_left_and_figures_on_the_right():
    assert table(("op", "8 B"), [("barrier", ""), ("x", "12.3 us")]).split("\n") == [
        "  op           8 B", "  barrier", "  x        12.3 us",
    ]
    with pytest.raises(ValueError, match="each row has the header's 2 cells, got 1"):
        table(("op", "8 B"), [("x",)])


def pretended_results() -> Results:
    """Long figures in every cell of every suite's report."""
    results = Results(skipped={"jax": "jax is not installed"}, versions={"python": "3.11"})
    sizes = (8, 4096, 1 << 16, MIB, 1 << 24, 1 << 26)

    def cases() -> Iterator[tuple[str, int]]:
        yield from itertools.product(COLLECTIVES[:-1], sizes)
        yield ("barrier", 0)

    for devices, (operation, nbytes), system in itertools.product((2, 64), cases(), ("vcluster", "library", "mpi4py")):
        results.add("mpi", system, operation, [0.1234, 0.5678], devices=devices, nbytes=nbytes)
    for devices in (2, 64):
        for what in ("cold", "cold minus numpy", "warm", "first_run", "shutdown", "script"):
            results.add("startup", "vcluster", what, [0.1234, 0.5678], devices=devices)
        for what in ("arguments", "results", "both", "copy"):
            results.add("run", "vcluster", what, [0.1234, 0.5678], devices=devices, nbytes=64 * MIB)
        results.add("run", "vcluster", "empty", [0.1234], devices=devices)
        for memory, (operation, nbytes) in itertools.product(("private", "shared"), cases()):
            options = {"devices": devices, "nbytes": nbytes, "memory": memory}
            results.add("collectives", "vcluster", operation, [0.1234], from_first_start=[0.2], **options)
            results.add("peers", "vcluster", operation, [0.1], **options)
            if memory == "private":
                results.add("peers", "mpich", operation, [0.4], **options)
        for operation, system in itertools.product(("all_reduce", "broadcast", "barrier"), ("vcluster", "mpich")):
            results.add("loops", system, operation, [0.1234, 0.5678], devices=devices, nbytes=8)
        for what in (
            "an array of 1", "a np.float64", "100,000 numbers", "contiguous", "NumPy's copy", "transposed", "barrier",
        ):
            results.add("cliffs", "vcluster", what, [0.1234, 0.5678], devices=devices)
    results.additions = {"loops": (0.5, 0.7)}
    for what in ("import numpy", "import vcluster", "import VirtualCluster"):
        results.add("startup", "vcluster", what, [0.1234])
    for system, seconds in (("vcluster", 0.001), ("queue", 0.04)):
        results.add("messages", system, "round_trip", [seconds], devices=2, nbytes=8, memory="private")
        results.add("messages", system, "stream", [seconds], devices=2, nbytes=4 * MIB, memory="private")
        results.note("startup", "vcluster", "proportional set size", [5e6, 6e6], "bytes", devices=devices)
        for what in ("idle", "waiting"):
            results.note("idle", "vcluster", what, [0.123, 0.456], "of a core", devices=devices)
        for system, what in itertools.product(("vcluster", "one process"), ("wide", "narrow")):
            results.add("step", system, what, [0.1234, 0.5678], devices=devices, nbytes=MIB)
        for system, what in itertools.product(("vcluster", "one process"), ("megatron", "megatron_ring")):
            results.add("block", system, what, [0.1234, 0.5678], devices=devices, nbytes=MIB)
    for what in PRODUCTS:
        for system, operation in (("vcluster", what), ("jax", what), ("vcluster", f"{what}, whole run")):
            results.add("products", system, operation, [12.345, 23.456], devices=8, nbytes=64 * MIB)
        results.note("products", "vcluster", what, [549.7e9], "flop", devices=8)
    for what in ("2x4 unmatched, by seconds", "unsharded, all cores"):
        for operation in (what, f"{what}, whole run"):
            results.add("products", "vcluster", operation, [12.345, 23.456], devices=8, nbytes=64 * MIB)
        results.note("products", "vcluster", what, [549.7e9], "flop", devices=8)
    results.note("products", "vcluster", "unsharded, all cores, threads", [64], "of a device")
    results.note("products", "vcluster", "flops a second", [123.4e9], "flop/s")
    results.note("products", "vcluster", "bytes copied a second", [12.3e9], "B/s")
    for what in ("record", "cut", "lay out", "localize", "step", "whole"):
        results.add("simulate", "vcluster", what, [1.234, 2.345], devices=8192)
    for what in ("record many", "localize many", "folded"):
        results.add("simulate", "vcluster", what, [1.234, 2.345], devices=102400)
    results.add("simulate", "vcluster", "op", [12.3e-6], devices=8, memory="1234567 ops")
    for what in ("set-up", "timed"):
        results.add("plan", "vcluster", what, [1.234, 2.345], devices=1024, memory="GPT-3 175B")
    results.add("plan", "vcluster", "slicing", [0.123], devices=128, memory="96 layers in 32 blocks")
    results.add("startup", "gloo", "script", [8.1], devices=2)
    results.add("idle", "vcluster", "wake", [123e-6], devices=2)
    for what, seconds in (("everything", 15e-6), ("unsupervised", 14e-6), ("untraced", 11e-6)):
        results.add("checks", "ours", what, [seconds], devices=4, nbytes=8)
    for what in ("traced", "untraced"):
        results.add("tracing", "ours", what, [0.1234], devices=64, nbytes=8)
    results.add("tracing", "ours", "replayed, random pairs on ethernet-cpu", [0.1234], devices=64)
    for what in ("record", "merge", "save", "load", "count"):
        for measured in (what, f"{what}, CPU of the host"):
            results.add("tracing", "ours", measured, [0.1234], devices=4, nbytes=1 << 40, memory="1000000 events")
    return results


@pytest.mark.sampled(6)
@pytest.mark.parametrize("suite", SUITES)
def test_every_report_fits_80_columns(suite):
    lines = SUITES[suite].report(pretended_results()).splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 80


def test_the_limit_of_a_product_counts_the_cores_that_can_be_at_work():
    """At 100 flop/s and 10 B/s of two cores: 400 flop and 20 B take 6 s, on one of them 12 s."""
    results = Results()
    results.note("products", "vcluster", "flops a second", [100.0], "flop/s", devices=2)
    results.note("products", "vcluster", "bytes copied a second", [10.0], "B/s", devices=2)
    for what, devices, seconds in (
        ("unsharded", 1, 15.0), ("unsharded, all cores", 1, 8.0),
        ("2x4 outer", 8, 7.5), ("2x4 outer, by seconds", 8, 3.0),
    ):
        results.add("products", "vcluster", what, [seconds], devices=devices, nbytes=20)
        results.note("products", "vcluster", what, [400.0], "flop", devices=devices)
    results.note("products", "vcluster", "unsharded, all cores, threads", [2.0], "of a device")
    results.add("products", "jax", "2x4 outer", [4.0], devices=8)
    rows = [line.split()[-3:] for line in SUITES["products"].report(results).splitlines()[1:5]]
    whole = 1.3 * 6
    assert rows == [
        ["15.6", "s", "yes"], [f"{whole:.2f}", "s", "NO"], [f"{whole:.2f}", "s", "NO"], [f"{whole:.2f}", "s", "yes"],
    ]


def test_the_peers_report_divides_our_median_by_theirs():
    lines = SUITES["peers"].report(pretended_results()).splitlines()
    private = next(number for number, line in enumerate(lines) if line.split()[:2] == ["all_reduce", "private"])
    assert lines[private].split()[2:] == ["100", "ms"] * 6
    assert lines[private + 1].split() == ["/", "mpich", *["0.25"] * 6]
    barrier = next(number for number, line in enumerate(lines) if line.split()[:1] == ["barrier"])
    assert lines[barrier + 1].split() == ["/", "mpich", "0.25"]


def test_the_checks_report_says_what_each_costs():
    lines = SUITES["checks"].report(pretended_results()).splitlines()
    assert [line.split()[-2:] for line in lines[-2:]] == [["1.0", "us"], ["4.0", "us"]]


def test_the_messages_report_says_how_many_times_faster():
    lines = SUITES["messages"].report(pretended_results()).splitlines()
    assert lines[1].split() == ["round", "trip", "8", "B", "1.00", "ms", "40.0", "ms", "40.0", "x", "-"]
    assert lines[2].split()[:9] == ["stream", "4", "MiB", "4.19", "GB/s", "0.10", "GB/s", "40.0", "x"]
    assert lines[2].split()[9:] == ["10.0", "GB/s,", "40", "x", "NO"]


def said(suite: str, results: Results) -> dict[str, list[str]]:
    """The rows of a report, by what they begin with."""
    rows = [line.strip() for line in SUITES[suite].report(results).splitlines()]
    return {row.rpartition("  ")[0].split("  ")[0]: row.split("  ")[-1].split() for row in rows}


def test_other_reports_say_whether_a_figure_is_what_it_may_be_at_most():
    results = Results()
    for what, devices, seconds in (
        ("cold minus numpy", 4, 0.07), ("warm", 4, 0.03), ("cold", 256, 2.6), ("script", 4, 0.3)
    ):
        results.add("startup", "vcluster", what, [seconds], devices=devices)
    for what in ("record", "cut", "lay out", "localize", "step", "whole"):
        results.add("simulate", "vcluster", what, [1.234, 2.345], devices=8192)
    for what in ("record many", "localize many", "folded"):
        results.add("simulate", "vcluster", what, [1.234, 2.345], devices=102400)
    results.add("simulate", "vcluster", "op", [12.3e-6], devices=8, memory="1234567 ops")
    results.add("startup", "gloo", "script", [8.0], devices=4)
    results.note("startup", "vcluster", "proportional set size", [5.5 * MIB], "bytes", devices=64)
    rows = said("startup", results)
    assert rows["4 devices, cold, less numpy"] == ["80.0", "ms", "yes"]
    assert rows["4 devices, warm"] == ["20.0", "ms", "NO"]
    assert rows["256 devices, cold"] == ["2.50", "s", "NO"]
    assert rows["first test on 4 devices"] == ["400", "ms", "yes"]
    assert rows["first test on 4 devices, torch"] == ["-"]
    assert rows["memory of one of 64, idle"] == ["6", "MiB", "yes"]

    for system, seconds in (("vcluster", 1.2), ("one process", 1.0)):
        results.add("step", system, "wide", [seconds], devices=4, nbytes=8)
    assert said("step", results)["512 wide, 512 rows"] == ["10%", "NO"]
    for system, seconds in (("vcluster", 1.1), ("one process", 1.0)):
        results.add("block", system, "ring", [seconds], devices=4, nbytes=8)
    assert said("block", results)["ring"] == ["15%", "yes"]
    results.note("idle", "vcluster", "idle", [0.002], "of a core", devices=64)
    results.add("idle", "vcluster", "wake", [61e-6], devices=2)
    rows = said("idle", results)
    assert rows["an idle cluster of 64"] == ["1%", "yes"]
    assert rows["waking a sleeping device"] == ["60.0", "us", "NO"]
    for what, seconds in (("both", 0.029), ("copy", 0.010)):
        results.add("run", "vcluster", what, [seconds], devices=4, nbytes=64 * MIB)
    assert "1.45 x" in SUITES["run"].report(results)
    assert said("run", results)["both"] == ["1.5", "x", "yes"]


def test_the_document_is_json_with_machine_versions_command_and_every_figure(tmp_path):
    results = pretended_results()
    written = results.document(["python", "-m", "benchmarks"], "2026-01-01T00:00:00+00:00", {"cores": 2})
    write_json(tmp_path / "figures.json", written)
    read = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert read == written
    assert read["command"] == ["python", "-m", "benchmarks"]
    assert read["machine"] == {"cores": 2}
    assert read["versions"] == {"python": "3.11"}
    assert read["skipped"] == {"jax": "jax is not installed"}
    assert len(read["measurements"]) == len(results.measurements)
    first = read["measurements"][0]
    assert first["seconds"]["median"] == (0.1234 + 0.5678) / 2
    assert "from_first_start" not in first
    collective = next(m for m in read["measurements"] if m["suite"] == "collectives")
    assert collective["from_first_start"]["median"] == 0.2
    assert Results.from_document(read) == results


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "figures are 'vcluster benchmarks' in format 1, got None in None"),
        ({"format": "vcluster benchmarks", "format_version": 1}, "the figures are incomplete: 'measurements'"),
        (
            {"format": "vcluster benchmarks", "format_version": 1, "measurements": [{"seconds": {"median": 1.0}}]},
            "the figures are incomplete: .*low_quartile",
        ),
    ],
)
def test_a_document_that_is_none_of_figures_is_refused(document, said):
    with pytest.raises(ValueError, match=said):
        Results.from_document(document)


def test_a_figure_that_is_no_number_is_never_written(tmp_path):
    results = Results()
    results.add("run", "vcluster", "empty", [float("nan")])
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "figures.json", results.document([], "", {}))
