"""Calls in plain loops: their figures, their table with its targets, and the speed of Python beside it."""

import pytest

from benchmarks.cases import COLLECTIVES, Case, Trial, seconds_in_a_loop, timed_rounds
from benchmarks.machine import additions_seconds
from benchmarks.peers.beside import LIBRARY, PLAIN
from benchmarks.results import Results, speed_line
from benchmarks.suites import mpi
from benchmarks.suites.loops import NAME, report
from benchmarks.systems import OURS


def test_the_figures_of_a_loop_add_up_to_it():
    times = [[(0.0, 2.0), (2.0, 3.0), (3.0, 7.0)], [(1.0, 2.5), (2.5, 6.0), (6.0, 6.5)]]
    assert seconds_in_a_loop(times) == [1.5, 3.5, 1.0]     # from the last start, 1.0, to the last end, 7.0


def test_calls_of_a_loop_have_no_barrier_between_them_and_a_right_last_answer():
    trial, made = Trial(Case("broadcast", 8, in_a_loop=True), 0, 1), []

    def call():
        made.append("call")
        return trial.x

    times = timed_rounds(trial, 5, lambda: made.append("barrier"), call)
    assert len(times) == 5 and [end for _, end in times[:-1]] == [start for start, _ in times[1:]]
    assert made[-7:] == ["barrier", *["call"] * 5, "barrier"] and made.count("barrier") == 2


@pytest.mark.parametrize(("seconds", "met"), [((0.5, 0.7), "1.5 NO"), ((1.4, 1.2), "3.0 yes")])
def test_the_mean_is_held_against_the_best_peer_by_the_phase_of_the_machine(seconds, met):
    results = Results()
    results.add(NAME, OURS, "all_reduce", [1e-6] * 3 + [5e-6], devices=2, nbytes=8)
    results.add(NAME, "mpich", "all_reduce", [1e-6], devices=2, nbytes=8)
    results.add(NAME, "gloo", "all_reduce", [3e-6], devices=2, nbytes=8)
    results.additions[NAME] = seconds
    assert report(results).splitlines()[1].split() == [
        "all_reduce", "2", "1.00", "us", "2.00", "us", "5.00", "us", "mpich", "1.00", "us", "2.00", *met.split()]
    assert Results.from_document(results.document((), "", {})).additions == results.additions
    assert speed_line(results, NAME) == (
        f"10^7 additions in Python took {seconds[0]:.2f} s before and {seconds[1]:.2f} s after.")
    assert speed_line(results, "peers") == ""


def test_the_speed_of_python_is_a_time():
    assert 0 < additions_seconds(1) < 1000


@pytest.mark.parametrize("factor", [0.123, 12.3])
def test_the_table_beside_mpi4py_has_80_columns_on_a_crowded_machine(factor):
    """Where ours is quicker by chance, the sign of the difference is its own."""
    results = Results()
    for operation in COLLECTIVES:
        for nbytes in mpi.SIZES if operation != "barrier" else (0,):
            for system, part in ((OURS, factor), (LIBRARY, factor), (PLAIN, 1.0)):
                results.add(mpi.NAME, system, operation, [98.7e-3 * part], devices=2, nbytes=nbytes)
    told = mpi.report(results)
    assert max(map(len, told.splitlines())) <= 80
    assert "+-" not in told and ("-86.6 ms" if factor < 1 else "+1.12 s") in told
