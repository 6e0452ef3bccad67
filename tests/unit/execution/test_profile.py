"""Ops are measured once, remembered in a file, and take that in place of their flops and bytes."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from local_programs import feed_forward, integers

from parallelism import ir
from parallelism.execution import Executable, Profile
from parallelism.execution.op_profile import key_of, measured
from parallelism.mesh import Mesh
from parallelism.recorder import record
from parallelism.simulation import simulate


class Counting:
    """Says that every op takes as many seconds as it has flops, and which it was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, op):
        self.asked.append(op)
        return float(op.flops)


@pytest.mark.takes_seconds
def test_each_distinct_op_is_measured_once_and_found_in_the_file_the_next_time(tmp_path):
    mesh, count = Mesh(dp=2, tp=2), Counting()
    program = feed_forward(8, 4, 6, mesh)
    profile = Profile(tmp_path / "ops.json", count)
    first = simulate(Executable(program, seconds=profile), "dgx-h100")
    computed = {e.name for e in first.filter(kind="compute")} - {"@ffn"}
    assert computed == {"matmul", "relu", "sum", "add", "constant", "multiply"}
    assert len(count.asked) == len(set(map(key_of, count.asked))) == len(profile.seconds)
    again, other = Counting(), Profile(tmp_path / "ops.json")
    other._measure = again
    assert simulate(Executable(program, seconds=other), "dgx-h100") == first
    assert again.asked == []


@pytest.mark.takes_seconds
def test_what_was_measured_is_what_compute_takes_on_any_hardware():
    program = feed_forward(8, 4, 6, Mesh(dp=2, tp=2))
    executable = Executable(program, seconds=Counting())
    for hardware in ("dgx-h100", "ethernet-cpu"):
        trace = simulate(executable, hardware)
        products = trace.filter(name="matmul")
        assert len(products) and all(e.duration_seconds == e.flops for e in products)
    on_host = simulate(executable, "host")
    assert on_host.makespan_seconds == pytest.approx(on_host.flops(0)) and on_host.hardware is None


def test_devices_get_the_seconds_and_measure_nothing():
    mesh = Mesh(dp=2, tp=2)
    hand = feed_forward(8, 4, 6, mesh)
    executable = Executable(hand, seconds=Profile(None, Counting()))
    executable.inputs(mesh, integers(hand.function))
    shipped = copy.copy(executable.seconds)
    assert shipped.seconds == executable.seconds.seconds
    with pytest.raises(ValueError, match="a device does not measure: exp is not in the profile"):
        shipped(ir.record(np.exp, ir.TensorType("f64", (3,))).ops[0])
    trace = record(executable, mesh, integers(hand.function)).trace
    assert [e.seconds for e in trace.filter(name="matmul", rank=0)] == [
        e.flops for e in trace.filter(name="matmul", rank=0)]


def test_where_a_part_begins_makes_no_other_op():
    def op(start):
        program = ir.record(lambda: ir.apply(
            "iota", dim=0, shape=(3, 2), starts=(start, 0), dtype=np.dtype(np.int64)))
        return program.ops[0]

    assert key_of(op(0)) == key_of(op(6)) and "starts" not in key_of(op(0))


def test_measuring_runs_an_op_on_numbers_that_it_takes():
    program = ir.record(lambda x, i: np.log(x)[i], ir.TensorType("f32", (5, 2)), ir.TensorType("i64", (3,)))
    assert all(measured(op) > 0 for op in program.ops)


def test_a_symbol_cannot_be_measured():
    with pytest.raises(ValueError, match=r"exp has symbols, B, and cannot be measured"):
        Profile()(ir.record(np.exp, ir.TensorType("f64", (ir.symbol("B"),))).ops[0])


@pytest.mark.parametrize(("text", "message"), [
    ("{", "expected a vcluster profile, got what is no JSON"),
    ("[1]", r"expected a vcluster profile, got \[1\]"),
    (json.dumps({"format": "vcluster trace"}), "expected a vcluster profile, got {'format': 'vcluster trace'}"),
    (json.dumps({"format": "vcluster profile", "version": 9}), "expected version 1 of a profile, got 9"),
    (json.dumps({"format": "vcluster profile", "version": 1, "seconds": []}),
     r"seconds should be a table by op, got \[\]"),
    (json.dumps({"format": "vcluster profile", "version": 1, "seconds": {"exp": -1}}),
     "seconds of 'exp' should be a number from 0 on, got -1"),
    (json.dumps({"format": "vcluster profile", "version": 1, "seconds": {"exp": "1"}}), "got 1"),
    ('{"format": "vcluster profile", "version": 1, "seconds": {"exp": NaN}}', "got nan"),
    ("[" * 100_000, "no JSON"),
])
def test_a_file_that_is_no_profile_is_refused(tmp_path, text, message):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Profile(path)
    assert str(caught.value).startswith(str(path))
