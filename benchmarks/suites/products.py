"""Products of sharded matrices: from operands on the devices to the product on the devices, beside JAX.

The *least* is what the flops take at the rate at which this machine's BLAS multiplies, and the bytes received at the
rate at which it copies, with as many devices at work as there are cores.  JAX, where the peers' interpreter has it,
runs the same products on its host devices, in turn with vcluster, in one process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from benchmarks.cases import Array, WrongAnswerError
from benchmarks.installed import missing
from benchmarks.plan import Plan
from benchmarks.products import FULL_EXTENTS, PRODUCTS, QUICK_EXTENTS, Product, operands
from benchmarks.remote import ROOT
from benchmarks.results import Results
from benchmarks.systems import OURS, Say
from benchmarks.tables import nbytes_text, paragraph, ratio_text, seconds_text, table
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding
from tensor_parallelism import MatMul, MatMulSharding
from vcluster.arguments import PerDevice
from vcluster.cluster import VirtualCluster
from vcluster.device import VirtualDevice

NAME = "products"
PEER = "jax"
LEAST_FACTOR = 1.3
TILE = 1024
"""Extent of the products by which the rate of BLAS is taken."""
COPIED_ELEMENTS = 1 << 23


def operation_of(product: Product) -> MatMul:
    """What the policy of the layouts names; JAX does what it thinks best."""
    sharding = MatMulSharding(*(TensorSharding(*dims) for dims in (product.a, product.b, product.c)))
    return MatMul(sharding, policy=sharding.policy)


def measure(plan: Plan, results: Results, say: Say) -> None:
    """Each product by both systems in turn; then the rates."""
    extents = QUICK_EXTENTS if plan.quick else FULL_EXTENTS
    a, b = operands(extents)
    expected = a @ b
    count = 1 if plan.quick else 2
    python = plan.peers_python or sys.executable
    absent = missing(python)
    figures: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        peer = None
        if PEER in absent:
            results.skipped[PEER] = absent[PEER]
        else:
            say(f"{NAME}: starting {PEER}")
            peer = stack.enter_context(_jax(python, extents))
            results.versions[PEER] = _hear(peer)["version"]
        for number in range(plan.passes):
            for name, product in PRODUCTS.items():
                say(f"{NAME}: pass {number + 1}/{plan.passes}, {name}")
                operation = operation_of(product)
                mesh = Mesh(x=product.mesh[0], y=product.mesh[1])
                with VirtualCluster(mesh) as cluster:
                    start = time.perf_counter()
                    result = cluster.run(operation, a, b).result
                    figures.setdefault((OURS, f"{name}, whole run"), []).append(time.perf_counter() - start)
                    if not np.array_equal(result, expected):
                        raise WrongAnswerError(f"{name} on {mesh!r} gave a wrong product")
                    del result
                    kept = operation.inputs(mesh, a, b)
                    times = cluster.run(_rounds, operation, count, *_per_device(kept)).outputs
                rounds = zip(*times, strict=True)
                figures.setdefault((OURS, name), []).extend(
                    max(end for _, end in ranks) - min(start for start, _ in ranks) for ranks in rounds
                )
                if peer is not None:
                    figures.setdefault((PEER, name), []).extend(_ask(peer, name, count))
    flops, copied = _rates()
    results.note(NAME, OURS, "flops a second", [flops], "flop/s")
    results.note(NAME, OURS, "bytes copied a second", [copied], "B/s")
    for (system, what), seconds in figures.items():
        product = PRODUCTS[what.partition(",")[0]]
        planned = operation_of(product).plan((a.shape, b.shape), Mesh(x=product.mesh[0], y=product.mesh[1]), a.dtype)
        results.add(NAME, system, what, seconds, devices=product.devices, nbytes=sum(planned.bytes_received))
        if system == OURS and what in PRODUCTS:
            results.note(NAME, OURS, what, [float(sum(planned.flops))], "flop", devices=product.devices)


def report(results: Results) -> str:
    """A line for each product: seconds, flops, bytes, and both beside JAX and the least."""
    found = {(m.system, m.operation): m for m in results.of(NAME)}
    amounts = {quantity.what: quantity.amount.median for quantity in results.amounts_of(NAME)}
    rate, copied = amounts.get("flops a second", 0.0), amounts.get("bytes copied a second", 0.0)
    rows = []
    for name in PRODUCTS:
        ours, theirs, whole = (found.get(key) for key in ((OURS, name), (PEER, name), (OURS, f"{name}, whole run")))
        if ours is None:
            continue
        seconds, flops = ours.seconds.median, amounts.get(name, 0.0)
        least = flops / rate + ours.nbytes / copied if rate and copied else 0.0
        over_peer = seconds / theirs.seconds.median if theirs else None
        over_least = seconds / least if least else None
        met = (over_peer is None or over_peer <= 1) and (over_least is None or over_least <= LEAST_FACTOR)
        rows.append([
            name, seconds_text(seconds), f"{ours.seconds.spread:.0%}", f"{flops / 1e9:.1f}", nbytes_text(ours.nbytes),
            "-" if whole is None else seconds_text(whole.seconds.median),
            "-" if over_peer is None else ratio_text(over_peer),
            "-" if over_least is None else ratio_text(over_least), "yes" if met else "NO",
        ])
    head = ("", "product", "spread", "Gflop", "bytes", "run", "/ jax", "/ least", "met")
    return "\n\n".join([table(head, rows), paragraph(
        f"From operands to product on the devices; run: the whole call, with what it deals out and fetches. Flops and "
        f"bytes received of all devices. Least: at {rate / 1e9:.1f} Gflop/s of BLAS and {copied / 1e9:.1f} GB/s of "
        f"copies. Met: not slower than JAX, at most {LEAST_FACTOR} x the least."
    )])


def _per_device(kept: list[tuple[Any, ...]]) -> tuple[PerDevice, PerDevice]:
    left, right = zip(*kept, strict=True)
    return PerDevice(left), PerDevice(right)


def _rounds(device: VirtualDevice, operation: MatMul, count: int, a: Array, b: Array) -> list[tuple[float, float]]:
    """Start and end of each round on one device; one before them is not counted."""
    times = []
    for _ in range(count + 1):
        device.barrier()
        start = time.perf_counter()
        product = operation(device, a, b)
        times.append((start, time.perf_counter()))
        del product
    return times[1:]


def _rates() -> tuple[float, float]:
    """Flops and bytes a second of all cores together."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with VirtualCluster(cores) as cluster:
        found = [cluster.run(_rate).outputs for _ in range(3)]
    flops, copied = (max(sum(rates[i] for rates in outputs) for outputs in found) for i in range(2))
    return flops, copied


