"""Plans over two kinds of nodes run: their numbers are those of the step alone, their time that of the simulation."""

import pytest
from mixed_nodes import both
from simulated_runs import assert_simulated
from trained_runs import trained_on
from transformed import assert_trained, interpreted, transformer

from parallelism.mixing import Replicas, Stages, find_mixed
from parallelism.transforms import SGD, Adam, train_step


@pytest.mark.parametrize(("kind", "rule", "fixed", "backend"), [
    pytest.param(Stages, SGD(0.1), {"tp": 2, "pp": 2, "microbatch": 2}, "process", marks=pytest.mark.slow),
    pytest.param(Stages, Adam(0.01), {"pp": 4, "tp": 1, "zero": 1, "microbatch": 1}, "thread", marks=pytest.mark.slow),
    pytest.param(Replicas, Adam(0.01), {"pp": 2, "tp": 2, "zero": 1, "microbatch": [1, 3]}, "process",
                 marks=pytest.mark.slow),
])
def test_a_plan_over_both_parts_runs_as_it_was_found(cluster_of, kind, rule, fixed, backend):
    spec = transformer(layers=5, tied=False)
    plans = find_mixed(spec, hardware=both(), batch=8, optimizer=rule, simulations=1, recompute="none", **fixed)
    plan = next(each for each in plans.found if isinstance(each.arrangement, kind)).simulated()
    assert len({*(plan.arrangement.counts if kind is Stages else plan.arrangement.rows)}) > 1   # the faster part has more
    alone = train_step(spec.function(8), rule)
    cluster = cluster_of(plan.mesh, backend, hardware=plan.hardware, compute="modelled")
    steps = 2 if isinstance(rule, Adam) else 1           # the second reads the state of the first
    results, trace = trained_on(cluster, plan.step, alone, steps)
    assert_trained(results, interpreted(alone, steps=steps), tolerance=1e-10)
    simulated = plan.simulate()
    assert_simulated(simulated, trace)
    assert trace.makespan_seconds == simulated.makespan_seconds == pytest.approx(plan.seconds, rel=1e-9)
