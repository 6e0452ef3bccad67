"""Makes real dumps: three planted hangs of four ranks of `torch.distributed` on gloo, dumped by PyTorch itself.

    python tests/support/gloo_hangs.py DIR

writes ``DIR/KIND/trace_RANK.json``, without the folders of this machine.  `tests/data/hangs` was made so.  PyTorch keeps
the dumps of gloo since 2.7; ``version.json`` has the versions of those that are recorded.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import sys
import threading
import time
from pathlib import Path

RANKS = 4
SECONDS = 3.0
"""After so long every rank is where it stays, and the dump is written."""


def start(dist, x):
    """What all ranks do alike: two sums, and a barrier in each group of a mesh of 2 x 2."""
    for _ in range(2):
        dist.all_reduce(x)
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    row, column = rows[dist.get_rank() // 2], columns[dist.get_rank() % 2]
    dist.barrier(row)
    dist.barrier(column)
    return row, column


def skips(dist, x):
    """Rank 2 does not sum: its batch was empty."""
    start(dist, x)
    if dist.get_rank() != 2:
        dist.all_reduce(x)


def calls_another(dist, x):
    """Rank 1 sends its parameters to all, where the others sum."""
    start(dist, x)
    if dist.get_rank() == 1:
        dist.broadcast(x, 1)
    else:
        dist.all_reduce(x)
    dist.barrier()


def other_order(dist, x):
    """Ranks 0 and 3 sum over rows first, the others over columns."""
    row, column = start(dist, x)
    first, second = (row, column) if dist.get_rank() in (0, 3) else (column, row)
    dist.all_reduce(x, group=first)
    dist.all_reduce(x, group=second)


KINDS = {function.__name__: function for function in (skips, calls_another, other_order)}


def rank_of_job(rank, kind, port, folder):
    """One rank: it hangs in a thread, and its dump is written from another."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    threading.Thread(target=KINDS[kind], args=(dist, torch.ones(3)), daemon=True).start()
    time.sleep(SECONDS)
    dump = pickle.loads(_dump_fr_trace())  # noqa: S301 - of this process itself
    for entry in dump["entries"]:
        for frame in entry["frames"]:
            frame["filename"] = without_machine(frame["filename"])
        entry.pop("thread_id", None)
    Path(folder, f"trace_{rank}.json").write_text(json.dumps(dump, indent=1) + "\n", encoding="ascii")
    time.sleep(SECONDS)  # the others write theirs before a connection is closed
    os._exit(0)


def without_machine(filename):
    """A path from the part on that is the same on every machine."""
    for part in ("site-packages/", "lib/python3"):
        if part in filename:
            return f"/usr/lib/python3/{part}{filename.split(part, 1)[1]}"
    return f"/home/me/{Path(filename).name}"


def main(folder):
    import torch
    import torch.multiprocessing as processes

    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    for number, kind in enumerate(KINDS):
        Path(folder, kind).mkdir(parents=True, exist_ok=True)
        processes.spawn(rank_of_job, args=(kind, 29531 + number, str(Path(folder, kind))), nprocs=RANKS)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    Path(folder, "version.json").write_text(json.dumps(versions) + "\n", encoding="ascii")


if __name__ == "__main__":
    main(sys.argv[1])
