"""XLA as an executor: modules of StableHLO, compiled and run on 8 host devices of JAX.

    python xla_programs.py FOLDER       runs each NAME.mlir on the arrays of NAME.npz; writes NAME.out.npz

It needs no function of JAX, only the text: what is compiled is what was written.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax._src import compiler
from jax._src.sharding_impls import GSPMDSharding
from jaxlib import xla_client

jax.config.update("jax_enable_x64", True)


@cache
def compiled(text):
    """A module for as many devices as it says, and these."""
    count = int(text.split("mhlo.num_partitions = ")[1].split(" ")[0]) if "mhlo.num_partitions" in text else 1
    devices = jax.devices()[:count]
    client = devices[0].client
    options = compiler.get_compile_options(1, count, np.array([devices]))
    build = options.executable_build_options
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    return client.compile_and_load(text.encode(), xla_client.DeviceList(tuple(devices)), options), devices


def run(text, arrays):
    """The results of a module, whole."""
    found, devices = compiled(text)
    taken = found.get_parameter_shardings()
    given = [jax.device_put(x, GSPMDSharding(devices, sharding) if taken else devices[0])
             for x, sharding in zip(arrays, taken or arrays, strict=True)]
    outputs = found.execute_sharded(given).disassemble_into_single_device_arrays()
    made = found.get_output_shardings() or [None] * len(outputs)
    return [np.asarray(parts[0]) if sharding is None else np.asarray(jax.make_array_from_single_device_arrays(
        shape, GSPMDSharding(devices, sharding), parts))
            for parts, sharding, shape in zip(outputs, made, _shapes(text), strict=True)]


def _shapes(text):
    """The shapes of the results of a module."""
    results = re.search(r"@main\(.*\) -> (.*) \{$", text, re.MULTILINE)[1]
    return [tuple(map(int, re.findall(r"(\d+)x", type))) for type in re.findall(r"tensor<([^>]*)>", results)]


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).glob("*.mlir")):
        with np.load(path.with_suffix(".npz")) as found:
            arrays = [found[f"{i}"] for i in range(len(found.files))]
        arrays = [x.view("bfloat16") if x.dtype.kind == "V" else x for x in arrays]      # a file has no such dtype
        results = run(path.read_text(), arrays)
        np.savez(path.with_suffix(".out.npz"), **{f"{i}": x for i, x in enumerate(results)})
