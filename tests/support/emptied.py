"""The clusters of all tests, with devices that are emptied when a test takes one: for modules that keep state there."""

import pytest


def emptied(default_backend):
    """The fixture ``cluster_of`` of a module."""
    @pytest.fixture(scope="module")
    def cluster_of(cluster_of):
        def get(mesh, backend=default_backend):
            cluster = cluster_of(mesh, backend)
            cluster.run(lambda device: device.state.clear())
            return cluster

        return get

    return cluster_of
