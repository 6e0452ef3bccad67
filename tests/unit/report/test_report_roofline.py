"""The roofline and virtual beside wall time, as the page is given them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from parallelism import Event, Hardware, HostLink, Link, Trace
from parallelism.hardware import CALIBRATED, VARIABLE
from vcluster.report.measured import MOST_ROWS, measured
from vcluster.report.payload import payload
from vcluster.report.roofline import MOST_POINTS, hardware_named, roofline

HARDWARE = Hardware("ours", {"float32": 8.0, "float64": 4.0, "bfloat16": 16.0}, 1, 2.0, (Link("x", 2, 1, 1),),
                    HostLink(1, 1))


def product(start=0.0, seconds=2.0, name="matmul", rank=0, **fields):
    values = {"flops": 8.0, "nbytes": 4.0, "dtype": "float64", **fields}
    return Event(rank, "compute", name, start, seconds, **values)


def test_computes_that_look_alike_are_one_point_with_their_time_and_number():
    found = roofline(Trace([product(), product(2.0, name="matmul"), product(4.0, 4.0, name="block 1", phase="F"),
                            product(8.0, 4.0, name="block 2", phase="F")]), HARDWARE)
    assert found["points"] == [
        {"name": "phase F", "part": "forward", "x": 2, "y": 2, "seconds": 8, "count": 2},
        {"name": "matmul", "part": "other", "x": 2, "y": 4, "seconds": 4, "count": 2}]
    assert (found["of"], found["without"], found["more"], found["bandwidth"]) == (4, 0, 0, 2.0)


def test_what_calls_of_the_library_divide_is_one_compute():
    pieces = [product(0, 1.0), Event(0, "send", "send", 1), product(1, 3.0, flops=0.0, nbytes=0.0, part=1)]
    (point,) = roofline(Trace(pieces), None)["points"]
    assert (point["y"], point["seconds"], point["count"]) == (2, 4, 1)


def test_what_has_no_flops_bytes_or_duration_is_counted_only():
    nothing = [product(flops=0.0), product(nbytes=0.0), product(seconds=0.0)]
    assert roofline(Trace(nothing), HARDWARE) == {} == roofline(Trace([]), HARDWARE)
    assert roofline(Trace([*nothing, product()]), HARDWARE)["without"] == 3


def test_the_roofs_are_those_of_the_dtypes_that_occur():
    def roofs(trace):
        return [roof["dtype"] for roof in roofline(trace, HARDWARE)["roofs"]]

    assert roofs(Trace([product(), product(dtype="float32")])) == ["float32", "float64"]
    assert roofs(Trace([product(dtype=None)])) == ["float32"] == roofs(Trace([product(dtype="int8")]))
    priced = Trace([product()], priced=("modelled", "bfloat16", True, 0.0, 0.0))
    assert roofs(priced) == ["bfloat16"] and roofline(priced, HARDWARE)["points"][0]["x"] == 8      # a byte is 1/4


def test_the_roof_of_what_a_trace_names_is_looked_up_where_there_is_one(tmp_path, monkeypatch):
    assert hardware_named(Trace([], hardware="dgx-h100")).peak("float32") == 67e12
    assert hardware_named(Trace([], hardware="</script>")) is None is hardware_named(Trace([]))
    assert hardware_named(Trace([], hardware=CALIBRATED)) is None
    monkeypatch.setenv(VARIABLE, str(tmp_path / "host.json"))
    HARDWARE.save(tmp_path / "host.json")
    assert hardware_named(Trace([], hardware=CALIBRATED)) == HARDWARE
    (tmp_path / "host.json").write_text("broken")
    assert hardware_named(Trace([], hardware=CALIBRATED)) is None
    assert roofline(Trace([product()], hardware="theirs"), None)["hardware"] == "theirs"


@pytest.mark.parametrize("wrong", [{"flops": 1e308, "nbytes": 1e-308}, {"seconds": 1e308}, {"nbytes": 1e308},
                                   {"flops": 5e-324, "nbytes": 1e308}])
def test_numbers_that_a_float_cannot_hold_are_no_points(wrong):
    with np.errstate(all="ignore"):
        assert roofline(Trace([product(**wrong)]), HARDWARE) == {}
    json.dumps(payload(Trace([product(**wrong), product()])), allow_nan=False)


def test_of_very_many_points_those_of_least_time_are_left_out_and_counted():
    many = [product(i, 2.0, flops=1.1**i if i else 2.0) for i in range(MOST_POINTS + 50)]
    with np.errstate(all="ignore"):
        found = roofline(Trace(many), HARDWARE)
    assert len(found["points"]) <= MOST_POINTS and found["of"] + found["without"] == len(many)


# -- virtual beside wall time ------------------------------------------------------------------------------------------

def both(name="matmul", virtual=2.0, wall=4.0, rank=0, kind="compute", **fields):
    return Event(rank, kind, name, 0.0, virtual, 1.0, wall, **fields)


def test_each_row_has_both_times_and_they_are_never_mixed():
    found = measured(Trace([
        both("block 1"), both("block 2", 4.0, 4.0, 1), both("all_reduce", 1.0, 8.0, kind="collective"),
        both("0F0", 3.0, 3.0, phase="F"), both("recv", 1.0, 1.0, kind="recv", peer=1)]))
    assert found["rows"] == [
        {"name": "the whole run", "count": 5, "virtual": 4, "wall": 8},
        {"name": "compute block #", "count": 2, "virtual": 6, "wall": 8},
        {"name": "all_reduce", "count": 1, "virtual": 1, "wall": 8},
        {"name": "compute, phase F", "count": 1, "virtual": 3, "wall": 3},
        {"name": "recv", "count": 1, "virtual": 1, "wall": 1}]


def test_without_one_of_the_times_there_is_nothing_to_compare():
    assert measured(Trace([both(wall=0.0)])) == {} == measured(Trace([both(virtual=0.0)])) == measured(Trace([]))
    assert "measured" not in payload(Trace([both(wall=0.0)])) and "measured" in payload(Trace([both()]))


def test_what_the_times_are_of_is_said_with_them():
    def words(*events, **header):
        return " ".join(measured(Trace(events or [both()], **header))["words"])

    assert "is the error" in words() and "take no virtual time" in words()
    assert "is the error of the virtual time" in words(hardware=CALIBRATED)
    assert "take no virtual time" not in words(hardware=CALIBRATED)
    assert "Virtual time is that of dgx-h100, wall time that of the machine which ran it" in words(hardware="dgx-h100")
    assert "Compute had a core for 25% of its wall time: devices took turns" in words(both(cpu_seconds=1.0))
    assert words(both(cpu_seconds=4.0)).endswith("Compute had a core for 100% of its wall time.")
    assert "had a core" not in words(both(cpu_seconds=1.0, seconds=1.0))       # declared, not taken


def test_of_very_many_kinds_the_longest_are_shown_and_the_others_counted():
    names = [chr(0x4E00 + i) for i in range(MOST_ROWS + 7)]
    found = measured(Trace([both(name, wall=1.0 + i) for i, name in enumerate(names)]))
    assert len(found["rows"]) == 1 + MOST_ROWS and found["more"] == 7
    assert found["rows"][1]["name"] == f"compute {names[-1]}"
