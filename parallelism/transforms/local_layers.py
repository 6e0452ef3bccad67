"""Local losses: each region learns from a loss of its own, and no gradient passes from one region to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set as Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from parallelism.dtypes import is_floating
from parallelism.ir.core import Builder, Extent, Function, Op, TensorType, Value
from parallelism.ir.core.region_patterns import matching, patterns
from parallelism.ir.core.regions import each, inside
from parallelism.ir.passes.gradients import GRADIENT
from parallelism.ir.tracing import apply
from parallelism.ir.tracing.current import recording
from parallelism.ir.tracing.tracing import Traced
from parallelism.transforms.parts import NEXT, UPDATE, Parts, needed, with_last_named
from parallelism.transforms.training import MAIN
from parallelism.transforms.words import word

HEAD = "local"
"""The name of what a region needs for its own loss: the region ``block.0.local`` and the weight ``p.local.block.0``."""


@dataclass(frozen=True)
class LocalLayers:
    """Each region that matches learns from a loss of its own; no gradient leaves it.

    A region but the last one gets a linear head, which is trained with it: from the result of the region, averaged over
    dims that the model's prediction does not have, it predicts what the model predicts, and the loss of the model is
    taken of that.  Later regions read the result without passing a gradient back.  The last region learns from the
    loss of the model, as does what comes after it; what comes before a region learns with it.  A term of the loss that
    is computed from what a region makes, but without the batch, is a loss of that region, such as one that balances
    its experts.  The heads are the auxiliary classifiers of Belilovsky et al., *Decoupled Greedy Learning of CNNs*,
    2019, arXiv:1901.08164, section 3, with one linear layer, and have the prediction loss of Nøkland and Eidnes,
    *Training Neural Networks with Local Error Signals*, 2019, arXiv:1901.06656, section 2.1.

    The program returns the sum of all losses.  It has a weight more for each region but the last, ``p.local.block.0``
    for ``block.0``, and its state in the optimizer, updated as the first parameter is.  With a `Pipeline` whose stages
    begin at regions, no gradient is sent from stage to stage, so the schedule ``local`` fits, too.

    ``ValueError`` for a pattern that no region matches, for fewer than two regions, for a region with several results
    or a model with several predictions, for an update that clips all gradients together, and for a program that has
    layouts or local losses already.
    """

    regions: str | Sequence[str]
    phase: ClassVar[int] = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "regions", patterns(self.regions, type(self).__name__))
        if not self.regions:
            raise ValueError("LocalLayers needs the patterns of regions, such as block.*")

    def __call__(self, function: Function) -> Function:
        parts = Parts.of(function)
        self._check_first(parts)
        paths = [*dict.fromkeys(matching(parts.forward, self.regions, f"{self}").values())]
        if len(paths) < 2:
            raise ValueError(
                f"{self}: only {paths[0]!r} of @{function.name} matches; the last region learns from the "
                "loss of the model, so there must be two"
            )
        loss = _Loss.of(parts, f"{self}")
        heads = [self._head(parts, path, loss) for path in paths[:-1]]
        forward = _with_heads(parts, heads, loss)
        update = parts.update and _with_updates(parts, heads, f"{self}")
        return replace(parts, forward=forward, update=update).joined()

    def __str__(self) -> str:
        return word(HEAD, value=",".join(self.regions))

    def _check_first(self, parts: Parts) -> None:
        """``ValueError`` for a program that another transform has changed already."""
        if any(op.kind == "local_loss" for op in parts.forward.ops):
            raise ValueError(f"{self}: @{parts.name} learns from local losses already")
        if parts.frozen:
            raise ValueError(
                f"{self}: %{parts.frozen[0].name} of @{parts.name} is frozen; local losses train all weights"
            )
        if not parts.parameters:
            raise ValueError(
                f"{self}: @{parts.name} has no parameters: those of a loss are the parts of its first "
                "argument, p.w"
            )
        made = {value for op in parts.forward.ops if op.kind == "reshard" for value in op.outputs}
        laid = [value for value in parts.forward.values if value.layout and value not in made]
        laid += [value for value in (*parts.gradients, *parts.state) if value.layout]
        if laid:
            raise ValueError(
                f"{self}: %{laid[0].name} of @{parts.name} has a layout; {self} comes before what splits "
                "the program, or all in one Strategy"
            )
        if any(value.name.startswith(MAIN) for value in parts.state):
            raise ValueError(
                f"{self}: @{parts.name} has main copies of its weights; {self} comes before "
                "MixedPrecision, or both in one Strategy"
            )

    def _head(self, parts: Parts, path: str, loss: _Loss) -> _Head:
        """The head of a region."""
        ops = [op for op in parts.forward.ops if inside(op, path)]
        read = {value for op in parts.forward.ops if not inside(op, path) for value in op.inputs}
        read |= {*parts.forward.outputs}
        results = [value for op in ops for value in op.outputs if value in read and value in loss.learning]
        if len(results) != 1:
            raise ValueError(
                f"{self}: region {path!r} of @{parts.name} must have one result that depends on "
                "parameters and is used outside for the prediction; it has "
                f"{', '.join(f'%{v.name}' for v in results) or 0}"
            )
        (result,) = results
        classes, left = parts.classes, [*range(result.type.ndim)]
        places: list[int | None] = []
        """For each dim of the prediction the dim of the result that is the same; None: the head makes it."""
        for dim in range(loss.prediction.type.ndim):
            dim_class = classes.of(loss.prediction, dim)
            same = next(
                (
                    other
                    for other in left
                    if classes.of(result, other) == dim_class
                    and result.type.shape[other] == loss.prediction.type.shape[dim]
                ),
                None,
            )
            places.append(same)
            left = [other for other in left if other != same]
        if not left:
            raise ValueError(
                f"{self}: %{result.name}, the result of region {path!r} of @{parts.name}, has no dim that "
                f"a head could take up: all are dims of the prediction %{loss.prediction.name}"
            )
        prefix = parts.parameters[0].name.partition(".")[0]
        shape = [
            result.type.shape[left[-1]],
            *(loss.prediction.type.shape[dim] for dim, place in enumerate(places) if place is None),
        ]
        weight = Value(f"{prefix}.{HEAD}.{path}", TensorType(result.type.dtype, shape))
        if weight.name in {value.name for value in parts.forward.values}:
            raise ValueError(f"{self}: @{parts.name} has a value %{weight.name} already")
        return _Head(path, result, weight, tuple(places), tuple(left))


class _Loss(NamedTuple):
    """The loss of a model: terms that are computed from its prediction, and others, such as those that balance experts.

    The latter are computed without the batch, from values that the former do not need.
    """

    prediction: Value
    terms: tuple[Value, ...]
    """The terms that are computed from the prediction, which is all in them that depends on parameters."""
    ops: tuple[Op, ...]
    """The ops that compute these terms from the prediction and from inputs."""
    value: Value
    """The sum of all terms."""
    others: Mapping[Value, tuple[Op, ...]]
    """The other terms, each with the ops that compute it from what regions make."""
    learning: frozenset[Value]
    """The floating-point values that depend on parameters, and from which the prediction is computed."""

    @classmethod
    def of(cls, parts: Parts, subject: str) -> _Loss:
        forward, value = parts.forward, parts.forward.outputs[0]
        depending = {*parts.parameters}
        for op in forward.ops:
            if not depending.isdisjoint(op.inputs):
                depending.update(value for value in op.outputs if is_floating(value.type.dtype))
        data = {*parts.data}
        found = dict[Value, list[Value]]()
        others = dict[Value, tuple[Op, ...]]()
        terms = {
            term: _after_one_value(_after_parameters(parts, term), term, data, depending)
            for term in _added(forward.ops, value)
        }
        supervised = {term for term, ops in terms.items() if not data.isdisjoint(_inputs(ops))}
        for term, ops in terms.items():
            read = _read(ops, depending)
            if term in supervised or not supervised:
                for each in read:
                    found.setdefault(each, []).append(term)
                if not read and term in depending:
                    found.setdefault(term, [])
            else:
                others[term] = tuple(ops) if read else ()
        if len(found) != 1 or not all(found.values()):
            raise ValueError(
                f"{subject}: the loss of @{parts.name} must be computed from one prediction; it is from "
                f"{' and '.join(f'%{v.name}' for v in found) or 'none'}"
            )
        (prediction,) = found
        before = needed(forward.ops, [prediction])
        learning = depending & {prediction, *(value for op in before for value in op.inputs)}
        taken = tuple(dict.fromkeys(found[prediction]))
        return cls(
            prediction,
            taken,
            tuple(needed(forward.ops, taken, [prediction])),
            value,
            others,
            frozenset(learning),
        )


def _added(ops: Sequence[Op], total: Value) -> list[Value]:
    """The terms of a sum of numbers; the number itself if it is none."""
    makers = {value: op for op in ops for value in op.outputs}
    terms = list[Value]()
    left = [total]
    while left:
        value = left.pop()
        op = makers.get(value)
        if op is not None and op.kind == "add" and not any(each.type.shape for each in op.inputs):
            left += op.inputs[::-1]
        else:
            terms.append(value)
    return [*dict.fromkeys(terms)]


def _read(ops: Sequence[Op], depending: Collection[Value]) -> list[Value]:
    """The values among those ``depending`` on parameters that the ops read and do not make."""
    made = {value for op in ops for value in op.outputs}
    return [*dict.fromkeys(value for value in _inputs(ops) if value in depending and value not in made)]


def _inputs(ops: Sequence[Op]) -> list[Value]:
    return [value for op in ops for value in op.inputs]


def _after_one_value(
    ops: list[Op], term: Value, data: Collection[Value], depending: Collection[Value]
) -> list[Op]:
    """Of ops that read several values that depend on parameters: those after the first value that combines them all.

    They are all ``ops`` if the batch is read before: a combination of predictions and targets is no prediction.
    """
    for op in ops if len(_read(ops, depending)) > 1 else ():
        if not data.isdisjoint(op.inputs):
            break
        for value in op.outputs:
            rest = needed(ops, [term], [value])
            if _read(rest, depending) == [value]:
                return rest
    return ops


def _after_parameters(parts: Parts, value: Value) -> list[Op]:
    """The ops that compute a value after the last one that reads a parameter, or what is made of parameters alone."""
    ops = needed(parts.forward.ops, [value])
    weights, constants = {*parts.parameters}, set[Value]()
    for op in ops:
        if all(
            value in weights or value in constants for value in op.inputs
        ):  # a view of a weight is a weight
            (constants if weights.isdisjoint(op.inputs) else weights).update(op.outputs)
    before, wanted = set[Op](), set[Value]()
    for op in reversed(ops):  # the ops from which a parameter is still to come
        if not (weights.isdisjoint(op.inputs) and wanted.isdisjoint(op.outputs)):
            before.add(op)
            wanted.update(op.inputs)
    return [op for op in ops if op not in before]


class _Head(NamedTuple):
    """What a region needs for a loss of its own."""

    path: str
    result: Value
    """The result of the region."""
    weight: Value
    places: tuple[int | None, ...]
    """For each dim of the prediction, that of the result; None: one of the weight."""
    left: tuple[int, ...]
    """The other dims of the result: the head averages over them and contracts the last one."""

    def prediction(self, x: Any, weight: Any) -> Any:
        """What the head predicts."""
        letters = "abcdefghijklmnopqrstuvwxyz"[: x.ndim]
        made = iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        out = [letters[place] if place is not None else next(made) for place in self.places]
        of_weight = "".join([letters[self.left[-1]], *(letter for letter in out if letter.isupper())])
        if self.left[:-1]:
            x = np.mean(x, axis=self.left[:-1])
        of_x = "".join(letter for dim, letter in enumerate(letters) if dim not in self.left[:-1])
        return np.einsum(f"{of_x},{of_weight}->{''.join(out)}", x, weight)


def _with_heads(parts: Parts, heads: Sequence[_Head], loss: _Loss) -> Function:
    """The forward with the heads, and the sum of all losses in place of that of the model."""
    forward = parts.forward
    builder = Builder()
    builder.copy(forward)
    added: dict[Value, list[Op]] = {}
    """The ops that come right after a value."""
    stopped: dict[str, tuple[Value, Value]] = {}
    total: Any = None
    with recording(builder):
        for head in heads:
            first = len(builder.ops)
            with builder.region(f"{head.path}.{HEAD}"):
                x = Traced(builder, head.result)
                predicted = head.prediction(x, Traced(builder, head.weight))
                values = {loss.prediction: predicted.astype(loss.prediction.type.dtype).value}
                _repeat(builder, loss.ops, values)
                terms = [Traced(builder, values[term]) for term in loss.terms]
                own = apply("local_loss", sum(terms[1:], terms[0]))
                total = own if total is None else total + own
                stopped[head.path] = head.result, apply("stop_gradient", x).value
            added[head.result] = builder.ops[first:]
        alone = dict[Value, Value]()
        for term, term_ops in loss.others.items():  # a loss of the region that makes what it is computed from
            read = {value for op in term_ops for value in op.inputs}
            makers = [op for op in forward.ops if op not in term_ops and not read.isdisjoint(op.outputs)]
            if makers:
                first, values = len(builder.ops), {}
                with builder.region(makers[-1].region):
                    _repeat(builder, term_ops, values)
                    alone[term] = apply("local_loss", Traced(builder, values.get(term, term))).value
                added.setdefault(makers[-1].outputs[-1], []).extend(builder.ops[first:])
        first = len(builder.ops)
        region = next(op.region for op in forward.ops if loss.value in op.outputs)
        with builder.region(region):
            whole = (Traced(builder, loss.value) + total).value
    ops = list[Op]()
    for op in forward.ops:
        seen = alone | {result: after for path, (result, after) in stopped.items() if not inside(op, path)}
        ops.append(replace(op, inputs=each(op.inputs, seen)))
        for value in op.outputs:
            ops += added.get(value, ())
    place = 1 + max(forward.inputs.index(value) for value in parts.parameters)
    inputs = (*forward.inputs[:place], *(head.weight for head in heads), *forward.inputs[place:])
    outputs = (whole, *forward.outputs[1:])
    return Function(forward.name, inputs, tuple(needed((*ops, *builder.ops[first:]), outputs)), outputs)


def _repeat(builder: Builder, ops: Sequence[Op], values: dict[Value, Value]) -> None:
    """Emits ops once more, for other ``values`` in place of their inputs; what they make is put there, too."""
    for op in ops:
        made = builder.emit(op.kind, each(op.inputs, values), dict(op.attributes))
        values.update(zip(op.outputs, made, strict=True))


def _with_updates(parts: Parts, heads: Sequence[_Head], subject: str) -> Function:
    """The update with that of each head's weight, which is as that of the first parameter of its dtype."""
    assert parts.update is not None
    update, builder, names = parts.update, Builder(), list[str]()
    builder.copy(update)
    outputs = [*update.outputs]
    owners = {value: parts.owner(value) for value in parts.state}
    owners |= {value: value.name for value in parts.parameters}
    owners |= {value: value.name.removeprefix(GRADIENT) for value in parts.gradients}
    behind = {value: {owner} - {None} for value, owner in owners.items()}
    """The parameters whose weights, gradients or state a value depends on."""
    for op in update.ops:
        behind.update(dict.fromkeys(op.outputs, {*()}.union(*(behind[value] for value in op.inputs))))
    for head in heads:
        like = next((value for value in parts.parameters if value.type.dtype == head.weight.type.dtype), None)
        if like is None:
            raise ValueError(
                f"{subject}: no parameter of @{parts.name} is of {head.weight.type.dtype}, the dtype of "
                f"region {head.path!r}, so its head has no update"
            )
        values = {}
        for value in update.inputs:
            if owners.get(value) == like.name:
                name = value.name.removesuffix(like.name) + head.weight.name
                values[value] = builder.input(
                    name, TensorType(value.type.dtype, _shape(value, like, head.weight))
                )
        own_names = {value.name for value in values}
        mine = [value for value in update.outputs if value.name.removeprefix(NEXT) in own_names]
        if others := {owner for value in mine for owner in behind[value]} - {like.name}:
            raise ValueError(
                f"{subject}: the update of %{like.name} of @{parts.name} depends on "
                f"%{min(map(str, others))}: regions that learn by themselves are not clipped together"
            )
        for op in needed(update.ops, mine):
            if values.keys().isdisjoint(op.inputs):
                continue  # it is the same for all parameters
            with builder.region(op.region, op.line):
                made = builder.emit(op.kind, each(op.inputs, values), dict(op.attributes))
            values.update(zip(op.outputs, made, strict=True))
        outputs += each(mine, values)
        names += [value.name.removesuffix(like.name) + head.weight.name for value in mine]
    return with_last_named(builder.function(UPDATE, outputs), names, UPDATE)


def _shape(value: Value, like: Value, weight: Value) -> tuple[Extent, ...]:
    return weight.type.shape if value.type.shape == like.type.shape else value.type.shape
