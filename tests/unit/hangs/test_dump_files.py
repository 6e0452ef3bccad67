"""Files that are no dumps: each gets one typed error that names the file, and nothing in it is executed."""

import contextlib
import copy
import json
import pickle
import random

import pytest
from hang_dumps import Job

from vcluster.__main__ import main
from vcluster.hangs import DumpError, explain, files


def job(size=2):
    made = Job(size, {"a0": [0, 1]})
    made.alike("all_reduce", 10)
    made.call(0, "send 0->1", 11)
    made.call(1, "recv 1<-0", 12)
    made.alike("all_gather", 13, group="a0", done=False)
    return made


def fails(path, match):
    with pytest.raises(DumpError, match=match) as caught:
        explain(path)
    return str(caught.value)


def test_a_folder_is_read_and_the_rank_is_of_the_field_or_of_the_name(tmp_path):
    paths = job().write(tmp_path)
    assert explain(tmp_path).records.ranks.keys() == {0, 1}
    dump = json.loads(paths[0].read_text())
    paths[0].write_text(json.dumps(dump | {"rank": 7}))
    assert explain(paths).records.ranks.keys() == {1, 7}
    paths[0].rename(tmp_path / "of_nobody.json")
    assert explain(tmp_path).records.ranks.keys() == {1, 7}
    (tmp_path / "of_nobody.json").write_text(json.dumps(dump))
    fails(tmp_path, r"of_nobody.json says no rank: a dump has a field `rank`, or its file's name ends in the rank")


def test_two_dumps_of_one_rank(tmp_path):
    paths = job().write(tmp_path)
    paths[1].write_text(json.dumps(json.loads(paths[1].read_text()) | {"rank": 0}))
    fails(paths, "trace_1.json is of rank 0, and so is .*trace_0.json: each rank has one dump")


def test_a_file_with_a_line_for_each_dump_is_read_line_by_line(tmp_path, monkeypatch):
    """As runs of this project write them: only a line has to be small, and not the file."""
    dumps = [job().dump(rank) | {"rank": rank} for rank in range(2)]
    lines = ",\n".join(map(json.dumps, dumps))
    path = tmp_path / "failed.json"
    path.write_text(f'{{"version": "2.10", "dumps": [\n{lines}\n]}}\n')
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps({"version": "2.10", "dumps": dumps}))
    monkeypatch.setattr(files, "MOST_BYTES", max(len(line) for line in lines.splitlines()) + 2)
    assert explain(path).records.ranks.keys() == {0, 1}
    fails(whole, r"whole.json has more than [\d,]+ bytes for one rank, which is too much to read at once")
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    fails(path, r"failed.json has more than 1,000 bytes for one rank")
    monkeypatch.undo()
    assert str(explain(path)) == str(explain(whole))
    for text, match in ((lines, "what begins with .* ends with ]} in a line"),
                        (lines[:-9] + "\n]}", "is no flight-recorder dump as JSON"),
                        (f"{lines}\n]}}\n[]", "what begins with .* ends with ]} in a line")):
        path.write_text(f'{{"version": "2.10", "dumps": [\n{text}\n')
        fails(path, match)


def test_no_file(tmp_path):
    fails(tmp_path, "no dump is in .*: give the dumps of a job, one file a rank")
    fails([], "no dump is in no file")
    with pytest.raises(FileNotFoundError):
        explain(tmp_path / "none_0.json")


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('it ran')",)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_with_the_lines_that_turn_it_into_json(tmp_path, protocol):
    path = tmp_path / "trace_0"
    path.write_bytes(pickle.dumps(Bomb(), protocol))
    text = fails(path, "trace_0 is a pickle, which may run code when it is read; only JSON is read here")
    one, two = text.splitlines()[1:]
    path.write_bytes(pickle.dumps(job().dump(0), protocol))  # who trusts it pastes them
    exec(f"{one.strip()}\n{two.strip()}", {})
    assert json.loads((tmp_path / "trace_0.json").read_text())["version"] == "2.10"


