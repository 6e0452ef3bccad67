"""A run that is watched: what each rank sent and received, also of a run that fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from parallelism.hardware import Hardware, HostLink, Link
from parallelism.mesh import Mesh
from parallelism.trace import UndeclaredComputeWarning
from vcluster.code import ClusterError, PerDevice
from vcluster.runs import Run, VirtualCluster

if TYPE_CHECKING:
    from parallelism.trace import Trace

DEADLINE_SECONDS = 8.0
"""A run of a student's function takes milliseconds.  One that takes so long is in a loop that never ends."""

_LOG, _SENT = "vcluster.check: messages", "vcluster.check: arrays"
_PEERS = {
    "send": (("send", 0, "dst"),),
    "isend": (("send", 0, "dst"),),
    "recv": (("recv", 0, "src"),),
    "irecv": (("recv", 0, "src"),),
    "sendrecv": (("send", 0, "dst"), ("recv", 1, "src")),
}
"""By call: what it does with which peer, and where that peer stands among the arguments behind the value."""


class Said(NamedTuple):
    """A message that a rank began to send or to receive."""

    verb: str
    """``send`` or ``recv``."""
    peer: int


class WrongPeer(ValueError):
    """A message to or from a rank that does not exist."""


class Watched:
    """A device that notes its messages, and is otherwise the device."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._said: list[Said] = device.state.setdefault(_LOG, [])
        self._sent: list[Any] = device.state.setdefault(_SENT, [])

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._device, name)
        return self._noting(name, member) if name in _PEERS else member

    def _noting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            first = 1 if name in ("send", "isend", "sendrecv") else 0
            if keywords.get("axes") is None:
                for verb, place, word in _PEERS[name]:
                    at = first + place
                    peer = args[at] if at < len(args) else keywords.get(word)
                    if isinstance(peer, int | np.integer):
                        if not 0 <= peer < self._device.size:
                            raise WrongPeer(f"{verb} {peer}")
                        self._said.append(Said(verb, int(peer)))
                if first:
                    value = args[0] if args else keywords.get("x")
                    self._sent.append(value.copy() if isinstance(value, np.ndarray) else value)
            return method(*args, **keywords)

        return call


@dataclass(frozen=True, eq=False)
class Watch:
    """What one run of a function did."""

    size: int
    outputs: Sequence[Any]
    """By rank; empty if the run failed."""
    said: tuple[tuple[Said, ...], ...]
    """The messages of each rank, in order.  The last one of a rank that is blocked is not finished."""
    changed: tuple[int, ...] = ()
    """The ranks that wrote into an argument."""
    trace: Trace | None = None
    error: ClusterError | None = None
    sent: tuple[tuple[Any, ...], ...] = ()
    """By rank, what it sent, in order; empty if the run failed."""

    def peers(self, rank: int) -> list[int]:
        """The ranks to which a rank sent, each once, in the order of the first messages."""
        return list(dict.fromkeys(said.peer for said in self.said[rank] if said.verb == "send"))


def one_second_a_message(devices: int) -> Hardware:
    """A message takes one second, whatever its size: a makespan counts steps."""
    link = Link("links", devices, latency_seconds=1.0, bytes_per_second=1e30, shape="fully_connected")
    return Hardware("steps", {"float64": 1e30}, 1e15, 1e30, (link,), HostLink(0.0, 1e30))


def cluster_of(mesh: Mesh | int, channel_capacity: int = 16) -> VirtualCluster:
    """Threads: they start at once, and a deadlock is found in a tenth of a second."""
    size = mesh if isinstance(mesh, int) else mesh.size
    return VirtualCluster(
        mesh,
        backend="thread",
        channel_capacity=channel_capacity,
        compute="modelled",
        hardware=one_second_a_message(max(size, 2)),
        deadline_seconds=DEADLINE_SECONDS,
    )


def watch(cluster: VirtualCluster, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> Watch:
    """Run ``function(device, *arguments)``; ``arguments`` has the values of each argument, by rank."""
    forget(cluster)
    try:
        run = cluster.run(_call, function, *map(PerDevice, arguments))
    except ClusterError as error:
        return failed(cluster, error)
    outputs, changed, said, sent = zip(*run.outputs, strict=True)
    ranks = tuple(rank for rank, each in enumerate(changed) if each)
    return Watch(
        cluster.size, outputs, tuple(map(tuple, said)), ranks, trace_of(run), sent=tuple(map(tuple, sent))
    )


def trace_of(run: Run[Any]) -> Trace:
    """The trace of a checked run.  Checks count messages and bytes, so compute without a price is no matter here."""
    with warnings.catch_warnings(action="ignore", category=UndeclaredComputeWarning):
        return run.trace


def watching(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its messages noted."""
    return lambda device, *arguments: function(Watched(device), *arguments)


def failed(cluster: VirtualCluster, error: ClusterError) -> Watch:
    """What the last run of a cluster did, which failed."""
    said: Sequence[Any] = [()] * cluster.size
    with suppress(ClusterError):
        said = cluster.run(_messages).outputs
    return Watch(cluster.size, (), tuple(map(tuple, said)), error=error)


def forget(cluster: VirtualCluster) -> None:
    """Forget the messages of earlier runs."""
    cluster.run(_forget)


def _call(
    device: Any, function: Callable[..., Any], *arguments: Any
) -> tuple[Any, bool, list[Said], list[Any]]:
    before = [np.array(argument, copy=True) for argument in arguments]
    with device.compute("arithmetic", seconds=0.0):  # a makespan counts steps of messages alone
        output = function(Watched(device), *arguments)
    if isinstance(output, np.ndarray) and any(
        np.may_share_memory(output, each) for each in arguments if isinstance(each, np.ndarray)
    ):
        output = output.copy()
    changed = any(
        not np.array_equal(was, np.asarray(now)) for was, now in zip(before, arguments, strict=True)
    )
    return output, changed, device.state[_LOG], device.state[_SENT]


def _forget(device: Any) -> None:
    device.state.clear()


def _messages(device: Any) -> list[Said]:
    return list(device.state.get(_LOG, ()))
