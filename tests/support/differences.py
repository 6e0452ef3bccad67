"""What the tests of layers compare with: gradients of a global function, and a layer run on shards of whole arrays."""

from __future__ import annotations

import numpy as np

from vcluster import Sharded


def complex_step(function, values, grad):
    """The gradients of ``sum(grad * function(*values))``, None of integers: a complex step rounds next to nothing."""
    return _each(values, lambda place, x: _loss(function, _changed(values, x, place, 1e-30j), grad).imag / 1e-30)


def central(function, values, grad, step=1e-5):
    """The same by central differences."""
    def slope(place, x):
        up, down = (_loss(function, _changed(values, x, place, sign * step), grad) for sign in (1, -1))
        return (up - down) / (2 * step)

    return _each(values, slope)


def _each(values, slope):
    found = []
    for i, x in enumerate(values):
        if np.asarray(x).dtype.kind != "f":
            found.append(None)
            continue
        found.append(np.array([slope(place, i) for place in np.ndindex(x.shape)]).reshape(x.shape))
    return found


def _changed(values, which, place, by):
    moved = list(values)
    moved[which] = moved[which].astype(np.result_type(moved[which], by))
    moved[which][place] += by
    return moved


def _loss(function, values, grad):
    return (function(*values) * grad).sum()


def forward_and_backward(device, operation, grad, *shards):
    out, saved = operation.forward(device, *shards)
    return out, *operation.backward(device, saved, grad)


def run_whole(cluster, operation, values, grad, kernel=forward_and_backward):
    """The run, and the output and the gradients joined; their shards are of the shapes that the layouts say."""
    sharding = operation.sharding
    operation.plan([np.shape(x) for x in values], cluster.mesh)     # before: else each thread searches for it
    layouts = [getattr(sharding, name) for name in operation.NAMES]
    inputs = [Sharded(x, layout) for x, layout in zip(values, layouts, strict=True)]
    run = cluster.run(kernel, operation, Sharded(np.asarray(grad), sharding.out), *inputs)
    found = []
    for i, layout in enumerate((sharding.out, *layouts)):
        shards = [out[i] for out in run]
        assert all(shard is None for shard in shards) or all(shard is not None for shard in shards)
        found.append(None if shards[0] is None else layout.unshard(shards, run.mesh))
    return run, found


def assert_close(found, expected, relative=1e-10):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=relative, atol=relative * max(1e-300, np.abs(other).max()))
