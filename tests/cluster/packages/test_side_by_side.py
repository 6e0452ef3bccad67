"""Works that are done by copies of this process have the results, the errors and the traces of one process alone."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from select import select
from subprocess import run
from typing import Any

import numpy as np
import psutil
import pytest

from parallelism import models, side_by_side as module
from parallelism.hardware import Hardware
from parallelism.pipelining.generators import ScheduleKind
from parallelism.planning import assembled_steps, batch_pricing, find_plan, search, two_block_steps
from parallelism.planning.plan import Task
from parallelism.planning.space import choices
from parallelism.planning.trained import TrainedModel
from parallelism.side_by_side import copies, first_come, side_by_side
from parallelism.symbolic import orders
from parallelism.training import Figures
from parallelism.training.run_figures import FiguresWithoutTrace
from parallelism.training.training_run import ADAM_W
from parallelism.transforms import SGD

HERE = os.getpid()


@pytest.fixture(params=[0, 1, 3])
def count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "copies", lambda: request.param)
    return int(request.param)


@pytest.fixture(autouse=True)
def nothing_is_left() -> object:
    process = psutil.Process()
    before = process.num_fds(), process.children()
    yield
    assert (process.num_fds(), process.children()) == before


def in_a_copy() -> bool:
    return os.getpid() != HERE


@pytest.mark.sampled(8, 1)
@pytest.mark.parametrize("works", [0, 1, 2, 3, 5])
def test_results_are_in_order_and_works_are_dealt_out(count: int, works: int) -> None:
    told: list[tuple[int, int]] = []

    def work(number: int) -> tuple[int, bool, bytes]:
        return number, in_a_copy(), bytes(2_000_000)     # more than a pipe holds

    found = side_by_side([partial(work, number) for number in range(works)], told=lambda *each: told.append(each))
    shares = min(max(works, 1), 1 + count)
    assert [number for number, *_ in found] == list(range(works))
    assert [copied for _, copied, _ in found] == [number % shares > 0 for number in range(works)]
    assert told == [(min(place * shares, works), works) for place in range(-(-works // shares))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("most", [1 << 15, 3])
def test_results_are_taken_as_they_come_and_neighbours_stay_together(
    count: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_PIECES", most)
    took: dict[int, int] = {}
    found = side_by_side([os.getpid] * 7, took=took.__setitem__)
    assert found == [took[place] for place in range(7)]
    assert sum(one != other for one, other in pairwise(found)) == len({*found}) - 1 <= count


def test_a_copy_does_what_this_process_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "copies", lambda: 1)
    told, tell = os.pipe()

    def work(place: int) -> bool:
        if place == 0:
            assert select([told], [], [], 20)[0]        # the copy has done all others
        if place == 1:
            os.write(tell, b".")
        return in_a_copy()

    found = side_by_side([partial(work, place) for place in range(5)], took=lambda place, result: None)
    assert found == [False, True, True, True, True]
    os.close(told)
    os.close(tell)


def test_an_interrupt_leaves_what_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "copies", lambda: 1)
    told, tell = os.pipe()

    def work(number: int) -> int:
        if number == 1:
            assert select([told], [], [], 20)[0]        # a result of the copy is on its way
            raise KeyboardInterrupt
        if number == 2:
            os.write(tell, b".")
            threading.Event().wait()
        return number

    took: dict[int, int] = {}
    with pytest.raises(KeyboardInterrupt):
        side_by_side([partial(work, number) for number in range(4)], took=took.__setitem__)
    assert took == {0: 0, 3: 3}
    os.close(told)
    os.close(tell)


def test_works_inside_of_a_work_are_not_dealt_out() -> None:
    inside: list[list[int]] = side_by_side([lambda: [copies()] * 2, lambda: [copies()]], took=lambda place, result: None)
    assert inside == ([[0, 0], [0]] if copies() else [[copies()] * 2, [copies()]])


@pytest.mark.sampled(3)
def test_an_error_is_that_of_the_work(count: int) -> None:
    with pytest.raises(ZeroDivisionError):
        side_by_side([lambda: 1, lambda: 1 // 0, lambda: 2])


@pytest.mark.sampled(3)
def test_an_error_of_the_own_share_ends_the_copies(count: int) -> None:
    with pytest.raises(ZeroDivisionError):
        side_by_side([lambda: 1 // 0, threading.Event().wait, threading.Event().wait])


@pytest.mark.sampled(6, 1)
@pytest.mark.parametrize("fail", [
    lambda: os._exit(3), lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: 1 // 0, lambda: os.kill(
        os.getpid(), signal.SIGINT)], ids=["exit", "kill", "raise", "interrupt"])
def test_what_a_copy_does_not_do_is_done_here(
    fail: Callable[[], object], count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(number: int) -> tuple[int, bool]:
        if number == 3 and in_a_copy():
            fail()
        return number, in_a_copy()

    found = side_by_side([partial(work, number) for number in range(6)])
    assert [number for number, _ in found] == list(range(6))
    assert found[3] == (3, False)
    assert capfd.readouterr() == ("", "")


def test_a_copy_that_never_ends_is_ended_and_its_work_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "copies", lambda: 1)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.1)
    assert side_by_side([lambda: 1, lambda: threading.Event().wait() if in_a_copy() else 2]) == [1, 2]


def test_a_copy_that_waits_for_a_lock_of_nobody_is_ended_where_this_process_is_patient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "copies", lambda: 1)
    monkeypatch.setattr(module, "STILL_SECONDS", 0.25)
    lock = threading.Lock()
    lock.acquire()          # as by a thread of a library, which a copy does not have
    begun, begin = os.pipe()

    def work(place: int) -> tuple[int, bool]:
        if in_a_copy():
            os.write(begin, b".")
            lock.acquire()
        elif place == 0:
            assert select([begun], [], [], 20)[0]       # the copy has taken the other
        return place, in_a_copy()

    found = side_by_side([partial(work, place) for place in range(2)], took=lambda place, result: None)
    assert found == [(0, False), (1, False)]
    os.close(begun)
    os.close(begin)


@pytest.mark.takes_seconds
def test_a_copy_that_computes_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "copies", lambda: 1)
    monkeypatch.setattr(module, "STILL_SECONDS", 0.25)
    begun, begin = os.pipe()

    def work(place: int) -> tuple[bool, int]:
        if place == 0:
            return in_a_copy(), len(select([begun], [], [], 20)[0])     # the copy has begun the other
        os.write(begin, b".")
        return in_a_copy(), sum(range(20_000_000))

    found = side_by_side([partial(work, place) for place in range(2)], took=lambda place, result: None)
    assert found == [(False, 1), (True, 199_999_990_000_000)]
    os.close(begun)
    os.close(begin)


@pytest.mark.slow
@pytest.mark.parametrize(("library", "work"), [
    ("jax", "jax.numpy.ones((300, 300)) @ jax.numpy.ones(300)"),
    ("torch", "torch.ones(4_000_000).add(299)"),
])
def test_a_process_that_has_loaded_a_library_with_threads_is_copied_and_nothing_is_said(library: str, work: str) -> None:
    pytest.importorskip(library)
    program = f"""
