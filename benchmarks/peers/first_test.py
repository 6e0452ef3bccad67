"""What a first test under torch takes, end to end: ``python -m benchmarks.peers.first_test RANKS``.

Ranks are spawned with ``torch.multiprocessing``, meet under gloo, and check one all_reduce, as a test would.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any


def check(rank: int, size: int, store: str) -> None:
    """What each rank does."""
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    x = torch.ones(1)
    dist.all_reduce(x)
    if x.item() != size:
        raise SystemExit(f"all_reduce of ones over {size} gave {x.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        importlib.import_module("torch.multiprocessing").spawn(
            check, args=(ranks, str(Path(folder, "store"))), nprocs=ranks
        )
