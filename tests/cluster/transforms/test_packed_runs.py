"""Steps on packed sequences, on devices: the numbers of one device, and the events of their simulation."""

from __future__ import annotations

import pytest
from trained_runs import assert_model_trains

from parallelism.transforms import SGD

CASES = [
    ("packed", 4, "dp=2"), ("packed", 3, "tp=2 sp"), ("packed llama", 4, "tp=2 sp dp=2 zero=1"), ("packed", 4, "cp=2"),
    ("packed llama", 3, "cp=4"), ("packed", 4, "ring=2"), ("packed llama", 4, "ring=4 tp=2"), ("packed", 2, "ring=4"),
    ("packed llama", 4, "ulysses=2"), ("packed", 4, "ring:outer=2 ulysses:inner=2"), ("packed", 4, "pp=2 1f1b:2 ring=2"),
    ("packed weights", 4, "tp=2"), ("packed weights", 4, "cp=2"), ("packed latent", 4, "dp=2 ep=2"),
    ("packed latent", 4, "ring=2"), ("packed", 4, "dp=2 recompute=block.*.attention.core"),
    ("packed", 5, "pp=2 zb_h1:2 dp=2"), ("packed llama", 4, "dp=2 zero=3 overlap"),
]


@pytest.mark.takes_seconds
@pytest.mark.sampled(18)
@pytest.mark.parametrize(("model", "rows", "text"), CASES, ids=[f"{m}-{t}" for m, _, t in CASES])
def test_packed_sequences_train_as_on_one_device(cluster_of, model, rows, text):
    assert_model_trains(cluster_of, model, rows, text, SGD(0.1))
