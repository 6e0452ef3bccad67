"""Hardware as a value: checked when built, laid out, written, read, and refused where it is broken."""

from __future__ import annotations

import json
import pickle
import re
import tomllib
from dataclasses import replace
from importlib.resources import files
from math import inf, nan

import numpy as np
import pytest
from drawn import up_to
from hypothesis import given, strategies as st

from parallelism import Costs, Hardware, HardwareFileError, HostLink, Link, LinkFault, Mesh, Straggler
from parallelism.hardware import stack_names
from vcluster.__main__ import main
from vcluster.cli.command_line import WrongWords

NODE = Link("nvlink", 4, 2e-6, 300e9)
HOST = HostLink(1e-5, 16e9)


def hardware(**fields) -> Hardware:
    values = {
        "name": "ours", "flops_per_second": {"float32": 1e12, "float64": 5e11}, "memory_bytes": 16e9,
        "memory_bytes_per_second": 9e11, "links": (NODE, Link("ethernet", 3, 25e-6, 1.25e9, ports=1)), "host": HOST,
        **fields,
    }
    return Hardware(**values)


def copied(value):
    return pickle.loads(pickle.dumps(value))  # noqa: S301


# -- presets ---------------------------------------------------------------------------------------------------------


def test_the_presets_are_these():
    assert Hardware.presets() == (
        "a100-pcie-node", "b200-node", "b300-node", "dgx-1-v100", "dgx-1-v100-16", "dgx-a100", "dgx-a100-40", "dgx-h100",
        "ethernet-cpu", "gb200-nvl72", "gb300-nvl72", "h100-pcie-node", "h200-node", "l40s-node", "laptop", "mi300x-node",
        "mi325x-node", "mi355x-node", "pcie-v100", "rtx-pro-6000-node", "tpu-v4", "tpu-v5e", "tpu-v5e-multislice", "tpu-v5p",
        "tpu-v6e", "tpu-v6e-multislice", "trainium2", "trainium2-ultra")


def numbers(table, path=""):
    for name, value in table.items():
        if name == "links":
            for link in value:
                yield from numbers(link, f"{path}links.{link['name']}.")
        elif isinstance(value, dict) and name != "sources":
            yield from numbers(value, f"{path}{name}.")
        elif isinstance(value, int | float | list):
            yield f"{path}{name}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", Hardware.presets())
def test_every_number_of_a_preset_has_its_source(name):
    table = tomllib.loads((files("parallelism.hardware") / "presets" / f"{name}.toml").read_text(encoding="utf-8"))
    assert sorted(table["sources"]) == sorted(numbers(table))
    told = Hardware.preset(name)
    assert told.name == name
    for source in told.sources.values():
        assert any(word in source for word in ("https://", "arXiv", "estimate", "choice", "measured", "NVIDIA", "IEEE",
                                               "Narayanan", "half of a core's share")), source


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", Hardware.presets())
def test_a_preset_is_a_value(name):
    told = Hardware.preset(name)
    assert told == Hardware.preset(name) == Hardware.of(name) == copied(told)
    assert len({told, Hardware.preset(name)}) == 1
    assert told != told.slow(rank=0, factor=2)
    assert repr(told) == f"<Hardware {name}: {told.devices} devices; print it>"


def test_what_the_data_sheets_say():
    a100, h100 = Hardware.preset("dgx-a100"), Hardware.preset("dgx-h100")
    assert (a100.peak("bfloat16"), a100.memory_bytes, a100.memory_bytes_per_second) == (312e12, 80e9, 2.039e12)
    assert [link.bytes_per_second for link in a100.links] == [300e9, 25e9]
    assert (h100.peak("bfloat16"), h100.memory_bytes_per_second) == (989.5e12, 3.35e12)
    assert [link.bytes_per_second for link in h100.links] == [450e9, 50e9]
    assert Hardware.preset("tpu-v4").links[0].extents == (4, 4, 4)


