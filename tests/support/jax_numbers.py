"""Functions of JAX over arrays of every dtype, as short names: what `test_jax_dtypes` draws from."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import lax, numpy as jnp

FLOATS = ("float16", "float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e4m3b11fnuz")
INTEGERS = ("int8", "int32", "uint8", "uint16", "uint32")
WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}

MOVES = {
    "sort": lambda a: jnp.sort(a, axis=0),
    "sort down": lambda a: jnp.sort(a, axis=-1, descending=True),
    "argsort": lambda a: jnp.argsort(a, axis=1),
    "argmax": lambda a: jnp.argmax(a, 0),
    "top_k": lambda a: lax.top_k(a, 2)[0],
    "top_k places": lambda a: lax.top_k(a, 3)[1],
    "cummax": lambda a: lax.cummax(a, 0),
    "flip": lambda a: a[::-1, ::2].T,
    "bitcast": lambda a: lax.bitcast_convert_type(a, WORDS[a.dtype.itemsize]),
    "bitcast bytes": lambda a: lax.bitcast_convert_type(lax.bitcast_convert_type(a, jnp.uint8), a.dtype),
    "constant": lambda a: a[0] + jnp.asarray(np.arange(a.shape[1]) % 3, a.dtype),
    "closed over": lambda a: jnp.maximum(a, TABLE[:a.shape[0], :a.shape[1]].astype(a.dtype)),
    "no updates": lambda a: a.at[jnp.zeros((0,), "int32")].set(np.asarray(1, a.dtype)),
    "no rows": lambda a: lax.dynamic_update_slice(a, jnp.zeros((0, a.shape[1]), a.dtype), (1, 0)),
    "no columns": lambda a: lax.dynamic_update_slice(a, jnp.zeros((1, 0), a.dtype), (a.shape[0] - 1, 1)),
    "updates": lambda a: a.at[jnp.array([0, -1])].set(a[1]),
    "to bfloat16": lambda a: a.astype("bfloat16"),
    "to float8": lambda a: a.astype("float8_e5m2"),
    "to int8": lambda a: a.astype("int8"),
    "to uint32": lambda a: a.astype("uint32"),
}
OF_FLOATS = {
    "nextafter": lambda a: lax.nextafter(a, a[::-1]),
    "remainder": lambda a: lax.rem(a, a[::-1]),
}
OF_INTEGERS = {
    "quotient": lambda a: lax.div(a, a[::-1]),
    "remainder": lambda a: lax.rem(a, a[::-1]),
    "modulo": lambda a: jnp.mod(a, jnp.maximum(a[::-1], jnp.ones_like(a))),
    "shift": lambda a: lax.shift_left(a, a[::-1]) ^ lax.shift_right_logical(a, a[:1] * 0 + 3),
    "shift arithmetic": lambda a: lax.shift_right_arithmetic(a, a[::-1]),
    "bits": lambda a: lax.population_count(a) + lax.clz(a),
    "cube": lambda a: lax.integer_pow(a, 3),
    "sum": lambda a: lax.reduce(a, np.zeros((), a.dtype), lax.add, (1,)),
}
TABLE = np.random.default_rng(3).normal(size=(9, 9)).astype(ml_dtypes.bfloat16)


def functions(dtype: str) -> dict[str, Any]:
    """The functions that take arrays of this dtype, by name."""
    return {**MOVES, **(OF_FLOATS if dtype in FLOATS else OF_INTEGERS)}


def drawn(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    """Numbers of a dtype: of floats some infinite, nan or zeros of both signs; of integers some at the limits."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if dtype in FLOATS:
        numbers = rng.normal(size=shape) * rng.choice([0.1, 1, 30])
        special = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0], size=shape)
        return np.where(rng.random(shape) < 0.3, special, numbers).astype(kind)
    limits = np.iinfo(kind)
    special = rng.choice([limits.min, limits.max, 0, 1, limits.max // 2], size=shape)
    return np.where(rng.random(shape) < 0.3, special, rng.integers(0, 10, shape)).astype(kind)


def wanted(function: Any, array: Any) -> Any:
    """What JAX gives."""
    return np.asarray(jax.jit(function)(jnp.asarray(array)))
