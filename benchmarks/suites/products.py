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
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
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
from tensor_parallelism import MatMul, MatMulSharding, ProductPlan, Seconds
from vcluster.code import PerDevice
from vcluster.device import VirtualDevice
from vcluster.runs import VirtualCluster

NAME = "products"
PEER = "jax"
LEAST_FACTOR = 1.3
BY_SECONDS, ALL_CORES = "by seconds", "all cores"
TILE = 1024
"""Extent of the products by which the rate of BLAS is taken."""
COPIED_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class Way:
    """A product as it is run."""

    label: str
    operation: MatMul
    plan: ProductPlan
    threads: int = 1
    """Of BLAS, on each device."""


def ways_of(name: str, extents: tuple[int, int, int], rates: Seconds) -> list[Way]:
    """First what the policy of the layouts names."""
    product, (m, k, n) = PRODUCTS[name], extents
    sharding = MatMulSharding(*(TensorSharding(*dims) for dims in (product.a, product.b, product.c)))
    named, quickest = MatMul(sharding, policy=sharding.policy), MatMul(sharding, cost=rates)
    wanted = ((m, k), (k, n)), mesh_of(product), np.float32
    ways = [Way(name, named, named.plan(*wanted))]
    if rates(*quickest.plan(*wanted).cost[:2]) < rates(*ways[0].plan.cost[:2]):
        ways.append(Way(f"{name}, {BY_SECONDS}", quickest, quickest.plan(*wanted)))
    if product.devices < cores() and find_spec("threadpoolctl"):
        ways.append(replace(ways[0], label=f"{name}, {ALL_CORES}", threads=cores() // product.devices))
    return ways


def mesh_of(product: Product) -> Mesh:
    """The mesh of a product."""
    return Mesh(x=product.mesh[0], y=product.mesh[1])


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(plan: Plan, results: Results, say: Say) -> None:
    """Each product by both systems in turn, the rates of the machine before and after."""
    extents = QUICK_EXTENTS if plan.quick else FULL_EXTENTS
    a, b = operands(extents)
    expected = a @ b
    count = 1 if plan.quick else 2
    python = plan.peers_python or sys.executable
    absent = missing(python)
    rates = _rates()
    ways = {name: ways_of(name, extents, rates) for name in PRODUCTS}
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
                with VirtualCluster(mesh_of(product)) as cluster:
                    for way in ways[name]:
                        for what, seconds in _timed(cluster, way, count, a, b, expected).items():
                            figures.setdefault((OURS, what), []).extend(seconds)
                if peer is not None:
                    figures.setdefault((PEER, name), []).extend(_ask(peer, name, count))
    after = _rates()
    best = Seconds(*map(max, zip(astuple(rates), astuple(after), strict=True)))
    results.note(NAME, OURS, "flops a second", [best.flops_per_second], "flop/s", devices=cores())
    results.note(NAME, OURS, "bytes copied a second", [best.bytes_per_second], "B/s", devices=cores())
    for name, product in PRODUCTS.items():
        for way in ways[name]:
            nbytes, flops, _ = way.plan.cost
            for what in (way.label, f"{way.label}, whole run"):
                results.add(NAME, OURS, what, figures[OURS, what], devices=product.devices, nbytes=nbytes)
            results.note(NAME, OURS, way.label, [float(flops)], "flop", devices=product.devices)
            if way.threads > 1:
                results.note(NAME, OURS, f"{way.label}, threads", [float(way.threads)], "of a device")
        if (PEER, name) in figures:
            results.add(NAME, PEER, name, figures[PEER, name], devices=product.devices)


def report(results: Results) -> str:
    """A line for each product, and for each other way to run it: seconds, flops, bytes, beside JAX and the limit."""
    found = {(m.system, m.operation): m for m in results.of(NAME)}
    amounts = {quantity.what: quantity for quantity in results.amounts_of(NAME)}
    rate, copied = (
        amounts[what].amount.median if what in amounts else 0.0 for what in ("flops a second", "bytes copied a second")
    )
    rows = []
    for name in PRODUCTS:
        theirs = found.get((PEER, name))
        for label in (name, f"{name}, {BY_SECONDS}", f"{name}, {ALL_CORES}"):
            ours, whole = found.get((OURS, label)), found.get((OURS, f"{label}, whole run"))
            if ours is None:
                continue
            seconds = ours.seconds.median
            flops = amounts[label].amount.median if label in amounts else 0.0
            limit = None
            if rate and copied:
                threads = amounts[f"{label}, threads"].amount.median if f"{label}, threads" in amounts else 1
                at_work = min(1.0, ours.devices * threads / (amounts["flops a second"].devices or 1))
                limit = LEAST_FACTOR * (flops / rate + ours.nbytes / copied) / at_work
            over_peer = seconds / theirs.seconds.median if theirs else None
            met = (over_peer is None or over_peer <= 1) and (limit is None or seconds <= limit)
            rows.append([
                name if label == name else f"  {label.removeprefix(f'{name}, ')}",
                seconds_text(seconds), f"{ours.seconds.spread:.0%}", f"{flops / 1e9:.1f}", nbytes_text(ours.nbytes),
                "-" if whole is None else seconds_text(whole.seconds.median),
                "-" if over_peer is None else ratio_text(over_peer),
                "-" if limit is None else seconds_text(limit), "yes" if met else "NO",
            ])
    head = ("", "product", "spread", "Gflop", "bytes", "run", "/ jax", "limit", "met")
    return "\n\n".join([table(head, rows), paragraph(
        f"From operands to product on the devices; run: the whole call, with what it deals out and fetches. Flops and "
        f"bytes received of all devices. Limit: {LEAST_FACTOR} x what they take at {rate / 1e9:.1f} Gflop/s of BLAS "
        f"and {copied / 1e9:.1f} GB/s of copies. Met: not slower than JAX, and within the limit."
    ), paragraph(
        "A product runs as its policy says: unmatched and outer gather, and multiply the same on many devices, which "
        "JAX need not. By seconds: the way that takes fewest at these rates. A device has one thread of BLAS; all "
        "cores: it has those that no other device needs, as in JAX."
    )])


def _timed(
    cluster: VirtualCluster, way: Way, count: int, a: Array, b: Array, expected: Array
) -> dict[str, list[float]]:
    """Seconds of a way, and of its whole run."""
    start = time.perf_counter()
    result = cluster.run(way.operation, a, b).result
    whole = time.perf_counter() - start
    if not np.array_equal(result, expected):
        raise WrongAnswerError(f"{way.label} on {cluster.mesh!r} gave a wrong product")
    del result
    kept = way.operation.inputs(cluster.mesh, a, b)
    times = cluster.run(_rounds, way.operation, count, way.threads, *_per_device(kept)).outputs
    seconds = [
        max(end for _, end in ranks) - min(start for start, _ in ranks) for ranks in zip(*times, strict=True)
    ]
    return {way.label: seconds, f"{way.label}, whole run": [whole]}


def _per_device(kept: list[tuple[Any, ...]]) -> tuple[PerDevice, PerDevice]:
    left, right = zip(*kept, strict=True)
    return PerDevice(left), PerDevice(right)


def _rounds(
    device: VirtualDevice, operation: MatMul, count: int, threads: int, a: Array, b: Array
) -> list[tuple[float, float]]:
    """Start and end of each round on one device; one before them is not counted."""
    times = []
    limits = import_module("threadpoolctl").threadpool_limits(threads) if threads > 1 else nullcontext()
    with limits:
        for _ in range(count + 1):
            device.barrier()
            start = time.perf_counter()
            product = operation(device, a, b)
            times.append((start, time.perf_counter()))
            del product
    return times[1:]


def _rates() -> Seconds:
    """Flops and bytes a second of all cores together."""
    with VirtualCluster(cores()) as cluster:
        found = [cluster.run(_rate).outputs for _ in range(3)]
    return Seconds(*(max(sum(rates[i] for rates in outputs) for outputs in found) for i in range(2)))


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
