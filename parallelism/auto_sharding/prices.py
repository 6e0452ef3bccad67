"""Seconds of split ops and of changes of layout: what `parallelism.simulation.simulate` says of each by itself.

Many are priced at once: they become the ops of one program, none of which uses what another makes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from math import prod
from os import PathLike

from parallelism.auto_sharding.op_sharding import OpSharding
from parallelism.execution import Executable
from parallelism.execution.device_program import ProgramStep, communicates
from parallelism.hardware import Hardware
from parallelism.ir import Function, Op, TensorType, Value
from parallelism.ir.operators import layout_text
from parallelism.layouts import Devices, Localized
from parallelism.layouts.localization.moves import moves
from parallelism.layouts.propagation import Axes
from parallelism.memoized import memoized
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding
from parallelism.simulation import simulate

Change = tuple[TensorSharding, TensorSharding, TensorType]
"""A change of layout: from, to, and the type of the whole tensor."""


@dataclass(frozen=True)
class Connection:
    """A change of layout: from what one op leaves to what another needs."""

    source: TensorSharding
    target: TensorSharding
    type: TensorType
    """The type of the whole tensor."""
    mesh: Mesh
    seconds: float
    """What `simulate` says of it by itself."""

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The ops of the first device: collectives and local slices; none if every device has its shard already."""
        before, after = Value("x", self.type, self.source), Value("y", self.type, self.target)
        whole = Function("connection", (before,), (reshard_op(before, after),), (after,))
        return Localized(whole, Devices.of(self.mesh)).program(0).ops

    @property
    def bytes_received(self) -> int:
        """The bytes that the first device receives."""
        return sum(int(op.bytes_received) for op in self.ops)

    def __str__(self) -> str:
        steps = (
            ", then ".join(f"{op.kind} over {', '.join(op['axes'])}" for op in self.ops) or "nothing moves"
        )
        return f"{self.source.short()} -> {self.target.short()}: {steps}"


def connect(
    source: TensorSharding,
    target: TensorSharding,
    type: TensorType,
    mesh: Mesh,
    hardware: Hardware | str | PathLike[str],
    *,
    priced_dtype: str | None = None,
) -> Connection:
    """The change of a whole tensor of this type from one layout to another, with its seconds on a hardware.

    Its steps are those of the resharding plan, and its price is that of `simulate` without shared links.
    ``ValueError`` if the layouts do not fit the type or the mesh, and if a reduction is pending in ``target`` that is
    not pending in ``source``.
    """
    for layout in (source, target):
        Devices.of(mesh).check(layout, f"a tensor of type {type}")
    source = source.over(type.ndim)
    target = target.over(type.ndim)
    (seconds,) = Prices(mesh, Hardware.of(hardware), priced_dtype).moves(
        [(source, target, type)], exactly=True
    )
    return Connection(source, target, type, mesh, seconds)


