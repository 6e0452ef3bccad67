"""Devices keep programs between runs: each is unpickled once, and again after failures, deaths and changes."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys

import numpy as np
import pytest
from trained_runs import B
from transformed import MODELS, trained

from parallelism.execution import Executable
from parallelism.execution.device_program import DeviceProgram
from parallelism.mesh import Mesh
from parallelism.operation import Operation
from parallelism.pipelining import Pipeline as Training
from parallelism.transforms import SGD, Pipeline, Strategy, train_step
from pipeline_parallelism import MLP
from vcluster.code import ClusterError, DeviceFailedError
from vcluster.processes import kept_programs
from vcluster.processes.kept_programs import MOST_PROGRAMS
from vcluster.runs import VirtualCluster


class Counted(Operation):
    """Returns how often this copy of the operation has run, the sum of what it has, and the argument."""

    kept_by_devices = True

    def __init__(self, content=1.0, pad=0):
        self.content, self.pad = content, b"\0" * pad
        self.derived = {}

    def __getstate__(self):
        return self.__dict__ | {"derived": {}}

    def __call__(self, device, argument):
        self.derived["runs"] = self.derived.get("runs", 0) + 1
        if argument == "fail" and device.rank == 1:
            raise ValueError("on purpose")
        if argument == "die" and device.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        device.barrier()
        return self.derived["runs"], float(np.sum(self.content)), argument

    def result(self, mesh, outputs):
        return outputs


class Subclass(Counted):
    """Does not say that devices may keep it."""


BACKENDS = [
    ("thread", {}), ("thread", {"transport": "queue"}), ("process", {}), ("process", {"transport": "queue"}),
    ("process", {"start_method": "fork"}), ("process", {"start_method": "spawn"}),
]


@pytest.mark.sampled(2)
@pytest.mark.slow_for("spawn", "fork")
@pytest.mark.parametrize(("backend", "options"), BACKENDS, ids=str)
def test_a_device_keeps_a_program_with_what_it_derived(cluster_of, backend, options):
    cluster = cluster_of(Mesh(devices=3), backend, **options)
    program, other = Counted(np.arange(4.0)), Counted(5)
    assert [cluster.run(program, x).result for x in (1, 2)] == [[(1, 6.0, 1)] * 3, [(2, 6.0, 2)] * 3]
    assert cluster.run(other, 3).result == [(1, 5.0, 3)] * 3
    assert cluster.run(program, 4).result == [(3, 6.0, 4)] * 3
    assert cluster.run(Counted(np.arange(4.0)), 5).result == [(4, 6.0, 5)] * 3      # an equal program
    assert program.derived == {}                            # the host's own object is untouched


@pytest.fixture(params=["process", "thread"])
def cluster(request, cluster_of):
    cluster = cluster_of(Mesh(devices=2), request.param)
    cluster.forget()
    return cluster


def runs(cluster, program, argument=0):
    return [count for count, _, _ in cluster.run(program, argument).result]


def test_a_changed_attribute_makes_another_program(cluster):
    program = Counted(7.0)
    assert cluster.run(program, 0).result == [(1, 7.0, 0)] * 2
    program.content = 8.0
    assert cluster.run(program, 0).result == [(1, 8.0, 0)] * 2
    assert cluster.run(program, 0).result == [(2, 8.0, 0)] * 2


SCALE = 2.0


class Scaled(Operation):
    """Returns a global times the sum of an array."""

    kept_by_devices = True

    def __init__(self):
        self.content = np.ones(3)

    def __call__(self, device):
        return SCALE * float(self.content.sum())

    def result(self, mesh, outputs):
        return outputs


def test_a_change_in_an_array_or_a_global_makes_another_program(cluster, monkeypatch):
    program = Scaled()
    assert cluster.run(program).result == [6.0] * 2
    program.content[0] = 11
    assert cluster.run(program).result == [26.0] * 2
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert cluster.run(program).result == [39.0] * 2


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """``imported(name, text)`` is a module with this text, which can be imported during the test."""
    names = []

    def module(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return importlib.import_module(name)

    monkeypatch.syspath_prepend(tmp_path)
    yield module
    for name in names:
        del sys.modules[name]


def test_a_change_in_an_array_of_an_imported_class_makes_another_program(cluster, imported):
    program = imported(
        "kept_sum",
        "from parallelism.operation import Operation\nclass Sum(Operation):\n    kept_by_devices = True\n"
        "    def __call__(self, device):\n        return float(self.content.sum())\n").Sum()
    program.content = np.ones(3)
    assert cluster.run(program).outputs == [3.0] * 2
    program.content[0] = 11
    assert cluster.run(program).outputs == [13.0] * 2


RATE = 0.0


class Descent:
    """An optimizer with a rate that somebody may change, though it should be frozen."""

    def update(self, parameters, gradients, state):
        return [p - RATE * g for p, g in zip(parameters, gradients, strict=True)], state


def biases_after(cluster, step):
    """The biases after a step with inputs and targets that are integers."""
    x = np.array([[1.0, 2.0], [3.0, -1.0]])
    return [bias for _, bias in cluster.run(step, x, x[:, :1]).result.parameters]


@pytest.mark.parametrize("cluster", ["thread"], indirect=True)
def test_a_step_of_training_is_unpickled_once(cluster, monkeypatch):
    decoded, programs = [], kept_programs.decode
    monkeypatch.setattr(kept_programs, "decode", lambda block: decoded.append(len(block)) or programs(block))
    model = MLP((2, 3, 1), Training(2, 2))
    steps = model.train_step(returns="parameters"), model.predict_step()
    for _ in range(3):
        biases_after(cluster, steps[0])
        cluster.run(steps[1], np.ones((2, 2)))
    assert len(decoded) == 2 * cluster.size


def test_an_optimizer_with_another_rate_makes_another_step(cluster, imported):
    optimizer = imported(
        "kept_rate",
        "class Descent:\n    def __init__(self, rate):\n        self.rate = rate\n"
        "    def update(self, parameters, gradients, state):\n"
        "        return [p - self.rate * g for p, g in zip(parameters, gradients)], state\n").Descent(0.0)
    step = MLP((2, 3, 1), Training(2, 2), seed=1).train_step(optimizer, returns="parameters")
    assert not any(bias.any() for bias in biases_after(cluster, step))
    optimizer.rate = 1.0
    assert all(bias.any() for bias in biases_after(cluster, step))


def test_an_optimizer_of_a_script_is_sent_with_its_globals_each_time(cluster, monkeypatch):
    step = MLP((2, 3, 1), Training(2, 2), seed=2).train_step(Descent(), returns="parameters")
    assert not any(bias.any() for bias in biases_after(cluster, step))
    monkeypatch.setattr(sys.modules[__name__], "RATE", 1.0)
    assert all(bias.any() for bias in biases_after(cluster, step))


def test_a_part_of_a_script_deep_inside_of_an_imported_class_is_sent_with_its_globals(cluster, imported, monkeypatch):
    optimizer = imported(
        "kept_several",
        "class Several:\n    def __init__(self, *parts):\n        self.parts = parts\n"
        "    def update(self, *given):\n        return self.parts[0].update(*given)\n").Several(Descent())
    step = MLP((2, 3, 1), Training(2, 2), seed=3).train_step(optimizer, returns="parameters")
    assert not any(bias.any() for bias in biases_after(cluster, step))
    monkeypatch.setattr(sys.modules[__name__], "RATE", 1.0)
    assert all(bias.any() for bias in biases_after(cluster, step))


def test_subclasses_and_arguments_are_not_kept(cluster):
    program = Subclass(9.0)
    assert [runs(cluster, program) for _ in range(2)] == [[1, 1], [1, 1]]
    kept = Counted(10.0)
    assert [runs(cluster, kept) for _ in range(2)] == [[1, 1], [2, 2]]
    assert cluster.run(lambda device, operation: operation.derived, kept).outputs == [{}, {}]   # as an argument: a copy


def test_after_a_failed_run_no_device_has_the_program(cluster):
    program = Counted(11.0)
    assert [runs(cluster, program) for _ in range(2)] == [[1, 1], [2, 2]]
    with pytest.raises(DeviceFailedError, match="on purpose"):
        cluster.run(program, "fail")
    assert [runs(cluster, program) for _ in range(2)] == [[1, 1], [2, 2]]


def test_a_device_that_was_replaced_gets_the_program_again(cluster_of):
    cluster, program = cluster_of(Mesh(devices=2)), Counted(12.0)
    other = Counted(12.5)
    assert runs(cluster, program) == runs(cluster, other) == [1, 1]
    with pytest.raises(ClusterError):
        cluster.run(program, "die")
    assert [runs(cluster, program) for _ in range(2)] == [[1, 1], [2, 2]]
    assert runs(cluster, other) == [2, 1]


@pytest.mark.sampled(2)
def test_the_programs_used_longest_ago_go_first(cluster):
    programs = [Counted(20.0 + i) for i in range(MOST_PROGRAMS)]
    for program in programs:
        assert runs(cluster, program) == [1, 1]
    assert runs(cluster, programs[0]) == [2, 2]
    assert runs(cluster, Counted(-1.0)) == [1, 1]
    assert runs(cluster, programs[0]) == [3, 3]
    assert runs(cluster, programs[1]) == [1, 1]


@pytest.mark.sampled(2)
def test_neither_host_nor_devices_keep_what_the_host_has_dropped(cluster):
    tops = []
    for i in range(2 * MOST_PROGRAMS):
        runs(cluster, Counted(100.0 + i, pad=1 << 16))
        gc.collect()
        assert len(cluster._body._encodings._entries) == 0
        tops.append(cluster._body.endpoint.heap._next)
    assert len(set(tops[MOST_PROGRAMS:])) == 1


def test_arrays_of_a_kept_program_cannot_be_written(cluster):
    class Writes(Operation):
        kept_by_devices = True

        def __init__(self):
            self.content = np.arange(3.0)

        def __call__(self, device):
            self.content[0] = 1

    with pytest.raises(DeviceFailedError, match="read-only"):
        cluster.run(Writes())


def test_a_program_of_a_changed_module_is_unpickled_again(tmp_path, monkeypatch):
    text = ("from parallelism.operation import Operation\nclass Answer(Operation):\n    kept_by_devices = True\n"
            "    def __call__(self, device):\n        return {}\n")
    file = tmp_path / "kept_answer.py"
    file.write_text(text.format("'old'"))
    monkeypatch.syspath_prepend(tmp_path)
    import kept_answer

    try:
        program = kept_answer.Answer()
        with VirtualCluster(2) as cluster:
            assert cluster.run(program).outputs == cluster.run(program).outputs == ["old"] * 2
            file.write_text(text.format("'new and longer'"))
            assert cluster.run(program).outputs == ["new and longer"] * 2
    finally:
        del sys.modules["kept_answer"]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mesh"), [
    Strategy.parse_on_mesh("pp=2 1f1b:2 tp=2"),
    (Strategy(Strategy.parse("dp tp"), Pipeline(microbatches=2, meshes=[Mesh(dp=2), Mesh(tp=2)])), Mesh(devices=4)),
], ids=str)
def test_the_programs_of_stages_are_derived_in_the_first_run_alone(cluster_of, monkeypatch, strategy, mesh):
    made, check = [], DeviceProgram.__post_init__
    monkeypatch.setattr(DeviceProgram, "__post_init__", lambda program: made.append(program.function) or check(program))
    step = strategy(train_step(MODELS["mlp"](B), SGD(0.1)))
    counts = []

    def run(inputs):
        result = cluster_of(mesh, "thread").run(step, inputs).result
        counts.append(len(made))
        return result

    trained(step.function, run, like=train_step(MODELS["mlp"](4), SGD(0.1)), steps=2)
    assert counts[0] > mesh.size
    assert counts[1:] == counts[:1]


def test_an_executable_is_kept():
    assert vars(Executable)["kept_by_devices"]