def test_the_machines_of_2025_are_as_their_data_sheets_say():
    """Per device: memory, its rate, dense products in bfloat16 and in the narrowest format, and links, one way."""
    said = {
        "b300-node": (288e9, 8e12, 2.25e15, 13.5e15, (900e9, 100e9)),
        "gb300-nvl72": (278e9, 8e12, 2.5e15, 15e15, (900e9, 100e9)),
        "rtx-pro-6000-node": (96e9, 1.597e12, 500e12, 2e15, (64e9, 50e9)),
        "mi325x-node": (256e9, 6e12, 1.3074e15, 2.6149e15, (64e9, 50e9)),
        "mi355x-node": (288e9, 8e12, 2.5166e15, 10.0663e15, (76.8e9, 50e9)),
        "tpu-v5e-multislice": (1.71799e10, 8.19e11, 1.97e14, 3.93e14, (5e10, 3.125e9)),
        "tpu-v6e-multislice": (3.43597e10, 1.64e12, 9.18e14, 1.836e15, (1e11, 12.5e9)),
        "trainium2-ultra": (1.03079e11, 2.9e12, 6.67e14, 1.299e15, (1.28e11, 64e9, 25e9)),
    }
    for name, (memory, rate, bfloat16, narrowest, links) in said.items():
        told = Hardware.preset(name)
        assert (told.memory_bytes, told.memory_bytes_per_second, told.peak("bfloat16")) == (memory, rate, bfloat16)
        assert max(told.flops_per_second.values()) == narrowest
        assert tuple(link.bytes_per_second for link in told.links) == links
    assert Hardware.preset("gb300-nvl72").links[0].extents == (72,)
    assert Hardware.preset("trainium2-ultra:2").devices == 128          # 2 UltraServers of 4 tori of 16 chips
    assert Hardware.preset("tpu-v6e-multislice:3").devices == 768


@pytest.mark.slow
def test_a_group_in_a_slice_uses_no_data_centre_network():
    """Two slices: groups inside of one are as fast as alone; a group of both waits for the network."""
    one, several = Costs(Hardware.preset("tpu-v6e")), Costs(Hardware.preset("tpu-v6e-multislice:2"))
    inside = [each.collective("all_reduce", 2**28, range(256)).seconds for each in (one, several)]
    across = several.collective("all_reduce", 2**28, [0, 256]).seconds
    assert inside[0] == inside[1] and across > 2**28 / 12.5e9


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", Hardware.presets())
def test_the_numbers_of_a_preset_fit_each_other(name):
    told = Hardware.preset(name)
    rates = dict(told.flops_per_second)
    if name in ("b300-node", "gb300-nvl72"):      # their tensor cores do three times as much in float4 as in float8
        assert rates.pop("float4") == 3 * rates["float8"]
    halves = ("float64", "float32"), ("tfloat32", "bfloat16"), ("bfloat16", "float8"), ("float8", "float4")
    assert all(rates[wide] <= rates[narrow] for wide, narrow in halves if wide in rates and narrow in rates)
    assert all(rates[narrow] == pytest.approx(2 * rates[wide], rel=0.03)         # as far as data sheets round
               for wide, narrow in halves[1:] if wide in rates and narrow in rates)
    assert rates.get("float16", rates.get("bfloat16")) == rates.get("bfloat16", rates.get("float16"))
    speeds = [told.memory_bytes_per_second, *(link.bytes_per_second for link in told.links)]
    assert speeds == sorted(speeds, reverse=True)           # memory, then outward
    delays = [link.latency_seconds for link in told.links]
    assert delays == sorted(delays) and told.kernel_launch_seconds <= delays[0]


def test_what_follows_a_colon_is_the_extents_of_the_outermost_level():
    assert Hardware.preset("dgx-h100:3").devices == 24
    assert Hardware.preset("tpu-v4:2x2x3").links[0].extents == (2, 2, 3)
    for words in ("dgx-h100:", "dgx-h100:-1", "dgx-h100:2x2", "tpu-v4:4x4", "tpu-v4:0x1x1", "tpu-v4:axbxc", "laptop:²"):
        with pytest.raises(ValueError, match="extents"):
            Hardware.preset(words)


