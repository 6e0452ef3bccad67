"""Clusters that stay open between tests, so that only the first test on a mesh starts processes."""

import os
from typing import Any

from vcluster.runs import VirtualCluster
from vcluster.testing.explanations import Settings, explain_assertions
from vcluster.testing.meshes import Wanted

MOST_DEVICES = 64
"""Maximal number of open devices. Beyond it, the least recently used clusters are closed."""


class WarmClusters:
    """The open clusters of a session, by mesh and options."""

    def __init__(self, backend: str, settings: Settings) -> None:
        """``backend`` is the default for tests; ``settings`` configure assertion messages."""
        self._backend, self._settings = backend, settings
        self._open: dict[Any, VirtualCluster] = {}
        self._spoiled: set[Any] = set()
        self._explaining: dict[Any, list[int]] = {}
        """The processes that can explain asserts. A process that replaced a dead one is not among them."""
        self._owner = os.getpid()

    def get(self, wanted: Wanted) -> VirtualCluster:
        """A cluster in the state of a new one: empty state, empty channels, the seeds of a first run."""
        options = {"backend": self._backend, **dict(wanted.options)}
        key = (wanted.mesh, *sorted(options.items()))
        cluster = self._open.pop(key, None)
        if cluster is None or cluster.closed or key in self._spoiled:
            if cluster is not None:
                cluster.close()
            most = _most_devices(options["backend"], wanted.mesh.size)
            while self._open and sum(other.size for other in self._open.values()) + wanted.mesh.size > most:
                self._open.pop(next(iter(self._open))).close()
            cluster = VirtualCluster(wanted.mesh, **options)
        self._spoiled.discard(key)
        if cluster.backend != "thread" and self._explaining.get(key) != cluster.pids():
            cluster.run(explain_assertions, self._settings)
            self._explaining[key] = cluster.pids()
        self._open[key] = cluster
        cluster.forget()
        return cluster

    def spoil(self, cluster: VirtualCluster) -> None:
        """Note that a test failed on this cluster: the next test gets a new one."""
        self._spoiled.update(key for key, other in self._open.items() if other is cluster)

    def __contains__(self, cluster: VirtualCluster) -> bool:
        return any(cluster is other for other in self._open.values())

    def pids(self) -> set[int]:
        """The processes of all open clusters."""
        return {pid for cluster in self._open.values() if not cluster.closed for pid in cluster.pids()}

    def close(self) -> None:
        """Close all clusters. Does nothing in a fork of the process that owns them."""
        if os.getpid() == self._owner:
            for cluster in self._open.values():
                cluster.close()
        self._open.clear()


def _most_devices(backend: str, size: int) -> int:
    """How many devices may be open, for a cluster of ``size`` devices more."""
    if backend != "mpi":
        return MOST_DEVICES
    from vcluster.mpi import current

    return current(size).size - 1
