"""Traces as files: equal after the round trip, and one clear error for whatever is no trace."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from parallelism.hardware import Software
from parallelism.timeline import Priced
from parallelism.trace import Event, Trace
from parallelism.trace.files import LARGEST_INTEGER
from parallelism.trace.trace import KINDS

SIZE = 4
ranks, amounts = st.integers(0, SIZE - 1), st.integers(0, LARGEST_INTEGER)
finite, positive = st.floats(allow_nan=False, allow_infinity=False), st.floats(0, allow_infinity=False)
OF_TYPE = {
    "int": amounts, "float": positive, "str": st.text(max_size=5),
    "tuple[int, ...]": st.lists(amounts, max_size=3).map(tuple),
    "tuple[str, ...]": st.lists(st.text(max_size=3), max_size=3).map(tuple),
    "tuple[tuple[str, int], ...]": st.lists(st.tuples(st.text(max_size=3), amounts), max_size=2).map(tuple),
    "tuple[tuple[int, int], ...]": st.lists(st.tuples(ranks, amounts), max_size=3).map(tuple),
}
SPECIAL = {
    "rank": ranks, "kind": st.sampled_from(KINDS), "peer": st.none() | st.integers(-1, SIZE - 1), "nbytes": finite,
    "start_seconds": finite, "wall_start_seconds": finite, "tag": st.none() | st.integers(-5, 5),
    "group": st.none() | st.lists(ranks, max_size=3).map(tuple),
    "pairs": st.lists(st.tuples(ranks, ranks), max_size=3).map(tuple),
}


def of_field(field):
    if field.name in SPECIAL:
        return SPECIAL[field.name]
    value = OF_TYPE[field.type.removesuffix(" | None")]
    return st.none() | value if field.type.endswith(" | None") else value


events = st.builds(Event, **{field.name: of_field(field) for field in fields(Event)})
traces = st.builds(
    Trace, st.lists(events, max_size=6), st.just(SIZE), hardware=st.none() | st.text(max_size=5),
    mesh_shape=st.sampled_from((None, {"dp": 2, "tp": 2}, {"\udc80": 4})),
    ranks=st.none() | st.lists(ranks), host_traffic=st.booleans())
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4), max_leaves=6)

within_a_test = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
EXAMPLE = Trace([
    Event(0, "compute", "work", 0.0, 0.5, cpu_seconds=0.5, stage=0, microbatch=1, phase="F"),
    Event(1, "collective", "shift", 0.5, 0.25, bytes_received=8, group=(0, 1), sequence=0, sources=((0, 8),)),
    Event(0, "collective", "shift", 0.5, 0.25, bytes_received=8, group=(0, 1), sequence=0, sources=((1, 8),)),
], mesh_shape={"tp": 2})


def saved(trace, path):
    trace.save(path)
    return json.loads(path.read_text())


def load_changed(path, change):
    document = saved(EXAMPLE, path)
    change(document)
    path.write_text(json.dumps(document))
    return Trace.load(path)


@within_a_test
@given(traces)
def test_what_is_loaded_equals_what_was_saved(tmp_path, trace):
    trace.save(tmp_path / "t.json")
    loaded = Trace.load(tmp_path / "t.json")
    assert loaded == trace


def test_defaults_take_no_room_and_words_stand_once(tmp_path):
    document = saved(Trace([Event(0, "compute", "work", flops=float(i)) for i in range(1000)]), tmp_path / "t.json")
    assert set(document["columns"]) == {"rank", "kind", "name", "flops"}
    assert document["columns"]["name"] == {"values": ["work"], "index": [0] * 1000}


@pytest.mark.parametrize(("told", "kept"), [
    ({}, 5), ({"folded": True}, 6), ({"pieces": True}, 7), ({"software": Software("elementwise", True)}, 8),
    ({"folded": True, "software": Software(False, False, True)}, 8),
])
def test_a_file_tells_of_a_simulation_what_is_not_usual(tmp_path, told, kept):
    trace = Trace(EXAMPLE, priced=Priced("modelled", **told))
    document = saved(trace, tmp_path / "t.json")
    assert len(document["priced"]) == kept
    assert Trace.load(tmp_path / "t.json") == trace and hash(Trace.load(tmp_path / "t.json")) == hash(trace)


def test_an_earlier_file_tells_two_habits_of_the_software(tmp_path):
    def earlier(document):
        document["priced"] = ["modelled", None, False, 0.0, 0.0, False, False, ["elementwise", True]]

    assert load_changed(tmp_path / "t.json", earlier).priced.software == Software("elementwise", True, False)


@pytest.mark.parametrize("software", [[], [True], ["rows", True], [True, 1], [True, True, None], [True] * 4, {}])
def test_a_file_with_other_words_on_its_software_is_refused(tmp_path, software):
    def change(document):
        document["priced"] = ["modelled", None, False, 0.0, 0.0, False, False, software]

    with pytest.raises(ValueError, match="priced should be how compute, dtype and links were priced"):
        load_changed(tmp_path / "t.json", change)


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path):
    event = Event(np.int64(1), "collective", "shift", flops=np.float32(0.5), bytes_received=np.int32(8),
                  group=(np.int64(1), 0), sources=((np.int64(0), np.int64(8)),))
    Trace([event]).save(tmp_path / "t.json")
    assert list(Trace.load(tmp_path / "t.json")) == [event]


@pytest.mark.parametrize(("field", "value", "expected"), [
    ("flops", float("nan"), "a finite number from 0 up, got nan"),
    ("duration_seconds", -1.0, "a finite number from 0 up"),
    ("bytes_sent", 1.5, "an integer from 0 up, got 1.5"),
    ("kind", "magic", "one of compute, collective, "),
    ("peer", 7, "an integer from -1 to 1 or null, got 7"), ("name", None, "a text, got None"),
    ("stage", True, "an integer from 0 up or null, got True"),
    ("sources", ((9, 1),), "a list of ranks with their bytes"),
])
def test_an_event_that_could_not_be_loaded_is_not_saved(tmp_path, field, value, expected):
    path = tmp_path / "t.json"
    with pytest.raises(ValueError, match=rf"t\.json: event 1, field '{field}': expected {expected}"):
        Trace([EXAMPLE[0], replace(EXAMPLE[1], **{field: value})], EXAMPLE.size).save(path)
    assert not path.exists()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("change", "message"), [
    (lambda d: d.update(format="chrome"), "expected a vcluster trace"),
    (lambda d: d.update(version=2), "expected version 1 of the vcluster trace, got 2"),
    (lambda d: d.update(version=True), "expected version 1"),
    (lambda d: d.update(size=10**9), "size should be an integer from 0 to 65536, got 1000000000"),
    (lambda d: d.update(ranks=[5]), "ranks should be a list of ranks below 2, or null, got"),
    (lambda d: d.update(mesh_shape=[["tp", 3]]), "mesh_shape should be"),
    (lambda d: d.update(mesh_shape=[["tp", 1]]), "has 1 devices, the trace has 2"),
    (lambda d: d.update(hardware=3), "hardware should be a name or null, got 3"),
    (lambda d: d.pop("host_traffic"), "host_traffic should be true or false, got None"),
    *((lambda d, told=told: d.update(priced=["modelled", None, True, 0, 0, *told]), "priced should be how compute")
      for told in ([1], [True, None], [False, False, [1, True]], [False, False, ["words", True]],
                   [False, False, [True]], [False, False, None, None])),
    (lambda d: d.update(columns=[]), "an object of columns, got"),
    (lambda d: d["columns"].pop("rank"), "event 0, field 'rank': the column is missing"),
    (lambda d: d["columns"].update(colour=[1, 2, 3]), "no field 'colour'"),
    (lambda d: d["columns"].update(rank=[0, 1, 2]), "event 2, field 'rank': expected an integer from 0 to 1, got 2"),
    (lambda d: d["columns"].update(rank=[0, "1", 0]), "event 1, field 'rank': expected an integer .* got '1'"),
    (lambda d: d["columns"].update(rank=[0, 1]), "event 2, field 'kind': expected 2 values, one for each event, got 3"),
    (lambda d: d["columns"].update(cpu_seconds=5), "event 0, field 'cpu_seconds': expected a list with a value"),
    (lambda d: d["columns"].update(cpu_seconds=[0, 10**400, 0]), "event 1, field 'cpu_seconds': expected a finite"),
    (lambda d: d["columns"]["kind"].update(values=["compute", "magic"]), "event 1, field 'kind': expected one of"),
    (lambda d: d["columns"]["kind"].update(index=[0, -1, 0]), "event 1, field 'kind': expected an index into 2 values"),
    (lambda d: d["columns"].update(name=["a", "b", "c"]), "event 0, field 'name': expected a table of two lists"),
    (lambda d: d["columns"]["sources"].update(values=[[], [[0, -8]], []]), "event 1, field 'sources': expected"),
])
def test_a_file_that_is_wrong_says_where_and_what(tmp_path, change, message):
    with pytest.raises(ValueError, match=r"^\S*t\.json: .*" + message):
        load_changed(tmp_path / "t.json", change)


@pytest.mark.parametrize("content", [
    b"", b"{", b"null", b"[]", b"\xff\xfe\x00", b"\x80abc", b"[" * 200_000, b"1" * 5000, b'"vcluster trace"',
    b"\x00" * 9,
])
def test_what_is_no_trace_at_all_is_one_error(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.json: expected a vcluster trace, got"):
        Trace.load(tmp_path / "t.json")


def test_a_file_that_is_not_there_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "t.json")


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_file_cut_short_anywhere_is_refused(tmp_path, every):
    path = tmp_path / "t.json"
    EXAMPLE.save(path)
    content = path.read_bytes().rstrip()
    for length in range(0, len(content), every):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"t\.json"):
            Trace.load(path)


def places(value, path=()):
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


FULL = Trace([
    Event(1, "collective", "reshard", 0.5, 0.25, 1.0, 1.5, 0.125, bytes_sent=8, bytes_received=16, messages=2,
          flops=3.0, nbytes=4.0, axes=("tp",), group=(0, 1), peer=0, algorithm="ring", stage=1, microbatch=2, phase="F",
          tag=3, sequence=4, work=5, parent=6, serial=7, sources=((0, 16),), dtype="float64", shape=(2, 3),
          location="a.py:1"),
    EXAMPLE[0],
], mesh_shape={"tp": 2}, hardware="host")


@within_a_test
@given(st.data())
def test_anything_anywhere_in_a_file_is_a_trace_or_a_value_error(tmp_path, data):
    path = tmp_path / "t.json"
    document = saved(FULL, path)
    *way, last = data.draw(st.sampled_from([place for place in places(document) if place]))
    inner = document
    for key in way:
        inner = inner[key]
    inner[last] = data.draw(anything)
    path.write_text(json.dumps(document))
    loaded = None
    try:
        loaded = Trace.load(path)
    except ValueError as error:
        message = str(error)
    if loaded is None:
        assert message.startswith(f"{path}: ")
        return
    loaded.save(path)
    assert Trace.load(path) == loaded
    assert max(map(len, loaded.summary().splitlines())) <= 80 and loaded._repr_html_()
    assert loaded.host_traffic or loaded.communication_matrix().size == loaded.size**2


def test_nothing_is_written_beside_the_file(tmp_path):
    EXAMPLE.save(str(tmp_path / "t.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


@within_a_test
@given(traces)
def test_chrome_takes_every_trace(tmp_path, trace):
    trace.to_chrome(tmp_path / "c.json")
    json.loads((tmp_path / "c.json").read_text())
