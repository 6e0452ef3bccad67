"""What users of other libraries write of a device, and what they mean here."""

from __future__ import annotations

import re
from typing import Any

from parallelism.spelling import parameters_of, unexpected_keyword

NAMES_ELSEWHERE = {
    "psum": "device.all_reduce", "pmean": "device.all_reduce(x, op='mean')", "pmax": "device.all_reduce(x, op='max')",
    "pmin": "device.all_reduce(x, op='min')", "allreduce": "device.all_reduce", "allgather": "device.all_gather",
    "allgatherv": "device.all_gather", "allgatherintotensor": "device.all_gather", "alltoall": "device.all_to_all",
    "alltoallsingle": "device.all_to_all", "alltoallv": "device.all_to_all(x, split_sizes=...)",
    "psumscatter": "device.reduce_scatter", "reducescatter": "device.reduce_scatter",
    "reducescattertensor": "device.reduce_scatter", "bcast": "device.broadcast",
    "broadcastobjectlist": "device.broadcast_object", "ppermute": "device.permute", "pshuffle": "device.permute",
    "collectivepermute": "device.permute", "getrank": "device.rank", "rankid": "device.rank", "myrank": "device.rank",
    "processindex": "device.rank", "axisindex": "device.position(axis)", "getlocalrank": "device.position(axis)",
    "getsize": "device.size", "worldsize": "device.size", "getworldsize": "device.size", "numdevices": "device.size",
    "devicecount": "device.size", "axissize": "device.mesh.shape[axis]", "isendrecv": "device.sendrecv",
    "allgatherobject": "device.all_gather_object", "newgroup": "device.all_reduce(x, groups=[[0, 1], [2, 3]])",
    "split": "device.all_reduce(x, axis)", "getgroup": "device.group(axis)", "axisnames": "device.mesh.axes",
    "probe": "device.recv(src), which knows its source", "barriers": "device.barrier", "synchronize": "device.barrier",
    "device": "device.rank", "id": "device.rank", "generator": "device.rng", "random": "device.rng",
}
"""Names in torch.distributed, JAX and mpi4py, without case and underscores, and what to write here."""

_UNEXPECTED = re.compile(r"VirtualDevice\.(\w+)\(\) got an unexpected keyword argument '(\w+)'")


def explain_keyword(error: BaseException, device: type[Any]) -> None:
    """Give the error of a keyword that a method of ``device`` does not have a text that names the one that is meant.

    Collectives check their options themselves.  Messages do not: that would make each of them slower.
    """
    if type(error) is TypeError and (found := _UNEXPECTED.match(str(error))):
        call, keyword = found.groups()
        error.args = unexpected_keyword(f"device.{call}", keyword, parameters_of(getattr(device, call))).args
