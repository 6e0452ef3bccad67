"""Programs simulated: what the recorder records, one of equal devices for all, and how little is done for many."""

from __future__ import annotations

import re
import subprocess
import sys
from textwrap import dedent

import numpy as np
import pytest
from local_programs import ByHand, feed_forward, integers

from parallelism import ir, models
from parallelism.execution import Executable
from parallelism.hardware import Hardware
from parallelism.ir import Builder, TensorType
from parallelism.mesh import Mesh
from parallelism.recorder import record
from parallelism.sharding import TensorSharding
from parallelism.simulation import equal_devices, simulate
from parallelism.timeline import Pricing

SHAPES = [(6, 4, 8), (5, 3, 7), (1, 1, 1), (3, 0, 2)]


def told(trace, rank=None):
    return [
        (e.rank, e.kind, e.name, e.start_seconds, e.duration_seconds, e.bytes_sent, e.bytes_received, e.messages,
         e.flops, e.nbytes, e.axes, e.group, e.peer, e.algorithm, e.tag, e.sequence, e.sources, e.dtype, e.seconds,
         e.serial, e.payload_bytes, e.root, e.pairs) for e in trace if rank is None or e.rank == rank
    ]


@pytest.mark.takes_seconds
@pytest.mark.sampled(6)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", [Mesh(dp=1, tp=1), Mesh(dp=2, tp=3)], ids=repr)
def test_a_program_is_simulated_as_it_is_recorded(shape, mesh):
    hand = feed_forward(*shape, mesh)
    executable, inputs = Executable(hand), integers(hand.function)
    recorded = record(executable, mesh, inputs).trace.on("dgx-h100", priced_dtype="bfloat16")
    simulated = simulate(executable, "dgx-h100", priced_dtype="bfloat16")
    assert told(simulated) == told(recorded)
    assert simulated.totals == recorded.totals and simulated.peaks() == recorded.peaks()
    np.testing.assert_array_equal(simulated.communication_matrix(), recorded.communication_matrix())
    for rank in range(mesh.size):
        assert simulated.peak_bytes(rank) == ir.peak_bytes(hand.program(rank))


def test_memory_is_counted_in_categories_by_the_names_of_values():
    mesh = Mesh(dp=2, tp=2)
    hand = feed_forward(8, 4, 6, mesh)
    executable = Executable(hand, categories={"up": "weights", "down": "weights"})
    trace = simulate(executable, "dgx-h100", priced_dtype="float32")
    assert {e.name for e in trace.filter(kind="memory")} == {"weights", "inputs", "activations", "outputs"}
    assert trace.peak_bytes(0, "weights") == 2 * 4 * 3 * 8 and trace.peak_bytes(0, "inputs") == 4 * 4 * 8
    assert trace.peak_bytes(0) == ir.peak_bytes(hand.program(0))


@pytest.mark.takes_seconds
def test_a_simulated_trace_can_be_priced_elsewhere():
    executable = Executable(feed_forward(6, 4, 8, Mesh(dp=2, tp=2)))
    there = simulate(executable, "pcie-v100")
    assert simulate(executable, "dgx-h100", priced_dtype="float32").on("pcie-v100", priced_dtype="float64") != there
    assert told(simulate(executable, "dgx-a100").on("pcie-v100")) == told(there)


@pytest.mark.takes_seconds
@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [
    lambda dtype: models.gpt(12, 8, 2, 2, 4, 3, dtype=dtype),
    lambda dtype: models.mixture(6, 8, 4, 2, 5, 4, 6, dtype=dtype),
])
def test_a_program_is_priced_as_a_narrower_one_is(make):
    """Its integers and bools keep their size, also beside floats in one op."""
    wide, narrow = (Executable(ir.gradient(make(dtype)), Mesh(dp=1)) for dtype in ("float64", "float32"))
    priced = simulate(wide, "dgx-h100", priced_dtype="float32")
    assert any(event.other_bytes for event in priced)
    assert priced.makespan_seconds == simulate(narrow, "dgx-h100").makespan_seconds


