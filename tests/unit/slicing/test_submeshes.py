"""The numbers of devices that stages may have, and where the stages lie on the nodes."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from parallelism import Mesh
from parallelism.hardware import Hardware
from parallelism.slicing.submeshes import meshes_of, node_of, placed, starts_of, submesh_sizes


@st.composite
def stages(draw):
    """Nodes, and the devices of stages that fill some of them."""
    node, nodes = draw(st.sampled_from([1, 2, 4, 6, 8])), draw(st.integers(1, 8))
    sizes = submesh_sizes(node, node * nodes)
    chosen, left = [], node * nodes
    while left:
        chosen.append(draw(st.sampled_from([size for size in sizes if size <= left])))
        left -= chosen[-1]
    return node, nodes, draw(st.permutations(chosen))


@given(stages())
def test_stages_that_fill_the_nodes_have_places_on_them(case):
    node, nodes, sizes = case
    starts = starts_of(sizes)
    taken = [place for start, size in zip(starts, sizes, strict=True) for place in range(start, start + size)]
    assert sorted(taken) == [*range(node * nodes)]
    for start, size in zip(starts, sizes, strict=True):
        first, last = start // node, (start + size - 1) // node
        assert first == last or start % node == size % node == 0


def test_sizes_and_meshes_are_those_of_alpa():
    assert submesh_sizes(8, 8) == (1, 2, 4, 8) and submesh_sizes(8, 64) == (1, 2, 4, 8, 16, 32, 64)
    assert submesh_sizes(3, 9) == (1, 3, 6) and submesh_sizes(6, 6) == (1, 2, 4)
    assert meshes_of(16, ("dp", "tp"), 8) == (
        Mesh(dp=16, tp=1), Mesh(dp=8, tp=2), Mesh(dp=4, tp=4), Mesh(dp=2, tp=8))
    assert meshes_of(4, ("tp",), 8) == (Mesh(tp=4),)


def test_the_ranks_of_a_hardware_are_laid_where_the_stages_lie():
    two = Hardware.preset("dgx-h100:2")
    assert node_of(two, 16) == 8 and node_of(two, 4) == 4
    assert placed(two, (8, 4, 4)) is two
    moved = placed(two, (4, 8, 4))
    assert moved.placement == (*range(8, 12), *range(8), *range(12, 16))
    assert placed(moved, (4, 8, 4)).placement == (
        *range(4, 8), *range(8, 12), *range(4), *range(12, 16))


@pytest.mark.parametrize("links", [1, 2])
def test_a_hardware_of_one_level_is_one_node(links):
    hardware = Hardware.preset("dgx-h100:2")
    hardware = replace(hardware, links=hardware.links[:links])
    assert node_of(hardware, hardware.devices) == 8
