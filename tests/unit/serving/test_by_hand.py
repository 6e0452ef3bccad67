"""Figures of serving beside arithmetic that a reader can do by hand, from the figures of the models' configs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from parallelism import Hardware, Mesh, models
from parallelism.models.inference.caches import kinds_of
from parallelism.serving import EngineSettings, StepPrices, find_serving
from parallelism.serving.placement import Placement, usual_strategy
from vcluster.__main__ import main
from vcluster.cli.command_line import WrongWords

LLAMAS = {"llama3.1-8b": (32, 4096, 32, 8, 14_336, 128_256), "llama3.1-70b": (80, 8192, 64, 8, 28_672, 128_256)}
"""Layers, width, heads, heads of keys and values, width of the feed-forward, and vocabulary; heads are 128 wide."""
BITS = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4}


def found(name, devices, *, hardware="dgx-h100", **more):
    given = {"input_tokens": 1000, "output_tokens": 20, "batch": 1, "tp": devices, "pp": 1, "chunk": 512} | more
    return find_serving(name, hardware, devices, **given).best


@pytest.mark.parametrize("precision", BITS)
@pytest.mark.parametrize(("name", "tp"), [("llama3.1-8b", 1), ("llama3.1-8b", 4), ("llama3.1-70b", 8)])
def test_a_device_holds_its_part_of_every_product_and_of_both_tables(name, tp, precision):
    """The products of blocks in their bits; the tables of tokens and of the last product in 16, each split by the vocabulary;
    norms whole.  The rest is the cache's, of which each device has its part of the heads of keys and values."""
    layers, width, heads, groups, hidden, vocabulary = LLAMAS[name]
    block = width * (heads + 2 * groups) * 128 + heads * 128 * width + 3 * width * hidden
    plan = found(name, tp, precision=precision)
    assert plan.memory["weights"] == layers * block * BITS[precision] // 8 // tp + 2 * vocabulary * width * 2 // tp + (
        2 * layers + 1) * width * 2
    hardware = Hardware.preset("dgx-h100")
    left = hardware.reserve.usable_bytes(hardware.memory_bytes, int(tp > 1))
    left -= plan.memory["weights"] + plan.memory["activations"]
    token = 2 * layers * groups // tp * 128 * (1 if precision == "fp8" else 2)
    assert plan.cache_tokens == left // (16 * token) * 16


@pytest.mark.parametrize("name", ["llama3.1-8b", "gemma3-1b"])
def test_the_last_product_is_split_by_the_vocabulary_and_its_logits_are_gathered(name):
    """Also where its table is that of the tokens, as in Gemma."""
    spec = replace(models.transformer(name), dtype="bfloat16")
    mesh = Mesh(tp=4)
    placement = Placement(spec, mesh, usual_strategy(mesh))
    (part,) = placement.parts
    settings = EngineSettings(1, 64, 16, dict.fromkeys(kinds_of(spec), 1))
    program = placement.localized(part, settings).program(0)
    (gather,) = [op for op in program.ops if op.region == "head" and "group" in op.operator.attributes]
    assert gather.kind == "all_gather" and gather.inputs[0].type.shape[2] == spec.vocabulary // 4
    assert program.outputs[0].type.shape[2] == spec.vocabulary


def test_a_cache_in_float8_has_twice_the_tokens_and_is_read_in_half_the_time():
    """Weights in 16 bits beside a cache in 8, which is common, and weights in 8 beside a cache in 16."""
    plans = {(weights, cache): found("llama3.1-8b", 1, precision=weights, cache_dtype=cache, batch=64)
             for weights in ("bf16", "fp8") for cache in (None, "fp8", "fp8_e5m2", "bf16")}
    for weights in ("bf16", "fp8"):
        narrow, wide = plans[weights, "fp8"], plans[weights, "bf16"]
        assert narrow.memory["weights"] == wide.memory["weights"]
        assert narrow.cache_tokens == pytest.approx(2 * wide.cache_tokens, abs=64)
        launches = 32 * 0.9e-6
        assert narrow.parts.attention - launches == pytest.approx((wide.parts.attention - launches) / 2, rel=0.1)
        assert plans[weights, "fp8_e5m2"] == narrow
        assert plans[weights, None] == (wide if weights == "bf16" else narrow)


def test_a_pipeline_that_serves_does_not_run_empty_between_steps():
    """Of two microbatches each stage always has one: a step takes twice a stage; the step of one request all stages.

    A program that runs here begins a step when the one before is through, so two microbatches take three times a stage.
    """
    spec = replace(models.transformer("llama3.1-8b"), dtype="bfloat16")
    mesh = Mesh(pp=2)
    placement = Placement(spec, mesh, usual_strategy(mesh))
    settings = EngineSettings(1, 64, 16, {"full": 1})
    software, run = (StepPrices(placement, settings, Hardware.preset("dgx-h100"), as_run=each) for each in (False, True))
    work = {"t": 8, "r": 8, "pages": 4, "read_full": 512, "scored_full": 512}
    first, second = software.stage_seconds({"t": 8, "r": 8}, [work])[:, 0]
    sent = software._messages(work)[0]
    assert [software.seconds([work]), run.seconds([work])] == pytest.approx([first + sent + second] * 2, rel=1e-12)
    assert software.seconds([work, work]) == pytest.approx(max(2 * second, first + sent + second), rel=1e-12)
    assert run.seconds([work, work]) == pytest.approx(first + sent + 2 * second, rel=1e-12) and second > first + sent
    moving = {name: np.full(2, work[name]) for name in ("pages", "read_full", "scored_full")}
    steps = software.seconds_of_stretch([{"t": 8, "r": 8}] * 3, [moving] * 3, 2)
    assert steps.tolist() == pytest.approx([3 * second] * 2, rel=1e-12)


def test_a_cache_dtype_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"cache_dtype must be one of auto, bf16, .*, got 'fp4'"):
        found("llama3.1-8b", 1, cache_dtype="fp4")


def test_the_command_takes_the_dtype_of_the_cache_and_gives_it_on(capsys):
    words = ["serve", "llama3.1-8b", "--devices", "1", "--tp", "1", "--batch", "4", "--input-tokens", "100",
             "--output-tokens", "10"]
    assert main([*words, "--kv-cache-dtype", "fp8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cache_dtype"] == "float8_e4m3fn" and "--kv-cache-dtype fp8" in document["plans"][0]["command"]
    assert main([*words, "--kv-cache-dtype", "fp8"]) == 0
    assert "65.5 kB of cache in float8_e4m3fn in all layers" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(WrongWords, match=r"--kv-cache-dtype"):
        main([*words, "--kv-cache-dtype", "fp4"])


def test_the_command_says_whose_constants_a_hardware_has_that_nothing_was_compared_with(capsys):
    words = ["serve", "llama3.1-8b", "--devices", "1", "--tp", "1", "--batch", "4", "--input-tokens", "100",
             "--output-tokens", "10", "--hardware"]
    assert main([*words, "h200-node"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "compared with nothing: errors of 10 to 30 % are usual (nodes of eight NVIDIA H200 SXM, under TensorRT-LLM" in text
    assert "serving: constants of H100)" in text
    assert main([*words, "dgx-h100+plain"]) == 0
    assert "constants of H100" not in capsys.readouterr().out
