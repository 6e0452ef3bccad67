"""A change of layout costs what the simulator says, and moves what its program moves."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from parallelism import Mesh, TensorSharding
from parallelism.auto_sharding import connect
from parallelism.auto_sharding.prices import Prices
from parallelism.auto_sharding.problem import even_layouts
from parallelism.execution import Executable
from parallelism.hardware import Hardware
from parallelism.ir import Function, Op, TensorType, Value
from parallelism.ir.operators import layout_text
from parallelism.simulation import simulate

MESH = Mesh(x=2, y=4)
TYPE = TensorType("f4", (1024, 512, 3))
PAIRS = [
    ("[x, None, None]", "[None, None, None]"),
    ("[None, None, None]", "[(x, y), None, None]"),
    ("[x, y, None]", "[y, x, None]"),
    ("[x, None, None] partial=y", "[x, y, None]"),
    ("[None, None, None] partial=(x, y)", "[x, None, None]"),
    ("[None, y, None] partial=x", "[None, None, None]"),
    ("[x, y, None]", "[x, y, None]"),
]


@pytest.mark.takes_seconds
@pytest.mark.sampled(6)
@pytest.mark.parametrize("hardware", ["dgx-h100", "tpu-v4:2x2x2"])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_price_is_that_of_the_simulator(source, target, hardware):
    source, target = TensorSharding.parse(source), TensorSharding.parse(target)
    before, after = Value("x", TYPE, source), Value("y", TYPE, target)
    program = Function("f", (before,), (Op("reshard", (before,), {"layout": layout_text(target)}, (after,)),), (after,))
    trace = simulate(Executable(program, MESH), hardware, link_sharing=False)
    found = connect(source, target, TYPE, MESH, hardware)
    assert found.seconds == pytest.approx(trace.makespan_seconds, rel=1e-12, abs=0)
    assert found.bytes_received == sum(event.bytes_received for event in trace
                                       if event.rank == 0 and event.kind == "collective")
    assert (found.seconds == 0) == (source == target)


@pytest.mark.takes_seconds
def test_it_says_what_moves():
    found = connect(TensorSharding.parse("[x, None, None] partial=y"), TensorSharding.parse("[x, y, None]"), TYPE, MESH,
                    "dgx-h100")
    assert str(found) == "[x, None, None] partial=y -> [x, y, None]: reduce_scatter over y"
    assert str(connect(found.target, found.target, TYPE, MESH, "dgx-h100")).endswith("nothing moves")


def test_axes_must_be_those_of_the_mesh():
    with pytest.raises(ValueError, match="names axis 'z'"):
        connect(TensorSharding("z", None, None), TensorSharding("x", None, None), TYPE, MESH, "dgx-h100")


@pytest.mark.slow
@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [(1024, 512, 3), (64, 32, 16, 8), (4, 128, 8)])
@pytest.mark.parametrize("mesh", [MESH, Mesh(x=2, y=2, z=2), Mesh(x=2, y=8)])
def test_changes_that_are_priced_together_cost_the_same(mesh, shape, count):
    draw, type = random.Random(3), TensorType("f4", shape)
    whole = even_layouts(type, mesh)
    pending = [TensorSharding(*each.dims, partial=some) for each in whole for pending in range(1, 4)
               for some in combinations([axis for axis in mesh.axes if axis not in each.axes], pending)]
    pairs = [(draw.choice(whole + pending), draw.choice(whole), type) for _ in range(count)]
    hardware = Hardware.of(f"dgx-h100:{mesh.size // 8}")
    assert Prices(mesh, hardware).moves(pairs) == pytest.approx(
        Prices(mesh, hardware).moves(pairs, exactly=True), rel=1e-12, abs=0)


@pytest.mark.takes_seconds
def test_changes_that_are_not_alike_on_all_devices_are_priced_apart_and_as_alone(monkeypatch):
    mesh, type = Mesh(x=2, y=2), TensorType("f4", (8, 12))
    gathered = TensorSharding("x", None), TensorSharding(None, None), type
    permuted = TensorSharding(("x", "y"), None), TensorSharding(("y", "x"), None), type
    uneven = TensorSharding("x", None), TensorSharding(None, None), TensorType("f4", (7, 3))
    alone = [Prices(mesh, Hardware.of("dgx-h100")).moves([each], exactly=True) for each in (gathered, permuted, uneven)]
    together, priced = Prices._seconds, []
    monkeypatch.setattr(Prices, "_seconds", lambda self, *given: priced.append(len(given[1])) or together(self, *given))
    both = Prices(mesh, Hardware.of("dgx-h100")).moves([gathered, permuted, uneven], exactly=True)
    assert priced == [1, 2] and both == pytest.approx([seconds for each in alone for seconds in each], rel=1e-12)
