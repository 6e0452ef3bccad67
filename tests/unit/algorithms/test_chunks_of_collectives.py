"""Chunks of a collective: what a call names them by, and that together they take what the whole takes on the links."""

import numpy as np
import pytest

from parallelism import Costs, Hardware
from parallelism.algorithms import ChunkOf, runs_directly
from parallelism.hardware import on_stack


@pytest.mark.parametrize("count", [1, 4, 12])
def test_a_call_names_a_chunk_by_the_number_of_them(count):
    for kind in ("all_gather", "reduce_scatter"):
        assert ChunkOf.of(kind, str(ChunkOf(count))) == ChunkOf(count) and runs_directly(kind, str(ChunkOf(count)))
    assert ChunkOf.of("all_reduce", str(ChunkOf(count))) is None and not runs_directly("all_to_all", str(ChunkOf(count)))


@pytest.mark.parametrize("name", [None, "ring", "chunk of 0", "chunk of", "chunk of 2.5", "a chunk of 2"])
def test_another_name_is_none(name):
    assert ChunkOf.of("all_gather", name) is None


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("group", "count"), [(range(8), 8), (range(4), 4), (range(2, 4), 3), (range(16), 4)])
def test_chunks_take_what_the_whole_takes_without_its_base(kind, group, count):
    costs = Costs(on_stack(Hardware.preset("dgx-h100:2"), "megatron-core-h100"))
    base = costs._base_seconds(tuple(group))
    chunk = costs.collective(kind, 3e6, group, algorithm=str(ChunkOf(count)))
    whole = costs.collective(kind, count * 3e6, group)
    np.testing.assert_allclose(count * chunk.seconds, whole.seconds - base, rtol=1e-12)
    assert base > 0 and chunk.algorithm == whole.algorithm and chunk.nbytes == 3e6
    assert costs.channel_bytes(chunk, group).items() and costs.collective(kind, 3e6, [3], algorithm="chunk of 2").seconds == 0
