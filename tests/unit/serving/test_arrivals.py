"""Requests that arrive by themselves: what a plan answers in the long run, how much is chance, and percentiles."""

from __future__ import annotations

import json

import pytest

from parallelism.serving import find_serving
from parallelism.serving.serve import Answered, at_share, percentiles
from parallelism.serving.workloads import PricedRun
from vcluster.__main__ import main
from vcluster.cli.command_line import WrongWords

TOO_MANY = 1e4


def found(name="llama3.1-8b", devices=1, **more):
    given = {"input_tokens": 1000, "output_tokens": 300, "pp": 1} | more
    return find_serving(name, "dgx-h100", devices, **given)


def middle_rate(answered):
    """The requests a second that are answered between a quarter of them and three quarters."""
    ends = sorted(each.last_token_seconds for each in answered)
    quarter = len(ends) // 4
    return (len(ends) - 2 * quarter) / (ends[-quarter] - ends[quarter])


@pytest.mark.takes_seconds
@pytest.mark.parametrize(("name", "devices", "layout"), [
    ("llama3.1-8b", 1, {"tp": 1, "batch": 32}), ("llama3.1-8b", 1, {"tp": 1, "batch": 4, "input_tokens": 4000}),
    ("llama3.1-8b", 4, {"tp": 2, "pp": 2, "batch": 16}), ("mixtral-8x7b", 4, {"tp": 1, "ep": 4, "batch": 64})])
def test_a_plan_answers_in_the_long_run_what_a_simulation_of_too_many_requests_answers(name, devices, layout):
    """Where more wait always, as many are there as fit: by Little's law they are answered at their number by their time."""
    plan = found(name, devices, rate=TOO_MANY, **layout).best
    equal_parts = plan.layout.attentions
    assert plan.capacity == pytest.approx(middle_rate(plan.answered) * equal_parts, rel=0.015)
    assert plan.requests_per_second == plan.capacity


@pytest.mark.takes_seconds
@pytest.mark.parametrize(("prefill", "more"), [({"tp": 1, "replicas": 1}, {"devices": 2, "tp": 1, "batch": 32}),
                                               ({"tp": 2, "replicas": 1}, {"devices": 4, "tp": 1, "batch": 16})])
def test_pools_answer_in_the_long_run_what_the_slower_one_does(prefill, more):
    """A place is free after the 299 steps of an answer, in which all requests have half of their answers in the cache."""
    plan = found(prefill=prefill, rate=TOO_MANY, input_tokens=2000, **more).best
    assert plan.prefill is not None and plan.parts is not None
    assert plan.capacity == pytest.approx(middle_rate(plan.answered), rel=0.015)
    assert plan.capacity == pytest.approx(plan.batch * plan.replicas / (299 * plan.parts.seconds), rel=0.01)
    assert plan.prefill.moved_bytes == 2000 * 2 * 32 * 8 * 128 * 2
    assert plan.prefill.moved_seconds == pytest.approx(plan.prefill.moved_bytes / 380e9, rel=0.01)     # what messages reach


@pytest.mark.takes_seconds
@pytest.mark.parametrize(("part", "keeps_up"), [(0.95, True), (1.05, False)])
def test_whether_a_plan_keeps_up_is_no_matter_of_chance(part, keeps_up):
    """Of 208 random arrivals at 1.05 of what it answers the later ones did not wait longer than the first, by chance."""
    capacity = found(tp=1, batch=32, rate=TOO_MANY).best.capacity
    plans = found(tp=1, batch=32, rate=part * capacity)
    assert (plans.best.requests_per_second == part * capacity) == keeps_up
    assert plans.best.requests_per_second == pytest.approx(min(part, 1.0) * capacity)
    assert ("answers all that arrive" in plans.why()) == keeps_up


@pytest.mark.takes_seconds
def test_rows_whose_places_are_never_all_taken_are_run_once(monkeypatch):
    runs = []
    served = PricedRun.served
    monkeypatch.setattr(PricedRun, "served", lambda run: runs.append(run.engine.settings.batch) or served(run))
    plans = found(rate=2.0, tp=1)
    same = [row for row in plans.rows if row.first_token_seconds == plans.best.first_token_seconds]
    assert len(same) >= 6 and plans.best.batch == max(row.batch for row in same)
    assert len(runs) <= len(plans.rows) - len(same) + 2 + 7                        # and seven more series of the first
    assert plans.spread is not None and plans.spread.series == 8


