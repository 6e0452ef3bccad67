"""Functions of JAX on four processes, with inputs that are split: what they return is what JAX returns."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from jax_examples import EXAMPLES  # noqa: E402
from numpy.testing import assert_allclose, assert_array_equal  # noqa: E402

from parallelism import Mesh  # noqa: E402
from parallelism.execution import Executable  # noqa: E402
from parallelism.interop import from_jax  # noqa: E402
from parallelism.layouts import annotate  # noqa: E402


def split_inputs(program):
    """The largest two inputs, each split over an axis in its longest dim, even or not."""
    largest = sorted((value for value in program.inputs if value.type.ndim), key=lambda value: -value.type.size)
    longest = {value.name: int(np.argmax(value.type.shape)) for value in largest}
    return {value.name: f"[{', '.join(axis if d == longest[value.name] else 'None' for d in range(value.type.ndim))}]"
            for axis, value in zip(("dp", "tp"), largest, strict=False)}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_function_runs_split_on_four_processes(cluster_of, name):
    function, arguments = EXAMPLES[name]
    expected = [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*arguments))]
    program = from_jax(function, *arguments)
    layouts = split_inputs(program)
    assert layouts or not any(value.type.ndim for value in program.inputs)
    cluster = cluster_of(Mesh(dp=2, tp=2))
    inputs = [np.asarray(x) for x in jax.tree.leaves(arguments)]
    run = cluster.run(Executable(annotate(program, layouts), cluster.mesh), inputs)
    for ours, theirs in zip(run.result, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        if theirs.dtype.kind == "f":
            tolerance = 1e-4 if theirs.dtype.itemsize > 2 else 4e-3
            assert_allclose(ours.astype("f8"), theirs.astype("f8"), rtol=tolerance, atol=tolerance / 10)
        else:
            assert_array_equal(ours, theirs)
