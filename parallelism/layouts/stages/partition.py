"""A program and its gradient, cut into stages: which ops are whose, and which values pass between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

from parallelism.ir import Function, Op, Value
from parallelism.layouts.stages.backwards import with_backward
from parallelism.layouts.stages.cuts import balanced, begun_by
from parallelism.layouts.stages.microbatches import batch_dim, microbatched
from parallelism.layouts.stages.stages import StageFunctions, Stages

Cost = Callable[[Op], Any]


def flops(op: Op) -> Any:
    """What an op costs, if nothing else is said."""
    return op.flops


def partition(
    function: Function, stages: int | Sequence[str], *, batch: str = "B", trained: Collection[str] | None = None,
    recompute: bool | Collection[int] = False, cost: Cost = flops, sizes: Mapping[str, int] | None = None,
) -> Stages:
    """Cut a loss into stages, each with its part of the forward and of the backward.

    ``function`` returns the loss alone, a single floating-point number that is a sum over the rows of a batch, or a
    mean of them; ``batch`` is the symbol for their number.  The stages are for one microbatch: see `microbatched`,
    which also tells what cannot be cut.  Inputs without rows are weights; ``trained`` are those to differentiate by,
    all that are floating-point if not given.

    ``stages`` are names of values or regions, each the beginning of a stage but the first; or a number of stages, of
    which the largest costs as little as can be, and of these cuts the one that sends fewest bytes: ``cost(op)`` is that
    of the forward, in numbers; ``sizes`` are what symbols stand for while costs are compared, one row if the batch is
    not among them.

    - An op stays where it is in the order of the program.  What depends on no data (constants, masks, what is made of
      weights alone) is made in every stage that uses it.
    - A value that is used after the next stage passes through those between, as part of their messages, and so does its
      gradient, added up on the way.
    - Data is dealt to the stages that read it, and passes through none.
    - A weight that several stages read has a copy in each, and their gradients are added up in the end.

    A stage keeps of its forward just what its backward reads; constants and views are made again.  Stages in
    ``recompute`` (True: all) keep their inputs alone.

    ``ValueError`` for a function, a batch or names that do not fit, and for more stages than ops that depend on data.
    """
    if len(function.outputs) != 1 or function.outputs[0].type.shape or function.outputs[0].type.dtype.kind != "f":
        told = ", ".join(str(value.type) for value in function.outputs) or "nothing"
        raise ValueError(f"what is cut into stages returns a loss, one floating-point number; @{function.name} returns "
                         f"{told}")
    if isinstance(stages, str):
        raise TypeError(f"stages are a number, or the names that they begin with, in a list; got {stages!r}")
    whole = microbatched(function, batch)
    program = _Program(whole, batch, trained)
    if isinstance(stages, int):
        one = {batch: 1, f"{batch}_whole": 1, f"{batch}_first": 0}
        cuts = program.balanced_cuts(stages, cost, {**one, **(sizes or {})})
    else:
        cuts = begun_by(stages, [program.names(op) for op in program.chain], f"@{function.name}")
    again = range(len(cuts) + 1) if recompute is True else recompute or ()
    if not set(again) <= set(range(len(cuts) + 1)):
        raise ValueError(f"stages 0 to {len(cuts)} can be recomputed, got {sorted(again)}")
    edges = [0, *cuts, len(program.chain)]
    found = [program.stage(i, edges[i], edges[i + 1], recompute=i in again) for i in range(len(edges) - 1)]
    return Stages(whole, tuple(found), batch)


class _Program:
    """What is known of a program before it is cut: the chain of ops that depend on data is what can be."""

    def __init__(self, function: Function, batch: str, trained: Collection[str] | None) -> None:
        self.function = function
        self.order = {value: place for place, value in enumerate(function.values)}
        self.data = [value for value in function.inputs if batch_dim(value.type, batch) is not None]
        self.weights = [value for value in function.inputs if value not in self.data]
        self.trained = _trained(function, self.weights, trained)
        varying = _reached(function, self.data)
        self.chain = [op for op in function.ops if not varying.isdisjoint(op.inputs)]
        self.learning = _reached(function, self.trained, "f")
        """What the trained weights have made, and has a gradient: nothing that came by whole numbers."""
        self.made = {value: place for place, op in enumerate(self.chain) for value in op.outputs}
        self.used = {value: place for place, op in enumerate(self.chain) for value in op.inputs}
        self.used.update(dict.fromkeys(function.outputs, len(self.chain)))

    def names(self, op: Op) -> set[str]:
        """What a stage that begins with this op may be said to begin with."""
        path = op.region.split(".") if op.region else []
        return {value.name for value in op.outputs} | {".".join(path[:n + 1]) for n in range(len(path))}

    def crossing(self, place: int) -> tuple[Value, ...]:
        """The values made before a place of the chain and used from there on, in the order of a message."""
        found = [v for v, made in self.made.items() if made < place <= self.used.get(v, -1)]
        return tuple(sorted(found, key=lambda v: (-v.type.dtype.itemsize, self.order[v])))

    def balanced_cuts(self, stages: int, cost: Cost, sizes: Mapping[str, int]) -> tuple[int, ...]:
        needed = {name: sizes[name] for name in self.function.symbols & sizes.keys()}
        priced = self.function.specialize(**needed) if needed else self.function
        if priced.symbols:
            raise ValueError(f"to compare what the ops of @{priced.name} cost, sizes must tell "
                             f"{', '.join(sorted(priced.symbols))}")
        chain = set(self.chain)
        ops = [op for op, plain in zip(priced.ops, self.function.ops, strict=True) if plain in chain]
        changes = [0] * (len(self.chain) + 2)
        for was, value in zip(self.function.values, priced.values, strict=True):
            if was in self.made:
                nbytes = int(value.type.nbytes) * (1 + (was in self.learning))
                changes[self.made[was] + 1] += nbytes
                changes[self.used.get(was, self.made[was]) + 1] -= nbytes
        sent = [*accumulate(changes)][:len(self.chain)]
        return balanced([cost(op) for op in ops], stages, sent)

    def stage(self, number: int, start: int, end: int, *, recompute: bool) -> StageFunctions:
        """The functions of the ops of the chain from ``start`` to ``end``."""
        received, last = self.crossing(start), end == len(self.chain)
        sent = self.function.outputs if last else self.crossing(end)
        chain = {value for op in self.chain[start:end] for value in op.outputs}
        ops = _needed(self.function.ops, sent, chain, set(self.made))
        read = {value for op in ops for value in op.inputs}
        data = [value for value in self.data if value in read]
        weights = [value for value in self.weights if value in read]
        forward = Function(f"{self.function.name}.{number}", (*received, *data, *weights), tuple(ops), sent)
        trained = [value for value in weights if value in self.trained]
        return with_backward(forward, received, data, weights, trained, self.learning, recompute=recompute)


def _trained(function: Function, weights: Sequence[Value], names: Collection[str] | None) -> list[Value]:
    floating = [value for value in weights if value.type.dtype.kind == "f"]
    if names is None:
        return floating
    known = {value.name for value in floating}
    if isinstance(names, str) or (unknown := sorted(set(names) - known)):
        told = repr(names) if isinstance(names, str) else ", ".join(unknown)
        raise ValueError(f"what is trained are floating-point inputs of @{function.name} without rows "
                         f"({', '.join(sorted(known)) or 'none'}), not {told}")
    return [value for value in floating if value.name in names]


def _reached(function: Function, start: Collection[Value], kinds: str = "fiub") -> set[Value]:
    """The values that change with these, by way of values whose dtypes are of these kinds."""
    found = set(start)
    for op in function.ops:
        if not found.isdisjoint(op.inputs):
            found.update(value for value in op.outputs if value.type.dtype.kind in kinds)
    return found


def _needed(ops: Sequence[Op], wanted: Collection[Value], own: set[Value], chain: set[Value]) -> list[Op]:
    """The ops that make ``wanted``: of the chain only the stage's own."""
    needed, kept = set(wanted), []
    for op in reversed(ops):
        if not needed.isdisjoint(op.outputs) and (chain.isdisjoint(op.outputs) or not own.isdisjoint(op.outputs)):
            needed.update(op.inputs)
            kept.append(op)
    return kept[::-1]
