"""The collectives of one device: from the arguments of a call to its result and its event.

A call is checked, made into a `vcluster.collectives.call.Call`, run directly in shared memory
(`vcluster.collectives.general`) or step by step over channels (`vcluster.collectives.by_messages`), and recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallelism.collectives import CollectiveKind, Reduction, kind_of, registry
from parallelism.collectives.reductions import reduction
from parallelism.mesh import Axes, Mesh, split_sizes
from parallelism.operation import Groups, ReduceOp
from parallelism.operation.trees import leaves
from vcluster.code import call_site
from vcluster.collectives.by_messages import run_stepwise
from vcluster.collectives.call import Call, Traffic, traffic
from vcluster.collectives.general import Posted, run_direct
from vcluster.collectives.group import Group, group_key
from vcluster.collectives.prepared import Repeated, Unlike
from vcluster.collectives.zero_copy import Shown
from vcluster.memory import Lane
from vcluster.messages import (
    SCALAR,
    Endpoint,
    Pending,
    Steps,
    Wait,
    as_array,
    check_array,
    check_out,
    check_shape,
    from_form,
    is_tree,
    zeros_like,
)
from vcluster.messages.forms import pack, rebuild
from vcluster.tracing import Recorder, Row, Template, collective_template, dtype_name

MakeSteps = Callable[[list[Any]], Generator[Wait, None, tuple[Any, Traffic]]]

KNOWN_CALLS = 1024
"""Calls that a device remembers to have checked."""


class _Told:
    """A call as it is told, of some ranks only or in another order if these are given: written when first asked for."""

    __slots__ = ("_ranks", "_text", "_what")

    def __init__(self, what: object, ranks: tuple[int, ...] | None) -> None:
        self._what = what
        self._ranks = ranks
        self._text = ""

    def __str__(self) -> str:
        if not self._text:
            self._text = str(self._what) + ("" if self._ranks is None else f" of group {list(self._ranks)}")
        return self._text


class Plan:
    """A checked call, kept for when the same is called again with another array."""

    __slots__ = (
        "call", "dtype", "lane", "reduction", "repeated", "result_counts", "template", "times", "traffic", "what",
    )

    def __init__(self, call: Call, reduction: Reduction | None, size: int, *, what: object = None) -> None:
        self.call = call
        self.dtype = None if call.dtype is None else dtype_name(call.dtype)
        self.what = _Told(what or call, None if call.ranks == tuple(range(size)) else call.ranks)
        """What its ``str`` says is told of it while it is under way."""
        self.reduction = reduction
        kind = call.of_kind
        self.result_counts = kind.gets == "all" and not (kind.copies and kind.rooted and call.gives)
        """Whether a program that throws the result away has most likely forgotten it."""
        self.lane: Lane = ("group", group_key(call.ranks))
        self.traffic: Traffic | None = None
        """What this rank sends and receives if everybody calls the very same."""
        self.times = 0
        """How often it was run the long way."""
        self.repeated: Repeated | None = None
        self.template: Template | None = None


    def forget_repeated(self) -> None:
        """Somebody has called something else: it is worth preparing again when that has been repeated."""
        self.repeated = self.template = None
        self.times = 0


class Collectives:
    """Runs the collectives of one device."""

    def __init__(self, endpoint: Endpoint, mesh: Mesh, rank: int, recorder: Recorder, *, by_messages: bool) -> None:
        """``by_messages``: run the direct algorithms as messages, too (the ``queue`` transport)."""
        self.endpoint = endpoint
        self.recorder = recorder
        self.unwaited: dict[int, Pending] = {}
        self.dropped: dict[str, str] = {}
        """Lines that throw away the result of a collective, and which."""
        self._mesh = mesh
        self._rank = rank
        self._by_messages = by_messages
        self._groups: dict[tuple[int, ...], Group] = {}
        self._known: dict[Any, Plan] = {}
        self._version = registry.version()
        """Of the tables of kinds and algorithms that the known calls were checked by."""

    def forget_traffic(self) -> None:
        """Start anew after a failure."""
        self._groups.clear()
        self._known.clear()
        self.unwaited.clear()

    def begin_run(self) -> None:
        """Forget what the last run has dropped, and calls of kinds that may have been replaced since."""
        self.dropped.clear()
        if self._version != registry.version():
            self._version = registry.version()
            self._known.clear()

    def wait_for_all(self) -> None:
        """Finish what nobody waited for."""
        while self.unwaited:
            next(iter(self.unwaited.values())).wait()

    # -- one call -----------------------------------------------------------------------------------------------------

    def run(
        self, kind: str, x: Any, axes: Axes = None, *, groups: Groups | None = None, out: Any = None,
        algorithm: str | None = None, async_op: bool = False, dim: int = 0, concat_dim: int = 0,
        split_sizes: Sequence[int] | None = None, root: int = 0, op: ReduceOp | None = None,
        pairs: Sequence[tuple[int, int]] | None = None, name: str | None = None,
    ) -> Any:
        """Run one collective; see `vcluster.device` for what each means."""
        key = known = None
        plain = groups is None and split_sizes is None and not callable(op)
        if plain and (x is None or type(x) is np.ndarray):
            looks: Any = None
            if x is not None:
                looks = x.dtype, x.shape
            elif type(out) is np.ndarray:  # who gives nothing, and says so what will come
                looks = None, out.dtype, out.shape
            key = kind, axes, looks, algorithm, dim, concat_dim, root, op, pairs, name
            try:
                known = self._known.get(key)
            except TypeError:  # a list somewhere
                key = known = None
            if known is not None:
                repeated = known.repeated
                if repeated is not None and not async_op and not self.endpoint.tasks.lanes:
                    shown = repeated.ready(x, out)
                    if shown is not None:
                        return self._repeat(known, repeated, x, out, shown)
                same: Any = x
                if out is None and (same is None or same.flags.c_contiguous):
                    if known.reduction is not None:
                        same = same.astype(known.reduction.dtype, copy=False)
                    return self._drive(known, partial(self._one, known, x, same, out), name or kind, async_op)
        root, dim, concat_dim = _integer("root", root), _integer("dim", dim), _integer("dim", concat_dim)
        of_kind = kind_of(kind)
        members, axis_names, factors = self._members(of_kind, axes, groups)
        if members is None:
            return self._outside(kind, x, out, async_op)
        position = members.index(self._rank)
        if of_kind.rooted and not 0 <= root < len(members):
            raise ValueError(f"root is a position in the group, 0 to {len(members) - 1}, got {root}")
        base: dict[str, Any] = {
            "ranks": members, "position": position, "axes": axis_names, "algorithm": algorithm, "root": root,
            "pairs": _plain_pairs(pairs),
        }
        if of_kind.elementwise and is_tree(x):
            _no_out(kind, x, out)
            plan = Plan(Call(kind, **base), None, self._mesh.size, what=f"{kind}({type(x).__name__} of arrays)")
            return self._drive(plan, partial(self._reduce_tree, of_kind, x, op, base), name or kind, async_op)
        call, array, reducing = self._call(of_kind, x, op, dim, concat_dim, split_sizes, factors, base)
        if out is not None:
            if is_tree(x):
                _no_out(kind, x, out)
            check_out(call, out, array)
        plan = known or Plan(call, reducing, self._mesh.size)
        if key is not None and known is None:
            if len(self._known) >= KNOWN_CALLS:
                self._known.clear()
            self._known[key] = plan
        return self._drive(plan, partial(self._one, plan, x, array, out), name or kind, async_op, out is not None)

    def _repeat(self, plan: Plan, repeated: Repeated, x: Any, out: Any, shown: Shown) -> Any:
        """Run a call by the short way, if the others call the same as the last time."""
        recorder = self.recorder
        start = recorder.enter()
        try:
            site = call_site(2)
            template = plan.template
            assert template is not None
            if out is None and site.drops_result and plan.result_counts:
                self.dropped.setdefault(site.location, template[1])
            recorder.begins(template[1], site.location)
            try:
                result = repeated.run(x, out, shown)
            except Unlike as unlike:
                plan.forget_repeated()
                steps = partial(self._one, plan, x, x, out, posted=unlike.posted)
                return self._drive(plan, steps, template[1], False, out is not None)
            recorder.add_repeated(template, site.location, start)
            return result
        finally:
            recorder.leave()

    def _drive(self, plan: Plan, steps: MakeSteps, name: str, async_op: bool, has_out: bool = False) -> Any:
        """Run the steps of a call, recorded as one event."""
        recorder, tasks, call = self.recorder, self.endpoint.tasks, plan.call
        start = recorder.enter()
        work = recorder.next_work() if async_op else None
        site = call_site(2)
        if site.drops_result and not has_out and plan.result_counts:
            self.dropped.setdefault(site.location, name)
        event = recorder.add_collective(
            name, call.axes, call.ranks, call.algorithm or "direct", work, site.location, plan.dtype)

        def whole() -> Steps:
            result, told = yield from steps(event)
            recorder.finish_collective(event, told, start)
            return result

        try:
            if work is None:
                return tasks.run(plan.lane, whole(), plan.what)
            pending = self.unwaited[work] = Pending(self, tasks.issue(plan.lane, whole(), plan.what), work, name)
            return pending
        finally:
            recorder.leave()

    def _one(
        self, plan: Plan, x: Any, array: NDArray[Any] | None, out: Any, event: Row, *, posted: Posted | None = None,
    ) -> Generator[Wait, None, tuple[Any, Traffic]]:
        """The result of one call, in the form in which its value was given."""
        call = plan.call
        result, calls = yield from self._carry_out(call, array, out, plan.reduction, event, posted)
        if all(seen is call for seen in calls):  # everybody called the very same
            if plan.traffic is None:
                plan.traffic = traffic(calls, call.ranks, call.position)
            told = plan.traffic
        else:
            told = traffic(calls, call.ranks, call.position)
        plan.times += 1
        if plan.times > 1 and plan.repeated is None and self._is_direct(call) and Repeated.serves(calls):
            group = self._groups[call.ranks]
            plan.repeated = Repeated(self.endpoint, group, calls, plan.reduction, plan.lane, plan.what)
            name = event[1]
            plan.template = collective_template(
                name, call.axes, call.ranks, call.algorithm or "direct", told, plan.dtype)
        if call.of_kind.copies:
            sources = [s for s, t in call.pairs or () if t == call.position] if call.pairs is not None else [call.root]
            if out is None:
                result = from_form(calls[sources[0]].form, result) if sources else zeros_like(x)
        elif isinstance(result, list):  # of an all_scatter: as each was sent
            result = [from_form(seen.form, array) for seen, array in zip(calls, result, strict=True)]
        elif out is None and call.form == SCALAR and isinstance(result, np.ndarray) and result.ndim == 0:
            result = result[()]
        return result, told

    def _reduce_tree(
        self, kind: CollectiveKind, x: Any, op: ReduceOp | None, base: dict[str, Any], event: Row
    ) -> Generator[Wait, None, tuple[Any, Traffic]]:
        """The leaves of each dtype, one after the other in one buffer."""
        arrays = [as_array(kind.name, leaf) for leaf in leaves(x)]
        form = repr(rebuild(x, [(array.dtype.str, array.shape) for array, _ in arrays])).encode()
        reduced: list[Any] = [None] * len(arrays)
        total = Traffic(0, 0, 0, ())
        for dtype in dict.fromkeys(array.dtype for array, _ in arrays):
            indices = [i for i, (array, _) in enumerate(arrays) if array.dtype == dtype]
            buffer = np.concatenate([arrays[i][0].reshape(-1) for i in indices])
            call, converted, reducing = self._call(kind, buffer, op, 0, 0, None, (), base)
            call = replace(call, form=form)
            result, told = yield from self._one(Plan(call, reducing, self._mesh.size), buffer, converted, None, event)
            total = total.plus(told)
            place = 0
            for i in indices:
                array, form = arrays[i]
                reduced[i] = from_form(form, result[place : place + array.size].reshape(array.shape))
                place += array.size
        return rebuild(x, reduced), total

    def _carry_out(
        self, call: Call, x: NDArray[Any] | None, out: NDArray[Any] | None, reducing: Reduction | None,
        event: Row, posted: Posted | None,
    ) -> Generator[Wait, None, tuple[Any, list[Call]]]:
        group = self._groups.get(call.ranks)
        if group is None:
            group = self._groups[call.ranks] = Group(self.endpoint, call.ranks)
        if self._is_direct(call):
            return (yield from run_direct(self.endpoint, group, call, x, out, reducing, posted))
        result, calls = yield from run_stepwise(self.endpoint, group, call, x, reducing, partial(self._child, event))
        if out is not None and result is not None:
            check_shape(call.kind, out, result.shape, result.dtype)
            np.copyto(out, result)
            result = out
        return result, calls

    def _is_direct(self, call: Call) -> bool:
        return call.algorithm in (None, "direct") and not self._by_messages

    def _child(self, parent: Row, kind: str, peer: int, nbytes: int) -> None:
        """A message inside a collective."""
        counted = {"bytes_sent": nbytes, "messages": 1} if kind == "send" else {"bytes_received": nbytes}
        self.recorder.add(kind, "message", None, peer=peer, parent=self.recorder.serial(parent), **counted)

    def _outside(self, kind: str, x: Any, out: Any, async_op: bool) -> Any:
        """A rank in none of the groups: zeros like its x."""
        zeros = zeros_like(x)
        if out is not None:
            if is_tree(x):
                _no_out(kind, x, out)
            check_array(kind, out)
            check_shape(kind, out, np.shape(zeros), zeros.dtype)
            out.fill(0)
            zeros = out
        if not async_op:
            return zeros

        def nothing_to_wait_for() -> Steps:
            yield Wait(lambda: True)
            return zeros

        number = self.recorder.next_work()
        task = self.endpoint.tasks.issue(("outside", number), nothing_to_wait_for(), kind)
        pending = self.unwaited[number] = Pending(self, task, number, kind)
        return pending

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _members(
        self, kind: CollectiveKind, axes: Axes, groups: Groups | None
    ) -> tuple[tuple[int, ...] | None, tuple[str, ...] | None, tuple[int, ...]]:
        """The group, the axes it lies along, and how an extent is split over it; no group for a rank outside."""
        if groups is None:
            names = self._mesh.axes_of(axes)
            return self._mesh.group(self._rank, axes), names, tuple(self._mesh.shape[name] for name in names)
        if axes is not None:
            raise ValueError(f"{kind.name} takes axes or groups, got both: axes={axes!r}, groups={groups!r}")
        seen: set[int] = set()
        mine: tuple[int, ...] | None = None
        for group in groups:
            members = tuple(int(rank) for rank in group)
            for rank in members:
                if not 0 <= rank < self._mesh.size:
                    raise ValueError(f"groups of {self._mesh!r} hold ranks 0 to {self._mesh.size - 1}, got {rank}")
                if rank in seen:
                    raise ValueError(f"rank {rank} is twice in groups={[list(g) for g in groups]}")
                seen.add(rank)
            if self._rank in members:
                mine = members
        if mine is None and not kind.copies:     # a rank in no group gets zeros of a copy
            lists = [list(group) for group in groups]
            raise ValueError(f"rank {self._rank} is in none of groups={lists}, but calls {kind.name}")
        return mine, None, () if mine is None else (len(mine),)

    def _call(
        self, kind: CollectiveKind, x: Any, op: ReduceOp | None, dim: int, concat_dim: int, sizes: Sequence[int] | None,
        factors: tuple[int, ...], base: dict[str, Any],
    ) -> tuple[Call, NDArray[Any] | None, Reduction | None]:
        """The call, its value as a contiguous array (None where it does not count), and how to reduce it."""
        name, position, size = kind.name, base["position"], len(base["ranks"])
        if not kind.is_given_by(position, base["root"]):
            return _checked(Call(name, dim=dim, **base)), None, None
        array, form = pack(x) if kind.copies and is_tree(x) else as_array(name, x)
        reducing = None
        if kind.reduces:
            reducing = reduction("sum" if op is None else op, array.dtype)
            array = array.astype(reducing.dtype, copy=False)
        fields: dict[str, Any] = {"op": None if reducing is None else reducing.name, "form": form}
        if kind.cuts:
            if array.ndim == 0:
                raise ValueError(f"{name} splits its array along a dim, and a 0-d one has none")
            fields["dim"] = _normal_dim(name, dim, array.ndim)
            fields["sizes"] = _pieces(name, array.shape[dim], dim, sizes, factors, size)
            if kind.joins:
                fields["concat_dim"] = _normal_dim(name, concat_dim, array.ndim)
        elif kind.joins:
            fields["dim"] = _normal_dim(name, dim, array.ndim) if array.ndim else 0
        return _checked(Call(name, dtype=array.dtype, shape=array.shape, **fields, **base)), array, reducing


def _checked(call: Call) -> Call:
    call.steps()  # refuses an algorithm, or pairs, that do not apply
    return call


def _normal_dim(kind: str, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(f"{kind} of an array of {ndim} dims has dims {-ndim} to {ndim - 1}, got {dim}")
    return dim % ndim


def _pieces(
    kind: str, extent: int, dim: int, sizes: Sequence[int] | None, factors: tuple[int, ...], size: int
) -> tuple[int, ...]:
    if sizes is None:
        return split_sizes(extent, factors)
    checked = tuple(int(n) for n in sizes)
    if len(checked) != size or min(checked) < 0 or sum(checked) != extent:
        raise ValueError(
            f"{kind} over {size} ranks needs {size} split_sizes that add up to {extent}, the extent of dim {dim}; "
            f"got {list(checked)}"
        )
    return checked


def _integer(name: str, value: Any) -> int:
    """NumPy's integers count as integers."""
    if not hasattr(value, "__index__"):
        raise TypeError(f"{name} is an integer, got {value!r}")
    number: int = value.__index__()
    return number


def _plain_pairs(pairs: Sequence[tuple[int, int]] | None) -> tuple[tuple[int, int], ...] | None:
    return None if pairs is None else tuple((int(source), int(target)) for source, target in pairs)


def _no_out(kind: str, x: Any, out: Any) -> None:
    if out is not None:
        name = type(x).__name__
        raise TypeError(f"{kind} of a {name} of arrays takes no out=; its result is a new {name}")
