"""The figures of a step: they are those of its simulation, and its parts add up to its time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import fsum
from typing import Any

import numpy as np
import pytest

from parallelism.hardware import Hardware
from parallelism.ir import symbols
from parallelism.kernels import Mask
from parallelism.mesh import Mesh
from parallelism.models import mlp
from parallelism.models.layers import attention
from parallelism.simulation import CannotFold, shared_channels, simulate, step_parts
from parallelism.trace import split, step_split
from parallelism.training import Figures, MegatronFlags, TrainingRun, figures
from parallelism.transforms import SGD, Strategy, train_step

SMALL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 96,
    "make_vocab_size_divisible_by": 1, "bf16": True, "disable_bias_linear": True, "normalization": "RMSNorm"}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, {"global_batch_size": 4, "micro_batch_size": 2}),
    "all of it": (16, {
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2,
        "use_distributed_optimizer": True, "recompute_granularity": "selective", "global_batch_size": 16}),
    "interleaved": (8, {
        "num_layers": 4, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1,
        "global_batch_size": 16,
        "recompute_granularity": "full"}),
    "overlap": (4, {
        "pipeline_model_parallel_size": 2, "overlap_grad_reduce": True, "use_distributed_optimizer": True,
        "global_batch_size": 8}),
    "contexts": (4, {"context_parallel_size": 2, "global_batch_size": 4}),
}


def run_of(name: str) -> TrainingRun:
    devices, flags = RUNS[name]
    return MegatronFlags(**SMALL | flags).run(devices)


@cache
def figures_of(name: str) -> Figures:
    return figures(run_of(name), "dgx-a100")


@pytest.mark.slow
@pytest.mark.slow_for("overlap", "contexts", "all of it", "one device")
@pytest.mark.parametrize("name", RUNS)
def test_the_figures_are_those_of_the_simulation(name: str) -> None:
    run, found = run_of(name), figures_of(name)
    trace = simulate(run.step, found.hardware, mesh=run.mesh, batch=run.batch, fold=True)
    assert found.seconds == trace.makespan_seconds
    assert found.peak_bytes == max(trace.peaks().values())
    assert [sum(held.values()) for held in found.memory] == [
        max(peak for rank, peak in trace.peaks().items() if run.mesh.index(rank)["pp"] == stage)
        for stage in range(run.mesh.shape["pp"])]
    json = found.json()
    assert [*json] == ["seconds", "tokens_per_second", "tflops_per_device", "mfu", "hfu", "parts", "bubble",
                       "peak_bytes", "memory", "mesh", "strategy", "hardware", "stack", "validation"]
    assert json["mesh"] == dict(run.mesh.shape) and Strategy.parse(json["strategy"]) == run.strategy


@pytest.mark.sampled(2, 1)
@pytest.mark.slow_for("overlap", "contexts", "all of it")
@pytest.mark.parametrize("name", RUNS)
def test_parts_add_up_to_the_step(name: str) -> None:
    found = figures_of(name)
    assert fsum(found.parts.values()) == found.seconds
    assert min(found.parts.values()) > 0
    assert found.bubble == found.parts.get("bubble", 0.0) / found.seconds
    for seconds in found.step.step_split.values():
        assert fsum(seconds) == pytest.approx(found.seconds, rel=1e-12)
        assert seconds.bubble >= found.parts.get("bubble", 0.0)


@pytest.mark.slow
@pytest.mark.slow_for("overlap", "contexts", "interleaved", "one device")
@pytest.mark.parametrize("name", RUNS)
def test_parts_are_those_of_all_events_and_divide_the_coarser_ones(name: str) -> None:
    run = run_of(name)
    parts = step_parts(run.step, "dgx-a100", mesh=run.mesh, batch=run.batch)
    trace = simulate(run.step, "dgx-a100", mesh=run.mesh, batch=run.batch, fold=True, op_by_op=True)
    near = {"rel": 0, "abs": 1e-12 * trace.makespan_seconds}
    coarse, fine = split(trace), step_split(trace)
    for rank in trace.ranks:
        told, whole = fine[rank], coarse[rank]
        assert parts.step_split[rank] == pytest.approx(told, **near)
        model = told.products + told.attention + told.elementwise
        assert model == pytest.approx(whole.forward + whole.backward, **near)
        assert (told.recompute, told.update) == pytest.approx((whole.recompute, whole.other), **near)
        assert told.bubble == pytest.approx(whole.bubble + whole.idle, **near)
        assert fsum((told.tp, told.cp, told.dp, told.zero, told.pp)) == pytest.approx(whole.communication, **near)
        assert told.communication == told.ep == 0
    assert sum(parts.devices.values()) == run.mesh.size


@pytest.mark.slow
def test_each_axis_has_its_part() -> None:
    everything, contexts = figures_of("all of it").parts, figures_of("contexts").parts
    assert {"tp", "zero", "dp", "pp", "recompute", "update", "bubble", "products", "attention"} <= {*everything}
    assert "cp" in contexts and not {"tp", "zero", "recompute"} & {*contexts}
    assert not {"tp", "cp", "dp", "pp", "bubble"} & {*figures_of("one device").parts}


@pytest.mark.slow
def test_use_of_the_devices_by_hand() -> None:
    found, spec = figures_of("interleaved"), MegatronFlags(**SMALL | {"num_layers": 4}).spec()
    tokens, peak = 16 * 16, 312e12
    assert found.tokens_per_second == tokens / found.seconds
    assert found.tflops_per_device == pytest.approx(spec.flops(tokens) / found.seconds / 8 / 1e12)
    assert found.mfu == pytest.approx(found.tflops_per_device * 1e12 / peak)
    head = 2 * tokens * 32 * 96
    blocks = spec.forward_flops(tokens) - head      # all of a block runs again: the mask of dropout comes at its end
    assert found.hfu * peak * 8 * found.seconds == pytest.approx(spec.flops(tokens) + blocks)
    one = figures_of("one device")
    assert one.hfu == pytest.approx(one.mfu)


@pytest.mark.slow
def test_hidden_scores_count_for_the_model_and_not_for_what_is_computed() -> None:
    """Of 2 layers and 4096 tokens: a window of 64, in both layers or in one."""
    flags: dict[str, Any] = {
        "use_flash_attn": True, "attention_dropout": 0.0, "hidden_dropout": 0.0, "seq_length": 4096}
    spec, tokens, peak = MegatronFlags(**SMALL | flags).spec(), 4 * 4096, 312e12
    seconds, causal, windowed = [], 4096 * 4097 // 2, 4096 * 64 - 64 * 63 // 2
    for more, scores in (({}, 2 * causal), ({"window_size": "63,0"}, 2 * windowed),
                         ({"window_size": "63,0", "window_attn_skip_freq": "2"}, causal + windowed)):
        found = figures(MegatronFlags(**SMALL | flags | more, global_batch_size=4).run(1), "dgx-a100")
        assert found.flops == spec.flops(tokens) == pytest.approx(found.mfu * peak * found.seconds)
        of_all = 2 * 2 * 32 * 4096 * 4096 * 4     # both products of one layer
        products = spec.forward_flops(tokens) - 2 * of_all
        computed = 3 * products + 3.5 * of_all * scores / 4096**2
        assert found.hfu * peak * found.seconds == pytest.approx(computed) and found.hfu < found.mfu
        seconds.append(found.parts["attention"])
    assert seconds[1] < seconds[2] < seconds[0]


@pytest.mark.takes_seconds
def test_a_program_counts_all_scores_of_its_attention_as_well() -> None:
    from parallelism import ir

    def run(mask: Mask) -> TrainingRun:
        def loss(p: Any, x: Any) -> Any:
            heads = (x @ p["w"]).reshape((x.shape[0], 6, 2, 4))
            return np.sum(attention(heads, heads, heads, mask=mask))

        weights = {"w": ir.TensorType("float32", (8, 8))}
        program = ir.record(loss, weights, ir.TensorType("float32", (ir.symbols("B")[0], 6, 8)))
        return TrainingRun(program, 12, Strategy.parse("dp"), Mesh(dp=2), SGD(0.1))

    found = [figures(run(mask), "dgx-a100") for mask in (Mask(), Mask(True), Mask(True, 2))]
    assert len({each.flops for each in found}) == 1 and found[0].mfu == found[0].hfu
    assert [each.run.hidden_flops for each in found] == [
        3.5 * 4 * 12 * 2 * 4 * hidden for hidden in (0, 36 - 21, 36 - 11)]


def test_a_program_is_a_run_as_well() -> None:
    from parallelism import ir

    loss = mlp((8, 16, 4), ir.symbols("B")[0], dtype="float32")
    run = TrainingRun(loss, 12, Strategy.parse("dp pp@layer.1 1f1b:3"), Mesh(pp=2, dp=2), SGD(0.1))
    found = figures(run, "dgx-a100")
    assert run.dtype == "float32" and run.microbatch == 2
    assert found.tokens_per_second is None and found.mfu == found.hfu > 0
    assert len(found.memory) == 2


@pytest.mark.parametrize(("text", "mesh", "batch", "error"), [
    ("dp zero=3", Mesh(dp=2), 5, "a batch of 5 rows cannot be dealt to 2 replicas of 1 microbatches"),
    ("dp pp 1f1b:2", Mesh(pp=1, dp=2), 6, "a batch of 6 rows cannot be dealt to 2 replicas of 2 microbatches"),
    ("dp tp pp 1f1b:2", Mesh(pp=1, dp=2), 4, "tp needs an axis 'tp'"),
])
def test_a_run_that_does_not_fit_is_refused(text: str, mesh: Mesh, batch: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        TrainingRun(run_of("one device").model, batch, Strategy.parse(text), mesh)


def test_runs_that_differ_in_their_pipelines_alone_share_the_split_step() -> None:
    one, more = run_of("all of it"), MegatronFlags(**SMALL | RUNS["all of it"][1] | {"global_batch_size": 64}).run(16)
    assert one.step == one.strategy(train_step(one.model.function(symbols("B")[0]), one.optimizer))
    assert one.step.function is more.step.function
    assert (one.step.pipeline.microbatches, more.step.pipeline.microbatches) == (4, 16)
    assert one.step.recompute == more.step.recompute != ()
    assert run_of("interleaved").step.function is not one.step.function


@pytest.mark.slow
def test_where_equal_devices_share_links_one_stands_for_all_unless_too_many_share(
        monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = Hardware.preset("dgx-a100:2")
    inner, outer = hardware.links
    crowded = replace(hardware, links=(replace(inner, extents=2), replace(outer, ports=1)))
    run = MegatronFlags(**SMALL, pipeline_model_parallel_size=2, global_batch_size=4).run(4)
    trace, folded = simulate(run.step, crowded, **run.placed), figures(run, crowded)
    assert folded.seconds == pytest.approx(trace.makespan_seconds, rel=1e-12) and len(folded.trace.ranks) == 2
    monkeypatch.setattr(shared_channels, "MOST_TRANSFERS", 3)
    with pytest.raises(CannotFold, match="share links"):
        step_parts(run.step, crowded, **run.placed)
    found = figures(run, crowded)
    assert found.seconds == trace.makespan_seconds and found.trace.ranks == (0, 1, 2, 3)
    assert found.parts == pytest.approx(folded.parts, rel=1e-9) and found.memory == folded.memory
    assert fsum(found.parts.values()) == found.seconds and found.mfu == pytest.approx(found.hfu)


def test_too_few_devices_and_a_dtype_without_a_rate_are_refused() -> None:
    with pytest.raises(ValueError, match="has 8 devices, fewer than 16"):
        figures(run_of("all of it"), Hardware.preset("dgx-a100:1"))
    with pytest.raises(ValueError, match="has no rate for bfloat16"):
        figures(run_of("one device"), "laptop")
