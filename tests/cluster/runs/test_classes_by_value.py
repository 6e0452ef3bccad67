"""Classes of scripts and test modules travel by value, and stay as they are in the process that made them."""

import sys
from enum import Enum

import pytest

from parallelism.mesh import Mesh

SCALE = 2


class Scaled:
    """Has a method that reads a global."""

    def scale(self):
        return SCALE


class Color(Enum):
    """An enum with such a method."""

    RED = 1

    def scale(self):
        return SCALE


BACKENDS = [("thread", {}), ("process", {}), ("process", {"start_method": "fork"})]


@pytest.mark.parametrize(("backend", "options"), BACKENDS, ids=str)
def test_methods_read_the_globals_of_their_module_after_runs(cluster_of, monkeypatch, backend, options):
    cluster, method, mine = cluster_of(Mesh(devices=2), backend, **options), Scaled.scale, Scaled()

    def program(device, given):
        return given.scale(), Color.RED.scale(), Scaled(), Color.RED

    for scale in (2, 3, 4):
        monkeypatch.setattr(sys.modules[__name__], "SCALE", scale)
        for there, color, made, red in cluster.run(program, mine).outputs:
            assert (there, color, made.scale(), red.scale()) == (scale,) * 4
            assert type(made) is Scaled
            assert red is Color.RED
        assert Scaled.scale is method


@pytest.mark.parametrize(("backend", "options"), BACKENDS, ids=str)
def test_devices_get_the_changed_attributes_of_a_class(cluster_of, monkeypatch, backend, options):
    cluster = cluster_of(Mesh(devices=2), backend, **options)
    for scale in (5, 6):
        monkeypatch.setattr(Scaled, "scale", lambda _, scale=scale: scale)
        assert cluster.run(lambda device: Scaled().scale()).outputs == [scale] * 2
