"""StableHLO from programs: each op is a call of ``jax.numpy`` or ``jax.lax``, and JAX writes the module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parallelism.execution import Executable
from parallelism.interop.errors import UnsupportedError
from parallelism.interop.stablehlo import bindings
from parallelism.interop.written.composite_calls import COMPOSITES, Call
from parallelism.ir.core import Function, Op, TensorType, Value
from parallelism.layouts.localization import Localized, step_of
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding

_ELEMENTWISE = [
    "add",
    "subtract",
    "multiply",
    "divide",
    "power",
    "maximum",
    "minimum",
    "floor_divide",
    "remainder",
    "fmod",
    "negative",
    "absolute",
    "square",
    "sqrt",
    "reciprocal",
    "exp",
    "expm1",
    "log",
    "log1p",
    "sin",
    "cos",
    "log2",
    "log10",
    "exp2",
    "cbrt",
    "tan",
    "arcsin",
    "arccos",
    "arctan",
    "sinh",
    "cosh",
    "tanh",
    "arcsinh",
    "arccosh",
    "arctanh",
    "hypot",
    "arctan2",
    "logaddexp",
    "sign",
    "floor",
    "ceil",
    "rint",
    "trunc",
    "equal",
    "not_equal",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
    "logical_and",
    "logical_or",
    "logical_xor",
    "logical_not",
    "isfinite",
    "isnan",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "invert",
    "left_shift",
    "right_shift",
    "where",
    "matmul",
]
_REDUCTIONS = ["sum", "prod", "max", "min", "any", "all"]


def _place(jax: Any, x: Any, axis: int, begin: int, step: int, extent: int) -> Any:
    n = x.shape[axis]
    last = extent - begin - ((n - 1) * step + 1 if n else 0)
    pads = [(begin, last, step - 1) if d == axis else (0, 0, 0) for d in range(x.ndim)]
    return jax.lax.pad(x, np.zeros((), x.dtype), pads)


def _slice(x: Any, axis: int, begin: int, end: int, step: int) -> Any:
    return x[(slice(None),) * axis + (slice(begin, end, step),)]


def _iota(jax: Any, dim: int, shape: Sequence[int], starts: Sequence[int], dtype: Any) -> Any:
    return jax.lax.broadcasted_iota(dtype, tuple(shape), dim) + np.asarray(starts[dim], dtype)


def _split(jax: Any, x: Any, axis: int, sizes: Sequence[int]) -> Any:
    pieces = jax.numpy.split(x, np.cumsum(sizes)[:-1].tolist(), axis)
    return tuple(pieces) if len(pieces) > 1 else pieces[0]


def _windows(jax: Any, x: Any, axis: int, size: int, step: int) -> Any:
    count = (x.shape[axis] - size) // step + 1
    places = np.arange(count)[:, None] * step + np.arange(size)
    return jax.numpy.moveaxis(jax.numpy.take(x, places, axis), axis + 1, -1)


def _scatter(jax: Any, x: Any, indices: Any, updates: Any, axis: int, op: str) -> Any:
    key = (slice(None),) * axis
    at = x.at[(*key, jax.numpy.where(indices < 0, x.shape[axis], indices))]
    how = {"sum": "add", "prod": "multiply", "max": "max", "min": "min", "set": "set"}[op]
    return getattr(at, how)(updates, mode="drop")


def _constant(jax: Any, value: Any, shape: Sequence[int], dtype: Any) -> Any:
    return jax.numpy.asarray(
        np.array(value, dtype).reshape(shape) if isinstance(value, tuple) else np.full(shape, value, dtype)
    )


def _permute(jax: Any, x: Any, axes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> Any:
    return jax.lax.ppermute(x, tuple(axes), [tuple(pair) for pair in pairs])


def _all_reduce(jax: Any, x: Any, axes: Sequence[str], op: str) -> Any:
    if op == "prod":
        return jax.numpy.prod(jax.lax.all_gather(x, tuple(axes)), axis=0).astype(x.dtype)
    if x.dtype == bool:
        return {"sum": jax.lax.pmax, "max": jax.lax.pmax, "min": jax.lax.pmin}[op](
            x.astype("uint8"), tuple(axes)
        ) > 0
    return {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}[op](x, tuple(axes))


def _own_part(jax: Any, x: Any, axes: Sequence[str], dim: int, extent: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(tuple(axes)) * extent, extent, dim)


_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")

CALLS: dict[str, Call] = {
    **COMPOSITES,
    **dict.fromkeys(_ELEMENTWISE, lambda jax, op, x: getattr(jax.numpy, op.kind)(*x)),
    **dict.fromkeys(
        _REDUCTIONS, lambda jax, op, x: getattr(jax.numpy, op.kind)(x[0], op["axes"], keepdims=op["keepdims"])
    ),
    "einsum": lambda jax, op, x: jax.numpy.einsum(op["equation"], *x),
    "convert": lambda jax, op, x: x[0].astype(op["dtype"]),
    "bitcast": lambda jax, op, x: jax.lax.bitcast_convert_type(x[0], op["dtype"]),
    "reshape": lambda jax, op, x: x[0].reshape(op["shape"]),
    "transpose": lambda jax, op, x: x[0].transpose(op["permutation"]),
    "broadcast_to": lambda jax, op, x: jax.numpy.broadcast_to(x[0], op["shape"]),
    "flip": lambda jax, op, x: jax.numpy.flip(x[0], op["axis"]),
    "concatenate": lambda jax, op, x: jax.numpy.concatenate(x, op["axis"]),
    "split": lambda jax, op, x: _split(jax, x[0], **dict(op.attributes)),
    "slice": lambda jax, op, x: _slice(x[0], **dict(op.attributes)),
    "place": lambda jax, op, x: _place(jax, x[0], **dict(op.attributes)),
    "windows": lambda jax, op, x: _windows(jax, x[0], **dict(op.attributes)),
    "constant": lambda jax, op, x: _constant(jax, **dict(op.attributes)),
    "iota": lambda jax, op, x: _iota(jax, **dict(op.attributes)),
    "take": lambda jax, op, x: jax.numpy.take(x[0], x[1], op["axis"], mode="wrap"),
    "take_along": lambda jax, op, x: jax.numpy.take_along_axis(x[0], x[1], op["axis"]),
    "take_gradient": lambda jax, op, x: jax.vjp(
        lambda table: jax.numpy.take(table, x[1], op["axis"]),
        jax.numpy.zeros(op.outputs[0].type.shape, x[0].dtype),
    )[1](x[0])[0],
    "scatter": lambda jax, op, x: _scatter(jax, *x, **dict(op.attributes)),
    "one_hot": lambda jax, op, x: jax.nn.one_hot(x[0], op["extent"], dtype=op["dtype"]),
    "sort": lambda jax, op, x: jax.numpy.sort(x[0], axis=op["axis"]),
    "argsort": lambda jax, op, x: jax.numpy.argsort(x[0], axis=op["axis"], stable=True),
    "argmax": lambda jax, op, x: jax.numpy.argmax(x[0], axis=op["axis"]),
    "argmin": lambda jax, op, x: jax.numpy.argmin(x[0], axis=op["axis"]),
    "cumsum": lambda jax, op, x: jax.numpy.cumsum(x[0], axis=op["axis"]),
    "relu": lambda jax, op, x: jax.nn.relu(x[0]),
    "silu": lambda jax, op, x: jax.nn.silu(x[0]),
    "gelu": lambda jax, op, x: jax.nn.gelu(x[0]),
    "sigmoid": lambda jax, op, x: jax.nn.sigmoid(x[0]),
    "erf": lambda jax, op, x: jax.lax.erf(x[0]),
    "gelu_gradient": lambda jax, op, x: jax.vjp(jax.nn.gelu, x[1])[1](x[0])[0],
    "silu_gradient": lambda jax, op, x: jax.vjp(jax.nn.silu, x[1])[1](x[0])[0],
    "swiglu": lambda jax, op, x: jax.nn.silu(x[0]) * x[1],
    "weighted_swiglu": lambda jax, op, x: jax.nn.silu(x[0]) * x[1] * x[2][..., None],
    "softmax": lambda jax, op, x: jax.nn.softmax(x[0], op["axis"]),
    "log_softmax": lambda jax, op, x: jax.nn.log_softmax(x[0], op["axis"]),
    "accumulate": lambda jax, op, x: (x[0] + x[1]).astype(x[0].dtype),
    "all_reduce": lambda jax, op, x: _all_reduce(jax, x[0], op["axes"], op["op"]),
    "all_gather": lambda jax, op, x: jax.lax.all_gather(x[0], op["axes"], axis=op["dim"], tiled=True),
    "reduce_scatter": lambda jax, op, x: jax.lax.psum_scatter(
        x[0], op["axes"], scatter_dimension=op["dim"], tiled=True
    ),
    "all_to_all": lambda jax, op, x: jax.lax.all_to_all(
        x[0], op["axes"], op["split_dim"], op["concat_dim"], tiled=True
    ),
    "permute": lambda jax, op, x: _permute(jax, x[0], op["axes"], op["pairs"]),
    "all_slice": lambda jax, op, x: _own_part(jax, x[0], op["axes"], op["dim"], op["extent"]),
}
"""What the operators of the IR are in JAX."""


def to_stablehlo(function: Function | Executable, mesh: Mesh | None = None) -> str:
    """The StableHLO text of a program, parsed and verified by the MLIR bindings.

    Inputs keep their names, as the locations of arguments.  On a ``mesh``, layouts are written as Shardy's annotations.
    A `Partitioned`, or an `Executable` of a laid out program, is written as the program of one device, with its
    collectives, between the layouts of its inputs and outputs.  Where the programs of devices have other numbers, as
    the first row of a part, there is a ``stablehlo.case`` over the place of the device.

    `UnsupportedError` for an operator that has no counterpart, for symbols, and for devices whose programs have other
    ops or other shapes: StableHLO has one program for all.  `stages_to_stablehlo` writes a pipeline.
    """
    return _written(*_parts(function, mesh))


def localized_to_stablehlo(programs: Localized) -> str:
    """As `to_stablehlo` of an `Executable`.

    Terms of a pending sum are whole tensors: an input or output that has a sum pending over axes has these axes as first
    dims, with a term for each place.
    """
    return _written(*_of_devices(programs))


def _written(whole: Any, bodies: list[Function], mesh: Mesh | None, inputs: Any, outputs: Any) -> str:
    """The text; see `_parts`."""
    jax = bindings.jax_library()
    if names := ", ".join(sorted({name for body in bodies for name in body.symbols})):
        raise UnsupportedError(f"extents must be numbers; give values to {names} with specialize")
    with jax.enable_x64(True):
        given = [
            jax.ShapeDtypeStruct(_shape(value, layout, mesh), value.type.dtype)
            for value, layout in zip(whole, inputs or [None] * len(whole), strict=True)
        ]
        called = _callable(jax, bodies, mesh, inputs, outputs)
        called.__name__ = bodies[0].name.lstrip("@").replace(".", "_")
        low = jax.jit(called, keep_unused=True).trace(*given).lower(lowering_platforms=("cpu",))
        text = low.as_text()
        if mesh is not None:  # it was traced without devices
            text = text.replace("mhlo.num_partitions = 1 ", f"mhlo.num_partitions = {mesh.size} ", 1)
        return bindings.verified(bindings.named_arguments(text, [value.name for value in whole]))


def _parts(function: Any, mesh: Mesh | None) -> tuple[Any, list[Function], Mesh | None, Any, Any]:
    """The whole inputs, the function to write, the mesh, and layouts, if the function is that of each device."""
    if isinstance(function, Function):
        return function.inputs, [function], mesh, None, None
    if not isinstance(function, Executable):
        raise UnsupportedError(
            "a Function or an Executable can be written as StableHLO, got "
            f"{type(function).__name__}; of a pipeline, stages_to_stablehlo writes a module for each class of its stages"
        )
    programs: Any = function.programs
    if programs.inputs is None:
        raise UnsupportedError("a program of one device without layouts of its inputs cannot be written")
    return _of_devices(programs)


def _of_devices(programs: Any) -> tuple[Any, list[Function], Mesh, Any, Any]:
    bodies = [programs.program(rank) for rank in range(programs.mesh.size)]
    for rank, body in enumerate(bodies):
        if _skeleton(body) != _skeleton(bodies[0]):
            raise UnsupportedError(
                f"the programs of ranks 0 and {rank} have other ops or other shapes; StableHLO has "
                "one program for all devices"
            )
    return programs.function.inputs, bodies, programs.mesh, programs.inputs, programs.outputs


def _shape(value: Value, layout: TensorSharding | None, mesh: Mesh | None) -> tuple[int, ...]:
    """The shape of an argument: with a dim for each axis over which a sum is pending in it."""
    terms = layout.partial if layout is not None and mesh is not None else ()
    return (*(mesh.shape[axis] for axis in terms if mesh is not None), *map(int, value.type.shape))


def _skeleton(function: Function) -> Any:
    """A program without the attributes of its ops."""
    return (function.inputs, function.outputs, [(op.kind, op.inputs, op.outputs) for op in function.ops])


def _callable(jax: Any, bodies: list[Function], mesh: Mesh | None, inputs: Any, outputs: Any) -> Any:
    body = bodies[0]
    if mesh is None:
        return lambda *arrays: _run(jax, body, arrays, lambda x, value: x)
    axes = tuple(mesh.shape)
    abstract = jax.sharding.AbstractMesh(
        tuple(mesh.shape.values()), axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )

    def spec(layout: TensorSharding) -> Any:
        axes_of_dims = (dim.axes or None for dim in layout.dims)
        return jax.sharding.PartitionSpec(*layout.partial, *axes_of_dims)

    if inputs is not None:
        inner = jax.shard_map(
            lambda *arrays: _with_terms(jax, bodies, mesh, inputs, outputs, arrays),
            mesh=abstract,
            in_specs=tuple(map(spec, inputs)),
            out_specs=tuple(map(spec, outputs)),
            check_vma=False,
        )
        return lambda *arrays: inner(*arrays)

    def laid(x: Any, value: Value) -> Any:
        layout = value.layout
        if layout is None or layout.partial:
            return x
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(abstract, spec(layout)))

    return lambda *arrays: _run(jax, body, arrays, laid)


def _run(jax: Any, function: Function, arrays: Sequence[Any], laid: Callable[[Any, Value], Any]) -> Any:
    values: dict[str, Any] = {
        value.name: laid(x, value) for value, x in zip(function.inputs, arrays, strict=True)
    }
    for op in function.ops:
        made = called(jax, op, [values[value.name] for value in op.inputs])
        values.update((value.name, laid(x, value)) for value, x in zip(op.outputs, made, strict=True))
    return tuple(values[value.name] for value in function.outputs)


def _with_terms(
    jax: Any, bodies: list[Function], mesh: Mesh, inputs: Any, outputs: Any, arrays: Sequence[Any]
) -> tuple[Any, ...]:
    """`_run_device`; a term of a pending sum is the only one in its first dims."""
    own = [x[(0,) * len(layout.partial)] for x, layout in zip(arrays, inputs, strict=True)]
    made = zip(_run_device(jax, bodies, mesh, own), outputs, strict=True)
    return tuple(jax.numpy.expand_dims(x, range(len(layout.partial))) for x, layout in made)


def _run_device(jax: Any, bodies: list[Function], mesh: Mesh, arrays: Sequence[Any]) -> Any:
    """The program of each device.  Of an op whose attributes differ, each device takes its own branch."""
    first = bodies[0]
    values = {value.name: x for value, x in zip(first.inputs, arrays, strict=True)}
    for ops in zip(*(body.ops for body in bodies), strict=True):
        given = [values[value.name] for value in ops[0].inputs]
        keys = [frozenset(dict(op.attributes, received=None).items()) for op in ops]
        kinds = dict(zip(keys, ops, strict=True))
        if ops[0].kind == "relayout":
            made = (_permuted(jax, ops[0], mesh, given[0]),)
        elif len(kinds) == 1:
            made = called(jax, ops[0], given)
        elif ops[0].kind in _COLLECTIVES:
            raise UnsupportedError(
                "this collective differs between devices", ops[0].kind, ops[0].region or ""
            )
        else:
            numbers = [[*kinds].index(key) for key in keys]
            branches = [lambda *x, op=op: called(jax, op, [*x]) for op in kinds.values()]
            number = jax.numpy.asarray(np.array(numbers, np.int32))[jax.lax.axis_index(mesh.axes)]
            made = jax.lax.switch(number, branches, *given)
        values.update((value.name, x) for value, x in zip(ops[0].outputs, made, strict=True))
    return tuple(values[value.name] for value in first.outputs)


def _permuted(jax: Any, op: Op, mesh: Mesh, x: Any) -> Any:
    """A step between layouts in which each device gets the whole part of another, or has it."""
    donors = step_of(op, mesh).donors if op["step"] == "permute" else ()
    if not donors or len({*donors}) < len(donors):
        raise UnsupportedError(
            f"a step of {op['step']} between layouts has no counterpart in StableHLO here",
            op.kind,
            op.region or "",
        )
    return jax.lax.ppermute(x, mesh.axes, [(donor, rank) for rank, donor in enumerate(donors)])


def called(jax: Any, op: Op, arrays: list[Any]) -> tuple[Any, ...]:
    """The outputs of an op, in JAX, in their dtypes."""
    if op.kind == "reshard":
        return (arrays[0],)
    if op.kind not in CALLS:
        raise UnsupportedError("this operator has no counterpart in StableHLO here", op.kind, op.region or "")
    if op.kind in _ELEMENTWISE + ["einsum"]:
        arrays = [_wide(x, value) for x, value in zip(arrays, op.inputs, strict=True)]
    result = CALLS[op.kind](jax, op, arrays)
    results = result if isinstance(result, tuple) else (result,)
    return tuple(x.astype(value.type.dtype) for x, value in zip(results, op.outputs, strict=True))


def _wide(x: Any, value: Value) -> Any:
    """The array of a value; in float32 where its dtype is narrow."""
    return x.astype("float32") if _is_narrow(value.type) else x


def _is_narrow(type: TensorType) -> bool:
    return type.dtype.itemsize <= 2 and type.dtype.kind not in "iub"