# -- equal devices -----------------------------------------------------------------------------------------------------

HARDWARE = {
    "switches": Hardware.preset("dgx-h100"), "torus": Hardware.preset("tpu-v4:2x2x4"),
    "straggler": Hardware.preset("dgx-h100").slow(rank=1, factor=3),
    "fault": Hardware.preset("dgx-h100").fault(source=0, target=1, bandwidth_factor=0.5),
    "laid out otherwise": Hardware.preset("dgx-h100").placed_by(Mesh(dp=4, tp=4), ("tp", "dp")),
}


@pytest.mark.slow
@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=HARDWARE)
@pytest.mark.parametrize("shape", [(8, 4, 16), (5, 3, 7)], ids=str)
def test_one_of_equal_devices_tells_what_each_of_them_would(shape, hardware):
    mesh = Mesh(dp=4, tp=4)
    executable = Executable(feed_forward(*shape, mesh))
    whole = simulate(executable, hardware, priced_dtype="bfloat16")
    folded = simulate(executable, hardware, fold=True, priced_dtype="bfloat16")
    equal = equal_devices(executable, hardware)
    assert folded.ranks == tuple(equal.first.tolist()) and sum(equal.sizes) == 16
    assert folded.makespan_seconds == whole.makespan_seconds
    for rank in range(16):
        stands = int(equal.first[equal.set_of[rank]])
        if stands == rank:
            assert told(folded, rank) == told(whole, rank)
        assert [e[1:5] for e in told(folded, stands)] == [e[1:5] for e in told(whole, rank)]
        assert folded.peak_bytes(stands) == whole.peak_bytes(rank)


@pytest.mark.parametrize(("name", "count"), [
    ("switches", 1), ("straggler", 4), ("fault", 16), ("laid out otherwise", 1),
])
def test_devices_are_equal_as_far_as_the_hardware_lets_them_be(name, count):
    executable = Executable(feed_forward(8, 4, 16, Mesh(dp=4, tp=4)))
    assert len(equal_devices(executable, HARDWARE[name]).first) == count


@pytest.mark.takes_seconds
def test_collectives_of_groups_that_lie_alike_go_over_the_ports_of_their_own_members():
    executable = Executable(feed_forward(6144, 1024, 4096, Mesh(dp=3, tp=2)))
    hardware = Hardware.preset("dgx-h100").slow(rank=0, factor=1.001)   # the groups are at their collectives together
    whole = simulate(executable, hardware, priced_dtype="bfloat16")
    folded = simulate(executable, hardware, fold=True, priced_dtype="bfloat16")
    assert folded.ranks == (0, 1, 2, 3)
    for rank in folded.ranks:
        assert told(folded, rank) == told(whole, rank)


def alone(mesh, function):
    """One program for all devices."""
    class Alone(ByHand):
        classes = ((0, mesh.size),)

        def class_of(self, rank):
            return 0

        def program(self, rank):
            return function

    return Executable(Alone(function, mesh, (), (), (function,), ()))


def chain(mesh, layers, *, axis="tp"):
    """Layers of a product and a sum over an axis, and the sums of the weights over the other."""
    made = Builder()
    x = made.input("x", TensorType("f32", (4, 64)))
    weights = [made.input(f"w{i}", TensorType("f32", (64, 64))) for i in range(layers)]
    group = {axis: {"axes": (axis,), "group": n, "op": "sum"} for axis, n in mesh.shape.items()}
    for weight in weights:
        y, = made.emit("matmul", (x, weight), {})
        x, = made.emit("all_reduce", (y,), group[axis])
    return made.function("chain", [made.emit("all_reduce", (weight,), group["dp"])[0] for weight in weights])


