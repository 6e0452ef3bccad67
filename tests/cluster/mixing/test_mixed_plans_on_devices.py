"""Plans over two kinds of nodes run: their numbers are those of the step alone, their time that of the simulation."""

import pytest
from mixed_nodes import both
from simulated_runs import assert_simulated
from trained_runs import trained_on
from transformed import assert_trained, interpreted, transformer

from parallelism.mixing import find_mixed
from parallelism.transforms import SGD, Adam, train_step


@pytest.mark.parametrize(("rule", "fixed", "backend"), [
    (SGD(0.1), {"tp": 2, "pp": 2, "microbatch": 2}, "process"),
    pytest.param(Adam(0.01), {"pp": 4, "tp": 1, "zero": 1, "microbatch": 1}, "thread", marks=pytest.mark.slow),
])
def test_a_plan_over_both_parts_runs_as_it_was_found(cluster_of, rule, fixed, backend):
    spec = transformer(layers=5, tied=False)
    plan = find_mixed(spec, hardware=both(), batch=8, optimizer=rule, simulations=1, recompute="none", **fixed).found[0]
    assert len({*plan.counts}) > 1                       # the faster part has more
    alone = train_step(spec.function(8), rule)
    cluster = cluster_of(plan.mesh, backend, hardware=plan.hardware, compute="modelled")
    steps = 2 if isinstance(rule, Adam) else 1           # the second reads the state of the first
    results, trace = trained_on(cluster, plan.step, alone, steps)
    assert_trained(results, interpreted(alone, steps=steps), tolerance=1e-10)
    simulated = plan.simulate()
    assert_simulated(simulated, trace)
    assert trace.makespan_seconds == simulated.makespan_seconds == pytest.approx(plan.seconds, rel=1e-9)
