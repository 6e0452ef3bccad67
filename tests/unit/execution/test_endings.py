"""What a device does after its last action, as values: which ones, for which steps, and that plans read the same."""

from __future__ import annotations

import numpy as np
import pytest
from transformed import model_step, transformer

from parallelism import Mesh, Pipeline, PipelinedProgram, ir, simulate
from parallelism.execution import TrainedPipeline
from parallelism.execution.endings import (
    AddUp,
    Endings,
    ExchangeShared,
    SumGradients,
    SumLoss,
    Update,
    WaitForLoss,
)
from parallelism.layouts import partition
from parallelism.pipelining import free_tag
from parallelism.transforms import SGD, Strategy, train_step

B, = ir.symbols("B")
ON = {"hardware": "dgx-h100", "priced_dtype": "bfloat16"}


def kinds(ends):
    return [type(end) for end in ends]


def test_without_an_update_gradients_are_summed_over_replicas_and_exchanged():
    program = PipelinedProgram(partition(transformer(layers=2).function(B), 2), Pipeline(2, 3))
    first, last = (program.endings.at(position, ("dp",)) for position in range(2))
    shared = ExchangeShared(("p.tokens",), np.dtype("f8"), (0, 1), 0)
    assert first == (SumGradients(0, ("dp",)), AddUp(0, waits=True), shared)
    assert last == (SumGradients(1, ("dp",)), SumLoss(1, ("dp",), later=False), AddUp(1, waits=True), shared,
                    WaitForLoss())
    assert kinds(program.endings.at(1, ())) == [SumLoss, AddUp, ExchangeShared, WaitForLoss]


def test_exchanges_are_apart_by_dtype_and_have_tags_of_their_own():
    stages = partition(transformer(layers=2).function(B), 3, batch="B").functions
    shared = [stages[0], stages[1], stages[0]]
    found = Endings(shared, (0, 1, 2), {"p.tokens": np.dtype("f4")}, updated=True)
    assert {each.positions for each in found.exchanges} == {(0, 2)}
    assert {each.dtype.name for each in found.exchanges if "p.tokens" in each.names} == {"float32"}
    assert len({each.tag for each in found.exchanges}) == len(found.exchanges) == 2
    assert sorted(name for each in found.exchanges for name in each.names) == sorted(stages[0].weights)
    assert found.alone == {*stages[1].weights} - {*stages[0].weights}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", ["pp=2 tp=2 sp 1f1b:2", "pp=2 dp=2 zero=1 interleaved_1f1b:2x2", "pp=2 dp=2 1f1b:3"])
def test_a_device_does_what_its_endings_say(text):
    strategy, mesh = Strategy.parse_on_mesh(text)
    program = TrainedPipeline(strategy(train_step(transformer(layers=4).function(B), SGD(0.1))), mesh)
    trace, (_, replicas) = simulate(program, mesh=mesh, batch=12, fold=False, **ON), program.axes(mesh)
    assert program.endings.exchanges
    for rank, events in enumerate(trace.by_rank()):
        ends = program.endings.at(program.places(mesh)[rank][0], replicas)
        last = 1 + max(place for place, event in enumerate(events) if event.stage is not None)
        sent = [event.tag - free_tag(program.pipeline) for event in events[last:]
                if event.kind == "send" and event.tag >= free_tag(program.pipeline)]
        assert sent == [end.tag for end in ends if isinstance(end, ExchangeShared)]
        sums = [end.axes for end in ends if isinstance(end, SumLoss) and end.axes]
        found = [event.axes for event in events[last:] if event.kind == "collective"]
        assert found[:len(sums)] == sums and isinstance(ends[-1], Update)
        if not replicas:    # the update sums what devices of the stage have terms of, in one call
            names = [name for name in ends[-1].names if name in program.endings.pending]
            assert found[len(sums):] == [program.endings.pending[name] for name in names[:1]] and len(names) > 4


def test_the_update_takes_the_sums_of_its_own_stages():
    program = TrainedPipeline(Strategy.parse("pp 1f1b:2")(model_step("mlp", B, SGD(0.1))), Mesh(pp=2))
    updates = [end for position in range(2) for end in program.endings.at(position, ()) if isinstance(end, Update)]
    assert [end.names for end in updates] == [stage.trained for stage in program.stages.functions]
