"""Losses that people write in PyTorch train on every split as on one device, and are simulated as they run."""

from __future__ import annotations

import pytest
from pytorch_programs import PROGRAMS
from trained_runs import ON, B, assert_trains

from parallelism.transforms import SGD, Strategy

STRATEGIES = [
    (8, "dp=2"), (8, "dp=2 zero=1"), (9, "dp=3 zero=3"), (8, "tp=2"), (8, "tp=2 sp"), (7, "tp=2 dp=2 zero=2"), (8, "cp=2"),
    (6, "cp=2 dp=2"), (8, "tp=2 cp=2"), (7, "pp=2 1f1b:3"), (9, "pp=1 1f1b:4"), (8, "pp=2 1f1b:2 dp=2 zero=1"),
    (7, "pp=2 1f1b:2 tp=2"), (8, "pp=2 gpipe:2 tp=2 sp dp=2 zero=3"), (8, "pp=2 zero_bubble_h1:2 dp=2 zero=2"),
    (8, "pp=2 1f1b:2 cp=2"), (8, "pp=2 1f1b:2 recompute=block.*"), (8, "pp=2 zero_bubble_v:2x2"),
    (8, "dp=2 zero=3 overlap=1KB"), (8, "dp:node=2 dp=2 zero=3"), (7, "hsdp=2x2"), (8, "tp=3"), (7, "tp=4 dp=2")]
WITHOUT_SEQUENCE = {"two_heads", "learned_weights", "distilled", "variational", "recurrent", "two_towers", "focal"}
WHOLE = {"recurrent"}
"""A sum of two products is cut into four gates, so that no weight is split."""


def refused(name, text):
    """What a strategy says of a program that has nothing for it; None if it has."""
    if "cp" in text and name in WITHOUT_SEQUENCE:
        return "have no sequence to split"
    if "tp" in text and name in WHOLE:
        return "no weight of @recurrent.step is left to be split"
    return None


@pytest.mark.takes_seconds
@pytest.mark.sampled(430, 40)
@pytest.mark.parametrize(("rows", "text"), STRATEGIES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_pytorch_train_as_on_one_device(cluster_of, name, rows, text):
    strategy, mesh = Strategy.parse_on_mesh(text)
    rule, clip = SGD(0.1, 0.5), 0.3
    alone = PROGRAMS[name](rows, rule, clip)
    whole = PROGRAMS[name](B, rule, clip) if strategy.pipeline else alone
    if (told := refused(name, text)) is not None:
        with pytest.raises(ValueError, match=told):
            strategy(whole)
        return
    assert_trains(cluster_of(mesh, "thread", compute="modelled", **ON), strategy(whole), alone, rows, steps=3)
