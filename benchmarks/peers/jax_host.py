"""JAX over forced host devices, all in one process: ``python -m benchmarks.peers.jax_host SOCKET DEVICES``.

A round is one call of the compiled function until its result is ready; there is no barrier to leave, and no ``out=``.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks.cases import Case, Times, Trial
from benchmarks.peers.link import serve

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""What `jax.lax` has as one operation."""


def main(path: str, size: int) -> None:
    """Serve all devices as one rank."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={size}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax: Any = importlib.import_module("jax")
    sharding: Any = importlib.import_module("jax.sharding")
    spec = sharding.PartitionSpec("x")
    mesh = jax.make_mesh((size,), ("x",))
    bodies: dict[str, Any] = {
        "all_reduce": lambda a: jax.lax.psum(a, "x"),
        "all_gather": lambda a: jax.lax.all_gather(a, "x", axis=1, tiled=True),
        "reduce_scatter": lambda a: jax.lax.psum_scatter(a, "x", scatter_dimension=1, tiled=True),
        "all_to_all": lambda a: jax.lax.all_to_all(a, "x", 1, 1, tiled=True),
    }
    compiled = {
        name: jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)) for name, body in bodies.items()
    }

    def rounds(case: Case, count: int) -> Times:
        trials = [Trial(case, rank, size) for rank in range(size)]
        x = jax.device_put(np.stack([trial.x for trial in trials]), sharding.NamedSharding(mesh, spec))
        call = compiled[case.operation]
        times: Times = []
        for _ in range(count + 1):
            start = time.perf_counter()
            answer = call(x).block_until_ready()
            times.append((start, time.perf_counter()))
            for trial, row in zip(trials, np.asarray(answer), strict=True):
                trial.check(row)
        return times[1:]

    serve(path, 0, f"jax {jax.__version__}", rounds)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
