"""A cluster that has run for long holds as much as before: shared memory, descriptors, threads, memory, objects.

The programs of the warm-up come again and again, with failing runs among them, so that nothing new has to be kept.
"""

from __future__ import annotations

import os
import random
import tracemalloc
from contextlib import suppress
from pathlib import Path

import kernels
import psutil
from host import Host, say
from random_programs import MESHES, Step, program
from trials import hold, run_right

from vcluster import ClusterError, Mesh

PROGRAMS = 100
SAMPLES = 20
MOST_GROWTH_BYTES = 1 << 20
ARENA_BYTES = 1 << 20
"""Python's own allocator takes and returns so much at a time: one more or less says nothing of what is in use."""
ROUNDS = 5
"""Snapshots of tracemalloc, after the first."""


def once(cluster, seed):
    """A run that is always the same. One in fifty fails, one in a hundred is followed by a `forget`."""
    rng = random.Random(seed)
    if seed % 50 == 7:
        steps = [*program(rng, cluster.mesh, 2), Step("all_reduce", cluster.mesh.axes, 3, False, None, 0)]
        with suppress(ClusterError):
            cluster.run(kernels.wrong, 0, steps, (0, 2, rng.choice(("other", "raise", "dtype"))))
            hold(False, "no error of a wrong program")
        return
    run_right(cluster, rng)
    if seed % 100 == 11:
        cluster.forget()


def holds(cluster):
    """Counts that must be equal, and bytes that may vary: two dicts."""
    cluster.forget()
    used = cluster.run(kernels.collect).outputs
    kernels.settle()
    in_use = {"the host": kernels.bytes_in_use()}
    body = cluster._body
    processes = {"the host": psutil.Process()}
    if cluster.backend == "process":
        processes |= {f"rank {rank}": psutil.Process(pid) for rank, pid in enumerate(cluster.pids())}
    counts = {f"blocks in shared memory of rank {rank}": nbytes for rank, (nbytes, _) in enumerate(used)}
    if cluster.backend == "process":
        in_use |= {f"rank {rank}": nbytes for rank, (_, nbytes) in enumerate(used)}
    counts["blocks in shared memory of the host"] = body.endpoint.heap.used_bytes()
    for name, process in processes.items():
        counts[f"descriptors of {name}"] = process.num_fds()
        counts[f"threads of {name}"] = process.num_threads()
    memory = {f"pages of {name}": anonymous_bytes(process.pid) for name, process in processes.items()}
    memory |= {f"objects of {name}": nbytes for name, nbytes in in_use.items() if nbytes is not None}
    if body.arena.fd >= 0:  # grows when more blocks than ever are in use at once, which messages under way may be
        memory["shared memory"] = os.fstat(body.arena.fd).st_blocks * 512
    return counts, memory


def anonymous_bytes(pid):
    """The resident memory of a process, without files and what is shared with the others. Copying a page of the fork
    server does not change it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def rises(samples):
    """Whether a series has a trend: half of its second half are new maxima."""
    half = len(samples) // 2
    records = sum(samples[i] > max(samples[:i]) for i in range(max(half, 1), len(samples)))
    return records >= max(2, (len(samples) - half + 1) // 2)


def flat(host: Host, runs: int, warm_up: int, mesh: Mesh = MESHES[2]) -> None:
    """Counts equal, memory that is in use without trend and less than 1 MiB more."""
    with host.new_cluster(mesh) as cluster:
        repeat(cluster, warm_up)
        counts, memory = holds(cluster)
        series = {name: [nbytes] for name, nbytes in memory.items()}
        for sample in range(SAMPLES):
            repeat(cluster, runs // SAMPLES)
            now, memory = holds(cluster)
            for name, nbytes in memory.items():
                series[name].append(nbytes)
            say(end="flat", text=f"sample {sample + 1} of {SAMPLES}")
            changed = {what: (counts[what], now[what]) for what in counts if now[what] != counts[what]}
            if changed:
                say(finding="not equal", trial="flat", seed=str(sample), text=str(changed))
                counts = now
    for name, values in series.items():
        kib = [(value - values[0]) // 1024 for value in values]
        say(note=f"memory of {name} on {host.kind}: {values[0] >> 10} KiB, then {kib} KiB more")
        most = MOST_GROWTH_BYTES + ARENA_BYTES * name.startswith("pages") * (f"objects of {name[9:]}" in series)
        if values[-1] - values[0] >= most or rises(values):
            text = f"{name}: {kib} KiB after each {runs // SAMPLES} runs"
            say(finding="memory grows", trial="flat", seed="", text=text)


def traced(host: Host, runs: int, warm_up: int, mesh: Mesh = MESHES[2]) -> None:
    """No line of which the objects grow in every round."""
    with host.new_cluster(mesh) as cluster:
        tracemalloc.start(1)
        if host.backend == "process":
            cluster.run(kernels.start_tracing)
        repeat(cluster, warm_up)
        growing = lines_of(cluster)
        for _ in range(ROUNDS):
            repeat(cluster, runs // ROUNDS)
            now = lines_of(cluster)
            for name, lines in growing.items():  # what is kept here gets less from round to round
                growing[name] = {
                    line: [*sizes, *now[name][line]] for line, sizes in lines.items()
                    if line in now[name] and now[name][line][0] > sizes[-1]
                }
            say(end="traced")
        tracemalloc.stop()
    for name, lines in growing.items():
        for line, sizes in lines.items():
            say(finding="a line grows", trial="traced", seed="", text=f"{name}: {line}: bytes {sizes}")


def lines_of(cluster):
    """By process and line, the bytes that were allocated there and are in use, in a list."""
    lines = {"the host": kernels.lines_here()}
    if cluster.backend == "process":
        lines |= {f"rank {rank}": one for rank, one in enumerate(cluster.run(kernels.traced_lines).outputs)}
    return lines


def repeat(cluster, runs):
    """So many runs, or a few more: each program comes equally often."""
    for number in range(-(-runs // PROGRAMS) * PROGRAMS):
        once(cluster, number % PROGRAMS)
        if number % 250 == 249:
            say(end="flat")


WAYS = {"flat": flat, "traced": traced}
