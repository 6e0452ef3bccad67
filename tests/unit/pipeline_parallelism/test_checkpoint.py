"""Checkpoints as values and files: what was saved is what is loaded, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism.dtypes import as_dtype
from parallelism.kernels import SGD, Adam, AdamState
from parallelism.pipelining import Pipeline
from pipeline_parallelism import MLP, Checkpoint, CheckpointError
from pipeline_parallelism.checkpoint import join_states, split_state

SIZES = (3, 5, 2)


def trained(optimizer, steps=2, dtype=np.float64):
    mlp = MLP(layer_sizes=SIZES, pipeline=Pipeline(stages=1, microbatches=1), dtype=dtype)
    rng = np.random.default_rng(0)
    step = None
    for _ in range(steps):
        step = mlp.reference_step(rng.standard_normal((4, 3)), rng.standard_normal((4, 2)), optimizer, previous=step)
    return mlp, Checkpoint(step.step, step.parameters, optimizer, step.optimizer_state)


def arrays_in(value):
    if isinstance(value, np.ndarray):
        return [value]
    return [array for part in value for array in arrays_in(part)] if isinstance(value, (list, tuple)) else []


def assert_same(a, b):
    assert (a.step, a.optimizer, a.layer_sizes) == (b.step, b.optimizer, b.layer_sizes)
    assert type(a.optimizer_state) is type(b.optimizer_state)
    for mine, other in zip(*(arrays_in([c.parameters, c.optimizer_state]) for c in (a, b)), strict=True):
        assert mine.dtype == other.dtype
        assert_array_equal(mine, other)


def forged(checkpoint, path, change=lambda header: None, body=lambda body: body):
    """A file whose checksum is right, and whose words are not."""
    checkpoint.save(path)
    first, _, text, content = path.read_bytes().split(b"\n", 3)
    header = json.loads(text)
    header = change(header) or header
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = text + b"\n" + body(content)
    path.write_bytes(b"\n".join((first, hashlib.sha256(content).hexdigest().encode(), content)))
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, momentum=0.9), Adam(0.01, epsilon=1e-7)])
def test_what_is_loaded_is_what_was_saved_to_the_bit(tmp_path, optimizer, dtype):
    _, checkpoint = trained(optimizer, dtype=dtype)
    checkpoint.parameters[1][0][0] = np.nan, -0.0
    checkpoint.save(tmp_path / "c")
    loaded = Checkpoint.load(tmp_path / "c")
    assert_same(loaded, checkpoint)
    assert np.signbit(loaded.parameters[1][0][0, 1])
    assert all(array.flags.writeable for array in arrays_in(loaded.parameters))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_arrays_of_narrow_floats_are_saved_as_they_are(tmp_path, name):
    rng = np.random.default_rng(0)
    layer = rng.normal(size=(3, 5)).astype(as_dtype(name)), rng.normal(size=5).astype(as_dtype(name))
    checkpoint = Checkpoint(2, [layer], SGD(0.1, momentum=0.9), list(layer))
    checkpoint.save(tmp_path / "c")
    assert_same(Checkpoint.load(tmp_path / "c"), checkpoint)
    assert len((tmp_path / "c").read_bytes().split(b"\n", 3)[3]) == 2 * 20 * as_dtype(name).itemsize


def test_training_goes_on_from_a_file_with_the_same_bits(tmp_path):
    mlp, checkpoint = trained(Adam(0.01))
    checkpoint.save(tmp_path / "c")
    x, targets = np.ones((2, 3)), np.ones((2, 2))
    both = checkpoint, Checkpoint.load(tmp_path / "c")
    steps = [mlp.reference_step(x, targets, Adam(0.01), previous=c) for c in both]
    assert [step.step for step in steps] == [3, 3]
    for a, b in zip(*(arrays_in(step.parameters) for step in steps), strict=True):
        assert_array_equal(a, b)


def test_before_the_first_step_there_is_no_optimizer(tmp_path):
    mlp, _ = trained(SGD(0.1), steps=1)
    checkpoint = Checkpoint(0, mlp.initial_parameters())
    checkpoint.save(tmp_path / "c")
    assert_same(Checkpoint.load(tmp_path / "c"), checkpoint)


def test_saving_replaces_the_whole_file_or_leaves_it(tmp_path, monkeypatch):
    path = tmp_path / "c"
    _, first = trained(SGD(0.1), steps=1)
    _, second = trained(SGD(0.1), steps=3)
    first.save(path)
    second.save(path)
    assert_same(Checkpoint.load(path), second)

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        first.save(path)
    assert_same(Checkpoint.load(path), second)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_the_file_is_synced_before_it_takes_its_name(tmp_path, monkeypatch):
    order = []
    fsync, renamed = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("sync"), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda self, target: (order.append("rename"), renamed(self, target))[1])
    trained(SGD(0.1))[1].save(tmp_path / "c")
    assert order == ["sync", "rename", "sync"]


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_truncation_and_every_changed_byte_is_found(tmp_path, every):
    path = tmp_path / "c"
    trained(SGD(0.1))[1].save(path)
    data = path.read_bytes()
    for end in range(0, len(data), every):
        path.write_bytes(data[:end])
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            Checkpoint.load(path)
    for place in range(0, len(data), every):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            Checkpoint.load(path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("change", "text"), [
    ({"step": -1}, "step to be an integer of 0 or more, got -1"),
    ({"step": True}, "step to be an integer"),
    ({"step": 2**53}, "step to be an integer"),
    ({"layer_sizes": [3]}, "layer_sizes to be two or more"),
    ({"layer_sizes": [3, 0, 2]}, "layer_sizes to be two or more"),
    ({"layer_sizes": [3, 2**50, 2**50]}, "bytes of arrays, got"),
    ({"layer_sizes": "352"}, "layer_sizes to be two or more"),
    ({"dtype": "|O"}, "dtype to be one of .*, got '|O'"),
    ({"dtype": ["<f8"]}, "dtype to be one of"),
    ({"dtype": "<f4"}, "bytes of arrays, got"),
    ({"moments": 3}, "as many moments as Adam.* has, got 3"),
    ({"moments": 1}, "as many moments as Adam"),
    ({"moments": 0}, "bytes of arrays, got"),
    ({"optimizer": None}, "as many moments as None has, got 2"),
    ({"optimizer": {"name": "os.system"}}, "optimizer to name one of SGD, Adam"),
    ({"optimizer": {"name": ["SGD"]}}, "optimizer to name one of"),
    ({"optimizer": {"name": "SGD", "lr": 0.1}}, "optimizer SGD with lr, momentum"),
    ({"optimizer": {"name": "SGD", "lr": "0.1", "momentum": 0}}, "lr to be a number, got '0.1'"),
    ({"optimizer": {"name": "SGD", "lr": 10**400, "momentum": 0}}, "lr to be a number"),
    ({"optimizer": {"name": "SGD", "lr": float("nan"), "momentum": 0}}, "lr to be a number, got nan"),
    ({"optimizer": {"name": "SGD", "lr": -1, "momentum": 0}}, "lr must be above 0 and finite, got -1"),
    ({"more": 1}, "expected an object of"),
])
def test_a_forged_file_is_refused_by_what_is_wrong_with_it(tmp_path, change, text):
    path = forged(trained(Adam(0.01))[1], tmp_path / "c", lambda header: {**header, **change})
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}: .*{text}"):
        Checkpoint.load(path)


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b"9" * 10_000])
def test_a_header_that_is_none_is_refused(tmp_path, text):
    path = forged(trained(Adam(0.01))[1], tmp_path / "c", lambda header: text or b" ")
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        Checkpoint.load(path)


def test_another_version_and_another_kind_of_file_are_told_apart(tmp_path):
    path = tmp_path / "c"
    path.write_bytes(b"vcluster checkpoint, version 2\nwho knows")
    with pytest.raises(CheckpointError, match="expected version 1, got b'2'"):
        Checkpoint.load(path)
    path.write_bytes(b"\x80\x05cos\nsystem\n")
    with pytest.raises(CheckpointError, match="begins with 'vcluster checkpoint, version '"):
        Checkpoint.load(path)
    with pytest.raises(FileNotFoundError):
        Checkpoint.load(tmp_path / "nothing")


def test_what_a_file_cannot_hold_is_refused_before_it_is_written(tmp_path):
    _, good = trained(Adam(0.01))
    (weights, bias), last = good.parameters
    state = good.optimizer_state
    for bad, text in [
        (replace(good, optimizer="mine"), "knows the optimizers SGD, Adam, got 'mine'"),
        (replace(good, optimizer=SGD(0.1)), "has no state of 2 moments"),
        (replace(good, optimizer_state={}), "got a dict"),
        (replace(good, parameters=[]), "one layer or more"),
        (replace(good, parameters=[last, (weights, bias)]), r"layer 1 should have weights \(2, o.*got \(3, 5\)"),
        (replace(good, parameters=[(weights, bias.astype("f4")), last]), "one floating dtype, got float64 and float32"),
        (replace(good, parameters=[(weights.astype(int), bias), last]), "one floating dtype, got int64"),
        (replace(good, optimizer_state=state._replace(means=state.means[:3])), "shapes of the parameters"),
    ]:
        with pytest.raises(ValueError, match=text):
            bad.save(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_states_are_split_and_joined_again():
    arrays = [np.full(n, n) for n in range(1, 7)]
    for state in (None, arrays, AdamState(4, arrays, arrays[::-1])):
        parts = split_state(state, [1, 2, 3])
        joined = join_states(parts)
        assert type(joined) is type(state)
        assert arrays_in(joined) == arrays_in(state)
    assert [part.updates for part in parts] == [4, 4, 4]
    assert [len(part.squares) for part in parts] == [1, 2, 3]
    assert parts[1].squares[0] is arrays[4]
    with pytest.raises(ValueError, match=r"must have equal values, except for arrays, got \[4, 5\]"):
        join_states([parts[0], parts[1]._replace(updates=5)])
