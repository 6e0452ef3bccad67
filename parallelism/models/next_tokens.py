"""Modules that predict further tokens, recorded (multi-token prediction; DeepSeek-V3, 2024, arXiv:2412.19437, section 2.2).

Module j, counted from 1, joins what the model made of token i with the embedding of token i + j, and predicts token
i + j + 1.  It has a block, norms and a product of its own; the table of tokens and the last product are the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

import numpy as np

from parallelism.ir.tracing.current import region
from parallelism.ir.tracing.tracing import apply
from parallelism.models.block_parts import Parts
from parallelism.models.figures import NEXT
from parallelism.models.layers import cross_entropy

WEIGHT = 0.3
"""What the mean loss of the modules is multiplied by (section 4.2)."""


def next_token_loss(
    parts: Parts,
    x: Any,
    targets: Any,
    block: Callable[[Any, int, str], Any],
    head: Callable[[Any], Any],
) -> Any:
    """`WEIGHT` times the mean loss of the modules, on what the last block made: ``x``, ``(batch, sequence, width)``.

    ``targets`` are the tokens that the model itself predicts.  ``block(x, layer, names)`` is a block whose parameters begin
    with ``names``, ``head(x)`` the logits of ``x`` behind the last norm.  A sequence ends before its last tokens have
    targets: these positions are left out.
    """
    spec, total = parts.spec, 0.0
    for module in range(spec.next_tokens):
        names = f"{NEXT}.{module}."
        with region(f"{NEXT}.{module}"):
            with region("join"):
                embedded = apply("take", parts.p["tokens"], _later(targets, module), axis=0)
                both = [parts.norm(x, f"{names}hidden_norm"), parts.norm(embedded, f"{names}embedding_norm")]
                x = np.concatenate(both, axis=2) @ parts.p[f"{names}joined"]
            x = block(x, spec.layers - 1, names)
            with region("head"):
                logits = head(_known(parts.norm(x, f"{names}norm"), module + 1))
            with region("loss"):
                targets_then = _later(targets, module + 1)
                loss = cross_entropy(logits, targets_then, fused=spec.fused_cross_entropy)
                total = total + _mean(loss, logits, module + 1)
    return total * (WEIGHT / spec.next_tokens)


def _later(tokens: Any, by: int) -> Any:
    """The tokens so many positions later; at the end of a sequence those of its beginning, which count nowhere."""
    return np.concatenate([tokens[:, by:], tokens[:, :by]], axis=1) if by else tokens


def _known(x: Any, without: int) -> Any:
    """``x`` with zeros at so many last positions, the targets of which are not known."""
    places = np.arange(x.shape[1])
    return x * (places < x.shape[1] - without).astype(x.dtype)[:, None]


def _mean(loss: Any, logits: Any, without: int) -> Any:
    """The mean over the positions that count, from that over all: the logits of the others are 0, their loss is known."""
    tokens, classes = logits.shape[1:]
    return (loss * tokens - without * log(classes)) * (1 / max(1, tokens - without))
