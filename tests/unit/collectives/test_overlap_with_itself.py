"""Which arrays have elements that share memory: those that no result can be written into."""

import itertools

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from parallelism.collectives.arguments import overlaps_itself

SHAPES = [(), (0,), (1,), (4,), (2, 3), (1, 3), (3, 1, 2), (2, 2, 2), (0, 3)]
STRIDES = (0, 4, 8, 12, 16, 24, -8, -24)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_elements_share_a_byte(shape):
    memory = np.zeros(400, "u1")
    middle = memory[200:].view("f8")
    for strides in itertools.product(STRIDES, repeat=len(shape)):
        places = [sum(map(int.__mul__, each, strides)) for each in np.ndindex(shape)]
        touched = [place + byte for place in places for byte in range(8)]
        assert overlaps_itself(as_strided(middle, shape, strides)) == (len(set(touched)) < len(touched)), strides


def test_an_array_of_more_elements_than_memory_is_not_walked():
    assert overlaps_itself(np.broadcast_to(1.0, (1 << 40, 3)))
    assert not overlaps_itself(np.zeros((3, 1000, 5))[::2, ::-1, 1:].transpose(2, 0, 1))
