"""Tests on the ranks of an MPI job, whatever backend they name: a plugin beside ``--vcluster-backend=mpi``.

A test that is parametrized over backends runs once, as it would on processes. Others are skipped, with a reason:
those of another backend, those of more devices than there are ranks, and those that are marked ``not_on_mpi``.
"""

from __future__ import annotations

from functools import wraps

import pytest

from vcluster.code import ClusterError
from vcluster.mpi import current
from vcluster.runs import VirtualCluster

OTHERS = {"thread": "threads", "queue": "queues", "fork": "a start method", "spawn": "a start method"}
"""Parameters of tests that are not for MPI."""

spare: list[VirtualCluster] = []
"""Clusters that tests share. They are closed when another test needs their ranks."""


_beside: list[bool] = []
"""Not empty while clusters are opened beside the job."""
_processes: dict[object, VirtualCluster] = {}
MOST_BESIDE = 3


def on_processes(mesh, **options):
    """A cluster of processes beside the job. The ones used last stay open for the next test."""
    key = mesh, *sorted(options.items())
    cluster = _processes.pop(key, None)
    if cluster is None:
        _beside.append(True)
        try:
            cluster = VirtualCluster(mesh, **options)
        finally:
            _beside.clear()
    _processes[key] = cluster
    while len(_processes) > MOST_BESIDE:
        _processes.pop(next(iter(_processes))).close()
    return cluster


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Skip what is not for MPI."""
    for item in items:
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        words = [word for one in given for word in (one if isinstance(one, tuple) else (one,)) if isinstance(word, str)]
        mark = item.get_closest_marker("not_on_mpi")
        other = next((OTHERS[word] for word in words if word in OTHERS), None)
        if mark is not None or other is not None:
            reason = f"of another backend: {other}" if mark is None else f"not on MPI: {mark.args[0]}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def every_cluster_on_ranks():
    """A cluster that a test opens serves its devices on ranks."""
    begin = VirtualCluster.__init__

    @wraps(begin)
    def on_ranks(self, *args, backend=None, transport="shared_memory", start_method=None, **options):
        if _beside:
            begin(self, *args, backend="process", **options)
            return
        if transport == "queue" or start_method is not None:
            pytest.skip("of another backend: queues, or a start method")
        try:
            begin(self, *args, backend="mpi", **options)
            return
        except ClusterError as error:
            if "ranks" not in str(error):
                raise
        while spare:
            spare.pop(0).close()
        try:
            begin(self, *args, backend="mpi", **options)
        except ClusterError as error:
            if "ranks" not in str(error):
                raise
            ranks, taken = current(1).size - 1, current(1).size - 1 - current(1).free
            beside = f" beside {taken} that it has" if taken else ""
            pytest.skip(f"there are {ranks} ranks, the test needs {self.mesh.size}{beside}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VirtualCluster, "__init__", on_ranks)
        yield
    while _processes:
        _processes.popitem()[1].close()
