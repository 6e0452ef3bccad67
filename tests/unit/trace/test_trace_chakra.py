"""Execution traces for ASTRA-sim: read back by protobuf, each rank does what the trace says, after what it says."""

from __future__ import annotations

import json

import pytest

from parallelism import Event, Mesh, Trace, ir, simulate
from parallelism.models import TransformerSpec
from parallelism.training import TrainingRun
from parallelism.transforms import Strategy
from vcluster import report

pytest.importorskip("google.protobuf")

from parallelism.trace import chakra as files


def messages_in(path):
    """The messages of a file, each after its length as a varint: a ``GlobalMetadata``, then each ``Node``."""
    content, made, at = path.read_bytes(), files._messages()["GlobalMetadata"], 0
    while at < len(content):
        length = shift = 0
        while content[at] > 127:
            length, shift, at = length | (content[at] & 127) << shift, shift + 7, at + 1
        end = at + 1 + (length | content[at] << shift)
        yield made.FromString(content[at + 1:end])
        made, at = files._messages()["Node"], end


def read(trace, folder):
    """The nodes of each rank, with their attributes as a dict; and the groups."""
    ranks = []
    for rank, path in enumerate(report.chakra(trace, folder)):
        assert path == folder / f"trace.{rank}.et"
        metadata, *nodes = messages_in(path)
        assert metadata.version == "0.0.4"
        ranks.append([(node, {a.name: getattr(a, a.WhichOneof("value")) for a in node.attr}) for node in nodes])
    return ranks, {int(name): tuple(ranks) for name, ranks in json.loads((folder / files.GROUPS).read_text()).items()}


def check_times(ranks):
    """Each node starts when the last one is over on which it depends, and none depends on a later one."""
    for nodes in ranks:
        ends = {}
        for node, attributes in nodes:
            assert attributes["start_seconds"] == max((ends[i] for i in node.data_deps), default=0)
            assert all(i in ends for i in node.ctrl_deps)
            ends[node.id] = attributes["start_seconds"] + attributes["duration_seconds"]
            start, end = attributes["start_seconds"], ends[node.id]
            assert node.start_time_micros == round(start * 1e6)
            assert node.start_time_micros + node.duration_micros == round(end * 1e6)


def messages(ranks, type):
    return sorted(tuple(found[f"comm_{name}"] for name in ("src", "dst", "tag", "size"))
                  for nodes in ranks for node, found in nodes if node.type == type)


HARDWARE = "dgx-h100"
SPEC = TransformerSpec(
    layers=2, width=8, heads=2, vocabulary=13, sequence=4, biases=False, norm="rms", activation="relu")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["tp=2 dp=2 zero=2 overlap", "cp=2 sp tp=2", "pp=2 1f1b:3 dp=2"])
def test_bytes_durations_and_dependencies_of_a_simulated_step_are_those_of_its_trace(tmp_path, text):
    run = TrainingRun(SPEC, 12, *Strategy.parse_on_mesh(text))
    trace = simulate(run.step, HARDWARE, **run.placed)
    ranks, groups = read(trace, tmp_path)
    check_times(ranks)
    waits = 0
    for rank, nodes in enumerate(ranks):
        own = [event for event in trace.filter(rank=rank) if event.kind != "memory"]
        waits += sum(event.kind == "wait" for event in own)
        whole = [event for event in own if event.kind not in ("wait", "send", "recv") and event.name != "permute"]
        of_them = [(node, found) for node, found in nodes if node.type not in (5, 6)]
        for (node, found), event in zip(of_them, whole, strict=True):
            assert (node.name, found["duration_seconds"]) == (event.name, event.duration_seconds)
            if event.kind == "compute":
                assert (node.type, found["num_ops"], found["tensor_size"]) == (4, event.flops, event.nbytes)
            else:
                assert (found["bytes_sent"], found["bytes_received"]) == (event.bytes_sent, event.bytes_received)
                assert (node.type, groups[int(found["pg_name"])]) == (7, event.group)
        for kind, number in (("send", 5), ("recv", 6)):
            moved = sum(found["comm_size"] for node, found in nodes if node.type == number)
            assert moved == sum(event.bytes_sent if kind == "send" else event.bytes_received
                                for event in own if event.kind == kind or event.name == "permute")
    sends = messages(ranks, 5)
    assert sends == messages(ranks, 6)
    assert len({tag for _, _, tag, _ in sends}) == len(sends)
    assert bool(waits) == ("overlap" in text or "pp" in text)
    assert bool(sends) == ("ring" in text or "pp" in text)