@pytest.mark.parametrize(("name", "told"), [
    ("dgx-h100", "1016: 127 groups on infiniband, each of 8 on nvlink, the largest that is described; dgx-h100:4 has 4"),
    ("gb200-nvl72:2", "144: 2 groups on infiniband, each of 72 on nvlink flop/s"),
    ("laptop", "4 flop/s"), ("tpu-v4", "64 flop/s")])
def test_the_devices_are_told_by_their_groups(name, told):
    assert f"devices {told}" in " ".join(str(Hardware.preset(name)).split())


def test_a_typing_error_is_told_the_nearest_name():
    with pytest.raises(ValueError, match=r"^no hardware 'dgx-h10'; did you mean 'dgx-h100'\?$"):
        Hardware.preset("dgx-h10")
    with pytest.raises(ValueError, match="no hardware 'TPU_v4'; did you mean 'tpu-v4'"):
        Hardware.of("TPU_v4")
    for name, meant in [("dgx-h200", "'h200-node'"), ("H100", "'dgx-h100' or 'h100-pcie-node'"), ("mi300x", "'mi300x-node'")]:
        with pytest.raises(ValueError, match=rf"^no hardware '{name}'; did you mean {meant}\?$"):
            Hardware.preset(name)
    with pytest.raises(ValueError, match="no hardware 'abacus'; there is a100-pcie-node, b200-node"):
        Hardware.of("abacus")
    with pytest.raises(ValueError, match=r"no hardware '\.\./dgx-h100'"):
        Hardware.preset("../dgx-h100")
    with pytest.raises(TypeError, match="hardware must be a Hardware, a preset's name or a file; got 8"):
        Hardware.of(8)


# -- what is checked -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("fields", "words"), [
    ({"memory_bytes": 0}, r"memory_bytes must be a number of bytes, above 0; got 0"),
    ({"memory_bytes": "80 GB"}, r"memory_bytes must be a number of bytes, above 0; got '80 GB'"),
    ({"memory_bytes": True}, r"memory_bytes must be a number of bytes, above 0; got True"),
    ({"memory_bytes": nan}, r"memory_bytes must be a number of bytes, above 0; got nan"),
    ({"memory_bytes": inf}, r"memory_bytes must be a number of bytes, above 0; got inf"),
    ({"memory_bytes": 10**400}, r"memory_bytes must be a number of bytes, above 0; got 1000"),
    ({"memory_bytes_per_second": -1}, r"memory_bytes_per_second must be a number of bytes a second, above 0; got -1"),
    ({"kernel_launch_seconds": -1e-6}, r"kernel_launch_seconds must be a number of seconds, at least 0; got -1e-06"),
    ({"flops_efficiency": 1.5}, r"flops_efficiency must be a number, above 0 and at most 1; got 1.5"),
    ({"flops_per_second": {}}, r"flops_per_second must be a table of rates by dtype, not empty; got \{\}"),
    ({"flops_per_second": 1e12}, r"flops_per_second must be a table of rates by dtype, not empty; got 1000000000000.0"),
    ({"flops_per_second": {"flaot32": 1}}, r"flops_per_second must be of .* got 'flaot32'; did you mean 'float32'"),
    ({"flops_per_second": {"float32": 0}}, r"flops_per_second.float32 must be a number of flops a .*, above 0; got 0"),
    ({"links": ()}, r"links must be at least one Link; got none"),
    ({"links": [{"name": "x"}]}, r"links must be a sequence of Link; got \[\{'name': 'x'\}\]"),
    ({"links": (replace(NODE, ports=2),)}, r"links\[0\].ports must be at most the 1 devices in a unit; got 2"),
    ({"links": (Link("x", 2**20, 1, 1),) * 2}, r"links must join at most 16777216 devices; got 1099511627776"),
    ({"host": NODE}, r"host must be a HostLink; got Link"),
    ({"placement": (0, 12)}, r"placement must name places 0 to 11; got 12"),
    ({"placement": (0, 0)}, r"placement must give each rank a place of its own; got \(0, 0\)"),
    ({"placement": (0.5,)}, r"placement must be a whole number of at least 0; got 0.5"),
    ({"stragglers": (Straggler(12, 2),)}, r"stragglers\[0\].rank must be a rank from 0 to 11; got 12"),
    ({"faults": (LinkFault(target=3),), "placement": (4, 5)}, r"faults\[0\].target must be a rank from 0 to 1; got 3"),
    ({"placement": "01"}, r"placement must be a list of places by rank; got '01'"),
    ({"name": ""}, r"name must be a line of 1 to 80 printable characters; got ''"),
    ({"name": "a\x1b[31m"}, r"name must be a line of 1 to 80 printable characters; got 'a\\x1b\[31m'"),
    ({"name": 7}, r"name must be a line of 1 to 80 printable characters; got 7"),
    ({"sources": {"memory_bytes": 3}}, r"sources.memory_bytes must be a line of 1 to 500 printable characters; got 3"),
    ({"sources": ["x"]}, r"sources must be a table of texts; got \['x'\]"),
])
def test_a_wrong_field_is_named_with_what_was_expected_and_what_came(fields, words):
    with pytest.raises((ValueError, TypeError), match=words):
        hardware(**fields)


