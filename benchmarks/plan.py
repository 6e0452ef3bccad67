"""How much is measured: devices, sizes, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.cases import COLLECTIVES

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Plan:
    """What the suites keep to.  What is None is the suite's own choice."""

    devices: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None
    operations: tuple[str, ...] = COLLECTIVES
    passes: int = 5
    """How often everything is gone through; each pass adds its rounds to every figure."""
    quick: bool = False
    peers_python: str | None = None
    """The interpreter that has the peers; None: the one that runs the benchmarks."""

    def devices_or(self, full: tuple[int, ...], quick: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers of devices that were asked for, or the suite's own."""
        return self.devices or (quick if self.quick else full)

    def sizes_or(self, full: tuple[int, ...], quick: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes in bytes that were asked for, or the suite's own."""
        return self.sizes or (quick if self.quick else full)

    def rounds(self, nbytes: int) -> int:
        """Rounds of one pass: many for what takes microseconds."""
        few, some, many = (2, 4, 15) if self.quick else (2, 5, 30)
        return many if nbytes <= 64 * KIB else some if nbytes <= MIB else few
