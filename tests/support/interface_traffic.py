"""A script of MPI jobs on several hosts: bytes on their interfaces beside those of the trace, a line of JSON each."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import numpy as np

from vcluster import VirtualCluster

TIMES = 4
"""Repetitions of each collective."""


def sent_bytes():
    """The name of this host, and what its interface has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return socket.gethostname(), int(next(line for line in lines if "eth0:" in line).split()[9])


def reduces(device, elements, algorithm):
    x = np.ones(elements)
    out = np.empty_like(x)
    device.barrier()
    name, before = sent_bytes()
    device.barrier()
    for _ in range(TIMES):
        device.all_reduce(x, out=out, algorithm=algorithm)
    device.barrier()
    return name, sent_bytes()[1] - before, float(out.sum())


def sweep(devices, sizes):
    """For each size and algorithm, the bytes between hosts by the trace, and on the interfaces."""
    with VirtualCluster(devices) as cluster:
        for nbytes in sizes:
            for algorithm in (None, "ring"):
                run = cluster.run(reduces, nbytes // 8, algorithm)
                assert all(total == devices * (nbytes // 8) for _, _, total in run), "a wrong sum"
                hosts = [name for name, _, _ in run]
                matrix = np.asarray(run.trace.communication_matrix())
                apart = np.array([[one != other for other in hosts] for one in hosts])
                moved = matrix[apart].sum()
                on_interfaces = {}
                for name, sent, _ in run:
                    on_interfaces[name] = max(sent, on_interfaces.get(name, 0))
                steps = 2 * np.eye(devices, k=1) * (devices - 1) if algorithm else 2
                messages = TIMES * int(np.where(apart, 1 + steps, 0).sum())     # with the calls, which all members post
                print(json.dumps({
                    "bytes": nbytes, "algorithm": algorithm or "direct", "hosts": len(on_interfaces),
                    "messages": messages, "traced": int(moved), "sent": sum(on_interfaces.values())}), flush=True)


if __name__ == "__main__":
    sweep(int(sys.argv[1]), [int(size) for size in sys.argv[2:]])
