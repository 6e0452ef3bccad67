"""Modules of PyTorch on the meta device, whose tensors have shapes and no numbers, as a model too large for memory has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from parallelism.interop.errors import UnsupportedError


@contextmanager
def on_the_host(torch: Any, whole: Any) -> Iterator[set[str]]:
    """A context in which the parameters and buffers of a module that are on meta lie on the host, as examples do.

    Gives their names in ``state_dict``.  They are zeros, of which the system takes no memory before they are read.
    """
    _check_attributes(torch, whole)
    before = [
        (held, name, tensor)
        for each in whole.modules()
        for held in (each._parameters, each._buffers)
        for name, tensor in held.items()
        if tensor is not None and tensor.is_meta
    ]
    every = [*whole.named_parameters(remove_duplicate=False), *whole.named_buffers(remove_duplicate=False)]
    names = {name for name, tensor in every if tensor.is_meta}
    made = {id(tensor): _without_memory(torch, tensor) for _, _, tensor in before}  # shared ones stay shared
    try:
        for held, name, tensor in before:
            held[name] = made[id(tensor)]
        yield names
    finally:
        for held, name, tensor in before:
            held[name] = tensor


def zeros(torch: Any, tensor: Any) -> Any:
    """Zeros of the shape and the dtype of a tensor, in pages that the system gives when they are read."""
    words = np.zeros(tensor.numel() * tensor.element_size(), np.uint8)
    return torch.from_numpy(words).view(tensor.dtype).view(tensor.shape)


def _without_memory(torch: Any, tensor: Any) -> Any:
    made = zeros(torch, tensor)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _check_attributes(torch: Any, whole: Any) -> None:
    """`UnsupportedError` for a tensor on meta that is neither a parameter nor a buffer: it would be a constant."""
    for prefix, module in whole.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                whole_name = f"{prefix}.{name}".removeprefix("model.").lstrip(".")
                raise UnsupportedError(
                    f"{type(module).__name__} keeps a tensor on the meta device as an attribute, whose numbers are not "
                    f"known; register_buffer({name!r}, ...) makes it an input of the program",
                    f"the tensor {whole_name}",
                )