@pytest.mark.parametrize(("fields", "words"), [
    ({"latency_seconds": "5 us"}, "latency_seconds must be a number of seconds, at least 0; got '5 us'"),
    ({"bytes_per_second": 0}, "bytes_per_second must be a number of bytes a second, above 0; got 0"),
    ({"extents": 0}, "extents must be a whole number of at least 1 and at most 1048576; got 0"),
    ({"extents": 2.0}, "extents must be a whole number of at least 1 and at most 1048576; got 2.0"),
    ({"extents": (2, 2)}, r"extents of a switch must be one whole number; got \(2, 2\)"),
    ({"extents": (), "shape": "torus"}, r"extents of a torus must be a list of at least one whole number; got \(\)"),
    ({"shape": "rnig"},
     "shape must be one of switch, ring, torus, fully_connected, memory; got 'rnig'; did you mean 'ring'"),
    ({"shape": ["ring"]}, r"shape must be one of .*; got \['ring'\]"),
    ({"ports": 0}, "ports must be a whole number of at least 1 and at most 1048576; got 0"),
    ({"extents": 2**50}, "extents must be a whole number of at least 1 and at most 1048576; got 1125899906842624"),
    ({"extents": 9999, "shape": "ring"}, "extents must be a whole number of at least 1 and at most 4096; got 9999"),
])
def test_a_wrong_field_of_a_link_is_named(fields, words):
    values = {"name": "x", "extents": 2, "latency_seconds": 1e-6, "bytes_per_second": 1e9, **fields}
    with pytest.raises((ValueError, TypeError), match=words):
        Link(**values)


def test_stragglers_and_faults_only_slow_down():
    with pytest.raises(ValueError, match=r"factor must be a number, at least 1; got 0\.5"):
        hardware().slow(rank=3, factor=0.5)
    with pytest.raises(ValueError, match="rank must be a whole number of at least 0; got -1"):
        hardware().slow(rank=-1, factor=2)
    with pytest.raises(ValueError, match="bandwidth_factor must be a number, above 0 and at most 1; got 2"):
        hardware().fault(source=0, bandwidth_factor=2)
    with pytest.raises(ValueError, match="delay_seconds must be a number of seconds, at least 0; got -1"):
        hardware().fault(source=0, delay_seconds=-1)
    with pytest.raises(ValueError, match="source or target must be a rank; got None for both"):
        hardware().fault(delay_seconds=1)


def test_numbers_of_numpy_are_numbers():
    told = hardware(memory_bytes=np.float32(16e9), links=(Link("x", np.int64(4), np.float64(1e-6), np.int32(10**9)),))
    assert told.links == (Link("x", 4, 1e-6, 1e9),)
    assert json.dumps(told.links[0].extents) == "[4]"


# -- where ranks lie -------------------------------------------------------------------------------------------------


def test_ranks_lie_at_their_numbers_and_meet_at_the_innermost_level_they_share():
    told = hardware()
    assert told.devices == 12
    assert [told.level(0, rank) for rank in range(1, 12)] == [0] * 3 + [1] * 8
    assert told.level(5, 6) == 0
    assert [told.place(rank) for rank in range(12)] == list(range(12))
    with pytest.raises(ValueError, match="ours has places for ranks 0 to 11, got rank 12"):
        told.place(12)


