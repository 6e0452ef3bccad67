"""Seconds on a `Hardware`: for a piece of compute, for a message, for a collective by each of its algorithms.

**Compute** is a roofline (Williams, Waterman and Patterson, *Roofline*, 2009) with a smooth efficiency and a launch:

    seconds = launch + max(flops / (peak * e(flops)), bytes / (bandwidth * e_m(bytes)))

where e and e_m are ``efficiency * sqrt(t / (t + ramp))``, t being the seconds at the full rate.  Of a product whose
shape is known e is ``efficiency`` times the part that `parallelism.hardware.rates.Products` has for the shape, if the
hardware has such.  Where a hardware does one after the other (``memory_overlap`` below 1), that part of the shorter
which is not behind the longer comes on top.  No compute takes less than ``issue_seconds``.  Of an op that a stack has
constants for, launches, bytes and attention count as `parallelism.hardware.kernels.Kernel` says.

**A message** takes its latency and its bytes over the bandwidth of its path (Hockney, *The communication challenge for
MPP*, 1994); in a memory those of messages of its size.  On a level with `parallelism.hardware.rates.Reached`, that is
the rate which messages reach.

**A collective** takes what the phases of its algorithm take: `parallelism.algorithms.phases` has the formulas and
their sources, `parallelism.cost.phase_costs` what they are on several levels of links, and ``hierarchical`` is
`parallelism.cost.hierarchical`.  An all_to_all that is `Deduplicated` takes as long as the slowest of what it sends
across the units of each level, once to a unit, and to the devices inside, once to each: they go on at the same time.
Levels with `parallelism.hardware.rates.Reached` have the rate and the latency of a step that collectives reach, and
the largest base among the levels that the group uses comes on top.  If the hardware has a rate for reducing and
rearranging, that time is added for any algorithm: the term in gamma of Thakur, Rabenseifner and Gropp, *Optimization
of Collective Communication Operations in MPICH*, 2005.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from math import inf, sqrt
from typing import Any

import numpy as np

from parallelism.algorithms import (
    HIERARCHICAL,
    TORUS,
    ChunkOf,
    Deduplicated,
    Pairs,
    bus_factor,
    kind_of,
    record_of,
    runs_directly,
)
from parallelism.algorithms.patterns import Rule, each_phase
from parallelism.algorithms.phases import names, phase_rules
from parallelism.cost.channel_loads import NO_LOADS, ChannelLoads
from parallelism.cost.group_shapes import group_shapes, has_own_ports, places_of
from parallelism.cost.hierarchical import PARTS, Group, Groups, seconds_in_parts, taken_apart
from parallelism.cost.lines import Falling, Term
from parallelism.cost.phase_costs import channel_loads, terms
from parallelism.cost.port_faults import as_met, slowest_ports
from parallelism.cost.torus import COLLECTIVES as ON_A_TORUS, positions_on_torus, torus_phases
from parallelism.display import quantities
from parallelism.display.markup import facts, figure
from parallelism.hardware import Hardware, LinkPath, rate_name
from parallelism.hardware.fields import changed
from parallelism.hardware.kernels import SCALARS, Kernel, kernel_of
from parallelism.hardware.rates import Products, Shape
from parallelism.memoized import memoized

FEW_BYTES = 64
"""Work on a few numbers reads and writes at most so many: eight float64 scalars."""
OF_ATTENTION = 5
"""The extents in the shape of attention; products have four."""
_PLAIN = Kernel()
MOST_IN_TURN = 1024
"""Up to a group of so many ranks, or many groups of fewer, algorithms are looked at with as many phases as ranks."""


@dataclass(frozen=True)
class CollectiveCost:
    """The seconds of a collective over ``size`` ranks by an algorithm; ``nbytes`` is the S of `closed_forms`.

    >>> from parallelism import Costs, Hardware
    >>> price = Costs(Hardware.preset("dgx-h100")).collective("all_reduce", 2**30, range(8))
    >>> print(price)
    all_reduce of 1 GiB over 8 ranks, halving_doubling: 4.05 ms, bus bandwidth 463 GB/s
    """

    collective: str
    algorithm: str
    nbytes: float
    size: int
    seconds: float

    @property
    def algorithm_bytes_per_second(self) -> float:
        """nbytes over seconds; nccl-tests call it algbw."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def bus_bytes_per_second(self) -> float:
        """The bandwidth of the links, for any number of ranks; nccl-tests call it busbw.  0 for a barrier."""
        return self.algorithm_bytes_per_second * (bus_factor(self.collective, self.size) or 0.0)

    def __str__(self) -> str:
        payload, bus = quantities.nbytes(self.nbytes), quantities.rate(self.bus_bytes_per_second)
        return (
            f"{self.collective} of {payload} over {quantities.plural(self.size, 'rank')}, {self.algorithm}: "
            f"{quantities.seconds(self.seconds)}, bus bandwidth {bus}"
        )

    def _repr_html_(self) -> str:
        return figure(
            facts(
                [
                    ("payload", quantities.nbytes(self.nbytes)),
                    ("time", quantities.seconds(self.seconds)),
                    ("payload over time", quantities.rate(self.algorithm_bytes_per_second)),
                    ("bus bandwidth", quantities.rate(self.bus_bytes_per_second)),
                ]
            ),
            title=f"{self.collective} over {quantities.plural(self.size, 'rank')}, {self.algorithm}",
        )