def test_a_hundred_thousand_devices_cost_what_one_does(monkeypatch):
    mesh, asked = Mesh(dp=512, cp=25, tp=8), []
    price = Pricing.collective
    monkeypatch.setattr(Pricing, "collective", lambda self, *a: asked.append(a) or price(self, *a))
    trace = simulate(alone(mesh, chain(mesh, 6)), "dgx-h100:12800", fold=True)
    assert mesh.size == 102_400 and trace.ranks == (0,) and len(asked) == 2
    # its begin and its inputs; of a layer two ops, what they make, what goes after each; of a weight a sum and that
    assert len(trace) == 2 + (6 * 6 - 1) + 6 * 2
    assert {len(e.group) for e in trace.filter(kind="collective")} == {8, 512}


@pytest.mark.takes_seconds
def test_the_events_of_many_ops_are_as_many_times_more():
    mesh = Mesh(dp=2, tp=2)
    count = {layers: len(simulate(alone(mesh, chain(mesh, layers)), "dgx-h100")) for layers in (2, 4, 8)}
    assert count[8] - count[4] == 2 * (count[4] - count[2])


def test_a_collective_that_others_do_not_call_is_told():
    mesh = Mesh(dp=2)
    one, other = chain(mesh, 1, axis="dp"), chain(mesh, 2, axis="dp")
    broken = ByHand(one, mesh, (), (), (one, other), (0, 1))
    message = "collective 2 over dp is all_reduce to some of a group, and nothing to rank 0"
    with pytest.raises(ValueError, match=message):
        simulate(Executable(broken), "dgx-h100")


# -- messages ----------------------------------------------------------------------------------------------------------


def passing_on(mesh, rows=4):
    """Every rank sends to the next along the line, and takes what comes from the one before."""
    def program(rank):
        made = Builder()
        x = made.input("x", TensorType("f64", (rows, 3)))
        if rank:
            x, = made.emit("recv", (), {"source": rank - 1, "tag": 1, "shape": (rows, 3), "dtype": np.dtype("f8")})
        y, = made.emit("relu", (x,), {})
        if rank + 1 < mesh.size:
            made.emit("send", (y,), {"destination": rank + 1, "tag": 1})
        return made.function("line", [y])

    whole = Builder()
    x = whole.input("x", TensorType("f64", (rows, 3)))
    function = whole.function("line", whole.emit("relu", (x,), {}))
    return ByHand.of(function, mesh, (TensorSharding.replicated(2),), (TensorSharding.replicated(2),), program)


@pytest.mark.takes_seconds
def test_messages_between_programs_are_simulated_as_recorded():
    mesh = Mesh(devices=3)
    hand = passing_on(mesh)
    recorded = record(Executable(hand), mesh, integers(hand.function)).trace.on("dgx-h100", priced_dtype="float32")
    simulated = simulate(Executable(hand), "dgx-h100", priced_dtype="float32")
    assert told(simulated) == told(recorded) and simulated.bytes_received(2) == 4 * 3 * 8
    folded = simulate(Executable(hand), "dgx-h100", priced_dtype="float32", fold=True)
    assert told(folded) == told(simulated)


# -- what is refused ---------------------------------------------------------------------------------------------------