import os, {library}
from parallelism.side_by_side import copies, side_by_side
assert float(({work})[0]) == 300
assert copies() == len(os.sched_getaffinity(0)) - 1
processes = {{*side_by_side([os.getpid, os.getpid])}}
assert len(processes) == min(2, 1 + copies())
assert float(({work})[0]) == 300
"""
    found = run([sys.executable, "-W", "always", "-c", program], env=os.environ | {"OMP_NUM_THREADS": "2"},
                capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0 and not found.stdout + found.stderr, found.stderr


def test_works_are_done_here_where_no_further_process_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, forks = os.fork, iter([True, False])

    def limited() -> int:
        if not next(forks):
            raise BlockingIOError
        return fork()

    monkeypatch.setattr(module, "copies", lambda: 3)
    monkeypatch.setattr(os, "fork", limited)
    assert side_by_side([in_a_copy] * 8) == [False, True, False, False] * 2


@pytest.mark.parametrize("work", [partial(threading.Event().wait, 60), lambda: bytes(1 << 20)], ids=["at work", "sending"])
def test_copies_end_when_their_parent_was_killed(
    work: Callable[[], object], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, held = os.pipe()
    begun, begin = os.pipe()

    def own() -> bytes:
        os.write(begin, b".")
        threading.Event().wait()
        return b""

    parent = os.fork()
    if parent == 0:
        try:
            side_by_side([own, *[work] * count])            # a pipe does not hold what they send
        finally:
            os._exit(0)
    os.close(held)
    assert os.read(begun, 1) == b"."
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert select([ended], [], [], 20)[0], "a copy still lives"
    for each in (ended, begun, begin):
        os.close(each)


def test_plans_whose_pieces_are_laid_out_together_stand_in_one_share() -> None:
    spec = models.TransformerSpec(layers=2, width=12, heads=2, vocabulary=24, sequence=6)
    possible = choices(TrainedModel.of(spec, ADAM_W), 4, 8, {"tp": [1, 2], "zero": [0, 1], "schedule": "1f1b"})
    rows, recomputed = np.arange(len(possible)), possible["recompute"]
    for count in (1, 2, 3, 64):
        parts = batch_pricing._dealt(rows, possible, count)
        shares = [share for part in parts for share in part]
        assert np.array_equal(np.sort(np.concatenate(shares)), rows) and 1 <= len(parts) <= -(-count // 2)
        assert all((np.diff(share) > 0).all() for share in shares)
        pieces = [{*zip(possible["tp"][share].tolist(), (possible["tp"] > 1)[share] & (possible["zero"] > 0)[share],
                        recomputed[share].tolist(), strict=True)} for share in shares]
        assert sum(map(len, pieces)) == len(set().union(*pieces))       # none stands in two shares
        assert len(shares) == 3 * len({*recomputed.tolist()}) and (count < 3 or len(parts) > 1)
    assert len(batch_pricing._dealt(rows, possible, 128)) == len(shares)
    one = np.flatnonzero((possible["tp"] == 1) & (recomputed == 0))
    assert [[share.tolist() for share in part] for part in batch_pricing._dealt(one, possible, 4)] == [[one.tolist()]]
    assert [[share.tolist() for share in part] for part in batch_pricing._dealt(one[:0], possible, 4)] == [[[]]]


@pytest.mark.parametrize("items", [[], ["a"], [*"abcde"]])
def test_items_are_taken_from_both_ends_until_all_are_taken(items: list[str]) -> None:
    turns = module.BothEnds(items)
    front, back = turns.taken(from_front=True), turns.taken(from_front=False)
    taken = [next(each, None) for each in (front, back, back, front, back, front, back)]
    turns.close()
    order = [None if place >= len(items) else items[at] for place, at in enumerate((0, -1, -2, 1, -3, 0, 0))]
    assert taken == order


def test_a_copy_takes_what_this_process_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "copies", lambda: 1)
    turns = module.BothEnds(range(9))
    asked, ask = os.pipe()
    begun, begin = os.pipe()

    def front() -> list[int]:
        found = [next(turns.taken(from_front=True))]
        os.write(begin, b".")
        assert select([asked], [], [], 20)[0]       # the copy has taken all others
        return found + [*turns.taken(from_front=True)]

    def back() -> list[int]:
        os.read(begun, 1)
        found = [*turns.taken(from_front=False)]
        os.write(ask, b".")
        return found

    assert side_by_side([front, back]) == [[0], [8, 7, 6, 5, 4, 3, 2, 1]]
    turns.close()
    for descriptor in (asked, ask, begun, begin):
        os.close(descriptor)


def test_rows_that_a_copy_took_before_it_failed_are_priced_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "copies", lambda: 1)
    monkeypatch.setattr(batch_pricing, "copies", lambda: 1)
    told, tell = os.pipe()
    priced: list[int] = []

    def share(table: Any, possible: Any, groups: Any, limits: Any, told_here: Any) -> Any:
        if in_a_copy():
            os.write(tell, str(next(iter(groups))[0]).encode())
            raise RuntimeError("a copy that fails")
        if not priced:
            assert select([told], [], [], 20)[0] and os.read(told, 1) == b"3"
        rows = np.concatenate([np.zeros(0, int), *groups])
        priced.extend(rows.tolist())
        return batch_pricing._Share(rows, np.zeros(0), rows[:0], True, {}, 0.0, {})

    monkeypatch.setattr(batch_pricing, "_share", share)
    groups = [np.array([0, 2]), np.array([1]), np.array([3, 4])]
    monkeypatch.setattr(batch_pricing, "_dealt", lambda rows, possible, count: [groups])
    table: Any = None
    shares = batch_pricing._shares(table, table, np.arange(5), np.zeros(5), lambda *_: None)
    assert [each.rows.tolist() for each in shares] == [[0, 2, 1], [], [3, 4]] and priced == [0, 2, 1, 3, 4]
    os.close(told)
    os.close(tell)


def test_whoever_comes_first_does_the_next_work_while_its_results_wait_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "copies", lambda: 1)
    (begun, begin), (asked, ask) = os.pipe(), os.pipe()

    def work(place: int) -> tuple[int, bool, bytes]:
        if not in_a_copy():
            os.write(begin, b".")
            assert select([asked], [], [], 20)[0]       # the copy has done all others
        else:
            assert select([begun], [], [], 20)[0]
            if place == 4:
                os.write(ask, b".")
        return place, in_a_copy(), bytes(200_000)

    told: list[tuple[int, int]] = []
    took: dict[int, tuple[int, bool, bytes]] = {}
    works = [partial(work, place) for place in range(5)]
    found = first_come(works, told=lambda *each: told.append(each), took=took.__setitem__)
    assert [place for place, *_ in found] == [*range(5)] and sum(copied for _, copied, _ in found) == 4
    assert told[0] == (0, 5) and took == dict(enumerate(found))
    for each in (begun, begin, asked, ask):
        os.close(each)


@pytest.mark.parametrize("works", [0, 1, 3])
def test_works_that_a_failing_copy_had_taken_are_done_here(count: int, works: int) -> None:
    begun, begin = os.pipe()

    def work(place: int) -> int:
        if in_a_copy():
            os.write(begin, b".")
            raise RuntimeError("a copy that fails")
        assert min(count, works - 1) == 0 or select([begun], [], [], 20)[0]     # a copy has taken one
        return place

    took: list[int] = []
    found = first_come([partial(work, place) for place in range(works)], took=lambda place, result: took.append(place))
    assert found == [*range(works)] == sorted(took)
    with pytest.raises(ZeroDivisionError):
        first_come([lambda: 1 // 0] * 3)
    for each in (begun, begin):
        os.close(each)


@pytest.mark.takes_seconds
def test_figures_that_a_copy_computed_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = models.TransformerSpec(layers=2, width=12, heads=2, vocabulary=24, sequence=6)
    asked: dict[str, Any] = {"hardware": "dgx-h100", "devices": 4, "batch": 8, "schedule": "1f1b", "recompute": "none"}
    alone = find_plan(spec, **asked, tp=1, microbatch=2, zero=0)
    begun, begin = os.pipe()
    figures_of = assembled_steps.figures_of

    def in_both(task: Task, settings: Any) -> Any:
        if in_a_copy():
            os.write(begin, b".")
        assert select([begun], [], [], 20)[0]       # the copy has taken one of the two
        return figures_of(task, settings)

    monkeypatch.setattr(assembled_steps, "figures_of", in_both)
    monkeypatch.setattr(batch_pricing, "copies", lambda: 0)
    monkeypatch.setattr(module, "copies", lambda: 1)
    found = find_plan(spec, **asked, tp=1, microbatch=2, zero=0, figures=2)
    assert len(found) == 2 == len(found.known) and found.simulated == alone.simulated
    assert [type(each) for each in found.known.values()] == [Figures, FiguresWithoutTrace]
    for plan, other in zip(found, alone, strict=True):
        assert plan.settings == other.settings and plan.figures.json() == other.figures.json()
        assert plan.figures.links == other.figures.links and plan.why() == other.why()
        trace = plan.figures.trace
        assert trace == other.figures.trace
        assert trace.on("h200-node") == other.figures.trace.on("h200-node")
    for each in (begun, begin):
        os.close(each)


@pytest.mark.takes_seconds
def test_ctrl_c_leaves_the_figures_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = models.TransformerSpec(layers=2, width=12, heads=2, vocabulary=24, sequence=6)
    monkeypatch.setattr(module, "copies", lambda: 0)
    figures_of, taken = assembled_steps.figures_of, list[Any]()

    def interrupted(task: Task, settings: Any) -> Any:
        if taken:
            raise KeyboardInterrupt
        taken.append(settings)
        return figures_of(task, settings)

    monkeypatch.setattr(assembled_steps, "figures_of", interrupted)
    with pytest.raises(search.Stopped, match=r"^stopped after 1 full simulations$") as stopped:
        find_plan(spec, hardware="dgx-h100", devices=4, batch=8, schedule="1f1b", tp=1, microbatch=2, zero=0,
                  recompute="none", figures=2)
    found = stopped.value.plans
    assert found.simulated == 1 and len(found) == 2 and found.best.is_simulated and found.best.settings == taken[0]


@pytest.mark.sampled(3)
def test_a_result_without_a_pickle_is_made_here(count: int) -> None:
    found = side_by_side([threading.Lock, threading.Lock])
    assert all(not lock.locked() for lock in found)


def test_a_process_with_threads_that_are_no_daemons_is_not_copied() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert copies() == 0
    stop.set()
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, pytest.param([1, 2], marks=pytest.mark.slow)])
def test_plans_cost_the_same_with_and_without_copies(count: int, tp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, zero = (1, [0, 3]) if tp == 1 else (2, [0, 1, 3])
    spec = models.TransformerSpec(layers=layers, width=12, heads=2, vocabulary=24, sequence=6, dtype="bfloat16")
    optimizer = SGD(0.1) if tp == 1 else ADAM_W
    task = Task(TrainedModel.of(spec, optimizer), 8, Hardware.preset("dgx-h100:1").placed(range(4)), 4)
    possible = choices(task.model, 4, 8, {
        "tp": tp, "pp": 1 if tp == 1 else [1, 2], "microbatch": 2, "schedule": "1f1b", "recompute": "none",
        "zero": zero, "order": "pp dp cp tp"})
    if tp == 1:         # all plans have the same pieces
        monkeypatch.setattr(batch_pricing, "_dealt", lambda rows, possible, count: [[rows[::2], rows[1::2]]])
    two_block_steps.two_block_steps.cache_clear()
    table = batch_pricing.PlanCosts(task, possible)
    no_limit = np.full(len(possible), np.inf)
    everything = batch_pricing._share(table, possible, [np.arange(len(possible))], no_limit, lambda *_: None)
    two_block_steps.two_block_steps.cache_clear()
    found = batch_pricing.price_plans(task, possible, no_limit, lambda *_: None)
    assert {*batch_pricing.PlanCosts(task, possible).steps.known} == {*table.steps.known}       # also of the copies
    together = np.setdiff1d(np.arange(len(possible)), [*everything.left])
    assert len(together)
    assert everything.left
    assert np.array_equal(found.seconds[together], everything.seconds[together])
    assert np.array_equal(found.peaks[together], everything.peaks[together])
    apart = [row for row in everything.left if possible["zero"][row] == 3]
    assert apart
    for row in apart[:2]:
        trace = task.simulate(possible.settings(row), link_sharing=False)
        assert found.seconds[row] == trace.makespan_seconds
        assert found.peaks[row] == max(trace.peaks().values())
    none = batch_pricing.price_plans(task, possible, np.zeros(len(possible)), lambda *_: None)
    assert np.array_equal(none.peaks, found.peaks)
    assert np.isinf(none.seconds[together]).all()


def test_orders_that_copies_made_are_those_of_this_process(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one pipeline with other numbers of microbatches are one order, also when they come from a copy."""
    asked = [("1f1b", ranks, rows, 1, range(0)) for ranks in (2, 3, 4) for rows in (3, 40, 41)]
    asked += [("interleaved_1f1b", 3, 30, 2, range(2, 3)), ("zero_bubble_v", 2, 24, 2, range(0))]
    monkeypatch.setattr(orders, "_known", {})
    alone = [orders.order_of(*each) for each in asked]
    assert [repeats > 0 for _, repeats in alone] == [False, True, True] * 3 + [True, True]
    orders._known.clear()
    orders._order_of.cache_clear()
    orders._repeating.cache_clear()
    monkeypatch.setattr(orders, "copies", lambda: 1)    # whether there are any is another question
    orders.make_orders(asked)
    monkeypatch.setattr(orders, "_made", None)          # nothing more is made
    for each, (expected, repeats) in zip(asked, alone, strict=True):
        order, more = orders.order_of(*each)
        assert (more, order.messages, order.rank_of) == (repeats, expected.messages, expected.rank_of)
        for name in ("kept", "begun", "first_state", "key_of", "microbatch_of", "last"):
            np.testing.assert_array_equal(getattr(order, name), getattr(expected, name), strict=True)
        for column, wanted in zip(order.levels, expected.levels, strict=True):
            assert [level.tolist() for level in column] == [level.tolist() for level in wanted]
            assert column[0].dtype == wanted[0].dtype
        assert (order.window is None) == (expected.window is None)
    assert all(orders.order_of("1f1b", n, 40, 1)[0] is orders.order_of("1f1b", n, 41, 1)[0] for n in (2, 3, 4))


def test_an_order_that_cannot_be_made_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rank: int, ranks: int, microbatches: int) -> Any:
        raise ValueError("no order")

    monkeypatch.setattr(module, "copies", lambda: 0)
    monkeypatch.setattr(orders, "copies", lambda: 1)
    monkeypatch.setitem(orders.SCHEDULES.kinds, "wrong", ScheduleKind("wrong", wrong))
    orders.make_orders([("wrong", 2, 4, 1, range(0)), ("1f1b", 2, 3, 1, range(0))])
    with pytest.raises(ValueError, match="no order"):
        orders.order_of("wrong", 2, 4, 1)
    assert orders.order_of("1f1b", 2, 3, 1)[0].count == 12
