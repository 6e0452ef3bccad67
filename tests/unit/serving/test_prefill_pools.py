"""Prefill on devices of its own: two queues one behind the other, the cache between them, and the search for such plans."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from parallelism import Hardware, Mesh, models
from parallelism.serving import Engine, EngineSettings, StepPrices, Workload, find_serving
from parallelism.serving.placement import ALONE, Placement, usual_strategy
from parallelism.serving.pools import PooledRun
from parallelism.serving.priced_engine import PricedEngine
from vcluster.__main__ import main
from vcluster.cli.command_line import WrongWords

SPEC = replace(models.transformer("gpt2"), dtype="bfloat16")
LLAMA = models.transformer("llama3.1-8b")
PROMPT, MOVED = 100, 0.001


def engine(batch, axes=(), pages=200):
    mesh = Mesh(**dict(axes)) if axes else ALONE
    placement = Placement(SPEC, mesh, usual_strategy(mesh))
    settings = EngineSettings(batch, 128, 16, {"full": pages})
    return PricedEngine(Engine(SPEC, settings), StepPrices(placement, settings, Hardware.preset("dgx-h100")))


def step_seconds(own, tokens, stop):
    """The seconds of a step of one request with so many tokens, the last at this position."""
    padded, pages = tokens if tokens == 1 else -(-tokens // 8) * 8, -(-stop // 16)
    scored = stop * (stop + 1) // 2 - (stop - tokens) * (stop - tokens + 1) // 2
    return own.prices.step_seconds(
        [{"t": padded, "r": 1, "pages": pages, "read_full": pages * 16, "scored_full": scored}])


def pooled(prompts, answers, workload, count, moved=MOVED):
    return PooledRun([engine(1) for _ in range(prompts)], [engine(answers)], workload, count, lambda tokens: moved).served()


def test_one_client_waits_for_prefill_the_cache_and_each_token():
    new = 12
    served = pooled(1, 1, Workload(((PROMPT, new),), concurrency=1), 4)
    own = engine(1)
    prefill = step_seconds(own, PROMPT, PROMPT)
    later = MOVED + sum(step_seconds(own, 1, PROMPT + number) for number in range(1, new))
    for number, each in enumerate(served.requests):
        assert each.arrival_seconds == pytest.approx(number * (prefill + later), rel=1e-9)
        assert each.waited_seconds == pytest.approx(prefill, rel=1e-9)
        assert each.last_token_seconds - each.first_token_seconds == pytest.approx(later, rel=1e-9)
        assert each.tokens == new
    assert served.seconds == pytest.approx(4 * (prefill + later), rel=1e-9)
    assert served.steps == 4 * new


@pytest.mark.parametrize("load", [0.5, pytest.param(0.9, marks=pytest.mark.slow)])
def test_two_queues_one_behind_the_other_wait_as_the_recursion_says(load):
    """A request leaves the first queue, and arrives at the second: with one place each, both are Lindley's recursion."""
    new, count = 6, 200
    own = engine(1)
    first = step_seconds(own, PROMPT, PROMPT)
    second = sum(step_seconds(own, 1, PROMPT + number) for number in range(1, new))
    served = pooled(1, 1, Workload(((PROMPT, new),), rate=load / max(first, second), seed=5), count)
    free = [0.0, 0.0]
    for each in served.requests:
        free[0] = max(free[0], each.arrival_seconds) + first
        assert each.first_token_seconds == pytest.approx(free[0], rel=1e-9)
        free[1] = max(free[1], free[0] + MOVED) + second
        assert each.last_token_seconds == pytest.approx(free[1], rel=1e-9)


def test_two_engines_of_prompts_take_turns_and_caches_arrive_in_order():
    """With two engines of prompts the caches of two requests arrive together, and the second waits for the only place."""
    served = pooled(2, 1, Workload(((PROMPT, 3),), concurrency=2), 2)
    own = engine(1)
    first = step_seconds(own, PROMPT, PROMPT)
    second = sum(step_seconds(own, 1, PROMPT + number) for number in range(1, 3))
    assert [each.waited_seconds for each in served.requests] == pytest.approx([first, first], rel=1e-9)
    ends = [each.last_token_seconds for each in served.requests]
    assert ends == pytest.approx([first + MOVED + second, first + MOVED + 2 * second], rel=1e-9)


def test_answers_of_one_token_need_no_other_device():
    served = pooled(1, 1, Workload(((PROMPT, 1), (PROMPT, 2)), concurrency=1), 4)
    assert [each.tokens for each in served.requests] == [1, 2, 1, 2]
    assert served.requests[0].first_token_seconds == served.requests[0].last_token_seconds
    assert served.steps == 4 + 2


def test_many_requests_are_all_answered_and_all_pages_come_back():
    prompts, answers = [engine(2), engine(2)], [engine(3, pages=30), engine(3, pages=30)]
    workload = Workload(((PROMPT, 9), (37, 2), (250, 30), (5, 1)), concurrency=9)
    served = PooledRun(prompts, answers, workload, 60, lambda tokens: tokens * 1e-5).served()
    assert [each.tokens for each in served.requests] == [9, 2, 30, 1] * 15
    for each in (*prompts, *answers):
        assert each.engine.is_done and each.engine.pages[0]["full"].free == each.engine.settings.pages["full"]
    for each in served.requests:
        assert each.arrival_seconds < each.first_token_seconds <= each.last_token_seconds
    assert len(answers[0].engine.requests) + len(answers[1].engine.requests) == 45


