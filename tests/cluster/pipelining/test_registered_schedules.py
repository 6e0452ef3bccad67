"""A schedule that somebody registers is drawn, planned, simulated and run as those of the package."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism import Pipeline, ScheduleKind, models, register_schedule
from parallelism.pipelining import registration
from parallelism.pipelining.generators import SCHEDULES
from parallelism.planning import find_plan
from pipeline_parallelism import MLP, SGD
from vcluster import VirtualCluster


def in_pairs(rank, ranks, microbatches):
    """Two forwards, then their two backwards."""
    for first in range(0, microbatches, 2):
        pair = range(first, min(first + 2, microbatches))
        for kind in "FB":
            for microbatch in pair:
                yield rank, kind, microbatch


def backwards_first(rank, ranks, microbatches):
    yield from ((rank, kind, k) for kind in "BF" for k in range(microbatches))


PAIRS = ScheduleKind("in_pairs", in_pairs, aliases=("two_by_two",))


@pytest.fixture
def registered():
    register_schedule(PAIRS)
    yield PAIRS
    registration.forget_schedule(PAIRS.name)


def test_it_is_found_by_its_names_and_drawn(registered):
    assert str(Pipeline(2, 3, "TwoByTwo")).splitlines() == [
        "in_pairs: 2 stages on 2 ranks, 3 microbatches; 10 cycles, 40% idle",
        "cycle   0  1  2  3  4  5  6  7  8  9",
        "rank 0  F0 F1 .  .  B0 B1 F2 .  .  B2",
        "rank 1  .  F0 F1 B0 B1 .  .  F2 B2 .",
    ]


def test_it_runs_as_another_schedule_does(registered):
    rng = np.random.default_rng(0)
    x, targets = rng.integers(-3, 4, (6, 5)).astype(float), rng.integers(-3, 4, (6, 3)).astype(float)
    runs = []
    for schedule in ("in_pairs", "1f1b"):
        mlp = MLP(layer_sizes=(5, 4, 3), pipeline=Pipeline(2, 3, schedule))
        with VirtualCluster(pp=2, backend="thread") as cluster:
            runs.append(cluster.run(mlp.train_step(SGD(0.5)), x, targets))
    assert runs[0].result.loss == runs[1].result.loss
    for mine, usual in zip(runs[0].result.gradients, runs[1].result.gradients, strict=True):
        for one, other in zip(mine, usual, strict=True):
            assert_array_equal(one, other)


@pytest.mark.slow
def test_it_is_planned_explained_and_simulated(registered):
    spec = models.TransformerSpec(layers=4, width=64, heads=4, vocabulary=96, sequence=32)
    fixed = {"hardware": "dgx-h100", "devices": 4, "batch": 8, "pp": 4, "microbatch": 2, "recompute": "none"}
    plans = find_plan(spec, schedule=["1f1b", "in_pairs"], **fixed)
    assert "the best plan with schedule=in_pairs" in plans.best.why_not(schedule="in_pairs")
    own = find_plan(spec, schedule="two_by_two", **fixed).best
    assert " in_pairs:4" in str(own)
    assert own.simulate().makespan_seconds == pytest.approx(own.seconds, rel=1e-12)
    assert own.seconds > plans.best.seconds          # two microbatches at a time leave bubbles that 1F1B fills


@pytest.mark.slow
def test_one_that_takes_the_place_of_another_is_planned_anew(registered):
    spec = models.TransformerSpec(layers=4, width=64, heads=4, vocabulary=96, sequence=32)
    fixed = {"hardware": "dgx-h100", "devices": 4, "batch": 8, "pp": 4, "microbatch": 2, "recompute": "none"}
    before = find_plan(spec, schedule="in_pairs", **fixed).best.seconds
    usual = SCHEDULES["1f1b"]
    register_schedule(ScheduleKind("in_pairs", usual.generator), replace=True)
    assert find_plan(spec, schedule="in_pairs", **fixed).best.seconds < before


@pytest.mark.parametrize(("kind", "why"), [
    (ScheduleKind("GPipe", in_pairs), "schedule 'GPipe' is part of the package"),
    (ScheduleKind("mine", in_pairs, aliases=("zb-v",)), "schedule 'zb-v' is part of the package"),
    (ScheduleKind("in_pairs", backwards_first), "schedule 'in_pairs' is registered; replace=True"),
    (ScheduleKind("backwards_first", backwards_first), "0B0 is too early; 0F0 comes at step 1"),
])
def test_what_is_not_a_schedule_is_refused(registered, kind, why):
    with pytest.raises(ValueError, match=why):
        register_schedule(kind)
    assert list(SCHEDULES)[-1] == "in_pairs"
    assert SCHEDULES["in_pairs"] is PAIRS


def test_a_placement_must_be_known_and_only_a_registered_schedule_is_forgotten():
    with pytest.raises(ValueError, match="schedule 'w': placement must be 'one', 'turns', 'v'; got 'w'"):
        ScheduleKind("w", in_pairs, "w")
    with pytest.raises(ValueError, match="no schedule 'gpipe' was registered"):
        registration.forget_schedule("gpipe")
