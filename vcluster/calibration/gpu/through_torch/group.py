"""Collectives of NCCL between the GPUs of a job that ``torchrun`` started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from vcluster.calibration.gpu.items import Given
from vcluster.calibration.gpu.through_torch.kernels import Row
from vcluster.calibration.gpu.through_torch.timing import Clock


def job_size() -> int:
    """How many processes the job has; 1 without ``torchrun``."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The rank of this process; 0 without ``torchrun``."""
    return int(os.environ.get("RANK", "0"))


def join(torch: Any, device: str) -> str:
    """Joins the processes of the job.  Returns the device of this one."""
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    if not device.startswith("cuda"):
        return device
    own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch.cuda.set_device(own)
    return own


def leave(torch: Any) -> None:
    """Ends what `join` began."""
    torch.distributed.destroy_process_group()


def collective_row(clock: Clock, given: Given) -> Row:
    """A collective of float32; ``nbytes`` are those of the whole buffer, as `parallelism.cost` counts them."""
    torch = clock.torch
    name = given["name"]
    devices = given["devices"]
    count = given["nbytes"] // 4
    whole = torch.randn(count, device=clock.device)
    part = torch.randn(count // devices, device=clock.device)
    group = torch.distributed
    works: Mapping[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "all_gather": lambda: group.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: group.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: group.all_to_all_single(torch.empty_like(whole), whole),
        "broadcast": lambda: group.broadcast(whole, 0),
    }
    work = works[name]
    for _ in range(3):
        work()
    clock.synchronize()
    group.barrier()
    repeats = 20 if given["nbytes"] < 1 << 26 else 6

    def several() -> None:
        for _ in range(repeats):
            work()

    seconds = clock.wall(several, 3) / repeats
    return {"seconds": seconds, "bytes_per_second": given["nbytes"] / seconds}
