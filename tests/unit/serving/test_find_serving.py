"""The search for a way to serve: its rows, its pick, the memory, and what it says of the others."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from parallelism import Hardware, models
from parallelism.planning import find_plan
from parallelism.serving import Request, find_serving
from vcluster.__main__ import main
from vcluster.cli.command_line import WrongWords

LLAMA = models.transformer("llama3.1-8b")
GIVEN = {"input_tokens": 300, "output_tokens": 40}


def found(**more):
    return find_serving(more.pop("spec", LLAMA), more.pop("hardware", "dgx-h100"), more.pop("devices", 4), **GIVEN | more)


@pytest.mark.slow
def test_the_pick_is_that_of_all_rows_one_by_one():
    batches, limits = (1, 8, 64), {"token_seconds": 0.008, "first_token_seconds": 0.5}
    plans = found(batch=batches, **limits)
    layouts = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2) if tp * pp <= 4]
    rows = [row for tp, pp in layouts for batch in batches for row in found(tp=tp, pp=pp, batch=batch).rows]
    assert len(rows) > 10
    within = [row for row in rows if row.token_seconds <= 0.008 and row.first_token_seconds <= 0.5]
    assert plans.best == max(within, key=lambda row: row.tokens_per_second)


@pytest.mark.slow
def test_a_row_again_has_the_same_figures():
    best = found().best
    again = found(**{name: getattr(best, name) for name in ("tp", "pp", "ep", "replicas", "batch")}).best
    assert again == best


def test_the_cache_has_what_weights_activations_and_the_reserve_leave():
    best = found(batch=4, tp=2, pp=1).best
    hardware = Hardware.preset("dgx-h100")
    usable = hardware.reserve.usable_bytes(hardware.memory_bytes, 1)
    page = LLAMA.cache_bytes(16) // 2  # half of the heads on each of two devices
    left = usable - best.memory["weights"] - best.memory["activations"]
    assert best.memory["cache"] == int(left // page) * page
    assert best.cache_tokens == 16 * int(left // page)
    assert best.peak_bytes + best.memory["reserve"] <= hardware.memory_bytes


def test_what_does_not_fit_is_refused_with_its_reason():
    plans = found(spec=models.transformer("llama3.1-70b"), devices=2, memory="60GB")
    assert "the weights do not fit the memory" in plans.refused
    assert not plans and "nothing can serve so" in plans.why_none
    with pytest.raises(ValueError, match="nothing can serve so"):
        _ = plans.best
    assert "the weights do not fit the memory" in plans.why_not(tp=1)
    assert plans.why_none.endswith("at least 3 devices are needed, or fewer bits")        # 141 GB, 60 on each
    assert found(input_tokens=10**6, devices=1, batch=1).why_none.endswith("the 1000039 tokens of one request take 131 GB")
    assert found(devices=2, tp=3).why_none == "nothing can serve so: no layout of 2 devices has tp=3"


@pytest.mark.parametrize(("words", "message"), [
    (["--prefill", ""], "--prefill needs settings of tp, pp, ep, replicas, as tp=4; got ''"),
    (["--memory", "70"], "memory must have a unit, such as 70GB; got '70', which is bytes"),
    (["--memory", "0GB"], "memory must be above 0 bytes and finite; got 0.0"),
    (["--reserve", "4"], "reserve must have a unit, such as 4GB; got '4', which is bytes"),
])
def test_wrong_words_are_refused_by_name(words, message):
    with pytest.raises(WrongWords, match=f"^{re.escape(message)}$"):
        main(["serve", "gpt2", "--devices", "2", "--input-tokens", "30", *words])


def test_a_reserve_of_nothing_and_settings_that_are_no_dict():
    assert found(memory="80GB", reserve="0GB", batch=1, tp=4).best.memory["reserve"] == 0
    with pytest.raises(TypeError, match=r"prefill must be a dict of settings, as .*; got 'tp=2'"):
        found(prefill="tp=2")


def test_limits_that_nothing_meets_have_a_nearest():
    plans = found(token_seconds=0.002, batch=1)
    assert not plans.plans and "nothing meets the limits; the nearest is tp=4" in plans.why_none


@pytest.mark.slow
def test_the_front_has_no_plan_that_another_beats():
    plans = found()
    front = plans.front
    assert len(front) > 2
    for one, other in pairwise(front):
        assert one.token_seconds < other.token_seconds and one.tokens_per_second < other.tokens_per_second
    assert plans.best in front


def test_experts_are_split_and_refused_where_there_are_none():
    mixtral = found(spec=models.transformer("mixtral-8x7b"), ep=4, tp=1, pp=1, batch=8)
    assert mixtral.best.layout == (1, 1, 4, 1)
    assert found(ep=2).refused == {"the model has no experts to split over ep": 1 + len(found(ep=2).reasons) - 1}


def test_clients_and_rates_are_dealt_to_replicas():
    plans = found(concurrency=12, tp=1, pp=1)
    assert plans.best.replicas == 4 and plans.best.batch == 3
    slow = found(rate=1.0, tp=4, pp=1, batch=8).best
    assert slow.requests_per_second == pytest.approx(1.0, rel=0.5)
    assert slow.first_token_seconds < found(tp=4, pp=1, batch=8).best.first_token_seconds


@pytest.mark.parametrize("rate", [0.05, 2.0])
def test_no_plan_answers_more_than_arrives_and_those_that_keep_up_are_ordered_by_the_time_of_a_request(rate):
    """A few random arrivals may come faster than all of them, which made rows with many replicas the first."""
    plans = found(rate=rate, batch=(1, 8), pp=1)
    best, rows = plans.best, plans.rows
    assert {row.replicas for row in rows} == {1, 2, 4}
    assert all(row.requests_per_second <= rate for row in rows)
    assert all(row.tokens_per_second == pytest.approx(row.requests_per_second * GIVEN["output_tokens"]) for row in rows)
    keep_up = [row for row in rows if row.requests_per_second == rate]
    assert best.requests_per_second == rate
    soonest = [row for row in keep_up if row.request_seconds < 1.02 * min(each.request_seconds for each in keep_up)]
    assert best in soonest and best.capacity >= soonest[0].capacity
    assert best.tp == 4 and "answers all that arrive" in plans.why()
    assert [len(row.answered) for row in rows if row.batch == 8] == [64] * 3


def test_a_plan_that_does_not_keep_up_answers_what_it_can():
    """With far more requests than it can answer it has about the tokens a second that it has with as many as it takes."""
    one, loaded = found(rate=1e4, batch=4, tp=1, pp=1).best, found(batch=4, tp=1, pp=1).best
    assert one.requests_per_second < 1e4 and "answers all" not in found(rate=1e4, batch=4, tp=1, pp=1).why()
    assert one.tokens_per_second == pytest.approx(loaded.tokens_per_second, rel=0.1)
    assert found(rate=1e300, batch=4, tp=1, pp=1).best.tokens_per_second == pytest.approx(one.tokens_per_second, rel=0.1)


def test_windows_take_the_memory_of_their_tokens_and_of_one_step():
    """Of gemma3-27b: 10 layers keep all tokens, 52 the 65 pages that a window of 1,024 touches; a step has 128 more."""
    gemma = {"spec": models.transformer("gemma3-27b"), "devices": 1, "tp": 1, "pp": 1, "input_tokens": 4000}
    plan = found(**gemma, batch=16).best
    of_layer = 2 * 16 * 128 * 2 * 16                        # keys and values of 16 heads of 128, in bfloat16, of 16 tokens
    windows = 52 * of_layer * (16 * 65 + 128)
    assert plan.memory["cache"] == windows + 10 * of_layer * plan.cache_tokens // 16
    requests = (plan.memory["cache"] - 52 * of_layer * 128) // (52 * of_layer * 65 + 10 * of_layer * 253)
    assert 16 < requests < 32
    assert found(**gemma, batch=requests).rows and not found(**gemma, batch=requests + 1).rows


def test_fewer_bits_are_faster():
    plain, fewer = (found(precision=each, tp=1, pp=1, batch=4).best for each in ("bf16", "fp8"))
    assert fewer.token_seconds < 0.7 * plain.token_seconds and fewer.cache_tokens > 2 * plain.cache_tokens


def test_a_price_gives_the_cost_of_tokens():
    best = found(price=3.6, batch=4, tp=4).best
    assert best.cost_per_million_tokens == pytest.approx(3.6 * 4 / 3600 / best.tokens_per_second * 1e6)
    assert found(batch=4, tp=4).best.cost_per_million_tokens is None


@pytest.mark.parametrize(("given", "message"), [
    ({"input_tokens": None}, "input_tokens and output_tokens must say the lengths"),
    ({"token_seconds": 0}, "token_seconds must be a number above 0, got 0"),
    ({"token_seconds": "30ms"}, "token_seconds must be a number above 0, got '30ms'"),
    ({"price": -1}, "price must be a number above 0"),
    ({"chunk": 0}, "chunk must be an integer of at least 1"), ({"tp": 0}, "tp must be an integer of at least 1"),
    ({"memory": -5}, "memory must be above 0 bytes and finite; got -5"), ({"hardware": "dgx-h10"}, "no hardware 'dgx-h10'"),
    ({"devices": 0}, "devices must be an integer of at least 1"),
    ({"spec": replace(models.transformer("gpt2")), "input_tokens": 2000}, "do not fit the 1024 positions of the model"),
])
def test_figures_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        found(**given)


@pytest.mark.parametrize(("name", "most"), [
    ("llama2-7b", 4096), ("llama3.1-8b", 131_072), ("deepseek-v3", 163_840), ("mixtral-8x7b", 32_768), ("falcon-7b", 2048)])
def test_requests_that_are_longer_than_the_positions_of_a_published_model_are_refused(name, most):
    """Those of its config, which may be more than those of a sequence of training."""
    given = {"spec": name, "devices": 1, "tp": 1, "pp": 1, "batch": 1, "precision": "int4", "memory": "1000GB"}
    with pytest.raises(ValueError, match=f"of up to {most + 1} tokens do not fit the {most} positions of the model;"):
        found(**given, input_tokens=most - 38)
    assert found(**given, input_tokens=most - 39).rows and found(**given, input_tokens=most - 38, positions=2 * most).rows


def test_the_command_takes_positions_of_a_config_and_of_a_flag(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 500}))
    words = ["serve", str(tmp_path), "--devices", "1", "--input-tokens", "490", "--output-tokens", "20", "--batch", "1"]
    with pytest.raises(WrongWords, match="requests of up to 509 tokens do not fit the 500 positions of the model"):
        main(words)
    assert main([*words, "--max-model-len", "600", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert "--max-model-len 600" in plan["command"]
    with pytest.raises(ValueError, match="positions must be an integer of at least 1, got 0"):
        found(positions=0)


def test_settings_of_a_question_are_checked():
    with pytest.raises(ValueError, match="the settings of a plan are tp, pp, ep, replicas, batch, got 'dp'"):
        found(batch=1, tp=4).why_not(dp=2)
    with pytest.raises(TypeError, match="why_not takes the settings that are asked about"):
        found(batch=1, tp=4).why_not()


# -- the command -------------------------------------------------------------------------------------------------------

COMMAND = ["serve", "llama3.1-8b", "--devices", "2", "--input-tokens", "200", "--output-tokens", "20"]
FIELDS = {"tp", "pp", "ep", "replicas", "batch", "first_token_seconds", "token_seconds", "tokens_per_second",
          "tokens_per_second_per_device", "requests_per_second", "cache_tokens", "peak_bytes", "command"}


def told(capsys, *words):
    status = main([*COMMAND, *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.slow
def test_the_command_prints_its_fields_and_a_command_that_gives_the_first_again(capsys):
    status, out, _ = told(capsys, "--json", "--price", "2.5")
    document = json.loads(out)
    assert status == 0 and {"plans", "front", "refused"} <= document.keys()
    assert all(plan.keys() >= FIELDS for plan in (*document["plans"], *document["front"]))
    first = document["plans"][0]
    status = main([*first["command"].split()[3:], "--json"])
    again = json.loads(capsys.readouterr().out)["plans"][0]
    assert again == first and status == 0


@pytest.mark.slow
def test_the_command_tells_plans_the_front_and_the_memory(capsys):
    status, out, _ = told(capsys, "--token", "20ms", "--why-not", "tp=1", "--first-token", "2s")
    assert status == 0
    for part in ("first token", "cache tokens", "tokens/s of a user", "tp=1", "The first again:", "weights", "compared with"):
        assert part in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("option", ["--token", "--first-token"])
def test_a_limit_that_has_lost_its_unit_is_refused(option, capsys):
    with pytest.raises(WrongWords, match=f"{option}: needs a unit, as 50ms or 50s, got '50'"):
        told(capsys, option, "50")
    assert told(capsys, option, "5", "--tp", "1", "--batch", "1")[0] == 0       # seconds


def test_the_command_says_how_requests_come_and_in_what_the_cache_is(capsys):
    _, out, _ = told(capsys, "--precision", "fp8", "--tp", "1", "--batch", "4")
    assert "as many as a plan takes at a time, the first all at once" in " ".join(out.split())
    assert "65.5 kB of cache in float8_e4m3fn in all layers" in " ".join(out.split())
    _, out, _ = told(capsys, "--precision", "int4", "--tp", "1", "--batch", "4", "--concurrency", "8")
    assert "from 8 clients, who begin at once" in " ".join(out.split())
    assert "131 kB of cache in bfloat16 in all layers" in " ".join(out.split())


def test_nothing_within_the_limits_is_exit_1_with_the_nearest(capsys):
    status, _, err = told(capsys, "--token", "2500us", "--tp", "2", "--batch", "1")
    assert status == 1 and "nothing meets the limits; the nearest is tp=2" in err


WRONG = [
    *(["--token", value] for value in ("0", "-1", "ms", "5parsecs", "1e999", "nan", "", "5 5ms", "5MS", "ten")),
    *(["--first-token", value] for value in ("0s", "-5ms", "s", "half", "1.2.3s", "1w", "0x5", "5ms5", "inf", "ms5")),
    *(["--devices", value] for value in ("0", "-1", "two", "1.5", "1e3", "", "8x", "99999999999", " ", "0b1")),
    *(["--input-tokens", value] for value in ("0", "-3", "many", "3k", "1.0", "")),
    *(["--output-tokens", value] for value in ("0", "-3", "few", "3k", "1.0", "")),
    *(["--concurrency", value] for value in ("0", "-3", "x", "2.5")),
    *(["--rate", value] for value in ("0", "-3", "x/s", "3/m")),
    *(["--hits", value] for value in ("100%", "1", "-5%", "x", "2", "%")),
    *(["--precision", value] for value in ("fp4", "bf8", "", "16", "float")),
    *(["--chunk", value] for value in ("0", "-1", "x")),
    *(["--memory", value] for value in ("80XB", "-5GB", "lots", "")),
    *(["--reserve", value] for value in ("4XB", "x", "-1GB")),
    *(["--price", value] for value in ("0", "-2", "free", "inf")),
    *([f"--{name}", value] for name in ("tp", "pp", "ep", "replicas", "batch") for value in ("0", "x", "1,,2")),
    *(["--why-not", value] for value in ("", "tp", "tp=", "tp=x", "dp=2", "tp=0", "tp=4 x")),
    ["--top", "0"], ["--top", "x"], ["--hardware", "dgx-h10"], ["--hardware", ""], ["--hardware", "missing.toml"],
    ["--requests", "missing.json"], ["--requests", "."], ["--frobnicate"], ["--ttft", "5ms"], ["--tensor-parallel-size", "2"],
    ["more"], ["--json=1"], ["--concurrency", "3", "--rate", "3"], ["--token"],
    ["--devices", "9", "--hardware", "dgx-h100:1"],
]


def test_there_are_a_hundred_wrong_commands():
    assert len(WRONG) + len(MODELS) >= 100


@pytest.mark.sampled(18)
@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_wrong_command_is_refused_in_one_line(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongWords) as refused:
        main([*COMMAND, *words])
    assert 0 < len(" ".join(str(refused.value).split())) < 900


MODELS = ["lama3-8b", "gpt", "", "missing.json", "llama3.1-9b", ".", "-x"]


@pytest.mark.parametrize("word", MODELS)
def test_a_wrong_model_is_refused_in_one_line(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongWords):
        main(["serve", word, "--devices", "2"])


@pytest.mark.takes_seconds
def test_numbers_of_numpy_are_numbers():
    def integers(**figures):
        return {name: np.int64(figure) for name, figure in figures.items()}

    given = integers(devices=1, input_tokens=30, output_tokens=3, batch=2)
    plans = find_serving(models.transformer("gpt2"), "dgx-h100", **given)
    assert plans.best.batch == 2
    assert Request((1, 2), **integers(new_tokens=3)) == Request((1, 2), 3)
    experts = models.Experts(**integers(count=4, chosen=2), capacity=np.float64(1.5))
    figures = {"layers": 2, "width": 16, "heads": 4, "vocabulary": 8, "sequence": 4}
    spec = models.TransformerSpec(**integers(**figures), experts=experts)
    assert spec == models.TransformerSpec(**figures, experts=models.Experts(count=4, chosen=2, capacity=1.5))
    assert type(spec.parameters) is type(spec.width) is type(spec.head_width * 1) is int
    plans = find_plan(spec, hardware="dgx-h100", **integers(devices=2, batch=8, microbatch=2, tp=2))
    assert plans.best.mesh.shape["tp"] == plans.best.microbatch == 2


@pytest.mark.takes_seconds
def test_rows_of_requests_that_arrive_by_themselves_have_the_figures_of_each_alone():
    """They share the prices of what is alike in their runs."""
    given = {"spec": models.transformer("gpt2"), "devices": 1, "rate": 30.0, "tp": 1}
    together = found(**given, batch=(1, 2, 8, 16)).rows
    alone = [row for batch in (1, 2, 8, 16) for row in found(**given, batch=batch).rows]
    assert sorted(map(repr, together)) == sorted(map(repr, alone)) and len(alone) == 4


def test_a_model_by_its_name_and_one_that_is_trained_with_dropout():
    gpt2 = models.transformer("gpt2")
    best = found(spec="gpt2", devices=1, batch=2).best
    assert best == found(spec=gpt2, devices=1, batch=2).best
    assert best == found(spec=replace(gpt2, dropout=0.1), devices=1, batch=2).best
    with pytest.raises(TypeError, match="for a TransformerSpec, or its name; got NoneType"):
        found(spec=None)
    for wrong in [(3,)], [(3.5, 2)]:
        with pytest.raises(ValueError, match=rf"lengths must be pairs of integers .*, got {re.escape(str(wrong[0]))}"):
            find_serving("gpt2", "dgx-h100", 1, lengths=wrong)
