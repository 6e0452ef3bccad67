"""Replicas that have not equally many rows: the step is that of one device, and its time that of the simulation."""

import pytest
from mixed_nodes import both
from simulated_runs import assert_simulated
from trained_runs import trained_on
from transformed import assert_trained, interpreted, transformer

from parallelism import Mesh, ir, simulate
from parallelism.execution import TrainedPipeline
from parallelism.transforms import SGD, Adam, Strategy, train_step

ROWS = 12


@pytest.mark.parametrize(("text", "mesh", "rule", "backend"), [
    pytest.param("dp pp 1f1b:3,shares=1|3", {"dp": 2, "pp": 2}, SGD(0.1), "process", marks=pytest.mark.slow),
    pytest.param("dp pp 1f1b:1,shares=1|2|1|2", {"dp": 4, "pp": 1}, Adam(0.01), "thread", marks=pytest.mark.slow),
    pytest.param("dp tp sp zero=1 pp@block.1 1f1b:2,shares=1|2", {"dp": 2, "pp": 2, "tp": 2}, Adam(0.01), "process",
                 marks=pytest.mark.slow),
    pytest.param("dp zero=2 pp gpipe:2,shares=2|1", {"pp": 2, "dp": 2}, Adam(0.01), "thread", marks=pytest.mark.slow),
])
def test_replicas_of_unequal_shares_train_as_one_device(cluster_of, text, mesh, rule, backend):
    spec, mesh = transformer(layers=2, sequence=4), Mesh(**mesh)
    alone = train_step(spec.function(ROWS), rule)
    step = Strategy.parse(text)(train_step(spec.function(ir.symbol("B")), rule))
    assert str(Strategy.parse(text)) == text
    cluster = cluster_of(mesh, backend, hardware=both(), compute="modelled")
    steps = 2 if isinstance(rule, Adam) else 1
    results, trace = trained_on(cluster, step, alone, steps)
    assert_trained(results, interpreted(alone, steps=steps), tolerance=1e-10)
    assert_simulated(simulate(step, both(), mesh=mesh, batch=ROWS), trace)


def test_shares_that_do_not_fit_are_refused():
    step = Strategy.parse("dp pp 1f1b:1,shares=1|2")(train_step(transformer().function(ir.symbol("B")), SGD(0.1)))
    program = TrainedPipeline(step, Mesh(dp=2, pp=1))
    assert program.parts(9, 2) == [((0, 3),), ((3, 6),)]
    with pytest.raises(ValueError, match=r"2 shares, 3 together, do not deal 8 rows to 2 replicas"):
        program.parts(8, 2)
    with pytest.raises(ValueError, match=r"2 shares, 3 together, do not deal 9 rows to 3 replicas"):
        program.parts(9, 3)
    for wrong in ("1f1b:1,shares=0|1", "1f1b:1,shares=", "1f1b:1,shares=1|", "1f1b:1,meshes=dp=2,shares=1"):
        with pytest.raises(ValueError, match=r"shares|a strategy is|a word of|pipeline"):
            Strategy.parse(f"dp pp {wrong}")