class Prices:
    """Seconds of ops and of changes of layout on a mesh of a hardware; each change is priced once."""

    def __init__(self, mesh: Mesh, hardware: Hardware, priced_dtype: str | None = None) -> None:
        self.mesh, self.hardware, self.priced_dtype = mesh, hardware, priced_dtype
        self._moves: dict[Change, float] = {}

    def ops(self, shardings: Sequence[OpSharding]) -> list[float]:
        """Seconds of each op, split so."""
        inputs: list[Value] = []
        ops: list[Op] = []
        for number, each in enumerate(shardings):
            op, taken, _ = each.placed(f"i{number}.", f"o{number}.")
            inputs += dict.fromkeys(taken)
            ops.append(op)
        return self._seconds(inputs, ops)

    def moves(
        self, wanted: Iterable[tuple[TensorSharding, TensorSharding, TensorType]], *, exactly: bool = False
    ) -> list[float]:
        """Seconds of each change of layout: from, to, and the type of the whole tensor.

        A change of several steps takes the sum of its steps, which many changes share.  ``exactly`` prices each change
        by itself; otherwise its canonical form is priced, which moves as many bytes.
        """
        if exactly:
            wanted = list(wanted)
            self._price(wanted)
            return [self._moves[each] for each in wanted]
        wanted = [self._canonical(*each) for each in wanted]
        steps = {each: self._steps(*each) for each in dict.fromkeys(wanted) if each not in self._moves}
        self._price(chain(*steps.values()))
        for change, own in steps.items():
            self._moves[change] = sum(self._moves[step] for step in own)
        return [self._moves[each] for each in wanted]

    def _steps(self, source: TensorSharding, target: TensorSharding, type: TensorType) -> list[Change]:
        """The changes that the steps of the plan are, each in its canonical form.

        A change of one step is itself.  So is a change whose steps leave devices with unequal shards, because another
        device may be the slowest in each step.
        """
        extents = list(type.shape)
        for dim, extent in enumerate(extents):
            if isinstance(extent, int) and extent % self.mesh.size == 0:
                extents[dim] = self.mesh.size
        steps = self._plan(source, target, TensorType(type.dtype, extents))
        if len(steps) == 1 or not all(self._is_even(after, type) for _, after in steps):
            return [(source, target, type)]
        return [self._canonical(before, after, type) for before, after in steps]

    @memoized
    def _plan(
        self, source: TensorSharding, target: TensorSharding, type: TensorType
    ) -> tuple[tuple[TensorSharding, TensorSharding], ...]:
        """The layouts before and after each step.  They do not depend on extents that all devices divide."""
        steps = dict.fromkeys(move.step for move in moves(source, target, type, Devices.of(self.mesh)))
        return tuple((step.before, step.after) for step in steps)

    def _is_even(self, layout: TensorSharding, type: TensorType) -> bool:
        return not any(
            isinstance(extent, int) and extent % prod(map(self.mesh.shape.__getitem__, dim.axes))
            for extent, dim in zip(type.shape, layout.dims, strict=True)
        )

    @memoized
    def _canonical(self, source: TensorSharding, target: TensorSharding, type: TensorType) -> Change:
        return canonical_change(source, target, type, self.mesh)

    def _price(self, changes: Iterable[Change]) -> None:
        """Prices changes of layout that have no price yet, each by itself.

        Those that are not alike on all devices are priced apart: in their program each device is one of a kind.
        """
        fresh = [each for each in dict.fromkeys(changes) if each not in self._moves]
        for alike in (True, False):
            self._price_together([each for each in fresh if self._is_alike(*each) == alike])

    def _is_alike(self, source: TensorSharding, target: TensorSharding, type: TensorType) -> bool:
        """Whether all devices do the same in a change: they have equal shards, and none has other peers."""
        if not all(self._is_even(layout, type) for layout in (source, target)):
            return False
        return all(move.kind != "relayout" for move in moves(source, target, type, Devices.of(self.mesh)))

    def _price_together(self, fresh: Sequence[Change]) -> None:
        """Prices changes of layout as ops of one program."""
        inputs: list[Value] = []
        ops: list[Op] = []
        for number, (source, target, type) in enumerate(fresh):
            inputs.append(Value(f"i{number}", type, source))
            ops.append(reshard_op(inputs[-1], Value(f"o{number}.0", type, target)))
        self._moves.update(zip(fresh, self._seconds(inputs, ops), strict=True))

    def _seconds(self, inputs: Sequence[Value], ops: Sequence[Op]) -> list[float]:
        """Seconds of each op on its slowest device; the outputs of op n are named ``on.``..."""
        if not ops:
            return []
        executable = Executable(
            Localized(Function("priced", tuple(inputs), tuple(ops), ()), Devices.of(self.mesh))
        )
        trace = simulate(
            executable,
            self.hardware,
            fold=True,
            op_by_op=True,
            link_sharing=False,
            priced_dtype=self.priced_dtype,
        )
        longest = [0.0] * len(ops)
        for rank in trace.ranks:
            program = executable.of_class(executable.programs.class_of(rank))
            numbers = [
                int(step.op.outputs[0].name[1:].split(".")[0])
                for step in program.steps
                if isinstance(step, ProgramStep) and (step.cost is not None or communicates(step.op))
            ]
            own = trace.columns.take(
                (trace.columns.numbers("rank") == rank) & ~trace.columns.isin("kind", {"memory"})
            )
            found = [0.0] * len(ops)
            for number, seconds in zip(numbers, own.numbers("duration_seconds")[1:].tolist(), strict=True):
                found[number] += seconds
            longest = list(map(max, longest, found))
        return longest


def canonical_change(source: TensorSharding, target: TensorSharding, type: TensorType, mesh: Mesh) -> Change:
    """The canonical form of a change of layout: another change that costs the same, and stands for many.

    Dims are sorted, since the plan for a transposed tensor is the transposed plan; but not where several are cut at
    once, because they are cut in their order, and what is cut first is copied for the second.  Dims that are whole
    before and after become one, at the end, and so does what a dim has more than is needed to split it over all
    devices.  Where axes do unlike things, or two go from one dim to another, the plan may lead through dims that are
    whole, so each dim stays.
    """
    left = {axis: dim for dim, each in enumerate(source.dims) for axis in each.axes}
    joined = {axis: dim for dim, each in enumerate(target.dims) for axis in each.axes}
    wandering = sum(axis in joined and joined[axis] != dim for axis, dim in left.items())
    gathered = any(axis not in joined for axis in left)
    each_stays = wandering + gathered + (source.partial != target.partial) > 1
    dims: list[tuple[Axes, Axes, int]] = []
    rest = 1
    for before, after, extent in zip(source.dims, target.dims, type.shape, strict=True):
        assert isinstance(extent, int)
        if not each_stays and not before.axes and not after.axes:
            rest *= extent
        elif not each_stays and extent and extent % mesh.size == 0:
            rest *= extent // mesh.size
            dims.append((before.axes, after.axes, mesh.size))
        else:
            dims.append((before.axes, after.axes, extent))
    held = {*left, *source.partial}
    if sum(not held.issuperset(after) for _, after, _ in dims) <= 1:
        dims.sort()
    if not each_stays:
        dims.append(((), (), rest))
    befores, afters, extents = zip(*dims, strict=True) if dims else ((), (), ())
    return (
        _layout(befores, source.partial, source.op),
        _layout(afters, target.partial, target.op),
        TensorType(type.dtype, extents),
    )


@lru_cache(maxsize=1 << 14)
def _layout(dims: tuple[Axes, ...], partial: Axes, op: str) -> TensorSharding:
    """The layout, made once: many changes have equal ones."""
    return TensorSharding(*dims, partial=partial, op=op)


def reshard_op(before: Value, after: Value) -> Op:
    """The op that changes the layout of ``before`` to that of ``after``."""
    assert after.layout is not None
    return Op("reshard", (before,), (("layout", layout_text(after.layout)),), (after,))
