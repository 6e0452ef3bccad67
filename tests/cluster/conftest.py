"""Clusters that the tests share: started when first asked for, closed at the end."""

from __future__ import annotations

import pytest

from vcluster.cluster import VirtualCluster

MOST_OPEN = 6
"""The clusters used longest ago are closed when there would be more."""


@pytest.fixture(scope="session")
def cluster_of():
    """A cluster by mesh, backend, transport and other options; a closed one is replaced."""
    open_clusters = {}

    def get(mesh, backend="process", transport="shared_memory", **options):
        key = (mesh, backend, transport, *sorted(options.items()))
        cluster = open_clusters.pop(key, None)
        if cluster is None or cluster.closed:
            cluster = VirtualCluster(mesh, backend=backend, transport=transport, **{"deadline_seconds": 40, **options})
        open_clusters[key] = cluster
        while len(open_clusters) > MOST_OPEN:
            open_clusters.pop(next(iter(open_clusters))).close()
        return cluster

    yield get
    for cluster in open_clusters.values():
        cluster.close()
