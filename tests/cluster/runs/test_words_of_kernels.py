"""What a kernel says of a device, and what it should write: the error of the kernel names it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vcluster import DeviceFailedError, VirtualCluster

X = np.ones(3)
NUMBER: Any = 3
KERNELS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rank": (lambda device: device.rank(), "device.rank is no method: write device.rank, without ()"),
    "size": (lambda device: range(device.size()), "device.size is no method: write device.size, without ()"),
    "mesh": (lambda device: device.mesh(), "device.mesh is no method: write device.mesh, without ()"),
    "state": (lambda device: device.state(), "device.state is no method"),
    "size of the mesh": (lambda device: device.mesh.size(), "device.mesh.size is no method: write device.mesh.size,"),
    "axes": (lambda device: 1 + len(device.mesh.axes()), "device.mesh.axes is no method"),
    "shape": (lambda device: device.mesh.shape()["devices"], "device.mesh.shape is no method"),
    "in an argument": (lambda device: device.all_reduce(X * device.rank()), "device.rank is no method"),
    "position": (lambda device: 1 + device.position, "device.position is a method: write device.position(...)"),
    "gather": (lambda device: device.all_gather[0], "device.all_gather is a method: write device.all_gather(...)"),
    "group": (lambda device: list(device.group), "device.group is a method: write device.group(...)"),
    "result": (lambda device: device.all_reduce(X, async_op=True).result(),
               "a pending operation has no 'result'; did you mean wait(), which returns the result?"),
    "get": (lambda device: device.all_reduce(X, async_op=True).get(), "did you mean wait(), which returns the result?"),
    "is_completed": (lambda device: device.all_reduce(X, async_op=True).is_completed(), "did you mean done()?"),
    "dtype": (lambda device: device.all_reduce(X, async_op=True).dtype, "did you mean wait(), which returns the array"),
    "sum with a number": (lambda device: device.all_reduce(X, async_op=True) + 1.0, "write .wait(), which returns"),
    "sum with an array": (lambda device: X * device.all_reduce(X, async_op=True), "write .wait(), which returns"),
}


@pytest.fixture(scope="module", params=["thread", "process"])
def cluster(request: pytest.FixtureRequest) -> Any:
    with VirtualCluster(2, backend=request.param) as made:
        yield made


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", KERNELS)
def test_the_error_says_what_to_write(cluster: VirtualCluster, name: str) -> None:
    kernel, told = KERNELS[name]
    with pytest.raises(DeviceFailedError) as raised:
        cluster.run(kernel)
    assert told in str(raised.value)


def test_other_errors_of_types_are_left_alone(cluster: VirtualCluster) -> None:
    for kernel in (lambda device: X(), lambda device: (lambda: 0)() + "", lambda device: device.all_reduce(X)(),
                   lambda device: NUMBER(device.rank)):
        with pytest.raises(DeviceFailedError) as raised:
            cluster.run(kernel)
        assert "without ()" not in str(raised.value) and "is a method" not in str(raised.value)


def test_outputs_that_are_called_say_what_to_write(cluster: VirtualCluster) -> None:
    outputs: Any = cluster.run(lambda device: device.rank).outputs
    with pytest.raises(TypeError, match=r"^run\.outputs is no method: write run\.outputs, without \(\)$"):
        outputs()
    assert outputs == [0, 1] and isinstance(outputs, list) and repr(outputs) == "[0, 1]"
    assert pickle.loads(pickle.dumps(outputs)) == [0, 1]      # noqa: S301
