"""PyTorch, which is optional: the one place that imports it, and what is said where it is missing."""

from __future__ import annotations

from typing import Any

MISSING = (
    "calibrate --gpu measures through PyTorch, which is not installed here: "
    "python -m pip install torch, or vcluster[gpu]"
)


class NoTorchError(RuntimeError):
    """PyTorch is missing, or it has no such device; the text says what to do."""


def torch_on(device: str) -> Any:
    """PyTorch, if it is installed and has such a device: ``cuda``, ``cuda:1`` or ``cpu``.  `NoTorchError` else."""
    try:
        import torch
    except ImportError:
        raise NoTorchError(MISSING) from None
    kind = device.partition(":")[0]
    if kind not in ("cuda", "cpu"):
        raise NoTorchError(f"a GPU to measure must be cuda, cuda:N or cpu; got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise NoTorchError(
            "PyTorch finds no GPU here: run this where there is one, or give --gpu-device cpu, which measures this "
            "processor"
        )
    number = device.partition(":")[2]
    if number and (not number.isdigit() or int(number) >= torch.cuda.device_count()):
        raise NoTorchError(
            f"PyTorch has no device {device!r}; it has {torch.cuda.device_count()} GPUs, from cuda:0 on"
        )
    return torch