def _rate(device: VirtualDevice) -> tuple[float, float]:
    """Flops and bytes a second of this device, while the others are at it, too."""
    tile = np.ones((TILE, TILE), np.float32)
    block = np.ones(COPIED_ELEMENTS, np.float32)
    other = block.copy()
    rates = []
    for call, amount in ((lambda: tile @ tile, 2 * TILE**3), (lambda: np.copyto(other, block), block.nbytes)):
        call()
        device.barrier()
        start = time.perf_counter()
        for _ in range(5):
            call()
        rates.append(5 * amount / (time.perf_counter() - start))
    return rates[0], rates[1]


@contextmanager
def _jax(python: str, extents: tuple[int, int, int]) -> Iterator[subprocess.Popen[str]]:
    """The peer's process; it ends when its stdin does."""
    process = subprocess.Popen(
        [python, "-m", "benchmarks.peers.jax_products", *map(str, extents)], cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )
    try:
        yield process
    finally:
        process.communicate()


def _ask(peer: subprocess.Popen[str], name: str, count: int) -> list[float]:
    assert peer.stdin is not None
    peer.stdin.write(json.dumps({"name": name, "count": count}) + "\n")
    peer.stdin.flush()
    seconds: list[float] = _hear(peer)["seconds"]
    return seconds


def _hear(peer: subprocess.Popen[str]) -> dict[str, Any]:
    assert peer.stdout is not None
    text = peer.stdout.readline()
    if not text:
        raise WrongAnswerError("jax ended before it answered")
    heard: dict[str, Any] = json.loads(text)
    return heard