def test_a_given_placement_is_where_they_lie():
    told = hardware(placement=[0, 4, 1])
    assert [told.level(0, rank) for rank in (1, 2)] == [1, 0]
    with pytest.raises(ValueError, match="ours has places for ranks 0 to 2, got rank 3"):
        told.level(0, 3)


@given(st.permutations(["a", "b", "c"]))
def test_ranks_are_laid_in_the_order_of_the_axes_that_is_asked_for(order):
    mesh = Mesh(a=2, b=3, c=2)
    told = hardware().placed_by(mesh, order)
    laid = np.arange(12).reshape(2, 3, 2).transpose(["abc".index(axis) for axis in order]).reshape(-1)
    assert [told.placement.index(place) for place in range(12)] == laid.tolist()
    if list(order) == list(mesh.axes):
        assert told.placement == tuple(range(12))


def test_an_order_names_every_axis():
    with pytest.raises(ValueError, match=r"order must name every axis of Mesh\(dp=2, tp=2\); got \('dp',\)"):
        hardware().placed_by(Mesh(dp=2, tp=2), ("dp",))
    with pytest.raises(ValueError, match="placement must name places 0 to 11; got 23"):
        hardware().placed_by(Mesh(dp=12, tp=2), ("tp", "dp"))


def test_the_axes_that_leave_a_node_are_known():
    told, mesh = hardware(), Mesh(pp=3, dp=1, tp=4)
    assert {axis: told.spans(mesh, axis) for axis in mesh.axes} == {"pp": "ethernet", "dp": None, "tp": "nvlink"}
    assert told.spans(mesh) == "ethernet"
    assert told.placed_by(mesh, ("tp", "dp", "pp")).spans(mesh, "pp") == "ethernet"       # 3 do not divide 4
    assert told.placed_by(Mesh(a=2, b=2), ("b", "a")).spans(Mesh(a=2, b=2), "a") == "nvlink"


def test_messages_share_the_ports_at_both_ends():
    told = hardware()
    inside, other, out, out_too, back = (
        told.path(*ends) for ends in ((0, 1), (2, 1), (0, 4), (3, 9), (4, 0)))
    assert set(inside.channels) & set(other.channels)               # rank 1 has one port to take both
    assert set(out.channels) & set(out_too.channels)                # a node has one port to the Ethernet
    assert not set(out.channels) & set(back.channels)               # the two directions do not meet
    assert not set(inside.channels) & set(out.channels)
    assert (out.latency_seconds, out.bytes_per_second, out.level) == (25e-6, 1.25e9, 1)
    assert {told.part(channel) for channel in out.channels} == {1.0}
    assert told.path(3, 3) == (0.0, inf, (), None)


def test_what_a_fault_leaves_is_shared_by_all_that_meet_it():
    told = hardware().fault(source=0, delay_seconds=1e-3, bandwidth_factor=0.5)
    first, second, other = told.path(0, 1), told.path(0, 2), told.path(1, 2)
    shared = set(first.channels) & set(second.channels)
    assert min(told.part(channel) for channel in shared) == 0.5 and first.bytes_per_second == 150e9
    assert first.latency_seconds == 2e-6 + 1e-3
    assert other.bytes_per_second == 300e9


@pytest.mark.sampled(3)
@pytest.mark.parametrize("extents", [(1,), (5,), (2, 3), (3, 1, 4), (4, 4)])
def test_a_torus_is_gone_through_dim_by_dim_the_shorter_way(extents):
    told = hardware(links=(Link("ici", extents, 1.0, 1e9, "torus"),))
    places = list(np.ndindex(*extents))
    for source, here in enumerate(places):
        for target, there in enumerate(places):
            hops = sum(min((b - a) % n, (a - b) % n) for a, b, n in zip(here, there, extents, strict=True))
            path = told.path(source, target)
            assert path.latency_seconds == hops == len(set(path.channels)) == len(path.channels)


