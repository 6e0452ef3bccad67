"""Arrays without numbers, and the device that has no others."""

from __future__ import annotations

import numpy as np
import pytest

from parallelism import Mesh
from parallelism.execution import TypedArray
from parallelism.layouts.stages.messages import packed, unpacked
from parallelism.simulation.device_events import FIELDS
from parallelism.simulation.typed_device import TypedDevice


@pytest.mark.parametrize("operation", [
    lambda x: x + x, lambda x: np.add(x, x[:1]), lambda x: np.concatenate([x, x]), np.ravel,
    lambda x: x.reshape(4, 3), lambda x: x[1:], lambda x: np.reshape(x, (12,)), lambda x: x > x,
    lambda x: packed([x.ravel(), x.ravel()]),
])
def test_a_typed_array_has_the_shape_and_dtype_that_numpy_gives(operation):
    numbers, typed = operation(np.ones((2, 6), np.float32)), operation(TypedArray((2, 6), np.float32))
    assert isinstance(typed, TypedArray)
    assert (typed.shape, typed.dtype, typed.size, typed.nbytes, typed.ndim) == (
        numbers.shape, numbers.dtype, numbers.size, numbers.nbytes, numbers.ndim)


def test_a_packed_message_is_unpacked_by_its_types():
    arrays = [TypedArray((3,), np.float64), TypedArray((2, 2), np.int32)]
    assert [(x.shape, x.dtype) for x in unpacked(packed(arrays), arrays)] == [(x.shape, x.dtype) for x in arrays]


def test_a_typed_array_has_no_numbers():
    with pytest.raises(TypeError, match=r"TypedArray\(\[2\], int64\) has no numbers"):
        np.asarray(TypedArray((2,), np.int64))
    with pytest.raises(ValueError, match="cannot reshape"):
        TypedArray((2,), np.int64).reshape(3)


def test_a_typed_device_numbers_messages_and_collectives_as_a_run_does():
    device = TypedDevice(Mesh(dp=2, tp=1), 0, lambda tag: TypedArray((tag,), np.float32))
    x = TypedArray((4,), np.float64)
    device.all_reduce(x, "dp")
    device.all_reduce(x, ("dp", "tp"))
    work = device.irecv(1, tag=3, axes="dp")
    device.isend(x, 1, axes="dp").wait()
    assert work.wait().nbytes == 12
    device.recv(1, tag=3, axes="dp")
    rows = [dict(zip(FIELDS, row, strict=True)) for row in device.events.rows]
    assert [(row["kind"], row["sequence"], row["work"], row["bytes_sent"], row["bytes_received"]) for row in rows] == [
        ("collective", 0, None, 0, 0), ("collective", 1, None, 0, 0), ("recv", 0, 1, 0, 12), ("send", 0, 2, 32, 0),
        ("wait", None, 2, 0, 0), ("wait", None, 1, 0, 0), ("recv", 1, None, 0, 12)]


def test_a_device_that_expects_no_messages_refuses_them():
    with pytest.raises(ValueError, match="a device without messages received one from 1 with tag 5"):
        TypedDevice(Mesh(pp=2), 0).recv(1, tag=5, axes="pp")
