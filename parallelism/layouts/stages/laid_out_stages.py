"""Layouts for the stages of a program, so that forward, backward and its halves agree."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from parallelism.ir import Function, Op, Value
from parallelism.ir.core import Extent
from parallelism.ir.operators import layout_text
from parallelism.layouts.localization.local_program import free_name, layout_of
from parallelism.layouts.localization.token_orders import check_orders
from parallelism.layouts.propagation import Devices, finite_constants, laid_out, op_placement
from parallelism.layouts.propagation.propagation import propagate
from parallelism.layouts.stages.stages import GRADIENT, StageFunctions, Stages
from parallelism.layouts.stages.sums import summed_in, widened
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

MANY_ROWS = 1 << 20
LayoutByName = dict[str, TensorSharding]


def laid_out_stages(
    stages: Stages,
    mesh: Mesh | Mapping[str, Extent],
    sums: Mapping[str, np.dtype[Any]] | None = None,
    meshes: Sequence[Mesh] | None = None,
    *,
    pending: bool = False,
) -> Stages:
    """The stages with a layout on every value of every function.  ``mesh`` has the axes inside a stage.

    With ``meshes`` each stage has its own, with the axes of ``mesh``.  No sum is then pending in what stages send.

    Layouts are propagated through the program as a whole, so that a value has one layout on both sides of a stage
    boundary; then through each backward.  What is returned beside the loss is whole on every device.  A gradient that
    passes a boundary, and the gradient of a weight, has the layout of its value.  A value that is kept for the backward
    has the layout in which the forward computed it.
    ``sums`` has the dtypes in which the gradients of weights are added up, by the names of the weights: a sum over axes
    inside the stage that is pending in such a gradient is computed in this dtype, too.  With ``pending`` such a sum
    stays pending in the gradient of a weight, so that what microbatches add up is summed over the axes once; of a weight
    that several stages have only if it is pending over the same axes in all of them.  ``ValueError`` as from `propagate`,
    and for stages that would have tokens in different orders.
    """
    metrics = {value.name: TensorSharding(*[()] * value.type.ndim) for value in stages.function.outputs[1:]}
    whole = propagate(laid_out(stages.function, metrics), mesh)
    layouts = _of(whole)
    if meshes is not None:
        check_orders(stages.function, meshes)
        layouts |= {name: gradient_layout(layouts[name]) for stage in stages.functions for name in stage.sent}
    waiting = frozenset(stages.holders) if pending else frozenset[str]()
    inside = [mesh] * len(stages.functions) if meshes is None else meshes
    laid = _laid_out(stages, layouts, inside, sums or {}, waiting)
    if differing := _pending_otherwise(laid):
        laid = _laid_out(stages, layouts, inside, sums or {}, waiting - differing)
    return replace(stages, function=whole, functions=tuple(laid))


def _laid_out(
    stages: Stages,
    layouts: LayoutByName,
    meshes: Sequence[Mesh | Mapping[str, Extent]],
    sums: Mapping[str, np.dtype[Any]],
    waiting: Collection[str],
) -> list[StageFunctions]:
    """The functions of each stage on its mesh.  Sums may stay pending in the gradients of the weights ``waiting``."""
    first: dict[Any, tuple[StageFunctions, StageFunctions]] = {}
    laid = []
    for stage, inside in zip(stages.functions, meshes, strict=True):
        own = {name: layouts[name] for name in stage.values}
        dtypes = [sums.get(name) for name in stage.trained]
        may_wait = tuple(name in waiting for name in stage.trained)
        of_mesh = inside if isinstance(inside, Mesh) else None
        key = stage.form, tuple(own.values()), tuple(dtypes), may_wait, of_mesh
        if key in first:
            before, after = first[key]
            with suppress(ValueError):
                laid.append(after.renamed(before.renaming_of(stage), stage.name))
                continue
        laid.append(_stage(stage, own, inside, dtypes, may_wait))
        first.setdefault(key, (stage, laid[-1]))
    return laid


def _pending_otherwise(laid: Sequence[StageFunctions]) -> set[str]:
    """The weights whose gradients are pending over other axes in one stage than in another."""
    axes: dict[str, set[tuple[str, ...]]] = {}
    for stage in laid:
        gradients = stage.backward.outputs[len(stage.returned) :]
        for name, value in zip(stage.trained, gradients, strict=True):
            axes.setdefault(name, set()).add(value.layout.partial if value.layout is not None else ())
    return {name for name, found in axes.items() if len(found) > 1}


def _stage(
    stage: StageFunctions,
    own: LayoutByName,
    mesh: Mesh | Mapping[str, Extent],
    dtypes: Sequence[Any],
    may_wait: Sequence[bool],
) -> StageFunctions:
    grads = {name: gradient_layout(own[name]) for name in (*stage.received, *stage.weights, *stage.sent)}
    given = {f"{GRADIENT}{name}": grads[name] for name in stage.answered} | own
    wanted = [grads[name] for name in (*stage.returned, *stage.trained)]
    first = len(stage.returned)
    joint = summed_in(stage.backward, first, dtypes)
    hints = dict(zip((value.name for value in joint.outputs[::-1]), wanted[::-1], strict=True))
    laid = propagate(laid_out(joint, hints | given), mesh)
    layouts = _of(laid) | given
    # Where nothing is pending, a narrow gradient is added to its sum as it is.
    waiting: list[np.dtype[Any] | None] = []
    maker = {value.name: op for op in laid.ops for value in op.outputs}
    returned = Counter(value.name for value in stage.backward.outputs)
    read = {value.name for op in stage.backward.ops for value in op.inputs}
    constants = finite_constants(laid)
    for place, dtype in enumerate(dtypes, first):
        source, wide, computed = _term(maker, laid.outputs[place], Devices.of(mesh), constants)
        left = computed.partial and may_wait[place - first] and (*computed.dims,) == (*wanted[place].dims,)
        if (
            left
            and stage.backward.outputs[place].name == source.name not in read
            and returned[source.name] == 1
        ):
            wanted[place] = layouts[source.name] = computed
            waiting.append(None)
            continue
        pending = bool(wide is not None and computed.partial)
        if wide is not None and pending:
            layouts[source.name] = computed
            if wide != laid.outputs[place]:  # what has a layout of its own, as an output has, keeps it
                layouts[wide.name] = computed
        waiting.append(dtype if pending else None)
    backward = laid_out(summed_in(stage.backward, first, waiting), layouts)
    weights = laid_out(summed_in(stage.backward_weights, 0, waiting), layouts)
    return replace(
        stage,
        forward=laid_out(stage.forward, layouts),
        recompute=stage.recompute and laid_out(stage.recompute, layouts),
        backward=_ending(backward, wanted),
        backward_input=_ending(laid_out(stage.backward_input, layouts), wanted[:first], stage.between),
        backward_weights=_ending(weights, wanted[first:]),
    )


def _term(
    maker: Mapping[str, Op], output: Value, devices: Devices, constants: frozenset[str]
) -> tuple[Value, Value | None, TensorSharding]:
    """Of a gradient: it before it is widened, then widened (None: it is not), and the layout in which its op leaves
    it, where a sum may be pending."""
    source, wide = widened(maker, output)
    op = maker.get(source.name)
    if op is None:
        return source, wide, layout_of(source)
    # The op will be placed with numbers for its symbols: then activations, which have rows, weigh more than gradients.
    alone = Function("gradient", op.inputs, (op,), op.outputs)
    (number,) = alone.specialize(**dict.fromkeys(alone.symbols, MANY_ROWS)).ops
    taken, homes = (tuple(map(layout_of, side)) for side in (op.inputs, op.outputs))
    place = op_placement(number, taken, homes, devices, constants)
    return source, wide, place.outputs[op.outputs.index(source)]


def gradient_layout(layout: TensorSharding) -> TensorSharding:
    """The layout of the gradient of a value: that of the value, without a pending reduction."""
    return TensorSharding(*layout.dims)


def _of(function: Function) -> LayoutByName:
    return {value.name: value.layout for value in function.values if value.layout is not None}


def _ending(function: Function, wanted: Sequence[TensorSharding], kept: Sequence[str] = ()) -> Function:
    """The function with its first outputs resharded to the wanted layouts.  One value may be two of these outputs.

    A value is resharded as soon as it is there, so that it can be added up or sent, and its part is not held until the
    end.  A resharded value whose name is in ``kept`` is also returned in its old layout.
    """
    outputs = list(function.outputs)
    names = {value.name for value in function.values}
    behind: dict[Value, list[Op]] = {}
    for place, layout in enumerate(wanted):
        value = outputs[place]
        if value.layout != layout:
            outputs[place] = Value(free_name(f"{value.name}.{place}", names), value.type, layout)
            op = Op("reshard", (value,), (("layout", layout_text(layout)),), (outputs[place],))
            behind.setdefault(value, []).append(op)
            if value.name in kept and value not in outputs:
                outputs.append(value)
    ops = [op for value in function.inputs for op in behind.get(value, ())]
    for op in function.ops:
        ops += [op, *(each for value in op.outputs for each in behind.get(value, ()))]
    return replace(function, ops=tuple(ops), outputs=tuple(outputs))
