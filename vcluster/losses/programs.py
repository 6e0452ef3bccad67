"""A loss in plain NumPy for `check_loss`: differentiated on one device, and split over many by a strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from parallelism import ir
from parallelism.transforms import SGD, Strategy, first_state, following, train_step
from vcluster.losses.cases import (
    AUXILIARY,
    AXES,
    GRADIENT,
    Array,
    Batch,
    LossCase,
    Reference,
    Terms,
    Weight,
)
from vcluster.runs import VirtualCluster

PARAMETERS = "p."
BATCH = ("tokens", "targets", "valid")
Weights = Mapping[str, Weight]


def recorded(loss: Callable[..., Any], weights: Weights, length: int, only: int | None = None) -> ir.Function:
    """The program of a loss for any number of rows of so many tokens.

    Its outputs are what is differentiated, the loss, and the auxiliary loss if it returns one; or ``only`` one of the last
    two.
    """
    (rows,) = ir.symbols("B")
    types = {name: ir.TensorType("f64", weight.shape) for name, weight in weights.items()}

    def program(p: Any, tokens: Any, targets: Any, valid: Any) -> Any:
        terms = _numbers(loss(p, Batch(tokens, targets, valid)))
        return (sum(terms[1:], terms[0]), *terms) if only is None else terms[only]

    tokens, valid = ir.TensorType("i64", (rows, length)), ir.TensorType("bool", (rows, length))
    name = getattr(loss, "__name__", "")
    if not name.isidentifier():
        name = "loss"
    return ir.record(program, types, tokens, tokens, valid, name=name)


def _numbers(returned: Any) -> tuple[Any, ...]:
    """The loss, or the loss and the auxiliary loss.  ``TypeError`` for anything else."""
    terms = returned if isinstance(returned, tuple) else (returned,)
    if len(terms) > 2 or any(np.ndim(each) or isinstance(each, Mapping) for each in terms):
        told = " and ".join(_told(each) for each in terms)
        raise TypeError(
            f"a plain loss returns a number, or two: the loss and the auxiliary loss; it returned {told}"
        )
    return terms


def _told(value: Any) -> str:
    return f"an array of shape {np.shape(value)}" if hasattr(value, "shape") else type(value).__name__


def with_gradients(reference: Callable[..., Any], weights: Weights) -> Reference:
    """The reference with all terms: as it is if it returns them by name, or else with derived gradients."""
    programs: dict[tuple[int, ...], list[ir.Function]] = {}

    def terms(values: Mapping[str, Array], batch: Batch) -> Terms:
        shape = batch.tokens.shape
        if shape not in programs:
            returned = reference(values, batch)
            if isinstance(returned, Mapping):
                return returned
            count = len(_numbers(returned))
            alone = [recorded(reference, weights, shape[1], number) for number in range(count)]
            names = [f"{PARAMETERS}{name}" for name in weights]
            programs[shape] = [
                ir.gradient(each, names, keep_outputs=True).specialize(B=shape[0]) for each in alone
            ]
        return _interpreted(programs[shape], values, batch)

    return terms


def _interpreted(programs: list[ir.Function], values: Mapping[str, Array], batch: Batch) -> Terms:
    found: dict[str, Array] = {}
    for program, name in zip(programs, ("loss", AUXILIARY), strict=False):
        value, *gradients = ir.interpret(program, _inputs(program, values, batch)).outputs
        found[name] = np.asarray(value)
        prefix = GRADIENT if name == "loss" else f"{AUXILIARY}.{GRADIENT}"
        found |= {
            f"{prefix}{weight}": np.asarray(each) for weight, each in zip(values, gradients, strict=True)
        }
    return found


def _inputs(program: ir.Function | Any, values: Mapping[str, Array], batch: Batch) -> dict[str, Array]:
    given = {f"{PARAMETERS}{name}": value for name, value in values.items()}
    given |= {name: getattr(batch, name) for name in BATCH}
    return {value.name: given[value.name] for value in program.inputs}


class SplitLoss:
    """A loss as a training step that a strategy splits."""

    def __init__(
        self,
        loss: Callable[..., Any] | ir.Function,
        strategy: str | Strategy,
        weights: Weights,
        clip: float | None,
    ) -> None:
        """``ValueError`` for a strategy over axes that losses do not know, and for weights with a layout or stages."""
        self._loss, self._weights, self._clip = loss, weights, clip
        self._strategy = strategy if isinstance(strategy, Strategy) else Strategy.parse(strategy)
        for name, weight in weights.items():
            if weight.layout or weight.stages is not None:
                raise ValueError(
                    f"the strategy says where the weight {name!r} lies, so its layout and stages are not given"
                )
        for axis in self.axes:
            if axis not in AXES:
                raise ValueError(
                    f"check_loss splits over {', '.join(AXES)}; the strategy {self._strategy} splits over {axis!r}"
                )
        self._steps: dict[int, Any] = {}

    @cached_property
    def axes(self) -> list[str]:
        """The axes of the strategy."""
        named = (getattr(each, "axis", None) for each in self._strategy.transforms)
        return [axis for axis in dict.fromkeys(named) if isinstance(axis, str)]

    @property
    def microbatches(self) -> int:
        """The microbatches of its pipeline."""
        pipeline = self._strategy.pipeline
        return 1 if pipeline is None else pipeline.microbatches

    def outputs(self, cluster: VirtualCluster, case: LossCase) -> list[Terms]:
        """The terms of a step on a cluster, as each rank has them."""
        step = self._step(case.whole.tokens.shape[1])
        function = step if isinstance(step, ir.Function) else step.function
        first = first_state(step, {f"{PARAMETERS}{name}": value for name, value in case.values.items()})
        batch = {name: getattr(case.whole, name) for name in BATCH}
        names = {value.name for value in function.inputs}
        run = cluster.run(step, first | {name: value for name, value in batch.items() if name in names})
        values = [np.asarray(value) for value in run.result]
        after = following(step, values)
        terms: dict[str, Any] = {
            f"{GRADIENT}{name}": value - after[f"{PARAMETERS}{name}"] for name, value in case.values.items()
        }
        metrics = values[1 : len(values) - len(after)]
        terms |= zip(("loss", AUXILIARY), metrics or values[:1], strict=False)
        return [terms] * cluster.size

    def _step(self, length: int) -> Any:
        """The training step for rows of so many tokens: its update subtracts the gradients."""
        if length not in self._steps:
            loss = self._loss
            function = loss if isinstance(loss, ir.Function) else recorded(loss, self._weights, length)
            self._steps[length] = self._strategy(train_step(function, SGD(1.0), clip=self._clip))
        return self._steps[length]
