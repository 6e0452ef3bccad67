"""Context parallelism in all its ways on real devices: a step is that of one device, and a simulation says what runs do."""

from __future__ import annotations

from functools import cache

import pytest
from trained_runs import ON, assert_trains

from parallelism import ir, models
from parallelism.transforms import Adam, Strategy, train_step

B, = ir.symbols("B")
NUMBER = 8
"""The bytes of a number in float64."""


@cache
def step_of(rows, sequence, groups, **more):
    spec = models.TransformerSpec(layers=2, width=4 * 2 * groups, heads=2 * groups, key_value_heads=groups, vocabulary=20,
                                  sequence=sequence, feed_forward=24, positions="rotary", dtype="float64", **more)
    return train_step(spec.function(rows), Adam(0.01))


def check(cluster_of, text, sequence, groups, backend="thread", rows=2, **more):
    strategy, mesh = Strategy.parse_on_mesh(text)
    assert Strategy.parse(str(strategy)) == strategy
    alone = step_of(rows, sequence, groups, **more)
    step = strategy(step_of(B, sequence, groups, **more) if strategy.pipeline else alone)
    return assert_trains(cluster_of(mesh, backend, compute="modelled", **ON), step, alone, rows)


@pytest.mark.takes_seconds
@pytest.mark.sampled(24)
@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("word", ["cp", "ring", "ulysses"])
def test_sequences_on_some_devices_train_as_on_one(cluster_of, word, devices):
    check(cluster_of, f"{word}={devices}", 3 * devices, devices, "process" if devices in (2, 5) else "thread")


@pytest.mark.slow
def test_a_ring_and_all_to_alls_run_on_processes(cluster_of):
    trace = check(cluster_of, "ring=2 ulysses:cp_heads=2", 12, 2, "process")
    keys = 2 * 12 * 2 * 4 * NUMBER          # those of 2 rows, 12 tokens, 2 groups, with 4 features
    queries = 2 * keys
    received = {name: sum(event.bytes_received for event in trace if event.rank == 3 and event.name == name)
                for name in ("permute", "all_to_all")}
    # Of two layers on 2 x 2 devices.  A device exchanges half of its part of queries, keys, values and result, forward and
    # backward.  Round the ring come the keys and values of the other half of the tokens, in the backward with gradients.
    assert received == {"permute": 2 * 3 * 2 * keys // 4, "all_to_all": 2 * 2 * (2 * queries + 2 * keys) // 4 // 2}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "more"), [
    ("dp=2 ring=2 tp=2 sp zero=1", {}), ("ring=2 ulysses:heads=2 tp=2", {}), ("ring=4 overlap", {}),
    ("pp=2 1f1b:2 ring=2 dp=2 zero=2", {}), ("pp=2 1f1b:2 ulysses=2 tp=2 sp recompute=block.*", {}),
    ("dp=2 ulysses=2 zero=3 overlap", {}), ("ring=3", {"window": 5}), ("ring=2 dp=2 zero=3", {"attention_dropout": 0.25}),
    ("ulysses=2 tp=2", {"attention_dropout": 0.25, "hidden_dropout": 0.25}), ("ring=2", {"attention_sinks": True}),
])
def test_exchanges_go_with_other_strategies(cluster_of, text, more):
    check(cluster_of, text, 12, 4, rows=4, **more)
