"""Arrays that are read-only on the host are a kernel's own, and it writes into them; the caller's stay as they are."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism.dtypes import as_dtype
from vcluster import Mesh, PerDevice, Sharded


def read_only(x):
    view = np.asarray(x).view()
    view.flags.writeable = False
    return view


@pytest.fixture(params=["process", "thread"])
def cluster(cluster_of, request):
    return cluster_of(Mesh(devices=3), request.param)


class Holder:
    def __init__(self, x):
        self.x = x


TABLE = np.arange(15.0).reshape(5, 3)
ARRAYS = {
    "C order": read_only(TABLE),
    "Fortran order": read_only(np.asfortranarray(TABLE)),
    "strides": read_only(TABLE[:, ::2]),
    "broadcast": np.broadcast_to(np.arange(3.0), (5, 3)),
    "of bytes": np.frombuffer(bytes(range(48)), np.uint8),
    "narrow": read_only(TABLE.astype(as_dtype("bfloat16"))),
    "records": read_only(np.ones(4, [("a", "i4"), ("b", "f8")])),
    "times": read_only(np.array(["2026-11-30"], "M8[D]")),
    "texts": read_only(np.array(["a", "bc"])),
    "scalar": read_only(5.0),
    "empty": read_only(np.ones((0, 3))),
    "large": read_only(np.arange(200_000.0)),
}


def kernel(device, alone, nested, held, own, shard):
    found = [alone, nested["deep"][0], held.x, own, shard]
    for each in found:
        if each.size:
            each.flat[device.rank % each.size] = each.flat[0]
    device.barrier()
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ARRAYS)
def test_a_kernel_writes_into_its_copy_of_a_read_only_array(cluster, name):
    x = ARRAYS[name]
    before = x.copy()
    shard = Sharded(read_only(TABLE.repeat(3, 0)), "[devices, None]")
    run = cluster.run(kernel, x, {"deep": [x]}, Holder(x), PerDevice([x] * 3), shard)
    for rank, output in enumerate(run.outputs):
        expected = before.copy()
        if expected.size:
            expected.flat[rank % expected.size] = expected.flat[0]
        for each in output[:4]:
            assert each.dtype == x.dtype and each.flags.writeable
            assert_array_equal(each, expected)
    assert_array_equal(x, before)
    assert not x.flags.writeable


def test_a_mapped_file_stays_as_it_is(cluster, tmp_path):
    np.save(tmp_path / "x.npy", TABLE)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")

    def doubled(device, x, part):
        x *= 2
        part += 1
        return x, part

    for x, part in cluster.run(doubled, mapped, mapped[1:, 1:]):
        assert_array_equal(x, 2 * TABLE)
        assert_array_equal(part, TABLE[1:, 1:] + 1)
    assert_array_equal(np.load(tmp_path / "x.npy"), TABLE)


def test_messages_and_results_may_be_written_too(cluster):
    def sends(device):
        x = np.arange(3.0)
        x.flags.writeable = False
        device.send({"x": (x, 1)}, (device.rank + 1) % device.size)
        got = device.recv((device.rank - 1) % device.size)["x"][0]
        got += device.rank
        return got, {"x": x}

    for rank, (got, sent) in enumerate(cluster.run(sends)):
        sent["x"][0] = got[0]
        assert_array_equal(got, np.arange(3.0) + rank)
