"""The collectives of a device, and the one place that chooses how each call is run.

A call with the signature of an earlier call is looked up. Any other call is checked and described as a
`vcluster.collectives.group.Call`. Every way to run a call has the same three methods: ``prepare`` (show this member's
array), ``run`` (meet the other members) and ``finish`` (return the result, in ``out=`` if that is given). These modules
of `vcluster.collectives` define the ways:

    `general`       any direct call, in shared memory
    `by_messages`   the steps of a named algorithm, over channels. With the queue transport, every call
    `prepared`      a direct call that was run before, without its checks: in the slots, or where large arrays lie
    `last_arriver`  the same for a small call of many members

`ways` says which of them a backend has.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial, reduce
from sys import _getframe
from typing import Any

import numpy as np
from numpy import ndarray as _ndarray

from parallelism.algorithms import MPI, kind_of, registry
from parallelism.arrays import Array
from parallelism.collectives import (
    ARRAY,
    SCALAR,
    SCALARS,
    Reduction,
    Traffic,
    TreeBuffers,
    call_fields,
    check_out,
    check_shape,
    checked_array,
    checked_root,
    is_tree,
    members_of,
    plain_pairs,
    refuse_out_of_tree,
)
from parallelism.collectives.call import traffic
from parallelism.dtypes import NUMERIC_KINDS, is_numeric
from parallelism.mesh import Axes, Mesh
from parallelism.operation import Groups, ReduceOp
from vcluster.code import call_site
from vcluster.code.call_sites import NO_SITES, known_sites
from vcluster.collectives.general import General
from vcluster.collectives.group import (
    DESCRIPTION_BYTES,
    Call,
    Calls,
    CheckedCall,
    Group,
    Ranks,
    may_be_prepared,
)
from vcluster.collectives.kept_calls import KeptCalls, RepeatedCalls
from vcluster.collectives.last_arriver import LastArriver
from vcluster.collectives.prepared import Prepared, PreparedCall, PreparedZeroCopy
from vcluster.collectives.thresholds import FEWEST_MEMBERS, INLINE_BYTES
from vcluster.collectives.ways import IN_SHARED_MEMORY, Ways
from vcluster.collectives.zero_copy import is_contiguous
from vcluster.messages import Endpoint, Pending, Steps, Wait, from_form, issue, pack, zeros_like
from vcluster.tracing import Recorder, Row

Members = tuple[Ranks | None, tuple[str, ...] | None, tuple[int, ...]]
Outcome = tuple[Any, Callable[[], Traffic]]
"""The result of a call, and what counts its traffic when the record is read."""
Counted = Generator[Wait, None, Outcome]


def choose_prepared(calls: Calls) -> type[Prepared] | None:
    """The way of a direct call that is repeated, by the calls of all members; None: the general one again."""
    members = len(calls)
    calls = list({id(call): call for call in calls}.values())  # most often all call the same
    givers = [call for call in calls if call.dtype is not None]
    if not may_be_prepared(calls) or any(len(call.description) > DESCRIPTION_BYTES for call in calls):
        return None
    if all(call.nbytes <= INLINE_BYTES for call in givers):
        return LastArriver if members >= FEWEST_MEMBERS else Prepared
    all_large = all(call.nbytes > INLINE_BYTES for call in givers)
    return PreparedZeroCopy if all_large and is_contiguous(givers[0]) else None


class Collectives:
    """Runs the collectives of one device."""

    def __init__(
        self, endpoint: Endpoint, mesh: Mesh, rank: int, recorder: Recorder, ways: Ways | None
    ) -> None:
        """``ways``: how groups meet, and how direct calls are run; None: in shared memory."""
        self.endpoint = endpoint
        self.recorder = recorder
        self.unwaited: dict[int, Pending] = {}
        self.dropped: dict[str, str] = {}
        """The lines that drop the result of a collective, and its name."""
        self._mesh = mesh
        self._lanes, self._threads = endpoint.tasks.lanes, endpoint.threads
        self._rank = rank
        self._ways = ways or IN_SHARED_MEMORY
        self._groups: dict[Ranks, Group] = {}
        self._along: dict[Axes, Members] = {}
        """The group of this rank along axes of the mesh, as `members_of` gives it."""
        self._version = registry.version()
        """The version of the tables of kinds and algorithms by which the kept calls were checked."""
        self._checked: KeptCalls = KeptCalls()
        self._repeated = RepeatedCalls()
        self._misguessed: set[str] = set()
        """The kinds of which members called something else when a call was made for the first time."""

    def forget_traffic(self) -> None:
        """Start anew after a failure."""
        self.forget_groups()
        self.unwaited.clear()

    def forget_groups(self) -> None:
        """Free the slots of all groups. No device is in a run, and each forgets its groups before it makes a call."""
        for group in self._groups.values():
            group.give_back()
        self._groups.clear()
        self._forget_calls()
        self._misguessed.clear()
        self.endpoint.forget_groups()

    def begin_run(self) -> None:
        """Forget the dropped results of the last run, and the calls of kinds that may have been replaced since."""
        self.dropped.clear()
        if self._version != registry.version():
            self._version = registry.version()
            self._forget_calls()

    def _forget_calls(self) -> None:
        self._checked.clear()
        self._repeated.clear()

    def wait_for_all(self) -> None:
        """Finish the asynchronous calls that were not waited for."""
        while self.unwaited:
            next(iter(self.unwaited.values())).wait()
        self.endpoint.tasks.wait_for_threads()

    # -- one call -----------------------------------------------------------------------------------------------------

    def repeated(
        self,
        kind: str,
        x: Any,
        axes: Axes,
        out: Any,
        dim: int = 0,
        root: int = 0,
        op: ReduceOp | None = None,
    ) -> Any:
        """`run` with the common arguments alone: a call that was prepared is found without a look at the rare ones."""
        checked: CheckedCall | None = None
        try:
            if type(x) is _ndarray:
                checked = self._repeated.get((kind, x.dtype, x.shape, axes, dim, root, op))
            elif x is None:
                gets = (out.dtype, out.shape) if type(out) is _ndarray else out
                checked = self._repeated.get((kind, None, gets, axes, dim, root, op))
        except TypeError:  # a list somewhere
            pass
        if checked is not None:
            prepared = checked.prepared
            if prepared is not None and not self._lanes:
                return self._run_prepared(checked, prepared, x, out)
        return self.run(kind, x, axes, out=out, dim=dim, root=root, op=op)

    def run(
        self,
        kind: str,
        x: Any,
        axes: Axes = None,
        *,
        groups: Groups | None = None,
        out: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        dim: int = 0,
        concat_dim: int = 0,
        split_sizes: Sequence[int] | None = None,
        root: int = 0,
        op: ReduceOp | None = None,
        pairs: Sequence[tuple[int, int]] | None = None,
        name: str | None = None,
    ) -> Any:
        """Run one collective; see `vcluster.device` for what each argument means."""
        key: Any = None
        checked: CheckedCall | None = None
        x_type = type(x)
        if (
            groups is None
            and split_sizes is None
            and not callable(op)
            and (
                x_type is np.ndarray
                or x is None
                or (x_type in SCALARS and (x_type is not int or -(1 << 63) <= x < 1 << 63))
            )
        ):
            if x_type is np.ndarray:
                key = kind, axes, x.dtype, x.shape, algorithm, dim, concat_dim, root, op, pairs, name
            elif x is None and type(out) is np.ndarray:
                gets = out.dtype, out.shape  # a member that gives nothing is known by what it gets
                key = kind, axes, gets, None, algorithm, dim, concat_dim, root, op, pairs, name
            else:
                key = kind, axes, x_type, None, algorithm, dim, concat_dim, root, op, pairs, name
            try:
                checked = self._checked.get(key)
            except TypeError:  # a list somewhere
                key = None
        if checked is not None:
            if checked.calls:
                self._prepare(checked)
            if checked.prepared is not None and not async_op and not self._lanes:
                if algorithm is None and concat_dim == 0 and pairs is None and name is None:
                    self._repeated.keep(checked, kind, x, axes, out, dim, root, op)
                return self._run_prepared(checked, checked.prepared, x, out)
            return self._run_checked(checked, x, checked.array_of(x), out, name or kind, async_op)
        members, axis_names, factors = self._members(kind, axes, groups)
        if members is None:
            return self._outside(kind, x, out, async_op)
        base = self._base(kind, members, axis_names, algorithm, root, pairs)
        return self._run_new(
            key, kind, x, op, dim, concat_dim, split_sizes, factors, base, out, name, async_op
        )

    def _base(
        self,
        kind: str,
        members: Ranks,
        axis_names: tuple[str, ...] | None,
        algorithm: str | None,
        root: int,
        pairs: Sequence[tuple[int, int]] | None,
    ) -> dict[str, Any]:
        """The fields of a call that do not depend on its array."""
        return {
            "ranks": members,
            "position": members.index(self._rank),
            "axes": axis_names,
            "algorithm": algorithm,
            "root": checked_root(kind, root, len(members)),
            "pairs": plain_pairs(pairs),
        }

    def _run_new(
        self,
        key: Any,
        kind: str,
        x: Any,
        op: ReduceOp | None,
        dim: int,
        concat_dim: int,
        sizes: Sequence[int] | None,
        factors: Sequence[int],
        base: dict[str, Any],
        out: Any,
        name: str | None,
        async_op: bool,
    ) -> Any:
        """Check a call, run it, and keep it by its key if it has one; see `described` for the arguments."""
        if key is None and is_tree(x) and kind_of(kind).elementwise:
            refuse_out_of_tree(kind, x, out)
            text = f"{kind}({type(x).__name__} of arrays)"
            checked = CheckedCall(Call(kind, **base), None, self._mesh.size, text=text)
            return self._drive(checked, partial(self._reduce_tree, kind, x, op, base), name or kind, async_op)
        call, array, reducing = described(self._ways, kind, x, op, dim, concat_dim, sizes, factors, base)
        checked = CheckedCall(call, reducing, self._mesh.size, name=name or kind)
        if key is not None:
            self._checked.keep(key, checked)
            if not async_op and self._guesses(checked) and checked.prepared is not None:
                try:
                    return self._run_prepared(
                        checked, checked.prepared, x if type(x) is np.ndarray else array, out
                    )
                finally:
                    checked.guessed = False
        return self._run_checked(checked, x, array, out, name or kind, async_op)

    def _guesses(self, checked: CheckedCall) -> bool:
        """Whether a call that is made for the first time is prepared for members that call the same.

        The group must have met before.  Where only the root gives an array, the others do not know its shape.
        """
        call, group = checked.call, self._groups.get(checked.call.ranks)
        if (
            group is None
            or not group.has_met
            or call.of_kind.gives == "root"
            or call.algorithm not in (None, "direct")
            or call.kind in self._misguessed
            or group.ways.direct is not General
            or self._lanes
        ):
            return False
        checked.calls = [call] * call.size
        self._prepare(checked)
        checked.guessed = checked.prepared is not None
        return checked.guessed

    def _run_prepared(self, checked: CheckedCall, prepared: PreparedCall, x: Any, out: Any) -> Any:
        """Run a call by the fast path, if its arrays allow it and the other members call the same as the last time."""
        recorder, template = self.recorder, checked.template
        frame = _getframe(3)  # most often the kernel's, and known
        site = known_sites.get(id(frame.f_code), NO_SITES).get(frame.f_lasti) or call_site(2)
        location, _, drops_result = site
        if drops_result and out is None and checked.warns:
            self.dropped.setdefault(location, checked.name)
        start = recorder.enter(checked.name, location)
        try:
            if self._threads.many or not prepared.prepare(x, out):
                template = None
                result = self._run_checked(checked, x, checked.array_of(x), out, checked.name, False)
            elif prepared.run():
                result = prepared.finish(out)
            else:
                template = None
                result = self._go_on(checked, prepared, x, out)
        except BaseException as error:
            recorder.leave(type(error), error)
            raise
        recorder.leave_repeated(template, location, start)
        return result

    def _go_on(self, checked: CheckedCall, prepared: PreparedCall, x: Any, out: Any) -> Any:
        """Another member calls something else than the last time: the general way goes on with what was posted."""
        checked.prepared, checked.surprised = (
            None,
            not checked.guessed,
        )  # prepare when the new call is repeated
        if checked.guessed:
            self._misguessed.add(checked.call.kind)
        steps = partial(self._steps, checked, x, x, out, posted=prepared)
        return self._drive(checked, steps, checked.name, False, out)

    def _run_checked(
        self, checked: CheckedCall, x: Any, array: Array | None, out: Any, name: str, async_op: bool
    ) -> Any:
        """Run a call by the general way, or by messages."""
        if out is not None:
            refuse_out_of_tree(checked.call.kind, x, out)
            seen = array if array is None or array.flags.c_contiguous else np.empty(0, array.dtype)
            check_out(
                checked.call, checked.call.position, out, seen
            )  # out= may overlap what is copied anyway
        return self._drive(checked, partial(self._steps, checked, x, array, out), name, async_op, out)

    def _drive(
        self,
        checked: CheckedCall,
        steps: Callable[[Row], Counted],
        name: str,
        async_op: bool,
        out: Any = None,
    ) -> Any:
        """Run the steps of a call, recorded as one event."""
        recorder, tasks, call = self.recorder, self.endpoint.tasks, checked.call
        with recorder as start:
            work = recorder.next_work() if async_op else None
            site = call_site(2)
            if out is None and site.drops_result and checked.warns:
                self.dropped.setdefault(site.location, name)
            event = recorder.add_collective(
                name, call.axes, call.ranks, call.algorithm or "direct", work, site.location, checked.dtype
            )

            def whole() -> Steps:
                result, traffic_of = yield from steps(event)
                recorder.finish_collective(event, traffic_of, start)
                return result

            if work is None:
                result = tasks.run(checked.lane, whole(), checked)
                recorder.end_among_others(event, name)
                return result
            return issue(self, checked.lane, whole(), checked, work, name, site.location)

    def _steps(
        self,
        checked: CheckedCall,
        x: Any,
        array: Array | None,
        out: Any,
        event: Row,
        *,
        posted: PreparedCall | None = None,
    ) -> Counted:
        """Run a checked call, or go on with what a prepared one posted; the result has the form of the value."""
        call, endpoint = checked.call, self.endpoint
        group = self._groups.get(call.ranks)
        if group is None:
            group = self._groups[call.ranks] = self._ways.meet(endpoint, call.ranks)
        way_type = group.ways.of(call.kind, call.algorithm)
        way = way_type(endpoint, group, call, checked.reduction, partial(self._add_message, event))
        if posted is None:
            way.prepare(array, out)
        else:
            way.go_on(posted, array, out)
        calls = yield from way.run()
        result = yield from way.finish(out)
        count_traffic = partial(traffic, tuple(calls), call.ranks, call.position)
        if way_type is group.ways.direct and checked.prepared is None:
            checked.calls, checked.surprised = () if checked.surprised else calls, False
        if out is None:
            result = _as_given(call, calls, x, result)
        return result, count_traffic

    def _prepare(self, checked: CheckedCall) -> None:
        """Prepare a call that is repeated."""
        call, calls = checked.call, checked.calls
        checked.calls = ()
        group = self._groups[call.ranks]
        way = (group.ways.prepared or choose_prepared)(calls)
        if way is not None:
            checked.prepared = way(self.endpoint, group, calls, checked.reduction, checked.lane, checked)
            checked.template = self.recorder.collective_template(
                checked.name,
                call.axes,
                call.ranks,
                call.algorithm or "direct",
                checked.dtype,
                partial(traffic, tuple(calls), call.ranks, call.position),
            )

    def _members(self, kind: str, axes: Axes, groups: Groups | None) -> Members:
        if groups is not None:
            return members_of(self._mesh, self._rank, kind, axes, groups)
        found = (
            self._along.get(axes) if axes.__hash__ is not None else None
        )  # a list is refused with the right words
        if found is None:
            found = self._along[axes] = members_of(self._mesh, self._rank, kind, axes, None)
        return found

    def _reduce_tree(
        self, kind: str, x: Any, op: ReduceOp | None, base: dict[str, Any], event: Row
    ) -> Counted:
        """The leaves of each dtype, one after the other in one buffer."""
        buffers, counts = TreeBuffers(x), []
        for numbers in buffers.by_dtype.values():
            buffer = buffers.buffer(numbers)
            call, converted, reducing = described(self._ways, kind, buffer, op, 0, 0, None, (), base)
            checked = CheckedCall(replace(call, form=buffers.form), reducing, self._mesh.size)
            result, count_traffic = yield from self._steps(checked, buffer, converted, None, event)
            counts.append(count_traffic)
            buffers.put(numbers, result)
        return buffers.tree(), lambda: reduce(
            Traffic.plus, (count() for count in counts), Traffic(0, 0, 0, ())
        )

    def _add_message(self, parent: Row, kind: str, peer: int, nbytes: int) -> None:
        """Record a message inside a collective."""
        counted = {"bytes_sent": nbytes, "messages": 1} if kind == "send" else {"bytes_received": nbytes}
        self.recorder.add(kind, "message", None, peer=peer, parent=self.recorder.serial(parent), **counted)

    def _outside(self, kind: str, x: Any, out: Any, async_op: bool) -> Any:
        """The result of a rank in none of the groups: zeros like its x."""
        zeros = zeros_like(x)
        if out is not None:
            refuse_out_of_tree(kind, x, out)
            check_shape(kind, out, np.shape(zeros), zeros.dtype)
            out.fill(0)
            zeros = out
        if not async_op:
            return zeros

        def nothing_to_wait_for() -> Steps:
            yield from ()
            return zeros

        work = self.recorder.next_work()
        return issue(self, ("outside", work), nothing_to_wait_for(), kind, work, kind)


def described(
    ways: Ways,
    kind: str,
    x: Any,
    op: ReduceOp | None,
    dim: int,
    concat_dim: int,
    sizes: Sequence[int] | None,
    factors: Sequence[int],
    base: dict[str, Any],
) -> tuple[Call, Array | None, Reduction | None]:
    """The checked call, its value as an array (None where it does not count), and how to reduce it.

    ``base`` holds the fields of the call that do not depend on the value. ``ValueError`` or ``TypeError`` for wrong
    arguments, before anything is sent.
    """
    fields, array, reducing = call_fields(
        kind,
        x,
        op,
        dim,
        concat_dim,
        sizes,
        factors,
        base["root"],
        base["position"],
        len(base["ranks"]),
        _to_array,
    )
    call = Call(kind, **fields, **base)
    if call.algorithm is not None or call.pairs is not None:
        call.over(call.size)  # refuses an algorithm, or pairs, that do not apply
    if call.algorithm == MPI:
        ways.check_library(call, reducing)
    return call, array, reducing


def _to_array(kind: str, x: Any) -> tuple[Array, bytes]:
    """A value as an array, and its form."""
    if type(x) is np.ndarray and (x.dtype.kind in NUMERIC_KINDS or is_numeric(x.dtype)):
        return x, ARRAY
    return pack(x) if kind_of(kind).copies and is_tree(x) else checked_array(kind, x)


def _as_given(call: Call, calls: Calls, x: Any, result: Any) -> Any:
    """A result in the form in which its value was given."""
    if call.of_kind.copies:
        sources = call.of_kind.sources_of(call.position, call.size, call.root, call.pairs)
        return from_form(calls[sources[0]].form, result) if sources else zeros_like(x)
    if isinstance(result, list):
        return [from_form(other.form, array) for other, array in zip(calls, result, strict=True)]
    is_scalar = call.form == SCALAR and isinstance(result, np.ndarray) and result.ndim == 0
    return result[()] if is_scalar else result
