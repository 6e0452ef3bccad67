"""torch.distributed under gloo: ``python -m benchmarks.peers.gloo SOCKET RANK RANKS STORE`` for each rank."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.cases import Case, Times, Trial, timed_rounds
from benchmarks.peers.link import serve


def main(path: str, rank: int, size: int, store: str) -> None:
    """Serve one rank.

    all_reduce and broadcast work in place there: the input is put into the output before each round, and before each
    call of an all_reduce in a loop, whose sums would grow without bound.
    """
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)

    def rounds(case: Case, count: int) -> Times:
        trial = Trial(case, rank, size)
        in_place = case.operation == "all_reduce" or (case.operation == "broadcast" and rank == 0)
        call = _call(dist, trial, torch.from_numpy(trial.x), torch.from_numpy(trial.out))
        return timed_rounds(trial, count, dist.barrier, call, trial.load if in_place else None)

    serve(path, rank, f"torch {torch.__version__}", rounds)
    dist.destroy_process_group()


def _call(dist: Any, trial: Trial, x: Any, out: Any) -> Callable[[], Any]:
    rank = trial.rank

    def round_trip() -> Any:
        if rank == 0:
            dist.send(x, 1)
            dist.recv(out, 1)
        elif rank == 1:
            dist.recv(out, 0)
            dist.send(out, 0)

    def all_reduce() -> Any:
        if trial.case.in_a_loop:
            trial.load()
        dist.all_reduce(out)

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": all_reduce,
        "all_gather": lambda: dist.all_gather_into_tensor(out, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x),
        "all_to_all": lambda: dist.all_to_all_single(out, x),
        "broadcast": lambda: dist.broadcast(out, 0),
        "barrier": dist.barrier,
        "round_trip": round_trip,
    }
    call = calls[trial.case.operation]

    def filled() -> Any:
        call()
        return trial.out

    return filled


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
