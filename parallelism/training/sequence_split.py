"""`SequenceSplit`: how sequences are dealt to devices, as Megatron-LM's flags about context parallelism say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from parallelism.display.quantities import shortened
from parallelism.models import TransformerSpec
from parallelism.training.flag_values import FlagValues
from parallelism.transforms import ContextParallel

HEADS_AXIS = "cp_heads"
"""The axis of the all_to_alls, where a ring goes around them."""
TYPES = ("all_gather", "p2p", "a2a", "a2a+p2p")
"""The words of ``--cp-comm-type``."""


class SequenceSplit(NamedTuple):
    """How attention sees whole sequences, and the devices of all_to_alls and of the ring around them."""

    exchange: str = "all_gather"
    """One of `TYPES`."""
    heads: int = 1
    """The devices along `HEADS_AXIS`, of ``a2a+p2p``."""

    @classmethod
    def of(cls, flags: FlagValues, spec: TransformerSpec) -> SequenceSplit:
        """What the flags say of a model: a ring if they say nothing, as in Megatron-LM, and ``all_gather`` where
        attention is not one kernel.  ``ValueError`` for layers that differ, and for sizes that are none."""
        usual = "p2p" if spec.fused_attention else "all_gather"
        kinds = [*dict.fromkeys((flags.cp_comm_type or usual).split())]
        if len(kinds) > 1 or kinds[0] not in TYPES:
            raise ValueError(
                f"--cp-comm-type must be one of {', '.join(TYPES)} for all layers, got {shortened(' '.join(kinds), 40)}"
            )
        if kinds[0] != "a2a+p2p":
            return cls(kinds[0])
        size = flags.context_parallel_size or 1
        sizes = (flags.hierarchical_context_parallel_sizes or "").split()
        numbers = [int(each) for each in sizes if each.isdecimal() and len(each) < 10]
        if len(sizes) != 2 or len(numbers) != 2 or numbers[0] * numbers[1] != size:
            raise ValueError(
                "--cp-comm-type a2a+p2p needs two --hierarchical-context-parallel-sizes whose product is the "
                f"--context-parallel-size, {size}; got {shortened(' '.join(sizes), 40)}"
            )
        return cls(kinds[0], numbers[0])

    @classmethod
    def over(cls, exchange: str, devices: int, heads: int) -> SequenceSplit | None:
        """The split over so many devices where so many ``heads`` of keys are left to deal.

        Of ``a2a+p2p`` the all_to_alls are over as many devices as can be, but not over all.  None if there is none.
        """
        if exchange == "a2a" and heads % devices:
            return None
        if exchange != "a2a+p2p":
            return cls(exchange)
        fit = [size for size in range(2, devices) if devices % size == 0 and heads % size == 0]
        return cls(exchange, fit[-1]) if fit else None

    def check(self, spec: TransformerSpec, size: int, tp: int) -> None:
        """``ValueError`` where a model does not allow it over so many devices, beside ``tp`` others."""
        if self.exchange == "all_gather" or size == 1:
            return
        if not spec.fused_attention:
            raise ValueError(
                f"--cp-comm-type {self.exchange} needs attention as one kernel, such as --attention-backend flash"
            )
        over = {"a2a": size, "p2p": 1}.get(self.exchange, self.heads) * tp
        if spec.copied_groups % over:
            raise ValueError(
                f"--cp-comm-type {self.exchange} deals heads to {over} devices, which must divide the {spec.groups} heads of "
                "keys and values"
            )

    @property
    def deals_heads(self) -> bool:
        """Whether all_to_alls deal heads to the devices."""
        return self.exchange.startswith("a2a")

    def axes(self, size: int) -> dict[str, int]:
        """The axes of so many devices, outermost first."""
        return {"cp": size // self.heads, HEADS_AXIS: self.heads}

    def transforms(self, sizes: Mapping[str, int]) -> Iterator[ContextParallel]:
        """The transforms on a mesh with these axes."""
        both = self.exchange == "a2a+p2p"
        if sizes.get("cp", 1) > 1:
            yield ContextParallel("cp", "p2p" if both else self.exchange)
        if both and sizes.get(HEADS_AXIS, 1) > 1:
            yield ContextParallel(HEADS_AXIS, "a2a")

    @classmethod
    def flags(cls, exchanges: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, Any]:
        """The flags of transforms that deal sequences: ``exchanges`` and ``sizes`` by axis."""
        if HEADS_AXIS in exchanges:
            pair = sizes[HEADS_AXIS], sizes.get("cp", 1)
            return {
                "context_parallel_size": pair[0] * pair[1],
                "cp_comm_type": "a2a+p2p",
                "hierarchical_context_parallel_sizes": f"{pair[0]} {pair[1]}",
            }
        exchange = exchanges.get("cp", "all_gather")
        return {
            "context_parallel_size": sizes.get("cp"),
            "cp_comm_type": exchange if sizes.get("cp", 1) > 1 else None,
        }