def test_two_ways_round_a_ring_do_not_meet_and_neighbours_have_links_of_their_own():
    told = hardware(links=(Link("ring", 5, 1.0, 1e9, "ring"),))
    channels = [set(told.path(rank, (rank + by) % 5).channels) for rank in range(5) for by in (1, -1)]
    assert len(set.union(*channels)) == 10
    assert set(told.path(0, 2).channels) == set(told.path(0, 1).channels) | set(told.path(1, 2).channels)


def test_full_connection_is_a_link_for_each_two():
    told = hardware(links=(Link("mesh", 4, 1.0, 1e9, "fully_connected"), Link("net", 2, 2.0, 1e8, "fully_connected")))
    inside = [told.path(a, b).channels for a in range(4) for b in range(4) if a != b]
    assert len(set(inside)) == 12
    across = [told.path(rank, rank + 4).channels for rank in range(4)]
    assert len(set(across)) == 4                                    # each device has a link of its own to the other


# -- files -----------------------------------------------------------------------------------------------------------

TOML = """
name = "ours"
memory_bytes = 16e9
memory_bytes_per_second = 9e11
flops_per_second = { float32 = 1e12, float64 = 5e11 }
host = { latency_seconds = 1e-5, bytes_per_second = 16e9 }
stragglers = [{ rank = 3, factor = 1.5 }]
faults = [{ source = 0, target = 1, bandwidth_factor = 0.5 }]

[[links]]
name = "nvlink"
extents = 4
latency_seconds = 2e-6
bytes_per_second = 300e9

[[links]]
name = "ethernet"
extents = [3]
latency_seconds = 25e-6
bytes_per_second = 1.25e9
ports = 1
"""


def written(tmp_path, text, name="ours.toml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_says_what_the_value_says(tmp_path):
    expected = hardware(stragglers=[Straggler(3, 1.5)], faults=[LinkFault(0, 1, bandwidth_factor=0.5)])
    assert Hardware.load(written(tmp_path, TOML)) == expected
    assert Hardware.load(written(tmp_path, json.dumps(tomllib.loads(TOML)), "ours.json")) == expected
    assert Hardware.of(str(tmp_path / "ours.json")) == expected


@pytest.mark.sampled(4)
@pytest.mark.parametrize("told", [
    *map(Hardware.preset, Hardware.presets()),
    hardware(placement=(3, 1), title="</script> & co", sources={"name": "a 'choice'"}, faults=[LinkFault(target=0)],
             stragglers=[Straggler(1, 2)]),
], ids=lambda told: told.name)
def test_what_is_saved_is_loaded(tmp_path, told):
    told.save(tmp_path / "saved.json")
    assert Hardware.load(tmp_path / "saved.json") == told


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("old", "new", "words"), [
    ("latency_seconds = 25e-6", "latency_seconds = '25 us'",
     r"links\[1\].latency_seconds must be a number of seconds, at least 0; got '25 us'"),
    ("latency_seconds = 25e-6", "latency = 25e-6",
     r"links\[1\].latency is no field; did you mean 'latency_seconds'"),
    ("latency_seconds = 25e-6\n", "", r"links\[1\].latency_seconds is missing; the fields are name, extents"),
    ("memory_bytes = 16e9\n", "", r"memory_bytes is missing; the fields are name, flops_per_second"),
    ("memory_bytes = 16e9", "memory_gb = 16", r"memory_gb is no field"),
    ("memory_bytes = 16e9", "memory_bytes = 1979-05-27", r"memory_bytes must be a number of bytes, above 0; got date"),
    ("memory_bytes = 16e9", "memory_bytes = inf", r"memory_bytes must be a number of bytes, above 0; got inf"),
    ("memory_bytes = 16e9", "memory_bytes = 16e9 GB", r"must be TOML; got "),
    ("float32 = 1e12", "float32 = '1 TF'", r"flops_per_second.float32 must be a number of flops a .*; got '1 TF'"),
    ("factor = 1.5", "factor = 0.5", r"stragglers\[0\].factor must be a number, at least 1; got 0.5"),
    ("rank = 3", "rank = 3.5", r"stragglers\[0\].rank must be a whole number of at least 0; got 3.5"),
    ("bandwidth_factor = 0.5", "bandwidth_factor = 0", r"faults\[0\].bandwidth_factor must be a number, above 0"),
    ("host = {", "host = 3 # {", r"host must be a table with latency_seconds, bytes_per_second; got 3"),
    ("extents = [3]", "extents = [3, 2]", r"links\[1\].extents of a switch must be one whole number; got \[3, 2\]"),
    ("extents = 4", "extents = '__import__(\"os\").abort()'",
     r"links\[0\].extents must be a whole number of at least 1 and at most 1048576; got '__im"),
    ("[[links]]", "[links]", r"must be TOML; got"),
    ("ports = 1", "ports = 5", r"links\[1\].ports must be at most the 4 devices in a unit; got 5"),
])
def test_a_broken_file_is_one_error_that_names_file_field_and_what_came(tmp_path, old, new, words):
    assert old in TOML
    with pytest.raises(HardwareFileError, match=words) as caught:
        Hardware.load(written(tmp_path, TOML.replace(old, new)))
    assert str(caught.value).startswith(str(tmp_path / "ours.toml"))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("text", "words"), [
    ("", "must be JSON; got"), ("[]", "must be an object with fields; got"), ("null", "must be an object"),
    ('{"name": NaN}', "must be JSON; got NaN, which is no number"),
    ('{"a": 1, "a": 2}', "must be JSON; got field 'a' twice"),
    ("[" * 100000, "must be JSON; got it is too deep"), ('{"memory_bytes": ' + "9" * 5000 + "}", "must be JSON; got"),
    ('{"links": {}}', "links must be a list of tables; got"),
    ('{"links": [[]]}', r"links\[0\] must be a table with name"),
    ('{"\\u001b[31m": 1}', r"'\\x1b\[31m' is no field"), ('{"</script>": 1}', "</script> is no field"),
    ('{"name": "' + "x" * (1 << 20) + '"}', "must be at most 1048576 bytes; got more"),
    ("{}", "name is missing"),
])
def test_hostile_json_is_refused_in_words(tmp_path, text, words):
    with pytest.raises(HardwareFileError, match=words) as caught:
        Hardware.load(written(tmp_path, text, "ours.json"))
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()


