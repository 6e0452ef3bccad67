"""What users of other libraries write of a device, and what they mean here."""

from __future__ import annotations

import re
from inspect import Parameter, Signature, signature
from typing import Any

from parallelism.spelling import parameters_of, unexpected_keyword

_MEANT = {
    "device.all_reduce": "psum allreduce",
    "device.all_reduce(x, op='mean')": "pmean",
    "device.all_reduce(x, op='max')": "pmax",
    "device.all_reduce(x, op='min')": "pmin",
    "device.all_gather": "allgather allgatherv allgatherintotensor",
    "device.all_to_all": "alltoall alltoallsingle",
    "device.all_to_all(x, split_sizes=...)": "alltoallv",
    "device.reduce_scatter": "psumscatter reducescatter reducescattertensor",
    "device.broadcast": "bcast",
    "device.broadcast_object": "broadcastobjectlist",
    "device.permute": "ppermute pshuffle collectivepermute",
    "device.rank": "getrank rankid myrank processindex device id",
    "device.position(axis)": "axisindex getlocalrank",
    "device.size": "getsize worldsize getworldsize numdevices devicecount",
    "device.mesh.shape[axis]": "axissize",
    "device.sendrecv": "isendrecv",
    "device.all_gather_object": "allgatherobject",
    "device.all_reduce(x, groups=[[0, 1], [2, 3]])": "newgroup",
    "device.all_reduce(x, axis)": "split",
    "device.group(axis)": "getgroup",
    "device.mesh.axes": "axisnames",
    "device.recv(src), which knows its source": "probe",
    "device.barrier": "barriers synchronize",
    "device.rng": "generator random",
}
"""What to write here, and the names of that in torch.distributed, JAX and mpi4py, without case and underscores."""

NAMES_ELSEWHERE = {name: here for here, names in _MEANT.items() for name in names.split()}

_UNEXPECTED = re.compile(r"VirtualDevice\.(\w+)\(\) got an unexpected keyword argument '(\w+)'")
_MISCALLED = re.compile(r"VirtualDevice\.(\w+)\(\) ((takes)|missing|got multiple values).*")


def explain_call(error: BaseException, device: type[Any]) -> None:
    """Give the error of a method of ``device`` that is called wrongly a text that says how it is called.

    Collectives check their options themselves.  Messages do not: that would make each of them slower.
    """
    if type(error) is not TypeError:
        return
    text = str(error)
    if found := _UNEXPECTED.match(text):
        call, keyword = found.groups()
        error.args = unexpected_keyword(f"device.{call}", keyword, parameters_of(getattr(device, call))).args
    elif found := _MISCALLED.match(text):
        call = found[1]
        wrong = (
            f"{call}() got too many arguments without a name"
            if found[3]
            else text.removeprefix("VirtualDevice.")
        )
        returns = ", and returns the message" if call in ("recv", "irecv") else ""
        form = f"device.{call}({_parameters(getattr(device, call))})"
        error.args = (f"device.{wrong}; it is called as {form}{returns}",)


def _parameters(method: Any) -> str:
    """The parameters of a method as they are written, without ``self`` and types."""
    _, *parameters = signature(method).parameters.values()
    plain = [each.replace(annotation=Parameter.empty) for each in parameters]
    return str(Signature(plain))[1:-1].replace("**options", "...")
