"""Functions with ``shard_map`` on a mesh of 8 devices: JAX's results and its modules, as a script and as a list.

    python shard_map_examples.py out.npz        runs them on 8 host devices of JAX and writes the modules and results
"""

from __future__ import annotations

import os
import sys
from functools import partial

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

AXES = {"a": 2, "b": 4}
KINDS: dict[str, list[str]] = {}


def floats(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def examples(mesh):
    shard = partial(jax.shard_map, mesh=mesh, check_vma=False)
    x, w = floats(8, 8), floats(8, 16)
    placed = partial(NamedSharding, mesh)

    def ring(x):
        total = x
        for _ in range(3):
            x = lax.ppermute(x, "b", [(i, (i + 1) % 4) for i in range(4)])
            total = total + x
        return total

    def tensor_parallel(x, up, down):
        hidden = jax.nn.gelu(x @ up)
        return lax.psum(hidden @ down, "b")

    def step(w, x, y):
        def local(w, x, y):
            loss, grad = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(w)
            return w - 0.1 * lax.pmean(grad, "a"), lax.pmean(loss, "a")

        return shard(local, in_specs=(P(), P("a"), P("a")), out_specs=(P(), P()))(w, x, y)

    return {
        "psum": (shard(lambda x: lax.psum(x, "b"), in_specs=P("a", "b"), out_specs=P("a", None)), (x,)),
        "psum over both axes": (shard(lambda x: lax.psum(x, ("a", "b")), in_specs=P("a", "b"), out_specs=P()), (x,)),
        "pmax and pmin": (shard(lambda x: (lax.pmax(x, "a"), lax.pmin(x, "b")), in_specs=P("a", "b"), out_specs=(
            P(None, "b"), P("a", None))), (x,)),
        "integers": (shard(lambda x: lax.psum(x, "b") * 2, in_specs=P("b"), out_specs=P()), (
            np.arange(8, dtype=np.int32),)),
        "all_gather": (shard(lambda x: lax.all_gather(x, "b", axis=1, tiled=True), in_specs=P("a", "b"), out_specs=P(
            "a", None)), (x,)),
        "all_gather along a new dim": (shard(lambda x: lax.all_gather(x, "a"), in_specs=P("a", "b"), out_specs=P(
            None, None, "b")), (x,)),
        "psum_scatter": (shard(lambda x: lax.psum_scatter(x, "b", scatter_dimension=1, tiled=True), in_specs=P(
            "a", None), out_specs=P("a", "b")), (x,)),
        "all_to_all": (shard(lambda x: lax.all_to_all(x, "a", 1, 0, tiled=True), in_specs=P("a", "b"), out_specs=P(
            None, ("b", "a"))), (floats(4, 16),)),
        "all_to_all in one dim": (shard(lambda x: lax.all_to_all(x, "b", 0, 0, tiled=True), in_specs=P("b"),
                                        out_specs=P("b")), (floats(16, 3),)),
        "ppermute": (shard(lambda x: lax.ppermute(x, "b", [(0, 1), (1, 2)]), in_specs=P("a", "b"), out_specs=P(
            "a", "b")), (x,)),
        "ring": (shard(ring, in_specs=P("a", "b"), out_specs=P("a", "b")), (x,)),
        "axis_index": (shard(lambda x: x + 10 * lax.axis_index("a") + lax.axis_index("b"), in_specs=P("a", "b"),
                             out_specs=P("a", "b")), (x,)),
        "pmean and a scan": (shard(lambda x: lax.scan(lambda c, y: (lax.pmean(c + y, "a"), c.sum()), x[0], x),
                                   in_specs=P(None, "b"), out_specs=(P("b"), P())), (floats(3, 8),)),
        "a product before and after": (lambda x, w: jnp.sin(shard(
            lambda x, w: lax.psum(x @ w, "b"), in_specs=(P("a", "b"), P("b")), out_specs=P("a"))(x * 2, w)) @ w.T,
            (x, w)),
        "two bodies": (lambda x: shard(lambda x: lax.psum(x, "a"), in_specs=P("a"), out_specs=P())(
            shard(lambda x: lax.psum(x, "b"), in_specs=P("a", "b"), out_specs=P("a"))(x)), (x,)),
        "a tensor-parallel layer": (shard(tensor_parallel, in_specs=(P("a"), P(None, "b"), P("b")), out_specs=P("a")), (
            x, floats(8, 12), floats(12, 8, seed=1))),
        "a data-parallel step": (step, (floats(8, 3), x, floats(8, 3, seed=1))),
        "constraints": (jax.jit(
            lambda x, w: lax.with_sharding_constraint(x @ w, placed(P("a", None))) * 2,
            in_shardings=(placed(P("a", "b")), placed(P("b"))), out_shardings=placed(P("b"))), (x, w)),
        "a collective by a reducer of one's own": (shard(
            lambda x: jnp.prod(lax.all_gather(x, "b"), 0), in_specs=P("a", "b"), out_specs=P("a", None)), (x,)),
        "a gradient through psum": (jax.grad(lambda x: jnp.sum(shard(lambda x: lax.psum(jnp.sin(x), "b"), in_specs=P(
            "a", "b"), out_specs=P("a"))(x) ** 2)), (x,)),
    }


def abstract_mesh():
    return jax.sharding.AbstractMesh(tuple(AXES.values()), tuple(AXES), axis_types=(
        jax.sharding.AxisType.Auto,) * len(AXES))


def main(path):
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))
    kept = {}
    for name, (function, arguments) in examples(mesh).items():
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        kept[f"{name}/text"] = np.array(jitted.lower(*arguments).as_text())
        for i, result in enumerate(jax.tree.leaves(jitted(*arguments))):
            kept[f"{name}/{i}"] = np.asarray(result)
    np.savez(path, **kept)


if __name__ == "__main__":
    main(sys.argv[1])