class Costs:
    """Seconds on one `Hardware`.  What was asked once is remembered.

    >>> costs = Costs(Hardware.preset("dgx-a100"))
    >>> costs.collective("all_reduce", 2**30, range(8)).algorithm
    'halving_doubling'
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._halves = cache(partial(taken_apart, hardware))
        self._own_ports = has_own_ports(hardware)
        self._shapes: dict[tuple[int, bytes], Group] = {}
        """The first group of each shape."""

    def __reduce__(self) -> tuple[Any, ...]:  # without what is remembered
        return Costs, (self.hardware,)

    # -- compute and messages ------------------------------------------------------------------------------------------

    def compute_seconds(
        self,
        flops: float = 0.0,
        nbytes: float = 0.0,
        *,
        dtype: object = None,
        rank: int | None = None,
        shape: Shape | None = None,
        kernel: str | None = None,
        other_bytes: float = 0.0,
        added_bytes: float = 0.0,
    ) -> float:
        """The seconds of compute with ``flops`` in a dtype and ``nbytes`` to and from memory; 0 without both.

        ``shape`` is that of products of matrices, (count, m, n, k), or of attention, (count, rows, keys, width, causal),
        if it is known that they are such; the ``flops`` of attention are those of the scores that its mask allows.
        ``kernel`` is the name of the op or chain, and ``other_bytes`` are those of ``nbytes`` that have another dtype:
        they count where the hardware has constants of that kernel.  ``added_bytes`` are those of them in float32, to which
        a product adds (`Products.accumulated`).  ``rank`` counts where it is a straggler.

        ``ValueError`` for flops in a dtype that the hardware has no rate for; but the flops of work on a few numbers,
        of at most `FEW_BYTES` and of no more flops than bytes, then take no time of their own.  Such is the bias
        correction of Adam, in float64: a chip without float64 emulates it, or leaves it to the host.
        """
        if flops < 0 or nbytes < 0:
            raise ValueError(f"flops and bytes must be at least 0; got {flops} flops and {nbytes} bytes")
        if not flops and not nbytes:
            return 0.0
        hardware = self.hardware
        known = self._kernel(kernel, flops <= nbytes <= FEW_BYTES) if hardware.kernels and kernel else _PLAIN
        computing = self._computing(flops, nbytes, dtype, shape, known)
        if added_bytes and hardware.products is not None and shape is not None and len(shape) != OF_ATTENTION:
            rate = hardware.memory_bytes_per_second * hardware.memory_efficiency
            computing += hardware.products.accumulated * added_bytes / rate
        moving = known.times * self._moving(nbytes)
        longest = max(computing, moving)
        besides = (1 - hardware.memory_overlap) * min(computing, moving)
        if known.others and other_bytes:
            longest += hardware.kernel_launch_seconds + self._moving(known.others * other_bytes)
        taken = max(
            known.launches * hardware.kernel_launch_seconds + longest + besides,
            known.launches * hardware.issue_seconds,
        )
        return (taken + known.host_seconds) * hardware.slowdown(rank)

    @memoized
    def _kernel(self, name: str, is_small: bool) -> Kernel:
        """The constants of an op or a chain; those of `SCALARS` for one on few numbers."""
        kernels = self.hardware.kernels
        scalars = kernels.get(SCALARS) if is_small else None
        return scalars or kernel_of(kernels, name) or _PLAIN

    def _computing(
        self, flops: float, nbytes: float, dtype: object, shape: Shape | None, known: Kernel
    ) -> float:
        """The seconds of the flops."""
        hardware = self.hardware
        free = (
            flops <= nbytes <= FEW_BYTES
            and dtype is not None
            and (rate_name(str(dtype)) not in hardware.flops_per_second)
        )
        computing = flops / hardware.peak(dtype) if flops and not free else 0.0
        if shape is not None and len(shape) == OF_ATTENTION:
            _, _, keys, width, causal = shape
            rate = known.rate(width, bool(causal))
            if rate is not None:
                return rate.seconds(computing, keys)
        elif hardware.products is not None and shape is not None:
            return self._of_product(computing / hardware.efficiency(dtype), shape, hardware.products)
        return (
            _ramped(computing, hardware.flops_ramp_seconds, hardware.efficiency(dtype)) if computing else 0.0
        )

    def _of_product(self, at_peak: float, shape: Shape, products: Products) -> float:
        """The seconds of a product of matrices, the fastest way; of one in parts with the kernel that adds these."""
        launch = self.hardware.kernel_launch_seconds
        in_parts = [
            at_peak / each.reached + self._moving(each.sum_bytes) + launch for each in products.split(shape)
        ]
        return min([at_peak / products.reached(shape), *in_parts])

    def _moving(self, nbytes: float) -> float:
        """The seconds of the bytes."""
        hardware = self.hardware
        return _ramped(
            nbytes / hardware.memory_bytes_per_second,
            hardware.memory_ramp_seconds,
            hardware.memory_efficiency,
        )

    @memoized
    def path(self, source: int, target: int) -> LinkPath:
        """`Hardware.path`, remembered."""
        return self.hardware.path(source, target)

    def message_seconds(self, nbytes: float, source: int, target: int) -> float:
        """The seconds of a message that has its path to itself; 0 from a rank to itself."""
        path = self.path(source, target)
        latency, bandwidth = path.latency_seconds, path.bytes_per_second
        if path.level is not None and (link := self.hardware.links[path.level]).pieces:
            other = link.line(nbytes)
            latency = latency - link.latency_seconds + other[0]
            bandwidth = bandwidth / link.bytes_per_second * other[1]
        return latency + nbytes / bandwidth

    # -- collectives ---------------------------------------------------------------------------------------------------

    def algorithms(self, collective: str, group: Iterable[int]) -> tuple[str, ...]:
        """The names of the algorithms that can be priced for a collective over a group of ranks."""
        ranks = _ranks(group)
        return self._as_met(ranks)._applying(collective, (ranks,))

    def collective(
        self,
        collective: str,
        nbytes: float,
        group: Iterable[int],
        *,
        algorithm: str | None = None,
        root: int = 0,
        pairs: Pairs = (),
    ) -> CollectiveCost:
        """The cost of a collective over a group of ranks; without ``algorithm``, by the cheapest one.

        ``nbytes`` is the whole buffer: the array of each member for all_reduce, reduce, broadcast, reduce_scatter and
        all_to_all, what the root holds for scatter, all shards together for all_gather, gather and all_scatter, one
        array for permute.  ``root`` and ``pairs`` are positions in the group.  Over one rank it takes nothing.
        ``ValueError`` for an algorithm that does not apply, naming those that do.
        """
        ranks = _ranks(group)
        if self.hardware.port_faults:
            met = self._as_met(ranks)
            return met.collective(collective, nbytes, ranks, algorithm=algorithm, root=root, pairs=pairs)
        if not runs_directly(collective, algorithm):  # an error names the ranks
            return self._collective(collective, nbytes, ranks, algorithm, root, pairs)
        return self._collective(collective, nbytes, self._like(ranks), algorithm, root, pairs)

    @memoized
    def _collective(
        self, collective: str, nbytes: float, ranks: Group, algorithm: str | None, root: int, pairs: Pairs
    ) -> CollectiveCost:
        if nbytes < 0:
            raise ValueError(f"bytes of {collective} must be at least 0; got {nbytes}")
        chunk = ChunkOf.of(collective, algorithm)
        if chunk is not None:
            return self._chunk(collective, nbytes, ranks, chunk)
        if algorithm is None:
            seconds, algorithm = self._cheapest(collective, nbytes, (ranks,), root, pairs)
        else:
            seconds = self._by(collective, algorithm, nbytes, (ranks,), root, pairs)
        if len(ranks) > 1:
            seconds += nbytes / self.hardware.collective_bytes_per_second.get(collective, inf)
            seconds += self._base_seconds(ranks)
        return CollectiveCost(collective, algorithm, nbytes, len(ranks), seconds)

    def _chunk(self, collective: str, nbytes: float, ranks: Group, chunk: ChunkOf) -> CollectiveCost:
        """The cost of a part of ``nbytes``: its share of the whole, which has no base."""
        whole = nbytes * chunk.parts
        seconds, algorithm = self._cheapest(collective, whole, (ranks,))
        if len(ranks) > 1:
            seconds += whole / self.hardware.collective_bytes_per_second.get(collective, inf)
        return CollectiveCost(collective, algorithm, nbytes, len(ranks), seconds / chunk.parts)

    def prices(
        self, collective: str, nbytes: float, group: Iterable[int], *, root: int = 0, pairs: Pairs = ()
    ) -> tuple[CollectiveCost, ...]:
        """The cost by each algorithm, the cheapest first."""
        ranks = _ranks(group)
        costs = (
            self.collective(collective, nbytes, ranks, algorithm=name, root=root, pairs=pairs)
            for name in self.algorithms(collective, ranks)
        )
        return tuple(sorted(costs, key=lambda cost: cost.seconds))

    def channel_bytes(
        self, cost: CollectiveCost, group: Iterable[int], *, root: int = 0, pairs: Pairs = ()
    ) -> ChannelLoads:
        """The bytes that cross each channel in a collective that costs so, all its phases together."""
        ranks = _ranks(group)
        return self._as_met(ranks)._bytes_added(
            NO_LOADS, cost.collective, cost.algorithm, cost.nbytes, (ranks,), root, pairs
        )

    @memoized
    def _as_met(self, ranks: Group) -> "Costs":
        """The costs of the collectives of a group: on hardware as slow as the faults of ports make it for the group."""
        if not self.hardware.port_faults:
            return self
        slowest = slowest_ports(self.hardware, np.array([ranks], np.int64))[0]
        return self._slowed(tuple(slowest.tolist()))

    @memoized
    def _slowed(self, slowest: tuple[float, ...]) -> "Costs":
        return Costs(as_met(self.hardware, slowest))

    def _bytes_added(
        self,
        found: ChannelLoads,
        collective: str,
        name: str,
        nbytes: float,
        groups: Groups,
        root: int,
        pairs: Pairs = (),
    ) -> ChannelLoads:
        def part(collective: str, nbytes: float, groups: Groups, root: int = 0) -> tuple[float, str]:
            nonlocal found
            seconds, name = self._cheapest(collective, nbytes, groups, root)
            found = self._bytes_added(found, collective, name, nbytes, groups, root)
            return seconds, name

        tokens = _tokens(collective, name)
        if tokens is not None:
            for each in self._deduplicated(tokens, nbytes, groups):
                part(collective, *each)
            return found
        halves = self._halves(groups) if name == HIERARCHICAL and collective in PARTS else None
        if halves is None:
            return found.added(self._loads(collective, name, groups, root, pairs), nbytes)
        seconds_in_parts(collective, part, nbytes, groups, *halves, root)
        return found

    @memoized
    def _loads(self, collective: str, name: str, groups: Groups, root: int, pairs: Pairs) -> ChannelLoads:
        return channel_loads(
            self.hardware, tuple(each_phase(self._rules(collective, name, groups[0], root, pairs))), groups
        )

    def _cheapest(
        self, collective: str, nbytes: float, groups: Groups, root: int = 0, pairs: Pairs = ()
    ) -> tuple[float, str]:
        seconds = {
            name: self._by(collective, name, nbytes, groups, root, pairs)
            for name in self._applying(collective, groups)
        }
        least = min(seconds.values())
        return least, next(name for name, took in seconds.items() if took <= least * (1 + 1e-12))

    def _applying(self, collective: str, groups: Groups) -> tuple[str, ...]:
        """The algorithms that apply; of those that take as long, the first is taken.

        Of very large groups, and very many, those are left out that have as many different phases as ranks: to look at
        all of their messages would take minutes, and rings, trees and doublings are there.
        """
        more: tuple[str, ...] = (HIERARCHICAL,) if collective in PARTS and self._halves(groups) else ()
        if collective in ON_A_TORUS and positions_on_torus(self.hardware, groups[0]) is not None:
            more += (TORUS,)
        size = len(groups[0])
        known = names(collective, size)
        if len(groups) * size**2 > MOST_IN_TURN**2:
            known = tuple(name for name in known if not record_of(collective, name, size).turns) or known
        return (*more, *known)

    def _by(
        self, collective: str, name: str, nbytes: float, groups: Groups, root: int = 0, pairs: Pairs = ()
    ) -> float:
        tokens = _tokens(collective, name)
        if tokens is not None:
            parts = self._deduplicated(tokens, nbytes, groups)
            return max(self._cheapest(collective, *part)[0] for part in parts)
        if name == HIERARCHICAL and collective in PARTS:
            halves = self._halves(groups)
            if halves is None:
                raise ValueError(
                    f"no algorithm 'hierarchical' for {collective} over {groups[0]} (each of several units must have "
                    f"equally many ranks of the group, at least two); these apply: "
                    f"{', '.join(names(collective, len(groups[0])))}"
                )
            return seconds_in_parts(collective, self._cheapest, nbytes, groups, *halves, root)
        found = self._terms(collective, name, self._once(groups), root, pairs)
        return float(sum(term.seconds(times, nbytes) for term, times in found.items()))

    def _deduplicated(
        self, tokens: Deduplicated, nbytes: float, groups: Groups, units: int = 1
    ) -> list[tuple[float, Groups]]:
        """The all_to_alls of rows that go on at the same time: across the units of each level, and inside.

        A device inside passes on what comes for others of its unit.  ``units`` are those that the groups are one of.
        """
        halves = self._halves(groups)
        if halves is None:
            return [(nbytes * tokens.share(units * len(groups[0])), groups)]
        inside, across = halves
        units *= len(across[0])
        outer = (nbytes * tokens.share(units), across)
        return [outer, *self._deduplicated(tokens, nbytes, inside, units)]

    @memoized
    def _terms(
        self, collective: str, name: str, groups: Groups, root: int, pairs: Pairs
    ) -> dict[Term | Falling, int]:
        rules = self._rules(collective, name, groups[0], root, pairs)
        size = len(groups[0])
        rounds = 0 if name == TORUS else record_of(collective, name, size).rounds
        share = 1 / size if kind_of(collective).in_shards else 1.0
        return terms(self._as_reached(collective, size), rules, groups, rounds, share)

    @memoized
    def _as_reached(self, collective: str, size: int) -> Hardware:
        """The hardware with the rates and latencies that a collective over groups of ``size`` reaches on its links."""
        links = tuple(link.for_collective(collective, size) for link in self.hardware.links)
        return self.hardware if links == self.hardware.links else changed(self.hardware, links=links)

    @memoized
    def _base_seconds(self, ranks: Group) -> float:
        """What any collective over these ranks takes beside its messages: the largest base of a level that they use."""
        reached = [
            (level, link.reached.base_seconds)
            for level, link in enumerate(self.hardware.links)
            if link.reached
        ]
        if not any(base for _, base in reached):
            return 0.0
        places = places_of(self.hardware, np.array(ranks, np.int64))
        used = [
            level
            for level in range(len(self.hardware.links))
            if (places // self.hardware.inside(level) != places[0] // self.hardware.inside(level)).any()
        ]
        return max((base for level, base in reached if level <= max(used)), default=0.0)

    @memoized
    def _once(self, groups: Groups) -> Groups:
        """The first of groups that lie alike and share no channel, as the others take as long; else all."""
        if len(groups) > 1 and self._own_ports:
            shapes = group_shapes(self.hardware, np.array(groups, np.int64))
            if (shapes == shapes[:1]).all():
                return groups[:1]
        return groups

    @memoized
    def _like(self, ranks: Group) -> Group:
        """The first group that was asked for and that lies as this one, so that every collective takes as long."""
        if self.hardware.faults or len(ranks) < 2:
            return ranks
        shape = group_shapes(self.hardware, np.array([ranks], np.int64))
        return self._shapes.setdefault((len(ranks), shape.tobytes()), ranks)

    def _rules(self, collective: str, name: str, group: Group, root: int, pairs: Pairs) -> tuple[Rule, ...]:
        if name != TORUS or collective not in ON_A_TORUS:
            return phase_rules(collective, name, len(group), root, pairs)
        grid = positions_on_torus(self.hardware, group)
        if grid is None:
            raise ValueError(
                f"no algorithm 'torus' for {collective} over {group} (it needs all ranks along each dim of a ring or "
                f"torus, or one); these apply: {', '.join(self._applying(collective, (group,)))}"
            )
        return torus_phases(collective, grid)


def _tokens(collective: str, algorithm: str | None) -> Deduplicated | None:
    """The tokens whose rows a collective by this algorithm moves, once to each unit; None for any other."""
    return Deduplicated.of(algorithm) if collective == "all_to_all" else None


def _ranks(group: Iterable[int]) -> Group:
    ranks = tuple(group)
    if not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(f"a group needs at least one rank, and each rank once; got {ranks}")
    return ranks


def _ramped(full: float, ramp: float, efficiency: float) -> float:
    """Seconds at a rate that is reached slowly, from those at the full rate."""
    return (sqrt(full * (full + ramp)) if ramp else full) / efficiency
