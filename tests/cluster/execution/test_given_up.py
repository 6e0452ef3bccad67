"""What the backward of a stage takes and nothing else needs is freed while the backward runs."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
from overlapped import bits
from simulated_runs import assert_simulated
from trained_runs import ON, assert_trains, simulated, trained_on
from transformed import model_step

from parallelism import Hardware, ir
from parallelism.execution.device_program import DeviceProgram
from parallelism.transforms import SGD, Adam, Strategy, train_step

B, = ir.symbols("B")


@pytest.mark.sampled(2)
@pytest.mark.not_on_mpi("it looks into devices that are threads of the test")
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_what_a_backward_gives_up_is_freed_while_it_runs(cluster_of, monkeypatch, schedule):
    """Nothing else refers to the arrays that a program may free: none of them is there when it ends."""
    left, whole_run = [], DeviceProgram.run

    def run(program, device, arrays, **marks):
        given = [weakref.ref(array) for value, array in zip(program.function.inputs, arrays, strict=True)
                 if value.name in program.given_up and marks.get("phase") in ("B", "I", "W")]
        results = whole_run(program, device, [arrays.pop(0) for _ in range(len(arrays))], **marks)
        left.extend(array() is not None for array in given)
        return results

    monkeypatch.setattr(DeviceProgram, "run", run)
    strategy, mesh = Strategy.parse_on_mesh(f"pp=2 {schedule}:2")
    step = strategy(model_step("mlp", B, SGD(0.1)))
    inputs = [np.ones(value.type.shape, value.type.dtype) for value in step.function.specialize(B=4).inputs]
    cluster_of(mesh, "thread").run(step, inputs)
    assert len(left) >= 4 and not any(left)


@pytest.mark.slow
@pytest.mark.parametrize("text", [
    "pp=1 1f1b:1", "pp=2 1f1b:1 dp=2 zero=1", "pp=2 gpipe:1 recompute=layer.*", "pp=2 interleaved_1f1b:1x2"])
def test_software_with_buffers_of_gradients_adds_those_of_a_single_microbatch_to_them(cluster_of, text):
    """As many bytes as the gradients have are held from the start; the results have the same bits."""
    strategy, mesh = Strategy.parse_on_mesh(text)
    alone, step = model_step("mlp", 6, Adam(0.1)), strategy(model_step("mlp", B, Adam(0.1)))
    found = []
    for buffers in (False, True):
        on = {**ON, "hardware": replace(Hardware.preset("dgx-h100:1"), gradient_buffers=buffers)}
        results, trace = trained_on(cluster_of(mesh, "thread", compute="modelled", **on), step, alone, steps=1)
        assert_simulated(simulated(step, mesh, 6, on), trace)
        events = [event for event in trace if event.rank == 0]
        added = [event for event in events if event.name == "accumulate"]
        before = next(place for place, event in enumerate(events) if event.stage is not None)
        held = sum(event.nbytes for event in events[:before] if (event.kind, event.name) == ("memory", "gradients"))
        found.append((bits(results), len(added) > 0, held > 0))
    assert [each[1:] for each in found] == [(False, False), (True, True)]
    assert found[0][0] == found[1][0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rule", [SGD(0.5), SGD(0.5, 0.5)], ids=["sgd", "momentum"])
@pytest.mark.parametrize("text", ["pp=1 1f1b:1 dp=2", "pp=1 1f1b:1 dp=3 zero=1"])
def test_weights_whose_gradients_are_one_array_train_as_alone(cluster_of, text, rule):
    def loss(p, x):
        return ((p["a"] + p["b"]) * x).mean()

    def step_of(rows):
        kind = ir.TensorType("float64", (6,))
        return train_step(ir.record(loss, {"a": kind, "b": kind}, ir.TensorType("float64", (rows, 6))), rule)

    strategy, mesh = Strategy.parse_on_mesh(text)
    alone = step_of(6)
    assert_trains(cluster_of(mesh, "thread", compute="modelled", **ON), strategy(step_of(B)), alone, 6)
