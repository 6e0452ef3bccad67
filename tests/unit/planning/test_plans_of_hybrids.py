"""Plans of models whose layers keep a state, attend, or feed forward in turn: the best are among those that are simulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from parallelism.models import Experts, LinearAttention, TransformerSpec
from parallelism.planning import batch_pricing, find_plan
from parallelism.planning.trained import TrainedModel
from parallelism.training.training_run import ADAM_W

KINDS = "MEM*EMME*MEM"
"""Without a period: see `parallelism.training.layer_blocks`."""
HYBRID = TransformerSpec(
    layers=12, width=64, heads=4, key_value_heads=2, feed_forward=96, vocabulary=128, sequence=32, norm="rms",
    positions="none", activation="relu2", biases=("convolution",), tied=False, dtype="bfloat16",
    linear_attention=LinearAttention(heads=8, head_width=16, state_width=16, groups=4, chunk=16,
                                     layers=tuple(kind == "M" for kind in KINDS)),
    layer_parts=tuple("feed_forward" if kind == "E" else "attention" for kind in KINDS),
    experts=Experts(count=4, chosen=2, width=32, layers=tuple(kind == "E" for kind in KINDS)))
FEW = {"pp": 1, "zero": 1, "recompute": ["none", "selective"], "sp": False, "microbatch": [1, 2]}


def plans_of(spec, **fixed):
    return find_plan(spec, hardware="dgx-h100", devices=4, batch=8, **fixed)


@pytest.mark.slow
def test_the_most_promising_plans_have_the_best_among_them(monkeypatch):
    assert TrainedModel.of(HYBRID, ADAM_W).takes_turns
    monkeypatch.setattr(batch_pricing, "MOST_PROMISING", 1000)
    every = plans_of(HYBRID, **FEW)
    monkeypatch.setattr(batch_pricing, "MOST_PROMISING", 4)
    few = plans_of(HYBRID, **FEW)
    assert few.best.settings == every.best.settings and few.best.seconds == every.best.seconds
    assert len(every) > len(few)
    (reason,) = [reason for reason in few.refused if "promising" in reason]
    assert few.refused[reason].count == len(every) - len(few)


@pytest.mark.takes_seconds
def test_a_sequence_is_split_by_no_plan():
    plans = plans_of(replace(HYBRID, layers=3), cp=[1, 2], tp=1, pp=1, ep=1, zero=0, recompute="none", microbatch=1)
    assert "cp does not split the sequences of linear attention" in plans.refused
    assert np.isfinite(plans.best.seconds)