# -- the search --------------------------------------------------------------------------------------------------------

GIVEN = {"input_tokens": 600, "output_tokens": 40}


def found(**more):
    return find_serving(LLAMA, "dgx-h100", more.pop("devices", 3), **GIVEN | more)


def test_a_plan_with_a_pool_moves_the_cache_and_holds_two_copies_of_the_weights():
    plan = found(prefill={"tp": 1, "pp": 1, "ep": 1, "replicas": 1}, tp=2, batch=8).best
    assert plan.layout == (2, 1, 1, 1) and plan.prefill is not None and plan.prefill.layout == (1, 1, 1, 1)
    pages = -(-600 // 16)
    assert plan.prefill.moved_bytes == LLAMA.cache_bytes(16 * pages) // 2          # half of the heads on each of two
    hardware = Hardware.preset("dgx-h100")
    sent = int(LLAMA.cache_bytes(16 * pages))                                       # one device sends all of them
    link = hardware.path(0, 2)
    assert plan.prefill.moved_seconds == pytest.approx(link.latency_seconds + sent / link.bytes_per_second, rel=0.02)
    assert plan.prefill.memory["weights"] > 1.8 * plan.memory["weights"] > 1.8 * LLAMA.parameters
    assert plan.words == "tp=2 pp=1 ep=1 replicas=1 batch=8 behind prefill tp=1 pp=1 ep=1 replicas=1"
    assert plan.json()["prefill"]["devices"] == 1
    assert plan.devices == 3 and plan.tokens_per_second_per_device == plan.tokens_per_second / 3


@pytest.mark.slow
def test_the_pick_with_pools_is_that_of_all_pairs_one_by_one():
    limit = 0.012
    plans = found(disaggregate=True, token_seconds=limit, pp=1, batch=[4, 16])
    assert {plan.prefill is None for plan in plans.rows} == {True, False}
    rows = [*found(token_seconds=limit, pp=1, batch=[4, 16]).rows]
    for prefill, tp in (({"tp": 1, "replicas": 1}, 2), ({"tp": 1, "replicas": 1}, 1), ({"tp": 2, "replicas": 1}, 1),
                        ({"tp": 1, "replicas": 2}, 1)):
        for batch in (4, 16):
            rows += found(token_seconds=limit, prefill={"pp": 1, "ep": 1, **prefill}, tp=tp, pp=1, batch=batch).rows
    within = [row for row in rows if row.token_seconds <= limit]
    assert plans.best.tokens_per_second == max(row.tokens_per_second for row in within)
    assert plans.best in rows


@pytest.mark.takes_seconds
def test_the_command_of_a_plan_with_a_pool_gives_its_figures_again(capsys):
    words = ["serve", "llama3.1-8b", "--devices", "2", "--input-tokens", "600", "--output-tokens", "40",
             "--disaggregate", "--pp", "1", "--batch", "8"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    pooled_plan = next(each for each in document["front"] + document["plans"] if each["prefill"])
    again = pooled_plan.pop("command").removeprefix("python -m vcluster ")
    assert main([*shlex.split(again), "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    plan.pop("command")
    assert plan == pooled_plan
    assert main([*shlex.split(again)]) == 0
    text = capsys.readouterr().out
    assert "Prompts are computed by 1 device of their own (tp=1 pp=1 ep=1 replicas=1)" in text
    assert "  1xone" in text and max(map(len, text.splitlines())) <= 80


@pytest.mark.takes_seconds
def test_a_page_has_the_front_and_the_requests(tmp_path, capsys):
    words = ["serve", "llama3.1-8b", "--devices", "2", "--input-tokens", "600", "--output-tokens", "40", "--tp", "1",
             "--pp", "1"]
    path = tmp_path / "serve.html"
    assert main([*words, "--batch", "8,16", "--disaggregate", "--html", str(path)]) == 0
    assert f"The page is {path}" in capsys.readouterr().out
    page = path.read_text()
    assert page.count("<circle") >= 4 and "prefill on devices of its own" in page and page.count("its first token after") > 8
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    alone = found(batch=8, tp=1, pp=1)
    shown = alone._repr_html_()
    assert "prefill on devices" not in shown and shown.count("<circle") == 2    # one plan: a broad picture, and a narrow one
    assert alone.best.answered and alone.best == replace(alone.best, answered=())
    with pytest.raises(WrongWords, match=r"--html: .* cannot be written"):
        main([*words, "--html", str(tmp_path / "none" / "serve.html")])


@pytest.mark.parametrize(("given", "message"), [
    ({"prefill": {"dp": 2}}, "the settings of prefill are tp, pp, ep, replicas, got 'dp'"),
    ({"prefill": {"tp": 0}}, "tp of prefill must be an integer of at least 1, got 0"),
    ({"prefill": {"tp": 3}}, "prefill on 3 devices leaves none of 3 for the answers"),
    ({"disaggregate": True, "output_tokens": 1}, "answers of one token are prefill alone"),
])
def test_pools_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        found(**given)


@pytest.mark.parametrize("text", ["tp", "tp=x", "tp=0", "batch=2", " ", "tp=1 tp=2"])
def test_settings_of_prefill_are_read(text):
    with pytest.raises(WrongWords, match="--prefill needs settings of tp, pp, ep, replicas, as tp=4; got"):
        main(["serve", "llama3.1-8b", "--devices", "2", "--prefill", text])
