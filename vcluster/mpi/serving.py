"""The life of a rank that serves devices: wait for a cluster, serve one of its devices until it closes, repeat."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

from vcluster.memory import Arena, forks
from vcluster.memory.threads import own
from vcluster.messages.encoding import decode, encode
from vcluster.mpi.endpoint import MpiEndpoint
from vcluster.mpi.group import OVER_MPI
from vcluster.mpi.guard import Watched
from vcluster.mpi.job import POOL, Job, open_file
from vcluster.mpi.link import MpiLink, Waiting
from vcluster.mpi.nodes import NodeMemory
from vcluster.mpi.transport import LEAVE, MEMORY, Message
from vcluster.processes import DeviceSpec
from vcluster.processes.commands import INTERRUPT
from vcluster.processes.line_coverage import measure
from vcluster.processes.worker import Worker, keep_freed_memory

CHECK_EVERY_SECONDS = 0.05
"""Interval, in seconds, between two looks of the thread that receives interrupts. It also lets MPI move what the kernel
has sent while it computes."""


def serve(job: Job, watched: Watched) -> None:
    """Serve devices until the host leaves the job."""
    keep_freed_memory()
    save_coverage = measure()
    orders: list[Message] = []
    job.transport.takers[POOL] = lambda source, message: orders.append(message)
    while True:
        waiting = Waiting()
        while not orders:
            job.transport.poll()
            if not orders:
                waiting.rest()
        order = orders.pop(0)
        if order.kind == LEAVE:
            break
        spec, ranks, memory = decode(order.block)
        watched.serves(spec.rank)
        _serve_device(job, spec, ranks, memory, order.address.generation)
        watched.serves(None)
    save_coverage()


def _serve_device(job: Job, spec: DeviceSpec, ranks: list[int], memory: NodeMemory, cluster: int) -> None:
    arena = Arena(spec.layout.nbytes, None if memory.file is None else open_file(*memory.file))
    endpoint = MpiEndpoint(
        arena,
        spec.layout,
        spec.rank,
        capacity=spec.capacity,
        transport=job.transport,
        cluster=cluster,
        ranks=ranks,
        generation=spec.generation,
        beside=memory.devices,
    )
    if memory.file is None:
        endpoint.send(spec.layout.host, MEMORY, encode(arena.fd, "a descriptor"))
    link = MpiLink(endpoint, spec.rank)
    forks.members.add(link)
    before = sys.stdout, sys.stderr, threading.excepthook
    worker = Worker(spec, arena, link, own_process=True, endpoint=endpoint, ways=OVER_MPI)
    worker.take_over(link)
    ended = threading.Event()
    thread = threading.Thread(
        target=_listen, args=(job, endpoint, ended), daemon=True, name=f"vcluster-interrupts-{spec.rank}"
    )
    own.add(thread)
    thread.start()
    try:
        worker.serve()
    finally:
        ended.set()
        thread.join()
        if INTERRUPT is not None:
            signal.signal(INTERRUPT, signal.SIG_IGN)
        sys.stdout, sys.stderr, threading.excepthook = before
        endpoint.let_go()
        arena.close_descriptor()


def _listen(job: Job, endpoint: MpiEndpoint, ended: threading.Event) -> None:
    """Pass interrupts on to the kernel, as a signal to this process."""
    while not ended.wait(CHECK_EVERY_SECONDS):
        # A late one is of an earlier run, or of the cluster that this rank has served before.
        if job.transport.interrupted() == endpoint.address and INTERRUPT is not None:
            endpoint.arena.words(endpoint.arena.cancel_place)[0] = 1  # its message may come later than this
            with suppress(ProcessLookupError):
                os.kill(os.getpid(), INTERRUPT)
