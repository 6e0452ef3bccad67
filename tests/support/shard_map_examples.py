"""Functions with ``shard_map`` on a mesh of 8 devices, and what JAX makes of them on 8 of its host devices."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxlib import xla_client

jax.config.update("jax_num_cpu_devices", 8)     # before JAX looks for devices, so before the first test runs

AXES = {"a": 2, "b": 4}
OTHERS = ("psum", "two bodies", "all_to_all", "all_to_all in one dim", "a data-parallel step", "constraints",
          "attention in a ring", "rows moved on")
"""The examples that are also read in the words of GSPMD, and as XLA compiles them."""


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

    def nested(x):
        inner = jax.shard_map(lambda y: lax.psum(y, "b"), in_specs=P(None, "b"), out_specs=P(), axis_names={"b"},
                              check_vma=False)
        return inner(x) * 2

    def pipeline(rows, weights):
        place, onward = lax.axis_index("b"), [(i, (i + 1) % 4) for i in range(4)]

        def turn(t, carry):
            x, kept = carry
            y = jnp.tanh(jnp.where(place == 0, rows[jnp.minimum(t, 3)], x) @ weights[0])
            return lax.ppermute(y, "b", onward), jnp.where(t >= 3, kept.at[jnp.maximum(t - 3, 0)].set(y), kept)

        return lax.fori_loop(0, 7, turn, (jnp.zeros(3), jnp.zeros((4, 3))))[1][None]

    def attention(x):
        def turn(_, carry):
            total, weight, most, keys = carry
            scores = x @ keys.T
            more = jnp.maximum(most, scores.max(1, keepdims=True))
            kept, part = jnp.exp(most - more), jnp.exp(scores - more)
            return (total * kept + part @ keys, weight * kept + part.sum(1, keepdims=True), more,
                    lax.ppermute(keys, "b", [(i, (i + 1) % 4) for i in range(4)]))

        first = jnp.zeros_like(x), jnp.zeros((2, 1)), jnp.full((2, 1), -1e30), x
        total, weight, *_ = lax.fori_loop(0, 4, turn, first)
        return total / weight

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
        "an axis left to the compiler": (jax.shard_map(
            lambda x: lax.psum(jnp.sin(x), "a"), mesh=mesh, in_specs=P("a"), out_specs=P(), axis_names={"a"},
            check_vma=False), (x,)),
        "a body inside another": (jax.shard_map(nested, mesh=mesh, in_specs=P("a"), out_specs=P(
            "a"), axis_names={"a"}, check_vma=False), (x,)),
        "gradients of a body that knows what varies": (jax.shard_map(
            jax.grad(lambda x, w: lax.psum(jnp.sin(lax.psum(x @ w, "b")).sum(), "a"), (0, 1)), mesh=mesh,
            in_specs=(P("a", "b"), P("b")), out_specs=(P("a", "b"), P("b"))), (x, w)),
        "groups that lie along no axes": (shard(
            lambda x: lax.psum_scatter(x[0], "b", axis_index_groups=[[0, 3], [2, 1]], tiled=True)[None], in_specs=P(
                ("a", "b")), out_specs=P(("a", "b"))), (x,)),
        "branches by the place of a device": (shard(
            lambda x: lax.switch(lax.axis_index("b") % 3, [jnp.sin, jnp.cos, lambda x: x.sum() + x], x), in_specs=P(
                "a", "b"), out_specs=P("a", "b")), (x,)),
        "a pipeline in a loop": (shard(pipeline, in_specs=(P(), P("b")), out_specs=P("b")), (
            floats(4, 3), floats(4, 3, 3))),
        "attention in a ring": (shard(attention, in_specs=P("b"), out_specs=P("b")), (floats(8, 4),)),
        "rows moved on": (jax.jit(lambda x: jnp.roll(x, 1, 0) + x, in_shardings=placed(P(("a", "b"))),
                                  out_shardings=placed(P(("a", "b")))), (x,)),
        "a gradient through psum": (jax.grad(lambda x: jnp.sum(shard(lambda x: lax.psum(jnp.sin(x), "b"), in_specs=P(
            "a", "b"), out_specs=P("a"))(x) ** 2)), (x,)),
    }


def abstract_mesh():
    return jax.sharding.AbstractMesh(tuple(AXES.values()), tuple(AXES), axis_types=(
        jax.sharding.AxisType.Auto,) * len(AXES))


def made_by_jax(names):
    """What JAX makes of the examples of these names; behind ``gspmd:`` in the words of GSPMD, too, and behind
    ``compiled:`` compiled, too."""
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))
    kept = {}
    for name, (function, arguments) in examples(mesh).items():
        ways = {way for way in ("", "gspmd:", "compiled:") if way + name in names}
        if not ways:
            continue
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        kept[f"{name}/text"] = np.array(jitted.lower(*arguments).as_text())
        for i, result in enumerate(jax.tree.leaves(jitted(*arguments))):
            kept[f"{name}/{i}"] = np.asarray(result)
        if "compiled:" in ways:
            kept |= {f"{name}/compiled/{key}": x for key, x in compiled(jitted, arguments, mesh).items()}
        if "gspmd:" in ways:
            with gspmd():
                kept[f"{name}/gspmd"] = np.array(jitted.lower(*arguments).as_text())
    return kept


@contextmanager
def gspmd():
    """JAX writes GSPMD's words in place of Shardy's."""
    jax.config.update("jax_use_shardy_partitioner", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_use_shardy_partitioner", True)
    jax.clear_caches()


def compiled(jitted, arguments, mesh):
    """What XLA makes of a function: the module of one device, and the arguments and results of each."""
    done = jitted.lower(*arguments).compile()
    proto = done.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    found = {"module": np.frombuffer(xla_client._xla.mlir.hlo_to_stablehlo(proto), np.uint8)}
    shardings = jax.tree.leaves(done.input_shardings[0])
    given = [jax.device_put(x, sharding) for x, sharding in zip(arguments, shardings, strict=True)]
    for side, arrays in (("given", given), ("made", jax.tree.leaves(done(*given)))):
        for i, array in enumerate(arrays):
            parts = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
            found |= {f"{side}/{i}/{rank}": parts[device] for rank, device in enumerate(mesh.devices.flat)}
    return found

