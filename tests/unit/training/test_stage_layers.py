"""How many layers the stages of a pipeline have."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, strategies as st

from parallelism.models import TransformerSpec, transformer
from parallelism.training import MegatronFlags, figures
from parallelism.training.stage_layers import (
    balanced_ends,
    begins_of,
    counts_of,
    even,
    head_layers,
    layout_counts,
    layout_text,
    remark_of,
    runs_text,
)

SPEC = TransformerSpec(layers=10, width=16, heads=2, vocabulary=128, sequence=8)


def counts(pp: int, layers: int = 10, **flags: Any) -> tuple[int, tuple[int, ...]]:
    return MegatronFlags(**flags).cut(replace(SPEC, layers=layers), pp)


@pytest.mark.parametrize(("pp", "flags", "chunks", "expected"), [
    (4, {}, 1, (2, 3, 3, 2)),
    (4, {"decoder_first_pipeline_num_layers": 1}, 1, (1, 3, 3, 3)),
    (4, {"decoder_last_pipeline_num_layers": 1}, 1, (3, 3, 3, 1)),
    (3, {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 1}, 1, (3, 6, 1)),
    (2, {"decoder_first_pipeline_num_layers": 4, "num_virtual_stages_per_pipeline_rank": 2}, 2, (2, 3, 2, 3)),
    (2, {"decoder_last_pipeline_num_layers": 3, "num_virtual_stages_per_pipeline_rank": 2}, 2, (3, 2, 4, 1)),
    (4, {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}, 1, (2, 3, 3, 2)),
    (4, {"account_for_loss_in_pipeline_split": True}, 1, (2, 3, 3, 2)),
    (4, {"account_for_loss_in_pipeline_split": True, "layers": 11}, 1, (3, 3, 3, 2)),
    (6, {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
         "num_virtual_stages_per_pipeline_rank": 2}, 2, (0, *[1] * 10, 0)),
    (4, {"num_virtual_stages_per_pipeline_rank": 2}, 2, (1, 1, 1, 2, 2, 1, 1, 1)),
    (4, {"num_layers_per_virtual_pipeline_stage": 1}, 3, None),
    (5, {"num_layers_per_virtual_pipeline_stage": 1}, 2, (1,) * 10),
    (2, {"pipeline_model_parallel_layout": "Et*2|(tt|)*2tttt|L"}, None, None),
    (2, {"pipeline_model_parallel_layout": "Et*2|tt|,(t)*6|L"}, 2, (2, 2, 6, 0)),
    (1, {"num_virtual_stages_per_pipeline_rank": 3, "decoder_first_pipeline_num_layers": 2}, 1, (10,)),
])
def test_flags_deal_the_layers(pp: int, flags: dict[str, Any], chunks: int | None, expected: tuple[int, ...] | None) -> None:
    if expected is None:
        with pytest.raises(ValueError):
            counts(pp, **flags)
    else:
        assert counts(pp, **flags) == (chunks, expected)


@pytest.mark.parametrize(("pp", "flags", "error"), [
    (11, {}, "--pipeline-model-parallel-size must be at most the 10 layers, got 11"),
    (2, {"num_virtual_stages_per_pipeline_rank": 6}, "10 layers are too few for 2 x 6 stages"),
    (2, {"num_virtual_stages_per_pipeline_rank": 2, "num_layers_per_virtual_pipeline_stage": 2}, "exclude each other"),
    (2, {"pipeline_model_parallel_layout": "EL", "account_for_loss_in_pipeline_split": True}, "exclude each other"),
    (3, {"decoder_first_pipeline_num_layers": 9, "decoder_last_pipeline_num_layers": 1},
     "take 10 of 10 layers, which leaves 0 for the other 1 rank"),
    (2, {"decoder_first_pipeline_num_layers": 9, "decoder_last_pipeline_num_layers": 2}, "take 11 of 10 layers"),
    (2, {"decoder_first_pipeline_num_layers": 5, "decoder_last_pipeline_num_layers": 4}, "take 9 of 10 layers"),
    (2, {"pipeline_model_parallel_layout": "Et*10|L|"}, "must have E first|nothing in stage 2"),
    (2, {"pipeline_model_parallel_layout": "Et*10||L"}, "has nothing in stage 1"),
    (2, {"pipeline_model_parallel_layout": "Et*5|ttt|ttL"}, "has 3 stages, which 2 ranks cannot share equally"),
    (2, {"pipeline_model_parallel_layout": "Et*9|L"}, "has 9 layers and 0 modules of further tokens, the model 10 and 0"),
    (2, {"pipeline_model_parallel_layout": "t*10E|L"}, "must have E first"),
    (2, {"pipeline_model_parallel_layout": "Et*10x|L"}, "has other letters than E, t, m, L"),
    (2, {"pipeline_model_parallel_layout": "E(t|*10L"}, "belongs to nothing"),
    (2, {"pipeline_model_parallel_layout": "((t*999)*999)*999"}, "has more than 20,000 letters"),
    (2, {"pipeline_model_parallel_layout": "E" + "t" * 5000 + "|L"}, "has 5000 layers"),
])
def test_what_cannot_be_dealt_is_refused(pp: int, flags: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error) as refused:
        counts(pp, **flags)
    assert len(str(refused.value)) < 400


@given(st.lists(st.integers(1, 4), max_size=20), st.integers(0, 4), st.integers(1, 4))
def test_layouts_and_regions_say_the_layers(inner: list[int], first: int, last: int) -> None:
    dealt = (first, *inner, last)
    assert layout_counts(layout_text(dealt), sum(dealt)) == dealt
    assert counts_of(begins_of(dealt), sum(dealt)) == dealt


@given(st.integers(2, 6), st.integers(0, 20), st.floats(0, 4) | st.floats(0, 1e30))
def test_a_head_that_counts_leaves_the_largest_stage_least_work(stages: int, more: int, head: float) -> None:
    layers = stages + more
    found = balanced_ends(layers, stages, head)
    assert sum(found) == layers and min(found) >= 1
    works = [
        max(*each[:-1], each[-1] + head)
        for each in product(range(1, more + 2), repeat=stages - 1)
        if (last := layers - sum(each)) >= 1
        for each in [(*each, last)]
    ] if (more + 1) ** (stages - 1) < 5000 else [max(*found[:-1], found[-1] + head)]
    assert max(*found[:-1], found[-1] + head) == pytest.approx(min(works))


def test_what_the_head_costs_is_told() -> None:
    llama = transformer("llama3-405b")
    assert head_layers(llama) == pytest.approx(0.61, abs=0.01)
    assert remark_of(llama, begins_of(even(126, 16))) == (
        "layers of the 16 stages: 7, 14 x 8, 7; the last stage has 1 layer fewer, the head costs 0.61 layers")
    assert remark_of(llama, begins_of(even(126, 14))) == "" and runs_text([1, 2, 2]) == "1, 2 x 2"
    head = 2 * SPEC.width * SPEC.vocabulary
    layers = 2 * SPEC.width * (4 * SPEC.width + 8 * SPEC.width) + 4 * SPEC.sequence * SPEC.width
    assert head_layers(SPEC) == head / layers


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interleaved_stages_with_counted_ends_take_most_of_the_bubble_of_llama_405b() -> None:
    """As it was trained: 126 layers on 16 ranks, the embedding and the head as layers (arXiv:2407.21783, section 3.3.2)."""
    flags = MegatronFlags(
        tensor_model_parallel_size=8, pipeline_model_parallel_size=16, micro_batch_size=1, global_batch_size=2048,
        sequence_parallel=True, use_distributed_optimizer=True, num_virtual_stages_per_pipeline_rank=8,
        account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    found = figures(flags.run(16_384, transformer("llama3-405b")), "dgx-h100")
    assert found.bubble < 0.15
    assert found.run.pipeline is not None and len(found.run.pipeline.begin) == 127
