"""The products of `benchmarks.products` under JAX's host devices: ``python -m benchmarks.peers.jax_products M K N``.

For each line on stdin, ``{"name": ..., "count": ...}``, a line on stdout, ``{"seconds": [...]}``: from operands on the
devices to the product on the devices.  The first line is ``{"version": ...}``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks.products import PRODUCTS, operands


def main(extents: tuple[int, int, int]) -> None:
    """Serve until stdin ends."""
    most = max(product.devices for product in PRODUCTS.values())
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={most}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax: Any = importlib.import_module("jax")
    sharding: Any = importlib.import_module("jax.sharding")
    a, b = operands(extents)
    expected = a @ b
    print(json.dumps({"version": f"jax {jax.__version__}"}), flush=True)
    for text in sys.stdin:
        asked = json.loads(text)
        product = PRODUCTS[asked["name"]]
        devices = np.array(jax.devices()[: product.devices]).reshape(product.mesh)
        mesh = sharding.Mesh(devices, ("x", "y"))
        a_layout, b_layout, c_layout = (
            sharding.NamedSharding(mesh, sharding.PartitionSpec(*dims)) for dims in (product.a, product.b, product.c)
        )
        there = jax.device_put(a, a_layout), jax.device_put(b, b_layout)
        multiply = jax.jit(lambda x, y: x @ y, in_shardings=(a_layout, b_layout), out_shardings=c_layout)
        answer = multiply(*there).block_until_ready()
        if not np.array_equal(np.asarray(answer), expected):
            raise SystemExit(f"{asked['name']}: a wrong product")
        seconds = []
        for _ in range(asked["count"]):
            start = time.perf_counter()
            multiply(*there).block_until_ready()
            seconds.append(time.perf_counter() - start)
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main((int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