def test_a_file_that_cannot_be_read_is_the_same_error(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    (tmp_path / "folder.toml").mkdir()
    for name, words in [
        ("none.toml", "cannot be read: No such file"), ("bytes.json", "must be JSON; got"),
        ("folder.toml", "cannot be read"),
        ("ours.yaml", "a hardware file ends in .toml or .json"), ("a\0.toml", "cannot be read"),
    ]:
        with pytest.raises(HardwareFileError, match=words):
            Hardware.load(tmp_path / name)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6,
)


@up_to(40)
@given(st.data())
def test_whatever_a_field_holds_it_is_a_hardware_or_the_typed_error(tmp_path_factory, data):
    table = tomllib.loads(TOML)
    places = [table, table["host"], table["flops_per_second"], *table["links"], *table["faults"]]
    at = data.draw(st.sampled_from(places))
    at[data.draw(st.sampled_from(sorted(at)))] = data.draw(JSON)
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    try:
        words = str(Hardware.load(path))
    except HardwareFileError as error:
        words = str(error)
    assert words.replace("\n", "").isprintable()


# -- pictures --------------------------------------------------------------------------------------------------------


def test_it_prints_as_a_table():
    told = hardware(title="two kinds of links", flops_efficiency=0.8, flops_ramp_seconds=7e-6)
    told = told.slow(rank=3, factor=1.5).fault(source=0, delay_seconds=1e-3, bandwidth_factor=0.5).placed(range(12))
    assert str(told) == """\
ours: two kinds of links
  devices   12: 3 groups on ethernet, each of 4 on nvlink
  flop/s    float32 1 T, float64 500 G
  reached   80% of that in large pieces, 57% in those of 7 us
  memory    16 GB at 900 GB/s
  reached   100% of that in large pieces
  launch    0 s
  nvlink    4 devices, switch: 2 us, 300 GB/s
  ethernet  3 groups of those, switch: 25 us, 1.25 GB/s, 1 port for each
  host      10 us, 16 GB/s
  ranks at  0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
  slow      rank 3 takes 1.5 times as long
  fault     0 to any: 1 ms later, 0.5 of the bandwidth"""