@pytest.mark.takes_seconds
def test_series_of_arrivals_differ_near_saturation_and_hardly_far_from_it():
    near, far = (found(tp=1, batch=32, rate=rate) for rate in (10.6, 2.0))
    for plans in (near, far):
        (low, high), best = plans.spread.first_token_seconds, plans.best
        assert low <= best.first_token_seconds <= high
        assert len(plans.spread.answered) == 8 * len(best.answered)
    (low, high), (least, most) = near.spread.first_token_seconds, far.spread.first_token_seconds
    assert high > 3 * low and most < 1.2 * least
    assert found(tp=1, batch=4).spread is None


def test_percentiles_are_values_of_requests():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [at_share(values, percent) for percent in (1, 20, 20.1, 50, 90, 100)] == [1.0, 1.0, 2.0, 3.0, 5.0, 5.0]
    answered = [Answered(1.0, 1.0 + each, 1.0 + each + 2 * each, 3) for each in values]
    assert percentiles(answered) == {"first_token_percentiles": {"p50": 3.0, "p90": 5.0, "p99": 5.0},
                                     "token_percentiles": {"p50": 3.0, "p90": 5.0, "p99": 5.0}}


@pytest.mark.takes_seconds
def test_limits_may_be_of_a_part_of_the_requests():
    """All requests come at once, so that some wait for the prompts of others: in the mean they are within, the last not."""
    given = {"tp": 1, "batch": 16, "precision": "fp8"}
    plan = found(**given).best
    mean, half, most = plan.first_token_seconds, *(plan.seconds_at(percent)[0] for percent in (50, 99))
    assert half < mean < most
    assert found(**given, first_token_seconds=mean).plans and not found(**given, first_token_seconds=half).plans
    assert not found(**given, first_token_seconds=mean, percentile=99).plans
    plans = found(**given, first_token_seconds=half, percentile=50)
    assert plans.best == plan and plans.task.share_within(plan.answered) == pytest.approx(
        sum(each.waited_seconds <= half for each in plan.answered) / len(plan.answered))
    with pytest.raises(ValueError, match="percentile must be above 0 and at most 100, got 101"):
        found(**given, percentile=101)


@pytest.mark.takes_seconds
def test_the_command_tells_percentiles_the_load_and_how_much_is_chance(capsys):
    words = ["serve", "llama3.1-8b", "--devices", "1", "--tp", "1", "--batch", "32", "--rate", "9", "--first-token", "80ms",
             "--percentile", "90"]
    assert main(words) in (0, 1)
    text = " ".join(capsys.readouterr().out.split())
    for part in ("for 90 % of the requests", "Half of the requests have a first token in", "a goodput of", "the load is",
                 "With 8 series of random arrivals the mean first token takes"):
        assert part in text
    assert main([*words[:-4], "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (plan,) = document["plans"]
    assert document["arrivals"]["series"] == 8
    assert plan["first_token_percentiles"]["p50"] <= plan["first_token_percentiles"]["p99"]
    assert plan["share_within_limits"] == 1 and plan["goodput_requests_per_second"] == 9
    assert 9 < plan["capacity_requests_per_second"] < 12
    with pytest.raises(WrongWords, match="--percentile: needs so many of a hundred, such as 99, got '0'"):
        main([*words, "--percentile", "0"])


@pytest.mark.takes_seconds
def test_the_command_finds_the_fewest_devices_that_answer_all_that_arrive(capsys):
    """70B in 8 bits does not fit one device; two of them answer 4 requests a second, and not 40."""
    words = ["serve", "llama3.1-70b", "--precision", "fp8", "--batch", "64", "--pp", "1", "--devices", "4,2,1", "--rate"]
    assert main([*words, "4"]) == 0
    text = capsys.readouterr().out
    assert "The fewest within the limits that answer all that arrive: 2 devices." in text and "nothing fits" in text
    assert "--devices 2 " in text and max(map(len, text.splitlines())) <= 80
    assert main([*words, "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(each["devices"], each["suffices"]) for each in document["by_devices"]] == [(1, False), (2, True)]
    assert document["by_devices"][0]["first"] is None and document["devices"] == 2
    assert main([*words, "40"]) == 1
    captured = capsys.readouterr()
    assert "None of these numbers of devices is within the limits" in captured.out
    assert captured.err.endswith("no number of devices answers all that arrive\n")
