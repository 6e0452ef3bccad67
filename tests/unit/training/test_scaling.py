"""Runs scaled down: the same strategy of a small model on few devices."""

from __future__ import annotations

from typing import Any

import pytest

from parallelism.mesh import Mesh
from parallelism.models import mlp, transformer
from parallelism.training import MegatronFlags, TrainingRun, scaled_down
from parallelism.transforms import Pipeline, Strategy


@pytest.mark.sampled(2, 1)
@pytest.mark.slow_for("pp8")
@pytest.mark.parametrize(("flags", "devices", "mesh"), [
    ({"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4, "global_batch_size": 64}, 256,
     Mesh(pp=2, dp=2, tp=4)),
    ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 8, Mesh(pp=2, dp=2, tp=2)),
    ({"context_parallel_size": 4, "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4}, 1024,
     Mesh(pp=2, dp=2, cp=2, tp=2)),
    ({}, 512, Mesh(pp=1, dp=16)),
    ({"pipeline_model_parallel_size": 8, "num_layers_per_virtual_pipeline_stage": 1, "global_batch_size": 8}, 8,
     Mesh(pp=8)),
])
def test_the_strategy_stays_and_the_model_is_small(flags: dict[str, Any], devices: int, mesh: Mesh) -> None:
    spec = transformer("llama3-70b")
    run = MegatronFlags(**flags, recompute_granularity="full", use_distributed_optimizer=True).run(devices, spec)
    small = scaled_down(run)
    assert small.mesh == mesh and isinstance(small.step.function.name, str)     # it can be cut
    kept, before = ([each for each in each_run.strategy.transforms if not isinstance(each, Pipeline)]
                    for each_run in (small, run))
    assert kept == before
    assert small.pipeline is not None and run.pipeline is not None
    assert (small.pipeline.schedule == run.pipeline.schedule and small.pipeline.chunks == run.pipeline.chunks) or (
        small.pipeline.chunks == 2)
    model: Any = small.model
    assert (model.activation, model.norm, model.positions, model.tied) == ("swiglu", "rms", "rotary", False)
    assert model.groups < model.heads and model.parameters < 2e5


def test_a_model_whose_first_layers_have_no_experts_keeps_experts_to_split() -> None:
    flags = MegatronFlags(expert_model_parallel_size=32, pipeline_model_parallel_size=16, global_batch_size=2048)
    small = scaled_down(flags.run(1024, transformer("deepseek-v3")), 8)
    model: Any = small.model
    assert small.mesh == Mesh(pp=2, dp=2, ep=2) and model.layers == 2 and model.parameters < 3e6
    experts = model.experts
    assert (experts.count, experts.chosen, experts.dense_layers) == (256, 8, 0)
    assert experts.width == experts.shared_width == model.feed_forward == 24
    layouts = {value.name: value.layout for value in small.step.function.inputs if value.layout}
    assert all(str(layouts[f"p.{layer}.expert_up"].dims[0].axes) == "('ep',)" for layer in range(2))


def test_axes_keep_their_order_and_few_microbatches_stay_few() -> None:
    run = MegatronFlags().run(64, transformer("gpt2"))
    other = TrainingRun(run.model, 64, Strategy.parse("dp tp pp 1f1b:1"), Mesh(tp=4, dp=16, pp=1))
    small = scaled_down(other, 8)
    assert [*small.mesh.shape.items()] == [("tp", 2), ("dp", 4), ("pp", 1)]
    assert small.microbatches == 1 and small.batch == 8


def test_a_program_and_a_mesh_of_too_many_axes_are_refused() -> None:
    from parallelism import ir

    run = MegatronFlags(pipeline_model_parallel_size=2, tensor_model_parallel_size=2).run(8, transformer("gpt2"))
    with pytest.raises(ValueError, match="cannot be scaled down to 4 devices: it has 3 axes"):
        scaled_down(run, 4)
    loss = mlp((4, 4), ir.symbols("B")[0])
    with pytest.raises(ValueError, match="only a TransformerSpec"):
        scaled_down(TrainingRun(loss, 4, Strategy.parse("dp"), Mesh(dp=2)))