def refusals():
    mesh = Mesh(dp=2, tp=2)
    hand = feed_forward(8, 4, 6, mesh)
    symbolic = ir.record(np.exp, TensorType("f64", (ir.symbol("B"),)))
    yield "no mesh", lambda: Executable(hand.function), TypeError, "@ffn needs a mesh to be laid out on"
    yield ("another mesh", lambda: Executable(hand, Mesh(dp=4)), ValueError,
           "@ffn is laid out on Mesh(dp=2, tp=2), not on Mesh(dp=4)")
    yield ("a category of nothing", lambda: Executable(hand, categories={"z": "weights"}), ValueError,
           "categories has %z, which is no value of @ffn")
    yield ("inputs for another mesh", lambda: Executable(hand).inputs(Mesh(dp=4), integers(hand.function)), ValueError,
           "@ffn is laid out on Mesh(dp=2, tp=2) and cannot run on Mesh(dp=4)")
    yield ("inputs one by one", lambda: Executable(hand).inputs(mesh, 1, 2, 3), TypeError,
           "@ffn takes its inputs as one list, or one dict by name; got 3 arguments")
    yield ("an input of another shape", lambda: Executable(hand).inputs(mesh, [np.zeros((1, 4))] * 3), ValueError,
           "@ffn: input %x: tensor<8x4xf64> was given an array of shape (1, 4)")
    yield ("a symbol", lambda: simulate(Executable(symbolic, Mesh(dp=1)), "dgx-h100"), ValueError,
           "@exp: nothing says what B is; in a run the shapes of the arrays say it, simulate takes numbers={'B': 64}, and ")
    yield ("a model", lambda: simulate(models.transformer("gpt2"), "dgx-h100"), TypeError,
           "got TransformerSpec; its loss is a Function, as function(batch=8)")
    yield ("a kernel", lambda: simulate(len, "dgx-h100"), TypeError,
           "parallelism.recorder.record counts what a kernel does, and .trace.on(hardware) prices it")
    yield ("too many devices", lambda: simulate(Executable(hand), "dgx-h100:1".replace("dgx-h100:1", "ethernet-cpu:2")),
           ValueError, "has places for 2 devices, not for 4")


@pytest.mark.parametrize(("make", "error", "message"), [pytest.param(*rest, id=name) for name, *rest in refusals()])
def test_what_cannot_be_run_or_simulated_is_told(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


@pytest.mark.takes_seconds
def test_groups_along_different_axes_may_be_met_in_the_same_devices():
    mesh = Mesh(dp=2, tp=2)     # ranks 0 and 3 are equal, and 1 and 2: both axes join the one kind with the other
    group = {axis: {"axes": (axis,), "group": 2, "op": "sum"} for axis in mesh.axes}

    def program(rank):
        made = Builder()
        x = made.input("x", TensorType("f4", (64, 64)))
        if rank in (1, 2):
            x, = made.emit("matmul", (x, x), {})
        for axis in ("dp", "tp", "tp", "dp"):
            x, = made.emit("all_reduce", (x,), group[axis])
            if rank in (0, 3):
                x, = made.emit("exp", (x,), {})
        return made.function("crosswise", [x])

    whole = TensorSharding.replicated(2)
    executable = Executable(ByHand.of(program(0), mesh, (whole,), (whole,), program))
    folded, all_of_them = (simulate(executable, "dgx-h100", fold=fold) for fold in (True, False))
    assert folded.ranks == (0, 1)
    assert told(folded) == [event for rank in (0, 1) for event in told(all_of_them, rank)]


@pytest.mark.takes_seconds
def test_a_function_is_laid_out_on_the_mesh_that_is_given():
    function, mesh = models.mlp((3, 2), 5), Mesh(dp=2)
    assert told(simulate(function, "dgx-h100", mesh=mesh)) == told(simulate(Executable(function, mesh), "dgx-h100"))
    with pytest.raises(TypeError, match="a Function is simulated on a mesh"):
        simulate(function, "dgx-h100")
    with pytest.raises(TypeError, match=r"a Function or a Step, got int$"):
        simulate(3, "dgx-h100")


@pytest.mark.slow
def test_simulating_loads_no_masked_arrays():
    program = """
        import sys
        from parallelism import Executable, Hardware, Mesh, ir, simulate
        from parallelism.layouts import annotate
        product = ir.record(lambda x, w: x @ w, ir.TensorType("f32", (6, 8)), ir.TensorType("f32", (8, 5)))
        program = Executable(annotate(product, {"x": "[None, tp]", "w": "[tp, None]"}), Mesh(tp=8))
        for fold in (True, False):
            assert simulate(program, Hardware.preset("dgx-h100"), fold=fold).count("all_reduce", rank=0) == 1
        assert "numpy.ma" not in sys.modules        # it would take longer to import than the simulation
    """
    assert subprocess.run([sys.executable, "-c", dedent(program)], check=False).returncode == 0
