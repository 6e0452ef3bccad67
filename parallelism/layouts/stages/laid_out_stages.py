"""Layouts for the stages of a program, so that forward, backward and its halves agree."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from parallelism.ir import Function, Op, Value
from parallelism.ir.core import Extent
from parallelism.ir.operators import layout_text
from parallelism.ir.passes import Renaming
from parallelism.layouts.localization.local_program import free_name
from parallelism.layouts.propagation import laid_out
from parallelism.layouts.propagation.propagation import propagate
from parallelism.layouts.stages.stages import GRADIENT, StageFunctions, Stages
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

LayoutByName = dict[str, TensorSharding]


def laid_out_stages(stages: Stages, mesh: Mesh | Mapping[str, Extent]) -> Stages:
    """The stages with a layout on every value of every function.  ``mesh`` has the axes inside a stage.

    Layouts are propagated through the program as a whole, so that a value has one layout on both sides of a stage
    boundary; then through each backward.  A gradient that passes a boundary, and the gradient of a weight, has the
    layout of its value.  A value that is kept for the backward has the layout in which the forward computed it.
    ``ValueError`` as from `propagate`.
    """
    whole = propagate(stages.function, mesh)
    layouts = _of(whole)
    first: dict[Any, tuple[StageFunctions, StageFunctions]] = {}
    laid = []
    for stage in stages.functions:
        own = {value.name: layouts[value.name] for value in stage.forward.values}
        key = stage.form, tuple(own.values())
        if key in first:
            before, after = first[key]
            with suppress(ValueError):
                laid.append(after.renamed(Renaming.between(before.functions, stage.functions), stage.name))
                continue
        laid.append(_stage(stage, own, mesh))
        first.setdefault(key, (stage, laid[-1]))
    return replace(stages, function=whole, functions=tuple(laid))


def _stage(stage: StageFunctions, own: LayoutByName, mesh: Mesh | Mapping[str, Extent]) -> StageFunctions:
    grads = {name: gradient_layout(own[name]) for name in (*stage.received, *stage.weights, *stage.sent)}
    given = {f"{GRADIENT}{name}": grads[name] for name in stage.answered} | own
    wanted = [grads[name] for name in (*stage.returned, *stage.trained)]
    hints = dict(zip((value.name for value in stage.backward.outputs[::-1]), wanted[::-1], strict=True))
    backward = propagate(laid_out(stage.backward, hints | given), mesh)
    layouts = _of(backward) | given
    return replace(
        stage, forward=laid_out(stage.forward, layouts),
        recompute=stage.recompute and laid_out(stage.recompute, layouts),
        backward=_ending(backward, wanted),
        backward_input=_ending(laid_out(stage.backward_input, layouts), wanted[:len(stage.returned)], stage.between),
        backward_weights=_ending(laid_out(stage.backward_weights, layouts), wanted[len(stage.returned):]))


def gradient_layout(layout: TensorSharding) -> TensorSharding:
    """The layout of the gradient of a value: that of the value, without a pending reduction."""
    return TensorSharding(*layout.dims)


def _of(function: Function) -> LayoutByName:
    return {value.name: value.layout for value in function.values if value.layout is not None}


def _ending(function: Function, wanted: Sequence[TensorSharding], kept: Sequence[str] = ()) -> Function:
    """The function with its first outputs resharded to the wanted layouts.  One value may be two of these outputs.

    A resharded value whose name is in ``kept`` is also returned in its old layout.
    """
    ops, outputs = list(function.ops), list(function.outputs)
    names = {value.name for value in function.values}
    for place, layout in enumerate(wanted):
        value = outputs[place]
        if value.layout != layout:
            outputs[place] = Value(free_name(f"{value.name}.{place}", names), value.type, layout)
            ops.append(Op("reshard", (value,), (("layout", layout_text(layout)),), (outputs[place],)))
            if value.name in kept and value not in outputs:
                outputs.append(value)
    return replace(function, ops=tuple(ops), outputs=tuple(outputs))