def test_in_a_notebook_names_are_escaped():
    told = hardware(name="</script><b>", links=(replace(NODE, name="<i>"),))
    assert "</script>" not in told._repr_html_() and "<i>" not in told._repr_html_()
    assert "&lt;/script&gt;&lt;b&gt;" in told._repr_html_()


@pytest.mark.takes_seconds
def test_the_command_lists_the_presets_shows_one_and_names_the_nearest(capsys, tmp_path):
    assert main(["hardware"]) == 0
    presets, stacks = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in presets.splitlines() if line[0] != " "] == [*Hardware.presets(), "host"]
    names = [line.split()[0] for line in stacks.splitlines()[1:]]
    assert names[:2] == ["dgx-h100+maxtext-h100", "dgx-a100+megatron-a100"]
    assert tuple(Hardware.preset(name).stack for name in names) == stack_names()
    assert max(map(len, stacks.splitlines())) <= 80
    assert main(["hardware", "tpu-v4:2x2x3"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(str(Hardware.preset("tpu-v4:2x2x3")) + "\n\nwhere the numbers are from\n")
    assert "  flops_per_second.bfloat16, flops_per_second.int8\n      Jouppi et al., TPU v4" in shown
    assert main(["hardware", str(written(tmp_path, TOML))]) == 0
    assert capsys.readouterr().out == f"{Hardware.load(tmp_path / 'ours.toml')}\n"
    with pytest.raises(WrongWords, match="no hardware 'laptp'; did you mean 'laptop'"):
        main(["hardware", "laptp"])
    with pytest.raises(WrongWords, match="nothing is expected here: 'b'"):
        main(["hardware", "a", "b"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", Hardware.presets())
def test_every_number_of_a_preset_says_whether_it_was_checked(name):
    said = re.compile(r"^(estimate|a choice|measured on|a sixth of)|; (unchecked$|checked: \S)")
    sources = Hardware.preset(name).sources
    assert sources
    assert [source for source in sources.values() if not said.search(source)] == []


def test_what_was_wrong_in_the_presets_is_as_published():
    """95 GiB a chip, and 15 GB/s over PCIe for each chip, not 95 GB and 16 GB/s; what copies from the host reach."""
    assert Hardware.preset("tpu-v6e").memory_bytes == pytest.approx(32 * 2 ** 30, rel=1e-4)
    from_host = {name: Hardware.preset(name).host.bytes_per_second for name in ("dgx-a100", "dgx-h100", "pcie-v100")}
    assert from_host == {"dgx-a100": 26.28e9, "dgx-h100": 51e9, "pcie-v100": 12e9}
    for name in ("dgx-a100", "dgx-h100", "h200-node", "b200-node"):
        hardware = Hardware.preset(name)
        nvlink, sources = hardware.links[0], hardware.sources
        assert sources["links.nvlink.extents"] != sources["links.nvlink.bytes_per_second"]
        assert 0.75 <= nvlink.reached.bus("all_gather", 8) / nvlink.bytes_per_second <= 0.83
        assert 0.83 <= hardware.memory_efficiency <= 0.9
    for name in ("dgx-h100", "h200-node", "b200-node"):
        nvlink = Hardware.preset(name).links[0]
        assert 0.93 <= nvlink.reached.bus("all_reduce", 8) / nvlink.bytes_per_second <= 1.06
        assert nvlink.reached.bus("all_reduce", 4) == nvlink.reached.bus("all_gather", 8)
    assert Hardware.preset("tpu-v5p").memory_bytes == pytest.approx(95 * 2 ** 30, rel=1e-4)
    assert Hardware.preset("tpu-v4").memory_bytes == pytest.approx(32 * 2 ** 30, rel=1e-4)
    assert {Hardware.preset(f"tpu-{kind}").host.bytes_per_second for kind in ("v4", "v5p")} == {15e9}