@pytest.mark.parametrize(("change", "match"), [
    (lambda d: d.pop("entries"), "it has no field `entries`, the list of calls"),
    (lambda d: d.pop("version"), "missing required field `version`"),
    (lambda d: d.update(version="3.1"), "is a dump of version '3.1'; 2.x can be read"),
    (lambda d: d["entries"][0].update(state="lost"), r"Invalid enum value 'lost' - at `\$.entries\[0\].state`"),
    (lambda d: d["entries"][1].update(record_id="one"), r"Expected `int`, got `str` - at `\$.entries\[1\].record_id`"),
    (lambda d: d["entries"][1].update(input_sizes=[["wide"]]), "Expected `int`, got `str`"),
    (lambda d: d["entries"][1].update(frames=[3]), "Expected `object`, got `int`"),
    (lambda d: d["entries"][0].pop("collective_seq_id"),
     "the collective 'nccl:all_reduce' with record_id 0 has no collective_seq_id, the number in its group by which calls"),
    (lambda d: d["pg_config"]["0"].update(ranks="[0, x]"), r'ranks of a group are a list as "\[0, 1, 2\]", each once, got'),
    (lambda d: d["pg_config"]["0"].update(ranks=[0, 0]), r"each once, got \[0, 0\]"),
])
def test_a_wrong_field(tmp_path, change, match):
    paths = job().write(tmp_path)
    dump = json.loads(paths[0].read_text())
    change(dump)
    paths[0].write_text(json.dumps(dump))
    assert "trace_0.json" in fails(paths, match)


def test_the_command_tells_and_ends_with_its_status(tmp_path, capsys):
    paths = job().write(tmp_path)
    assert main(["hang", *map(str, paths)]) == 0
    assert capsys.readouterr().out.startswith("no call is missing: all that all_gather(float32[3]) needs have called it")
    paths[0].write_bytes(b"\x80\x04N.")
    assert main(["hang", *map(str, paths)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 3


WRONG = [None, True, -1, 1.5, "", "x", [], [None], {}, {"a": 1}, 1 << 70, [[[[]]]]]


def mutated(text, rng):
    """A dump that is broken: cut off, with a wrong byte in its frame, or with a field that is wrong or missing."""
    way = rng.choice(("cut", "byte", "type", "missing", "version", "nested"))
    if way == "cut":
        return text[: rng.randrange(1, len(text))]
    if way == "byte":
        at = rng.choice([i for i, c in enumerate(text) if c in '{}[]:,"'])
        return text[:at] + rng.choice("\x00\x07;&") + text[at + 1 :]
    if way == "nested":
        return "[" * 100_000
    dump = json.loads(text)
    if way == "version":
        return json.dumps(dump | {"version": rng.choice(["", "1.9", "20.1", "2.", "two", "2.x"])})
    entry = rng.choice(dump["entries"])
    if way == "missing":
        where, name = rng.choice([(dump, "version"), (dump, "entries"), (entry, "record_id"), (entry, "state"),
                                  (entry, "profiling_name")])
        del where[name]
        return json.dumps(dump)
    where, name = rng.choice([(entry, each) for each in ("record_id", "state", "is_p2p", "input_sizes", "frames")]
                             + [(dump, each) for each in ("pg_config", "entries", "version")])
    wrong = [value for value in WRONG if not fits(name, value)]
    where[name] = rng.choice(wrong)
    return json.dumps(dump)


def fits(name, value):
    """Whether a value is right, or at least possible, for a field."""
    right = {
        "record_id": lambda v: type(v) is int and 0 <= v <= 1 << 62, "state": lambda v: False,
        "is_p2p": lambda v: type(v) is bool, "input_sizes": lambda v: v in (None, []),
        "frames": lambda v: v in (None, [], ), "pg_config": lambda v: v == {},
        "entries": lambda v: v == [], "version": lambda v: False}
    return right[name](copy.copy(value))


def refuses(tmp_path, seed, count):
    rng = random.Random(seed)
    paths = job().write(tmp_path)
    whole = paths[0].read_text()
    for _ in range(count):
        text = mutated(whole, rng)
        paths[0].write_text(text)
        with pytest.raises(DumpError) as caught:
            explain(paths)
        assert "trace_0.json" in str(caught.value)
        assert len(str(caught.value)) < 500


def survives(tmp_path, seed, count):
    """Bytes changed anywhere: an explanation or one typed error."""
    rng = random.Random(seed)
    paths = job().write(tmp_path)
    whole = paths[0].read_bytes()
    for _ in range(count):
        changed = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        paths[0].write_bytes(bytes(changed))
        with contextlib.suppress(DumpError):
            assert str(explain(paths))


def test_mutated_dumps_get_one_typed_error(tmp_path):
    refuses(tmp_path, 1, 60)
    survives(tmp_path, 2, 60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_thousand_mutated_dumps_get_one_typed_error_each(tmp_path):
    refuses(tmp_path, 3, 2000)
    survives(tmp_path, 4, 2000)
