"""A small uneven program, a hardware on which its blocks take unequal times, and all slicings that there are."""

from dataclasses import replace
from functools import cache
from itertools import combinations, product

import numpy as np

from parallelism import ir, models
from parallelism.hardware import Hardware
from parallelism.slicing import Slice, Slicing

B, = ir.symbols("B")
WIDTHS = (8, 16, 128, 32, 16, 4)
"""Five blocks: the second and the third have most of the work."""


@cache
def uneven(batch=B):
    """The loss of a perceptron of five unequal layers."""
    return models.mlp(WIDTHS, batch)


def slow(nodes=1):
    """Nodes of eight devices that compute slowly, every product at the same rate, and communicate fast."""
    preset = Hardware.preset(f"dgx-h100:{nodes}")
    return replace(
        preset, flops_per_second={"float64": 1e9}, memory_bytes_per_second=1e12, kernel_launch_seconds=0,
        flops_ramp_seconds=0, memory_ramp_seconds=0, flops_efficiency=1, memory_efficiency=1, products=None,
        sources={})


def every_slicing(slices, devices, microbatches, most_stages):
    """All slicings that use the devices, each with the bytes of its fullest device."""
    blocks = slices.blocks
    for stages in range(1, min(blocks, most_stages) + 1):
        for cuts in combinations(range(1, blocks), stages - 1):
            edges = [0, *cuts, blocks]
            for submeshes in product(range(len(slices.devices)), repeat=stages):
                if sum(slices.devices[each] for each in submeshes) != devices:
                    continue
                chosen = tuple(Slice(edges[i], edges[i + 1] - 1, each) for i, each in enumerate(submeshes))
                seconds = tuple(float(slices.seconds[first, last + 1, each]) for first, last, each in chosen)
                if np.isfinite(seconds).all():
                    yield Slicing(chosen, seconds, microbatches), max(
                        slices.bytes_of(each, min(stages - place, microbatches)) for place, each in enumerate(chosen))
