"""The engine as a value machine: who joins when, what a step has, and that every page comes back."""

from __future__ import annotations

import pytest
from served_models import SERVED
from workloads import CheckedEngine, answer_to, random_workload

from parallelism.models import TransformerSpec
from parallelism.serving import Engine, EngineSettings, Request, run_engine
from parallelism.serving.engine import Row, Work, read_and_scored
from parallelism.serving.pages import Pages

SPEC = TransformerSpec(layers=2, width=8, heads=2, vocabulary=19, sequence=64)
WINDOWED = SERVED["gemma3"]


def settings(**more):
    return EngineSettings(**{"batch": 2, "chunk": 4, "page_tokens": 4, "pages": {"full": 8}} | more)


def serve(seed, spec):
    chosen, requests = random_workload(seed, spec)
    engine = Engine(spec, chosen, requests)
    served = run_engine(engine, CheckedEngine(spec))
    assert [engine.answers[number] for number in range(len(requests))] == [
        answer_to(request, spec.vocabulary) for request in engine.requests
    ]
    for pages in engine.pages:
        assert all(each.free == each.count for each in pages.values())
    assert all(each.waited_seconds > 0 for each in served.requests)
    assert served.seconds >= max(each.last_token_seconds for each in served.requests)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("spec", [SPEC, WINDOWED], ids=["full", "windows"])
@pytest.mark.parametrize("seed", range(25))
def test_every_request_of_a_random_workload_is_answered_and_its_pages_come_back(seed, spec):
    serve(seed, spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, WINDOWED], ids=["full", "windows"])
def test_every_request_of_a_thousand_workloads_is_answered(spec):
    for seed in range(1000, 1500):
        serve(seed, spec)


def test_tokens_of_running_requests_come_first_and_prompts_share_what_is_left():
    engine = Engine(SPEC, settings(), [Request((1,) * 6, 3), Request((2,) * 5, 2), Request((3,), 1)])
    steps = []

    def run(engine, step):
        steps.append(step)
        return {row.request: 7 for work in step for rows in work.rows for row in rows if row.samples}, 1.0

    run_engine(engine, run)
    assert [work.rows[0] for (work,) in steps] == [
        (Row(0, 0, 4, False),),  # the whole budget of 4 tokens goes to the first prompt
        (Row(0, 4, 6, True), Row(1, 0, 2, False)),
        (Row(0, 6, 7, True), Row(1, 2, 5, True)),
        (Row(0, 7, 8, True), Row(1, 5, 6, True)),
        (Row(2, 0, 1, True),),  # a batch of two: the third joins when one leaves
    ]
    assert engine.answers == {0: (7, 7, 7), 1: (7, 7), 2: (7,)}


def test_a_stop_token_ends_an_answer():
    engine = Engine(SPEC, settings(), [Request((1,), 9, frozenset({5}))])
    tokens = iter([3, 5, 4])
    run_engine(engine, lambda engine, step: ({0: next(tokens)}, 1.0))
    assert engine.answers == {0: (3, 5)}


def test_requests_wait_for_their_arrival():
    engine = Engine(SPEC, settings(), [Request((1,), 1, arrival_seconds=10.0), Request((2,), 2, arrival_seconds=3.0)])
    served = run_engine(engine, lambda engine, step: (dict.fromkeys(engine.running, 0), 1.0))
    assert [(each.arrival_seconds, each.first_token_seconds, each.last_token_seconds) for each in served.requests] == [
        (3.0, 4.0, 5.0), (10.0, 11.0, 11.0)]
    assert (served.seconds, served.steps) == (11.0, 3)
    assert served.tokens_per_second == 3 / 11


def test_replicas_and_microbatches_share_requests():
    chosen = settings(batch=4, replicas=2, microbatches=2)
    engine = Engine(SPEC, chosen, [Request((number,), 2) for number in range(6)])
    first, second = engine.step()
    assert [[row.request for row in rows] for rows in first.rows] == [[0, 4], [1, 5]]
    assert [[row.request for row in rows] for rows in second.rows] == [[2], [3]]


def test_a_work_reads_whole_pages_and_scores_what_a_mask_leaves():
    chosen = settings(chunk=8)
    work = Work(((Row(0, 4, 7, True), Row(1, 9, 10, True)),))
    assert read_and_scored(SPEC, chosen, work, "full") == (8 + 12, (5 + 6 + 7) + 10)
    ring = chosen.ring_pages(WINDOWED)  # the window of 5 tokens, and 8 of a step, in pages of 4
    assert ring == 3
    assert read_and_scored(WINDOWED, chosen, work, "window") == (8 + 8, (5 + 5 + 5) + 5)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_a_window_is_read_by_the_pages_that_it_touches_and_these_are_kept(chunk):
    """Where pages behind a window are free at once, no token has more than those of a ring of that size."""
    chosen, most = settings(chunk=max(chunk, 4), frees_pages=True), 0
    for start in range(40):
        row = Row(0, start, start + chunk, True)
        seen = {place for token in range(row.start, row.stop) for place in range(max(token - 4, 0), token + 1)}
        touched = {place // 4 for place in seen}
        assert read_and_scored(WINDOWED, chosen, Work(((row,),)), "window")[0] == 4 * len(touched)
        most = max(most, len(touched))
    assert chosen.ring_pages(WINDOWED) + (chosen.step_pages() if chunk > 1 else 0) >= most
    assert chunk > 1 or chosen.ring_pages(WINDOWED) == most == 2
    assert settings(chunk=8).step_pages() == 0


@pytest.mark.parametrize(("request_", "message"), [
    (Request((1,) * 60, 6), "a prompt of 60 tokens and 6 new ones do not fit the 64 positions of the model"),
    (Request((1,) * 30, 4), "a prompt of 30 tokens and 4 new ones need 9 pages of 4 tokens, and the cache has 8"),
])
def test_what_does_not_fit_is_refused_at_once(request_, message):
    with pytest.raises(ValueError, match=message):
        Engine(SPEC, settings(), [request_])


def test_the_last_token_needs_no_place():
    engine = Engine(SPEC, settings(), [Request((1,) * 30, 3)])  # 32 tokens in 8 pages of 4
    run_engine(engine, CheckedEngine(SPEC))
    assert len(engine.answers[0]) == 3


@pytest.mark.parametrize(("given", "message"), [
    ({"batch": 0}, "batch must be an integer of at least 1, got 0"),
    ({"pages": {"full": 0}}, "pages of full layers must be an integer of at least 1, got 0"),
    ({"batch": 9, "chunk": 8}, "chunk must be at least the requests of a microbatch, 9, got 8"),
])
def test_settings_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        settings(**given)


def test_pages_of_a_kind_must_be_said():
    with pytest.raises(ValueError, match="pages must say how many window layers have; it has full"):
        Engine(WINDOWED, settings())


def test_a_request_takes_pages_once_and_no_more_than_are_free():
    pages = Pages(3)
    assert pages.take(4, 2) == (0, 1)
    with pytest.raises(ValueError, match="request 4 has pages already"):
        pages.take(4, 1)
    with pytest.raises(ValueError, match="request 5 needs 2 pages, and 1 of 3 are free"):
        pages.take(5, 2)
    pages.give_back(4)
    assert (pages.free, pages.take(6, 3)) == (3, (0, 1, 2))
