"""Classes of scripts and test modules travel by value, and stay as they are in the process that made them."""

import sys
import weakref
from enum import Enum
from typing import NamedTuple

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


class Slotted:
    """Has no ``__dict__``; one slot is private, and weak references are allowed."""

    __slots__ = ("__hidden", "__weakref__", "shown")

    def __init__(self, shown):
        self.shown, self.__hidden = shown, -shown

    def both(self):
        return self.shown, self.__hidden


class Below(Slotted):
    __slots__ = ()


class Freed(Slotted):
    """Has a ``__dict__`` again."""

    __slots__ = ("__dict__",)


class OneSlot:
    __slots__ = "only"

    def __init__(self, only):
        self.only = only


class Named(NamedTuple):
    shown: int


BACKENDS = [("thread", {}), ("process", {}), ("process", {"start_method": "fork"})]


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("backend", "options"), BACKENDS, ids=str)
def test_devices_get_the_changed_attributes_of_a_class(cluster_of, monkeypatch, backend, options):
    cluster = cluster_of(Mesh(devices=2), backend, **options)
    for scale in (5, 6):
        monkeypatch.setattr(Scaled, "scale", lambda _, scale=scale: scale)
        assert cluster.run(lambda device: Scaled().scale()).outputs == [scale] * 2


@pytest.mark.parametrize(("backend", "options"), BACKENDS, ids=str)
def test_objects_with_slots_come_back(cluster_of, backend, options):
    cluster = cluster_of(Mesh(devices=2), backend, **options)
    for kind in (Slotted, Below, Freed):
        made = cluster.run(lambda device, given, kind=kind: (given.both(), kind(3), given), kind(2)).outputs
        for there, new, same in made:
            assert (there, new.both(), same.both()) == ((2, -2), (3, -3), (2, -2))
            assert type(new) is type(same) is kind
    assert [made.only for made in cluster.run(lambda device: OneSlot(device.rank))] == [0, 1]
    assert cluster.run(lambda device: Named(4)).outputs == [Named(4)] * 2


@pytest.mark.parametrize(("backend", "options"), BACKENDS, ids=str)
def test_objects_with_slots_have_no_other_attributes_in_a_device(cluster_of, backend, options):
    cluster = cluster_of(Mesh(devices=2), backend, **options)

    def attributes(device):
        made = Slotted(1), Freed(1)
        return [hasattr(one, "__dict__") for one in made], [weakref.ref(one)() is one for one in made]

    assert cluster.run(attributes).outputs == [([False, True], [True, True])] * 2