@pytest.mark.parametrize(("group", "follows"), [((1, 0), True), ((0, 1), False)])
def test_what_is_asynchronous_holds_up_its_group_alone_until_it_is_waited_for(tmp_path, group, follows):
    common = {"group": (1, 0), "sequence": 0}
    gather = {"group": group, "sequence": int(follows)}
    trace = Trace([
        Event(0, "h2d", "arguments", 0, 1, bytes_received=6, serial=0),
        Event(0, "collective", "broadcast", 1, 5, work=3, root=1, payload_bytes=24, serial=1, **common),
        Event(0, "memory", "held", nbytes=8),
        Event(0, "compute", "a", 1, 1, flops=5, nbytes=7, serial=2),
        Event(0, "send", "send", 2, 0, peer=1, tag=4, sequence=0, bytes_sent=8, serial=3),
        Event(0, "collective", "all_gather", 2, 4, payload_bytes=30, serial=4, **gather),
        Event(0, "wait", "broadcast", 6, 0, work=3, serial=5),
        Event(0, "compute", "b", 6, 2, serial=6),
        Event(1, "collective", "broadcast", 0, 6, root=1, payload_bytes=24, **common),
        Event(1, "send", "inner", peer=0, parent=0, serial=1),
        Event(1, "recv", "recv", 6, 0, peer=0, tag=4, sequence=0, bytes_received=8, serial=2),
        Event(1, "collective", "all_gather", 6, 0, payload_bytes=30, serial=3, **gather),
        Event(1, "d2h", "result", 6, 1, bytes_sent=3, serial=4),
    ])
    ranks, groups = read(trace, tmp_path / "new")
    check_times(ranks)
    told = [[(node.name, node.type, tuple(node.data_deps), tuple(node.ctrl_deps)) for node, _ in nodes]
            for nodes in ranks]
    assert told == [
        [("arguments", 2, (), ()), ("broadcast", 7, (1,), ()), ("a", 4, (1,), ()), ("send", 5, (3,), ()),
         ("all_gather", 7, (3,), (2,) if follows else ()), ("b", 4, (2, 5), ())],
        [("broadcast", 7, (), ()), ("recv", 6, (1,), ()), ("all_gather", 7, (2,), (1,) if follows else ()),
         ("result", 3, (3,), ())]]
    numbers = {node.name: found for node, found in ranks[0]}
    assert numbers["arguments"]["tensor_size"] == 6
    assert (numbers["a"]["num_ops"], numbers["a"]["tensor_size"]) == (5, 7)
    assert [numbers["broadcast"][key] for key in ("comm_type", "comm_size", "root")] == [5, 24, 0]
    assert [numbers["all_gather"][key] for key in ("comm_type", "comm_size")] == [2, 15]
    assert groups == ({1: (1, 0)} if follows else {1: (1, 0), 2: (0, 1)})
    assert messages(ranks, 5) == messages(ranks, 6) == [(0, 1, 0, 8)]


@pytest.mark.takes_seconds
def test_a_collective_that_chakra_lacks_is_its_messages(tmp_path):
    moved = ir.parse("""func @f(%x: tensor<8x6xf64> [a, None]) -> (tensor<8x6xf64> [b, None]) {
      %1 = "reshard"(%x) {layout = "[b, None]"} : (tensor<8x6xf64>) -> tensor<8x6xf64> [b, None]
      return %1
    }""")
    ranks, groups = read(simulate(moved, HARDWARE, mesh=Mesh(a=2, b=2)), tmp_path)
    assert groups == {} and messages(ranks, 5) == messages(ranks, 6) == [(1, 2, 1, 192), (2, 1, 0, 192)]
    trace = Trace([Event(rank, "collective", "reshard", 0, 1, group=(0, 1, 2), sequence=0, sources=sources)
                   for rank, sources in enumerate([((1, 8), (2, 16)), (), ((0, 24),)])])
    ranks, groups = read(trace, tmp_path)
    assert groups == {}
    assert [(s, d, size) for s, d, _, size in messages(ranks, 5)] == [(0, 2, 24), (1, 0, 8), (2, 0, 16)]
    assert messages(ranks, 5) == messages(ranks, 6)
    assert [{node.name for node, _ in nodes} for nodes in ranks] == [{"reshard"}] * 3


def test_rounding_to_microseconds_does_not_add_up(tmp_path):
    trace = Trace([Event(0, "compute", "c", i * 0.4e-6, 0.4e-6, serial=i) for i in range(1000)])
    ranks, _ = read(trace, tmp_path)
    assert sum(node.duration_micros for node, _ in ranks[0]) == 400


def test_a_trace_of_some_ranks_is_refused(tmp_path):
    trace = Trace([Event(0, "compute", "c"), Event(2, "compute", "c")])
    with pytest.raises(ValueError, match="needs all 3 ranks; this trace covers 1 of them"):
        report.chakra(trace.filter(rank=2), tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert report.chakra(Trace([], size=0), tmp_path) == ()


def test_the_schema_has_the_numbers_of_chakra():
    """As its own ``et_def.proto`` has them: files of other tools are read, too."""
    nodes = files._messages()
    numbers = {name: {field.name: field.number for field in nodes[name].DESCRIPTOR.fields}
               for name in ("Node", "GlobalMetadata", "AttributeProto")}
    assert numbers["Node"] == {
        "id": 1, "name": 2, "type": 3, "ctrl_deps": 4, "data_deps": 5, "start_time_micros": 6, "duration_micros": 7,
        "inputs": 8, "outputs": 9, "attr": 10}
    assert numbers["GlobalMetadata"] == {"version": 1, "attr": 2}
    # Two by two after name and doc_string, a value and a list of such: double 3, 4, float 5, 6, ...
    order = ("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64",
             "sfixed32", "sfixed64", "bool", "string", "bytes")
    theirs = {f"{name}_val": 3 + 2 * i for i, name in enumerate(order)} | {
        f"{name}_list": 4 + 2 * i for i, name in enumerate(order)} | {"name": 1, "doc_string": 2}
    assert numbers["AttributeProto"].items() <= theirs.items()
    assert nodes["AttributeProto"].DESCRIPTOR.oneofs[0].name == "value"
    # The bytes on the wire: field 1 a varint, field 2 a text, field 3 an enum, field 5 packed.
    made = nodes["Node"](id=3, name="n", type="COMP_NODE", data_deps=[1, 2], duration_micros=5)
    assert made.SerializeToString() == bytes.fromhex("0803 1201 6e 1804 2a02 0102 3805".replace(" ", ""))
