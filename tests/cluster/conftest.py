"""Clusters that the tests of a module share: started when first asked for, closed at its end."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from vcluster.runs import VirtualCluster, run_loop

MOST_OPEN = 8
"""The clusters used longest ago are closed when there would be more."""


@pytest.fixture(scope="session", autouse=True)
def deadlocks_are_looked_for_often():
    """Hundreds of tests wait for it. A device that joins a deadlock late has half as long as usual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_loop, "CHECK_EVERY_SECONDS", 0.01)
        patch.setattr(run_loop, "CHECKS_WHILE_OTHERS_RUN", 10)
        yield


@pytest.fixture(scope="module", autouse=True)
def nobody_listens_to_the_garbage_collector():
    """hypothesis times it in every thread: the interrupt of a thread that falls into that would be reported."""
    listeners = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = listeners


@pytest.fixture
def hogs():
    """Two processes that burn the cores."""
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for hog in burning:
        hog.kill()
        hog.wait()


@pytest.fixture(scope="session")
def cluster_of(request):
    """A cluster by mesh, backend, transport and other options; a closed one is replaced.

    Of the module alone: some tests of another one end the process that all devices are forked from.
    """
    open_clusters = {}
    on_mpi = request.config.pluginmanager.getplugin("on_mpi")

    def get(mesh, backend="process", transport="shared_memory", **options):
        key = (mesh, backend, transport, *sorted(options.items()))
        cluster = open_clusters.pop(key, None)
        if cluster is None or cluster.closed:
            cluster = VirtualCluster(mesh, backend=backend, transport=transport, **{"deadline_seconds": 40, **options})
            if on_mpi is not None:
                on_mpi.spare.append(cluster)
        open_clusters[key] = cluster
        while len(open_clusters) > MOST_OPEN:
            open_clusters.pop(next(iter(open_clusters))).close()
        return cluster

    yield get
    for cluster in open_clusters.values():
        cluster.close()
