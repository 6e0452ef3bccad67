"""Serving of layers that keep a state: their slots, their bytes, copies of their groups over devices, and their plans."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from served_models import SERVED, VOCABULARY, greedy, logits_of, parameters_of

from parallelism import Executable, Hardware, Mesh, ir, models
from parallelism.ir.passes import with_room
from parallelism.models import LinearAttention, from_config
from parallelism.models.figures import is_product
from parallelism.models.inference.caches import cache_kinds, kinds_of
from parallelism.serving import Engine, EngineSettings, Request, StepPrices, find_serving
from parallelism.serving.engine import Row, Work, read_and_scored
from parallelism.serving.placement import ALONE, Placement, usual_strategy
from parallelism.transforms import Strategy
from vcluster.__main__ import main
from vcluster.cli.serving.cache_words import cache_of

MAMBA, DELTA = SERVED["nemotron-h"], SERVED["qwen3-next"]


def test_states_have_the_bytes_of_the_engines():
    """SGLang 0.5.23, configs/mamba_utils.py: heads x width x states in float32, and 3 tokens of x, B and C in bfloat16."""
    nano = from_config({
        "model_type": "nemotron_h", "hybrid_override_pattern": "ME*-M", "hidden_size": 2688, "mamba_num_heads": 64,
        "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 128})
    states = 64 * 64 * 128 * 4 + 3 * (64 * 64 + 2 * 8 * 128) * 2
    nano = replace(nano, dtype="bfloat16")
    assert [cache_kinds(nano, layer) for layer in range(5)] == [("states",), (), ("full",), (), ("states",)]
    assert nano.cache_bytes(0) == 2 * states
    assert nano.cache_bytes(1000) == nano.cache_bytes(1000, "bfloat16") == 2 * states + 1000 * 2 * 2 * 128 * 2
    assert nano.cache_bytes(10, "float8_e4m3fn") == 2 * states + 10 * 2 * 2 * 128
    assert kinds_of(nano) == ("full", "states") and kinds_of(models.transformer("gpt2")) == ("full",)
    tokens = ir.symbol("n")
    assert ir.specialized(nano.cache_bytes(tokens), {"n": 77}) == nano.cache_bytes(77)


def test_a_decode_reads_and_writes_the_states_in_their_place():
    spec = MAMBA
    function = spec.decode(4, 8)
    arrays = [np.zeros([int(each) for each in value.type.shape], value.type.dtype) for value in function.inputs]
    cache = sum(array.nbytes for value, array in zip(function.inputs, arrays, strict=True) if "cache" in value.name)
    assert cache == 4 * spec.cache_bytes(8, "float64")
    spec = replace(spec, linear_attention=replace(spec.linear_attention, state_width=300))
    function = spec.decode(4, 8)
    arrays = [np.zeros([int(each) for each in value.type.shape], value.type.dtype) for value in function.inputs]
    states = sum(array.nbytes for value, array in zip(function.inputs, arrays, strict=True) if ".state" in value.name
                 and "cache" in value.name)
    assert ir.interpret(function, arrays).peak_bytes < sum(array.nbytes for array in arrays) + states / 2


def test_heads_of_states_are_split_with_the_products_and_slots_with_the_batch():
    function = Strategy.parse("dp tp")(DELTA.decode(4, 8))
    executable = Executable(with_room(function), Mesh(dp=2, tp=2), donate="cache")
    names = [value.name for value in executable.programs.function.inputs]
    found = dict(zip(names, (layout.short() for layout in executable.programs.inputs), strict=True))
    assert found["cache.0.state"] == "[dp, None, tp, None, None]"
    assert found["cache.0.convolution"] == "[dp, None, None, tp, None]"
    assert (found["p.0.state_in"], found["p.0.state_out"]) == ("[None, tp]", "[tp, None]")


# -- the engine --------------------------------------------------------------------------------------------------------


def test_a_request_has_one_slot_and_waits_for_it():
    settings = EngineSettings(batch=3, chunk=8, page_tokens=2, pages={"full": 40, "states": 2})
    engine = Engine(DELTA, settings, [Request((1,) * each, 3) for each in (5, 1, 4)])
    assert [settings.table_pages(DELTA, "states", tokens) for tokens in (0, 1, 1000)] == [1, 1, 1]
    first = engine.step()
    assert [row.request for work in first for row in work.rows[0]] == [0, 1] and engine.pages[0]["states"].free == 0
    assert [engine.table(number, "states") for number in (0, 1)] == [(0,), (1,)]
    engine.finish(first, {0: 0, 1: 0})
    for _ in range(2):
        step = engine.step()
        engine.finish(step, {0: 0, 1: 0})
    assert {*engine.answers} == {0, 1} and [row.request for row in engine.step()[0].rows[0]] == [2]


def test_a_step_reads_a_state_of_each_sequence_and_several_tokens_go_through_chunks():
    settings = EngineSettings(batch=4, chunk=64, page_tokens=2, pages={"full": 40, "states": 4})
    rows = (Row(0, 7, 8, samples=True), Row(1, 0, 9, samples=True), Row(2, 4, 6, samples=False))
    assert DELTA.linear_attention.chunk == 4
    assert read_and_scored(DELTA, settings, Work((rows, rows[:1])), "states") == (3, 3 + 1)
    assert read_and_scored(DELTA, settings, Work((rows[:1],)), "states") == (1, 0)


# -- copies of groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "tp"), [(MAMBA, 2), (DELTA, 4), (MAMBA, 6)], ids=["one to two", "one to four", "to six"])
def test_a_model_whose_groups_are_copied_computes_the_same(spec, tp):
    one = replace(spec, linear_attention=replace(spec.linear_attention, groups=1), key_value_heads=2, heads=12)
    mesh = Mesh(tp=tp)
    placement = Placement(one, mesh, usual_strategy(mesh))
    copied = placement.spec.linear_attention
    assert (copied.groups, copied.normed_groups, copied.heads) == (tp, 1, one.linear_attention.heads)
    given = parameters_of(one)
    given |= {name: array + 1 for name, array in given.items() if name.endswith("_norm")}
    own = placement.parameters(given)
    assert {name: array.shape for name, array in own.items()} == placement.spec.weights
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, (2, 7))
    assert_allclose(logits_of(placement.spec, own, tokens), logits_of(one, given, tokens), atol=1e-12)


def test_heads_that_cannot_be_dealt_are_refused():
    mesh = Mesh(tp=3)
    message = "the 4 heads of linear attention, in 2 groups, are not split or copied evenly over 3 devices"
    with pytest.raises(ValueError, match=message):
        Placement(DELTA, mesh, usual_strategy(mesh))
    with pytest.raises(ValueError, match="norm_groups of linear attention must be an integer of at least 1, got 0"):
        LinearAttention(norm_groups=0)


# -- generation and plans ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [MAMBA, DELTA], ids=["mamba2", "gated_delta"])
def test_generation_in_chunks_is_that_without_a_cache(spec):
    parameters, prompts = parameters_of(spec), [[3, 1, 4, 1, 5], [9], [2, 6]]
    found = models.generate(spec, parameters, prompts, 3, page_tokens=3, chunk=4, batch=2)
    assert_array_equal(found, [greedy(spec, parameters, prompt, 3) for prompt in prompts])


HYBRID = models.TransformerSpec(
    layers=4, width=256, heads=8, key_value_heads=2, vocabulary=512, sequence=4096, norm="rms", activation="swiglu",
    feed_forward=512, positions="rotary", biases=("convolution",), tied=False,
    linear_attention=LinearAttention(heads=16, head_width=32, state_width=64, groups=2, layers=(True, True, True, False)))

HYBRID_STATES = 3 * (16 * 32 * 64 * 4 + 3 * (512 + 2 * 2 * 64) * 2)


def test_the_cache_has_the_states_of_all_requests_and_pages_in_what_is_left():
    given = {"input_tokens": 300, "output_tokens": 40, "memory": "100MB", "reserve": "20MB"}
    best = find_serving(HYBRID, "dgx-h100", 2, batch=12, tp=2, pp=1, **given).best
    spec = replace(HYBRID, dtype="bfloat16")
    states, page = 12 * spec.cache_bytes(0) // 2, 16 * (spec.cache_bytes(1) - spec.cache_bytes(0)) // 2
    left = 80e6 - best.memory["weights"] - best.memory["activations"] - states
    assert best.memory["cache"] == states + int(left // page) * page and best.cache_tokens == 16 * int(left // page)
    refused = find_serving(HYBRID, "dgx-h100", 2, batch=512, tp=2, pp=1, **given)
    assert "the cache of so many requests does not fit the memory" in refused.refused
    assert find_serving(HYBRID, "dgx-h100", 32, batch=4, tp=32, **given).refused


def test_decode_waits_for_the_states_of_all_requests():
    """What more requests take longer is the time to read and write their states, and the last tokens before convolutions."""
    wide = replace(HYBRID, dtype="bfloat16", linear_attention=replace(HYBRID.linear_attention, state_width=2048))
    hardware, placement = Hardware.preset("dgx-h100"), Placement(wide, ALONE, Strategy())
    settings = EngineSettings(256, 256, 16, {"full": 256, "states": 256})
    prices = StepPrices(placement, settings, hardware)
    work = {"t": 256, "r": 256, "pages": 1, "read_full": 4096, "scored_full": 256, "scored_states": 0}
    few, many = (prices.parts(work | {"read_states": each}).attention for each in (128, 256))
    read_and_written = 2 * 128 * wide.cache_bytes(0) / (hardware.memory_bytes_per_second * hardware.memory_efficiency)
    assert many - few == pytest.approx(read_and_written, rel=0.02)
    longer = prices.parts(work | {"read_states": 256, "scored_states": 4}).attention
    assert longer > many


@pytest.mark.takes_seconds
def test_products_are_read_in_8_bits_and_convolutions_are_not():
    given = {"input_tokens": 8, "output_tokens": 4, "batch": 4, "tp": 1, "pp": 1}
    plain, narrow = (find_serving(HYBRID, "dgx-h100", 1, precision=each, **given).best for each in ("bf16", "fp8"))
    weights = replace(HYBRID, dtype="bfloat16").weights
    products = sum(prod(shape) for name, shape in weights.items() if is_product(name, len(shape)))
    assert is_product("0.state_in", 2) and not is_product("0.convolution", 2)
    assert plain.memory["weights"] - narrow.memory["weights"] == products
    assert narrow.token_seconds < plain.token_seconds


@pytest.mark.slow
def test_answers_get_the_states_of_prompts():
    given = {"input_tokens": 60, "output_tokens": 8, "tp": 1, "pp": 1, "batch": 4}
    plan = find_serving(HYBRID, "dgx-h100", 2, prefill={"tp": 1, "replicas": 1}, **given).best
    assert plan.prefill.moved_bytes == replace(HYBRID, dtype="bfloat16").cache_bytes(64)      # whole pages


def test_a_model_of_states_alone_keeps_no_tokens():
    spec = replace(HYBRID, linear_attention=replace(HYBRID.linear_attention, layers=None))
    best = find_serving(spec, "dgx-h100", 1, input_tokens=30, output_tokens=4, batch=4, tp=1, pp=1).best
    assert best.cache_tokens == 0 and best.memory["cache"] == 4 * replace(spec, dtype="bfloat16").cache_bytes(0)


def test_the_command_tells_what_the_states_take(tmp_path, capsys):
    fields = {"model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 64, "num_heads": 4, "head_dim": 32,
              "n_groups": 1, "state_size": 16, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    main(["serve", str(tmp_path), "--devices", "1", "--input-tokens", "30", "--output-tokens", "4", "--batch", "4"])
    told = " ".join(capsys.readouterr().out.split())
    states = 2 * (4 * 32 * 16 * 4 + 3 * (128 + 32) * 2)
    assert f"The states of a request take {states / 1e6:.3g} MB, however long it is." in told and "A token takes" not in told
    assert cache_of(replace(HYBRID, dtype="bfloat16"), "bfloat16")["bytes_of_states"] == HYBRID_STATES
