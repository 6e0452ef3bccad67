"""Constants of single kernels, where one rate of products and one of memory do not tell what they take.

A stack names an op, or a chain of ops, as traces do (``layer_norm_gradient``, ``add+gelu``), and says of it how many
kernels a software runs for it, how many times as long they take as its bytes, and what part of the peak attention
reaches by the width of a head and the length of a sequence.  What a stack does not name is priced as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any

from parallelism.hardware import fields as checked

SCALARS = "scalars"
"""The name that stands for all work on few numbers (`parallelism.cost.FEW_BYTES`), whatever the op."""
MOST_KERNELS = 200


@dataclass(frozen=True)
class AttentionRate:
    """What part of the peak attention reaches, with heads of one width, under a causal mask or without one.

    Over n keys it is ``efficiency * n / (n + half_length)`` of the flops that are computed: those of the scores that the
    mask allows.
    """

    width: int
    causal: bool
    efficiency: float
    half_length: float = 0.0

    def __post_init__(self) -> None:
        checked.check(
            self,
            width=checked.whole_number,
            causal=checked.switch,
            efficiency=partial(checked.number, above=0, most=1),
            half_length=partial(checked.number, of="of keys"),
        )

    def seconds(self, at_peak: float, keys: float) -> float:
        """What attention takes whose computed flops would take ``at_peak`` at the peak."""
        return at_peak / self.efficiency * (1 + self.half_length / max(keys, 1))


@dataclass(frozen=True)
class Kernel:
    """What a software does for one op, or for one chain of ops.

    It runs ``launches`` kernels for it; 0: it is part of others, or none.  They take ``times`` as long as the bytes that
    the op reads and writes; 0: it is a view.  Of a product that is ``others`` times the bytes that it has in other
    dtypes than its own: those of gradients in float32, which a kernel behind it copies or adds.  Attention reaches
    ``rates``; of them that one counts whose width is nearest.  The device waits ``host_seconds`` for the host, which cannot
    issue what follows before it has read a result, as how many rows each expert has.
    """

    launches: float = 1.0
    times: float = 1.0
    others: float = 0.0
    host_seconds: float = 0.0
    rates: tuple[AttentionRate, ...] = ()

    def __post_init__(self) -> None:
        checked.check(
            self,
            launches=checked.number,
            times=checked.number,
            others=checked.number,
            host_seconds=checked.seconds,
            rates=partial(checked.each, kind=AttentionRate),
        )

    def rate(self, width: float, causal: bool) -> AttentionRate | None:
        """The rate of the nearest width, under the same mask if there is one; None without rates."""
        alike = [rate for rate in self.rates if rate.causal == causal] or self.rates
        return min(alike, key=lambda rate: abs(log(rate.width / max(width, 1))), default=None)


def checked_kernels(field: str, values: Any) -> checked.Table[Kernel]:
    """A checked table of kernels by the names of ops."""
    if not isinstance(values, Mapping) or len(values) > MOST_KERNELS:
        raise TypeError(
            f"{field} must be a table of at most {MOST_KERNELS} kernels by the names of ops; "
            f"got {checked.shown(values)}"
        )
    for name, value in values.items():
        checked.text(f"a name in {field}", name)
        if not isinstance(value, Kernel):
            raise TypeError(f"{field}.{name} must be a Kernel; got {checked.shown(value)}")
    return checked.Table(values)


_SAME = {
    "attention_block": "attention",
    "context_attention": "attention",
    "attention_block_gradient": "attention_gradient",
    "context_attention_gradient": "attention_gradient",
    "weighted_swiglu": "swiglu",
    "weighted_swiglu_gradient": "swiglu_gradient",
}
"""Ops that run the kernel of another one, or move about as many bytes: attention to a block of the columns is attention, and
an activation reads a weight for each row beside all of its features."""


def kernel_of(kernels: Mapping[str, Kernel], name: str) -> Kernel | None:
    """The kernel of an op, or of a chain: its own if it is named, else that of its op that takes the longest.

    >>> kernels = {"gelu": Kernel(times=1.5), "split": Kernel(0, 0)}
    >>> kernel_of(kernels, "add+gelu").times, kernel_of(kernels, "split").times, kernel_of(kernels, "add")
    (1.5, 0.0, None)
    >>> kernel_of(kernels, "split+add")
    """
    name = _SAME.get(name, name)
    if name in kernels:
        return kernels[name]
    found, longest = None, 1.0
    for kind in name.split("+"):
        each = kernels.get(kind)
        if each is not None and each.times > longest:
            found, longest = each, each.times
    return found
