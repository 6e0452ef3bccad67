"""A mask is refused, never dropped; and a result has the dtype of what was given, byte order included, on every way."""

from __future__ import annotations

import numpy as np
import pytest

from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

MASKED = np.ma.array([[1.0, 2.0], [3.0, 4.0]], mask=[[0, 1], [0, 0]])
KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "scatter", "gather",
    "all_scatter", "permute",
)


def call(device, kind, x, **options):
    if kind == "permute":
        options["pairs"] = [(0, 1), (1, 0)]
    return getattr(device, kind)(x, **options)


def refusals(device, masked):
    """What each call that would drop the mask says."""
    plain, layout = np.ones((2, 2)), TensorSharding("x", None)
    own = {"broadcast": {"root": device.rank}, "scatter": {"root": device.rank}}    # what others give is ignored
    tries = {kind: lambda kind=kind: call(device, kind, masked, **own.get(kind, {})) for kind in KINDS}
    tries |= {
        "tree": lambda: device.all_reduce({"a": plain, "b": [masked]}),
        "copied tree": lambda: device.broadcast((masked,), root=device.rank),
        "constant": lambda: device.all_reduce(np.ma.masked),
        "out": lambda: device.all_reduce(plain, out=masked.copy()),
        "matmul": lambda: device.matmul(masked, plain),
        "reshard": lambda: device.reshard(masked, layout, TensorSharding(None, None)),
        "send": lambda: device.send(masked, 1 - device.rank),
        "isend": lambda: device.isend([masked], 1 - device.rank),
    }
    said = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except TypeError as error:
            said[name] = str(error)
    device.send(plain, device.rank)
    try:
        device.recv(device.rank, out=masked.copy())
    except TypeError as error:
        said["recv"] = str(error)
    return said, len(tries) + 1


def test_a_masked_array_is_refused_wherever_its_mask_would_be_lost(cluster_of):
    for said, tried in cluster_of(Mesh(x=2)).run(refusals, MASKED):
        assert len(said) == tried
        assert all("without a mask, got a masked array" in text for text in said.values())


def test_a_masked_array_keeps_its_mask_as_an_argument_an_object_and_a_result(cluster_of):
    for gathered in cluster_of(Mesh(x=2)).run(lambda device, x: device.all_gather_object(x), MASKED):
        for found in gathered:
            np.testing.assert_array_equal(found.mask, MASKED.mask)
            np.testing.assert_array_equal(found.data, MASKED.data)


def test_shards_of_a_masked_array_are_refused():
    mesh, layout = Mesh(x=2), TensorSharding("x", None)
    with pytest.raises(TypeError, match="shard takes an array without a mask"):
        layout.shard(MASKED, mesh)
    with pytest.raises(TypeError, match="unshard takes an array without a mask"):
        layout.unshard([MASKED, MASKED], mesh)


def swapped(device):
    """The byte order of each result, and the results, of arrays in the other byte order."""
    found = {}
    for kind in KINDS:
        for times in range(2):
            x = (np.arange(6).reshape(2, 3) * 1000 + device.rank).astype(np.dtype(np.int32).newbyteorder())
            for algorithm in (None, "ring") if kind == "all_reduce" else (None,):
                found[kind, algorithm, times] = call(device, kind, x, algorithm=algorithm)
    x = np.arange(3, dtype=np.dtype(np.float32).newbyteorder())
    found["tree", 0] = device.all_reduce({"a": x})["a"]
    device.send(x, 1 - device.rank)
    found["recv", 0] = device.recv(1 - device.rank)
    return found


@pytest.mark.slow
def test_a_result_has_the_byte_order_of_what_was_given_on_every_way(cluster_of):
    ways = [
        cluster_of(Mesh(x=2), *way).run(swapped)
        for way in (("process", "shared_memory"), ("process", "queue"), ("thread", "shared_memory"))
    ]
    for ranks in zip(*ways, strict=True):
        for what in ranks[0]:
            results = [found[what] if isinstance(found[what], list) else [found[what]] for found in ranks]
            for arrays in zip(*results, strict=True):
                for array in arrays:
                    assert array is None or not array.dtype.isnative, what
                    np.testing.assert_array_equal(array, arrays[0], err_msg=str(what))
