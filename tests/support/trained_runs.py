"""Steps of training run on devices, and what a simulation says of them."""

from simulated_runs import assert_simulated
from transformed import assert_trained, interpreted, model_step, trained

from parallelism import ir
from parallelism.simulation import simulate
from parallelism.transforms import Adam, Step, Strategy

B, = ir.symbols("B")
ON = {"hardware": "dgx-h100", "priced_dtype": "bfloat16"}


def in_turn(cases, backends=("thread", "process")):
    """The cases, each with one of the backends."""
    return [(*case, backends[i % len(backends)]) for i, case in enumerate(cases)]


def trained_on(cluster, step, like, steps=2):
    """What some steps give, as `transformed.trained`, and the trace of the last one."""
    runs = []

    def run(inputs):
        runs.append(cluster.run(step, inputs))
        return runs[-1].result

    return trained(step.function if isinstance(step, Step) else step, run, like=like, steps=steps), runs[-1].trace


def simulated(step, mesh, rows, on=None, **options):
    """The simulation of a step with so many rows of the batch."""
    batch = {"batch": rows} if isinstance(step, Step) else {}
    return simulate(step, mesh=mesh, **batch, **(on or ON), **options)


def assert_trains(cluster, step, alone, rows, steps=2, tolerance=1e-10):
    """Some steps are those of the step alone, and a simulation is the last run.  Returns the trace of that."""
    results, trace = trained_on(cluster, step, alone, steps)
    assert_trained(results, interpreted(alone, steps=steps), tolerance)
    assert_simulated(simulated(step, cluster.mesh, rows), trace)
    return trace


def assert_model_trains(cluster_of, model, rows, text, rule, backend="thread", clip=None):
    """`assert_trains` for a model of `transformed` under the strategy that ``text`` says, which reads back as itself."""
    alone = model_step(model, rows, rule, clip=clip)
    strategy, mesh = Strategy.parse_on_mesh(text)
    assert Strategy.parse(str(strategy)) == strategy
    step = strategy(model_step(model, B, rule, clip=clip) if strategy.pipeline else alone)
    # Adam divides a gradient that is 0 but for rounding, such as that of a bias of keys, by its epsilon: 1e-16 becomes 1e-8.
    tolerance = 1e-9 if isinstance(rule, Adam) else 1e-10
    assert_trains(cluster_of(mesh, backend, compute="modelled", **ON), step, alone, rows, tolerance=tolerance)
