"""Partition of a program and its gradient into pipeline stages."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from parallelism.dtypes import is_floating
from parallelism.ir import Function, Op, Value
from parallelism.ir.core.derived import specialized_ops
from parallelism.ir.passes import Form, Renaming
from parallelism.ir.passes.gradients import rounded_values
from parallelism.layouts.stages.backwards import Rewriting, needed_ops, with_backward
from parallelism.layouts.stages.beginnings import by_rows
from parallelism.layouts.stages.cuts import balanced, begun_by
from parallelism.layouts.stages.microbatches import batch_dim, has_rows
from parallelism.layouts.stages.stages import StageFunctions, Stages

Cost = Callable[[Op], Any]


def flops(op: Op) -> Any:
    """The default cost of an op: its floating-point operations."""
    return op.flops


def partition(
    function: Function,
    stages: int | Sequence[str],
    *,
    batch: str = "B",
    trained: Collection[str] | None = None,
    recompute: bool | Collection[int] = False,
    cost: Cost = flops,
    sizes: Mapping[str, int] | None = None,
    rewritten: Rewriting | None = None,
) -> Stages:
    """Cut a loss into stages.  Each stage gets its part of the forward and of the backward.

    ``function`` returns the loss first: a single floating-point number that is a sum or a mean over the rows of a batch,
    or such a sum divided by a number that depends on data alone (`parallelism.layouts.stages.beginnings`).
    Further outputs are metrics: sums over the rows, or what is computed from such sums.
    ``batch`` is the symbol for the number of rows.  The stages work on one microbatch; `microbatched` says which
    functions cannot be cut.  Inputs without rows are weights.  ``trained`` names the weights to differentiate by; None
    means all floating-point ones.

    ``stages`` is a list of names of values or regions, at which each stage after the first begins, or a number of
    stages.  Given a number, the cuts minimize the cost of the largest stage, and among such cuts the bytes that are
    sent.  ``cost(op)`` is the cost of an op of the forward, as a number.  ``sizes`` holds values for the symbols while
    costs are compared; the batch has one row if ``sizes`` does not name it.

    - Ops keep the order of the program.  Ops that depend on no data (constants, masks, functions of weights only) are
      repeated in every stage that uses them.
    - A value that is used after the next stage passes through the stages between as part of their messages.  So does
      its gradient, which is summed on the way.
    - Data is given to the stages that read it, and passes through none.
    - A weight that several stages read has a copy in each; its gradients are summed at the end.
    - The first stage has the trained weights that nothing depends on.  Their gradients are zero.

    A stage keeps only those values of its forward that its backward reads; constants and views are computed again.
    Stages in ``recompute`` (True: all) keep only their inputs.  ``rewritten`` changes the backward of each stage.

    ``ValueError`` for a function, a batch or names that do not fit, and for more stages than ops that depend on data.
    """
    if (
        not function.outputs
        or function.outputs[0].type.shape
        or not is_floating(function.outputs[0].type.dtype)
    ):
        returned = ", ".join(str(value.type) for value in function.outputs) or "nothing"
        raise ValueError(
            f"a function that is cut into stages must return one floating-point number first, a loss; "
            f"@{function.name} returns {returned}"
        )
    if isinstance(stages, str):
        raise TypeError(
            f"stages must be a number, or a list of the names at which stages begin, got {stages!r}"
        )
    weights = [value for value in function.inputs if not has_rows(value, batch)]
    learning = [value.name for value in _trained(function, weights, trained)]
    cut = by_rows(function, batch, learning)
    program = _Program(cut.function, batch, learning, rewritten)
    if isinstance(stages, int):
        one = {batch: 1, f"{batch}_whole": 1, f"{batch}_first": 0}
        cuts = program.balanced_cuts(stages, cost, {**one, **(sizes or {})})
    else:
        cuts = begun_by(stages, [program.names(op) for op in program.chain], f"@{function.name}")
    again = range(len(cuts) + 1) if recompute is True else recompute or ()
    if not set(again) <= set(range(len(cuts) + 1)):
        raise ValueError(f"recompute must name stages 0 to {len(cuts)}, got {sorted(again)}")
    edges = pairwise([0, *cuts, len(program.chain)])
    functions = (program.stage(i, start, end, recompute=i in again) for i, (start, end) in enumerate(edges))
    return Stages(cut.function, tuple(functions), batch, cut.beginning, cut.ending, cut.results)


class _Program:
    """A program before it is cut.  Cuts are possible along the chain of ops that depend on data."""

    def __init__(
        self, function: Function, batch: str, trained: Collection[str], rewritten: Rewriting | None
    ) -> None:
        self.function, self.rewritten = function, rewritten
        self.order = {value: place for place, value in enumerate(function.values)}
        self.data = [value for value in function.inputs if batch_dim(value.type, batch) is not None]
        self.weights = [value for value in function.inputs if value not in self.data]
        self.trained = {value for value in self.weights if value.name in trained}
        varying = _reached(function, self.data)
        self.places = [place for place, op in enumerate(function.ops) if not varying.isdisjoint(op.inputs)]
        """Where the ops of the chain stand in the function."""
        self.repeated = sorted({*range(len(function.ops))} - {*self.places})
        """Where the ops stand that depend on no data."""
        self.chain = [function.ops[place] for place in self.places]
        self.loss = function.outputs[0]
        self.learning = _reached(
            function, self.trained, is_floating, lambda op: op.operator.gradient == "passes"
        )
        """The floating-point values that depend on trained weights, and so have a gradient."""
        if len(function.outputs) > 1:
            of_loss = needed_ops(function.ops, [self.loss])
            self.learning &= {value for op in of_loss for value in (*op.inputs, *op.outputs)}
        read = {value for op in needed_ops(function.ops, function.outputs) for value in op.inputs}
        self.unread = self.trained - read
        """The weights that nothing depends on.  The first stage has them, with a gradient of zero."""
        self.defined = {value: place for place, op in enumerate(self.chain) for value in op.outputs}
        self.used = {value: place for place, op in enumerate(self.chain) for value in op.inputs}
        self.used.update(dict.fromkeys(function.outputs, len(self.chain)))
        self.rounded = rounded_values(function)
        self.stages: dict[Form, StageFunctions] = {}
        """The first stage of each form; others of the form are this one under other names."""

    def names(self, op: Op) -> set[str]:
        """The names by which a stage that begins with this op can be given: its outputs and its regions."""
        path = op.region.split(".") if op.region else []
        return {value.name for value in op.outputs} | {".".join(path[: n + 1]) for n in range(len(path))}

    def crossing(self, place: int) -> tuple[Value, ...]:
        """The values computed before a position of the chain and used from there on, in the order of a message."""
        return tuple(sorted(self.alive[place], key=lambda v: (-v.type.dtype.itemsize, self.order[v])))

    @cached_property
    def alive(self) -> list[list[Value]]:
        """For each position of the chain, the values computed before it and used from there on."""
        alive: list[list[Value]] = [[] for _ in range(len(self.chain) + 1)]
        for value, defined in self.defined.items():
            for place in range(defined + 1, self.used.get(value, -1) + 1):
                alive[place].append(value)
        return alive

    def balanced_cuts(self, stages: int, cost: Cost, sizes: Mapping[str, int]) -> tuple[int, ...]:
        needed = {name: sizes[name] for name in self.function.symbols & sizes.keys()}
        if missing := self.function.symbols - needed.keys():
            raise ValueError(
                f"the costs of the ops of @{self.function.name} can be compared only with numbers: give "
                f"sizes for {', '.join(sorted(missing))}"
            )
        types = {value.type for value in self.defined}
        sizes_of = {type: int(type.specialize(needed).nbytes) for type in types}
        changes = [0] * (len(self.chain) + 2)
        for value, defined in self.defined.items():
            nbytes = sizes_of[value.type] * (1 + (value in self.learning))
            changes[defined + 1] += nbytes
            changes[self.used.get(value, defined) + 1] -= nbytes
        sent = [*accumulate(changes)][: len(self.chain)]
        places = [place for place in range(len(self.chain)) if self.rounded.isdisjoint(self.alive[place])]
        ends = [*places[1:], len(self.chain)]
        costs = self._costs(cost, needed)
        grouped = [sum(costs[start:end]) for start, end in zip(places, ends, strict=True)]
        cuts = balanced(grouped, stages, [sent[place] for place in places])
        return tuple(places[cut] for cut in cuts)

    def _costs(self, cost: Cost, numbers: Mapping[str, int]) -> list[Any]:
        """The costs of the ops of the chain.  Flops are counted once for ops that differ in names alone."""
        if cost is not flops:
            priced = self.function.specialize(**numbers) if numbers else self.function
            return [cost(priced.ops[place]) for place in self.places]
        keys = [(op.kind, op.types, op.attributes) for op in self.chain]
        different = dict(zip(reversed(keys), reversed(self.chain), strict=True))
        alone = specialized_ops(different.values(), numbers)
        costs = {key: cost(op) for key, op in zip(different, alone, strict=True)}
        return [costs[key] for key in keys]

    def stage(self, number: int, start: int, end: int, *, recompute: bool) -> StageFunctions:
        """The functions of the ops of the chain from ``start`` to ``end``."""
        received, last = self.crossing(start), end == len(self.chain)
        if rounded := self.rounded.intersection(received):
            raise ValueError(
                f"stage {number} of @{self.function.name} begins between {next(iter(rounded))}, which is in 8 bits, and its "
                f"product; a stage begins before an operand is quantized: {self.chain[start]}"
            )
        sent = self.function.outputs if last else self.crossing(end)
        own = sorted((*self.places[start:end], *self.repeated))
        ops = needed_ops([self.function.ops[place] for place in own], sent)
        read = {value for op in ops for value in op.inputs}
        data = [value for value in self.data if value in read]
        weights = [value for value in self.weights if value in read or (value in self.unread and not start)]
        forward = Function(f"{self.function.name}.{number}", (*received, *data, *weights), tuple(ops), sent)
        trained = [value for value in weights if value in self.trained]
        are_trained = {*trained}
        form = Form(
            [forward],
            more=(
                len(received),
                len(data),
                recompute,
                *(value in are_trained for value in weights),
                *(value in self.learning for value in forward.values),
                self._marks(forward),
            ),
        )
        if (first := self.stages.get(form)) is not None:
            with suppress(ValueError):
                forwards = [replace(first.forward, outputs=first.forward.outputs[: len(sent)])], [forward]
                return first.renamed(Renaming.between(*forwards), forward.name)
        made = with_backward(
            forward,
            received,
            data,
            weights,
            trained,
            self.learning,
            [self.loss] if last else sent,
            recompute=recompute,
            rewritten=self.rewritten,
        )
        return self.stages.setdefault(form, made)

    def _marks(self, forward: Function) -> tuple[int, ...]:
        """The marks of the ops, numbered in order; of functions with equal numbers the backwards are changed alike."""
        numbers: dict[str | None, int] = {None: 0}
        marks = [self.rewritten.mark(op) for op in forward.ops] if self.rewritten else []
        return tuple([numbers.setdefault(mark, len(numbers)) for mark in marks])


def _trained(function: Function, weights: Sequence[Value], names: Collection[str] | None) -> list[Value]:
    floating = [value for value in weights if is_floating(value.type.dtype)]
    if names is None:
        return floating
    known = {value.name for value in floating}
    if isinstance(names, str) or (unknown := sorted(set(names) - known)):
        given = repr(names) if isinstance(names, str) else ", ".join(unknown)
        raise ValueError(
            f"trained must name floating-point inputs of @{function.name} without rows "
            f"({', '.join(sorted(known)) or 'none'}), got {given}"
        )
    return [value for value in floating if value.name in names]


def _reached(
    function: Function,
    start: Collection[Value],
    passes: Callable[[Any], bool] = lambda dtype: True,
    through: Callable[[Op], bool] = lambda op: True,
) -> set[Value]:
    """The values that depend on these through ops that are passed through and values whose dtypes pass."""
    reached = set(start)
    for op in function.ops:
        if through(op) and not reached.isdisjoint(op.inputs):
            reached.update(value for value in op.outputs if passes(value.type.dtype))
    return reached
