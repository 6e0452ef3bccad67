"""What PyTorch's own code asks of the numbers of tensors, which have none in an export: checks, and what makes it fast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_checks_of_numbers(torch: Any) -> Iterator[None]:
    """A context in which distributions do not check their arguments, and nobody looks whether a mask is causal.

    Layers of ``torch.nn.Transformer`` look, to take a faster kernel of the same numbers.  Of what it cannot export
    PyTorch prints a long graph, which hides the error.
    """
    import torch.export._trace as trace
    import torch.nn.modules.transformer as layers

    def detected(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    distribution = torch.distributions.Distribution
    validates, detect = distribution._validate_args, layers._detect_is_causal_mask
    distribution._validate_args = False
    layers._detect_is_causal_mask = detected
    trace.print = _print_nothing
    try:
        yield
    finally:
        distribution._validate_args = validates
        layers._detect_is_causal_mask = detect
        del trace.print


def _print_nothing(*told: Any, **how: Any) -> None:
    pass
