"""The only module that imports JAX and MLIR's Python bindings, which come with ``jaxlib``.

`read_module` parses and verifies a module, as text or as a portable artifact, and gives it as plain values.  `lowered`
is the text that JAX makes of a function.  `verified` checks a text that was written here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from parallelism.dtypes import is_integer
from parallelism.interop.complex_numbers import numbers_in, type_of_parts
from parallelism.interop.errors import InteropError, UnsupportedError
from parallelism.interop.stablehlo.harmless import Ended, by_child, check_harmless
from parallelism.interop.stablehlo.linear_algebra import DIMS, GROUPED, Grouped
from parallelism.interop.stablehlo.module import OPEN, STOPS_GRADIENT, Block, Module, Node, OtherType, Type
from parallelism.interop.stablehlo.own_derivatives import warn_of_lost_derivatives
from parallelism.interop.stablehlo.shardings import list_groups, with_axes_split
from parallelism.interop.stablehlo.special import ERROR_FUNCTIONS, OWN
from parallelism.ir.core import DTYPES, Expression, TensorType
from parallelism.mesh import Mesh

MOST_NODES = 500_000
_ARTIFACT = b"ML\xefR"


@cache
def _libraries() -> Any:
    """JAX, its MLIR module, the bindings and the dialect of StableHLO.  ``ImportError`` says what to install."""
    try:
        import jax
        from jax.interpreters import mlir
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import stablehlo
    except ImportError as error:
        raise ImportError(
            'StableHLO is read by the MLIR bindings of jaxlib: pip install "vcluster[jax]"'
        ) from error
    return jax, mlir, ir, stablehlo


def jax_library() -> Any:
    """JAX itself."""
    return _libraries()[0]


# -- reading -----------------------------------------------------------------------------------------------------------


def read_module(content: str | bytes, *, trusted: bool = False) -> Module:
    """The module of a text or of a portable artifact.  `InteropError` names line and column of what is wrong.

    A text that is ``trusted``, because JAX made it, is not asked whether it harms the parser.
    """
    _, mlir, ir, _ = _libraries()
    with mlir.make_ir_context() as context, ir.Location.unknown():
        context.enable_multithreading(False)
        if isinstance(content, bytes) and content[:4] == _ARTIFACT:
            content = text_of(content)
        module = _parsed(ir, content, trusted)
        try:
            return list_groups(with_axes_split(_Reading(ir).module(module)))
        except RecursionError:
            raise InteropError("its attributes are nested too deep") from None
        except (RuntimeError, UnicodeDecodeError) as error:  # what the bindings raise for bytes in strings
            raise InteropError(f"a string of the module is not UTF-8: {error}") from None


def _parsed(ir: Any, content: str | bytes, trusted: bool) -> Any:
    if isinstance(content, bytes):
        try:
            content = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InteropError(
                f"it is neither text in UTF-8 nor a portable artifact of StableHLO: {error}"
            ) from None
    if "\0" in content:
        raise InteropError("the text has a zero byte")
    if not trusted:
        check_harmless(content)
    try:
        return ir.Module.parse(content)
    except ir.MLIRError as error:
        found = re.search(r'"-":(\d+):(\d+): (.*)', str(error))
        if found is None:
            raise InteropError(str(error).strip()) from None
        line, column, message = found.groups()
        place = f"line {line}, column {column}"
        if foreign := re.search(r'!"(\w+)"<.* type created with unregistered dialect', message):
            raise UnsupportedError(
                f"types of the dialect {foreign[1]} are not supported", "", place
            ) from None
        node = re.search(r"'([a-z_]+\.[a-z_]+)' op", message)
        raise InteropError(message, node[1] if node else "", place) from None
    except ValueError as error:  # a number so large that the parser has no room
        raise InteropError(f"the text cannot be parsed: {error}") from None


MOST_SECONDS = 120


def text_of(content: bytes) -> str:
    """The text of a portable artifact, or of a module in the bytecode of MLIR, which XLA writes.

    A child process reads it, one for all: the reader of bytes that are broken may abort or never end.
    """
    try:
        is_read, found = by_child(b"a", content, MOST_SECONDS)
    except Ended:
        raise InteropError(
            f"the portable artifact cannot be read: its reader ended, or took more than {MOST_SECONDS} s"
        ) from None
    if not is_read:
        raise InteropError(f"the portable artifact cannot be read: {found.decode('utf-8', 'replace')}")
    return found.decode("utf-8", "replace")


class _Reading:
    def __init__(self, ir: Any) -> None:
        self.ir = ir
        self.numbers: dict[Any, int] = {}
        self.types: dict[Any, Type] = {}
        self.count = 0

    def module(self, module: Any) -> Module:
        functions: dict[str, Node] = {}
        others: list[Node] = []
        for operation in module.body.operations:
            node = self.node(operation.operation)
            if node.kind == "func.func":
                functions[node.attributes["sym_name"]] = node
            else:
                others.append(node)
        attributes = self.attributes(module.operation)
        name = attributes.get("sym_name", "module")
        return Module(name, functions, attributes, tuple(others))

    def node(self, operation: Any) -> Node:
        self.count += 1
        if self.count > MOST_NODES:
            raise InteropError(f"the module has more than {MOST_NODES} ops")
        place = _place(str(operation.location))
        operands = tuple(self.number(value) for value in operation.operands)
        results = list(operation.results)
        regions = tuple(tuple(self.block(block) for block in region.blocks) for region in operation.regions)
        return Node(
            operation.name,
            operands,
            tuple(map(self.number, results)),
            tuple(self.type(value.type) for value in results),
            self.attributes(operation),
            regions,
            place,
        )

    def block(self, block: Any) -> Block:
        arguments = list(block.arguments)
        return Block(
            tuple(map(self.number, arguments)),
            tuple(self.type(value.type) for value in arguments),
            tuple(self.node(operation.operation) for operation in block.operations),
            tuple(_name(str(value.location)) for value in arguments),
        )

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def type(self, type: Any) -> Type:
        if type not in self.types:
            self.types[type] = self._type(type)
        return self.types[type]

    def _type(self, type: Any) -> Type:
        ir = self.ir
        if not isinstance(type, ir.RankedTensorType):
            return OtherType(str(type))
        tensor: Any = type
        if not tensor.has_rank:
            return OtherType(str(type))
        shape = [OPEN if tensor.is_dynamic_dim(d) else tensor.get_dim_size(d) for d in range(tensor.rank)]
        name = str(tensor.element_type).lower()
        if name not in DTYPES:  # NumPy would take some, as i24, for other types
            return OtherType(str(type))
        try:
            return TensorType(name, shape)
        except (TypeError, ValueError):
            return OtherType(str(type))

    def attributes(self, operation: Any) -> dict[str, Any]:
        found = {}
        for named in operation.attributes:
            name = named if isinstance(named, str) else named.name
            try:
                found[name] = self.attribute(operation.attributes[name])
            except TypeError:  # the bindings have no class for arrays of complex numbers
                found[name] = _complex_numbers(operation)
        return found

    def attribute(self, attribute: Any) -> Any:
        match type(attribute).__name__:
            case "IntegerAttr" | "BoolAttr" | "StringAttr" | "FlatSymbolRefAttr" | "FloatAttr":
                return attribute.value
            case "DenseI64ArrayAttr" | "DenseBoolArrayAttr" | "DenseI32ArrayAttr":
                return tuple(attribute)
            case "ArrayAttr":
                return tuple(map(self.attribute, attribute))
            case "DictAttr":
                return {named.name: self.attribute(named.attr) for named in attribute}
            case "UnitAttr":
                return True
            case "DenseIntElementsAttr" | "DenseFPElementsAttr":
                return self.dense(attribute)
        return str(attribute)

    def dense(self, attribute: Any) -> Any:
        """The numbers of an array; of equal ones a view of one."""
        if str(attribute.type).endswith("xindex>"):
            return np.array([int(str(number).split()[0]) for number in attribute], np.int64)
        type = self.type(attribute.type)
        if isinstance(type, OtherType):
            return type
        shape = tuple(int(n) for n in type.shape)
        if attribute.is_splat:
            number = np.asarray(attribute.get_splat_value().value)
            return np.broadcast_to(number.astype(type.dtype), shape)
        try:
            return np.array(attribute).astype(type.dtype).reshape(shape)
        except TypeError:  # the bindings have no buffers of narrow floats and narrow integers
            return _spelled(str(attribute), type.dtype).reshape(shape)


def _complex_numbers(operation: Any) -> Any:
    """The numbers of a complex constant; None if its text does not have them."""
    results = list(operation.results)
    type = type_of_parts(str(results[0].type)) if len(results) == 1 else None
    return None if type is None else numbers_in(str(operation), [int(n) for n in type.shape])


def _spelled(text: str, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The numbers of ``dense<[1.5, 0x7FC0]> : tensor<2xbf16>``, or of ``dense<"0xC03FC07F">``, which has bytes."""
    body = text[text.index("<") + 1 : text.rindex("> :")]
    words = np.dtype(f"uint{8 * dtype.itemsize}")
    if body.startswith('"'):
        numbers = np.frombuffer(bytes.fromhex(body[3:-1]), words.newbyteorder("<")).astype(words)
        return numbers.astype(dtype) if is_integer(dtype) else numbers.view(dtype)
    spelled = re.findall(r"[^\s,\[\]]+", body)
    if is_integer(dtype):
        return np.array([int(each) for each in spelled], np.int64).astype(dtype)
    floats = [0.0 if each.startswith("0x") else float(each) for each in spelled]
    numbers = np.array(floats, np.float64).astype(dtype)
    for i, each in enumerate(spelled):  # infinities and nans are spelled by their bits
        if each.startswith("0x"):
            numbers[i : i + 1] = np.array([int(each, 16)], words).view(dtype)
    return numbers


def _place(location: str) -> str:
    """A location in a few words: the name that JAX gave, or line and column."""
    if found := re.match(r'loc\("-":(\d+):(\d+)\)', location):
        return f"line {found[1]}, column {found[2]}"
    if found := re.match(r'loc\("([^"]*)"', location):
        line = re.search(r'\("([^"]*)":(\d+):', location)
        return f"{found[1]} ({line[1]}, line {line[2]})" if line else found[1]
    return ""


def _name(location: str) -> str:
    """The name that a location is, such as ``p.w`` for that of ``p['w']`` in JAX; empty if it is a place in a text."""
    found = re.match(r'loc\("([^"]*)"(?!:)', location)
    return re.sub(r"""\[['"]?([^]'"]*)['"]?\]""", r".\1", found[1]) if found else ""


def named_arguments(text: str, names: Sequence[str]) -> str:
    """The text of a module with the names of the arguments of ``@main`` as their locations: ``loc("p.w")``."""
    found = re.search(r"(?<= @main\()%arg0: .*?(?=\) -> )", text)
    if found is None:
        return text
    arguments = re.split(r", (?=%arg\d+: )", found[0])
    named = [f'{argument} loc("{name}")' for argument, name in zip(arguments, names, strict=True)]
    return f"{text[: found.start()]}{', '.join(named)}{text[found.end() :]}"


# -- writing and JAX ---------------------------------------------------------------------------------------------------


def verified(text: str) -> str:
    """``text``, parsed and verified.  `InteropError` if the bindings refuse it."""
    _, mlir, ir, _ = _libraries()
    with mlir.make_ir_context():
        _parsed(ir, text, trusted=True)
    return text


def artifact(text: str) -> bytes:
    """The portable artifact of a text, in the oldest version of StableHLO that the bindings write."""
    stablehlo = _libraries()[3]
    content: bytes = stablehlo.serialize_portable_artifact_str(text, stablehlo.get_minimum_version())
    return content


class Lowered(NamedTuple):
    """What JAX lowers a function to."""

    text: str
    arguments: list[tuple[str, TensorType]]
    """Name and type of every argument, by their pytrees."""
    kept: list[int]
    """The arguments that the text takes; it has none that are not used."""


def lowered(function: Callable[..., Any], types: Sequence[Any], mesh: Mesh | None) -> Lowered:
    """What JAX lowers ``function`` to, for arguments like ``types``: pytrees of arrays, of shapes, or of types."""
    jax = _libraries()[0]
    scope = _Scope(jax)
    given = [jax.tree.map(scope.abstract, type, is_leaf=_is_type) for type in types]
    jitted = function if hasattr(function, "trace") and hasattr(function, "lower") else jax.jit(function)
    if scope.has_symbols:
        return _exported(jax, jitted, types, given, _argument_names(jax, function, given))
    with _placed(jax, mesh):
        traced = jitted.trace(*given)
        warn_of_lost_derivatives(jax, traced.jaxpr)
        rules = _libraries()[1].LoweringParameters(override_lowering_rules=_own_rules())
        low = traced.lower(lowering_platforms=("cpu",), _private_parameters=rules)
    names = _argument_names(jax, function, given)
    infos = jax.tree.leaves(low.args_info)
    arguments = [(name, TensorType(info.dtype, info.shape)) for name, info in zip(names, infos, strict=True)]
    kept = low._lowering.compile_args.get("kept_var_idx")
    return Lowered(
        low.as_text(debug_info=True), arguments, sorted(range(len(names)) if kept is None else kept)
    )


@cache
def _stopping_rule() -> Any:
    """How ``jax.lax.stop_gradient`` is lowered here: to a barrier with a mark.  By itself JAX writes nothing of it."""
    jax, _, ir, stablehlo = _libraries()

    def lowered_to(_: Any, x: Any) -> Any:
        barrier = stablehlo.OptimizationBarrierOp([x])
        barrier.operation.attributes[STOPS_GRADIENT] = ir.UnitAttr.get()
        return list(barrier.operation.results)

    (equation,) = jax.make_jaxpr(jax.lax.stop_gradient)(1.0).eqns
    return equation.primitive, lowered_to


@cache
def _grouping_rule() -> Any:
    """How ``jax.lax.ragged_dot`` is lowered here: to a custom call with its dims.

    None where JAX's own lowering, which is for any dims, is not where it was.
    """
    jax, mlir, ir, stablehlo = _libraries()
    try:
        from jax._src.lax.lax import _ragged_dot_general_impl as of_any_dims
    except ImportError:
        return None
    rows, matrices, sizes = np.zeros((3, 2), "f4"), np.zeros((1, 2, 4), "f4"), np.zeros(1, "i4")
    (equation,) = jax.make_jaxpr(jax.lax.ragged_dot)(rows, matrices, sizes).eqns

    def lowered_to(context: Any, *operands: Any, **how: Any) -> Any:
        numbers = how["ragged_dot_dimension_numbers"]
        summed, batch = numbers.dot_dimension_numbers
        dims = (*batch, *summed, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)
        groups = context.avals_in[2].shape
        is_plain = len(groups) == 1 and isinstance(groups[0], int) and how.get("group_offset") is None
        if Grouped.of(dims) is None or not is_plain:
            return mlir.lower_fun(of_any_dims, multiple_results=False)(context, *operands, **how)
        types = [mlir.aval_to_ir_type(context.module_context, each) for each in context.avals_out]
        call = stablehlo.CustomCallOp(types, operands, call_target_name=GROUPED)
        call.operation.attributes[DIMS] = ir.ArrayAttr.get(
            [ir.DenseI64ArrayAttr.get(list(each)) for each in dims]
        )
        return list(call.operation.results)

    return equation.primitive, lowered_to


@cache
def _error_function_rules() -> tuple[Any, ...]:
    """How error functions are lowered for an export: to custom calls with their names.

    An export has no operators for them.  What JAX would write has infinite slopes at 0 in a branch that is not chosen, and
    its gradient there is no number.
    """
    jax, mlir, _, stablehlo = _libraries()

    def rule_of(name: str) -> Any:
        def lowered_to(context: Any, x: Any, **_: Any) -> Any:
            types = [mlir.aval_to_ir_type(context.module_context, each) for each in context.avals_out]
            return list(stablehlo.CustomCallOp(types, [x], call_target_name=f"{OWN}{name}").operation.results)

        (equation,) = jax.make_jaxpr(getattr(jax.lax, name))(1.0).eqns
        return equation.primitive, lowered_to

    return tuple([rule_of(name) for name in ERROR_FUNCTIONS])


def _own_rules() -> tuple[Any, ...]:
    """How primitives are lowered here otherwise than by JAX itself."""
    return tuple(rule for rule in (_stopping_rule(), _grouping_rule()) if rule is not None)


def _placed(jax: Any, mesh: Mesh | None) -> Any:
    """The context in which axes of the mesh can be named without devices."""
    if mesh is None:
        return nullcontext()
    axes = tuple(mesh.shape)
    abstract = jax.sharding.AbstractMesh(
        tuple(mesh.shape.values()), axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )
    return jax.sharding.use_abstract_mesh(abstract)


def _is_type(x: Any) -> bool:
    return isinstance(x, TensorType)


class _Scope:
    """Makes what JAX traces in place of arguments: shapes and dtypes.  Symbols become JAX's, of one scope."""

    def __init__(self, jax: Any) -> None:
        self.jax, self.has_symbols = jax, False
        self.scope: Any = None

    def abstract(self, x: Any) -> Any:
        """In place of one array."""
        made = self.jax.ShapeDtypeStruct
        if isinstance(x, TensorType):
            return made(self._shape(x), x.dtype)
        if isinstance(x, bool | int | float | complex) or not (hasattr(x, "shape") and hasattr(x, "dtype")):
            return x
        if isinstance(x, np.ndarray):
            return made(x.shape, x.dtype)
        return made(x.shape, x.dtype, sharding=getattr(x, "sharding", None))

    def _shape(self, type: TensorType) -> Any:
        if not any(isinstance(n, Expression) for n in type.shape):
            return type.shape
        from jax import export

        self.has_symbols = True
        self.scope = self.scope or export.SymbolicScope()
        return export.symbolic_shape(",".join(map(str, type.shape)) + ",", scope=self.scope)


def _exported(jax: Any, jitted: Any, types: Any, given: Any, names: Sequence[str]) -> Lowered:
    """What JAX exports of a function whose arguments have symbols in their shapes."""
    from jax import export

    calls = [GROUPED, *[f"{OWN}{name}" for name in ERROR_FUNCTIONS]]
    try:
        warn_of_lost_derivatives(jax, jitted.trace(*given).jaxpr)
        found = export.export(
            jitted,
            platforms=("cpu",),
            disabled_checks=[export.DisabledSafetyCheck.custom_call(call) for call in calls],
            _override_lowering_rules=(*_own_rules(), *_error_function_rules()),
        )(*given)
    except jax.errors.JAXTypeError:
        raise
    except Exception as error:  # JAX has no common type for what it cannot say with symbols
        if type(error).__module__.startswith("jax"):
            raise InteropError(
                f"JAX cannot export it with these symbols: {' '.join(str(error).split())}"
            ) from error
        raise
    leaves = [leaf for each in types for leaf in jax.tree.leaves(each, is_leaf=_is_type)]
    arguments: list[tuple[str, TensorType]] = []
    for name, leaf, info in zip(names, leaves, found.in_avals, strict=True):
        known = leaf if isinstance(leaf, TensorType) else TensorType(info.dtype, info.shape)
        arguments.append((name, known))
    return Lowered(found.mlir_module(), arguments, sorted(found.module_kept_var_idx))


def _argument_names(jax: Any, function: Any, given: Sequence[Any]) -> list[str]:
    try:
        parameters = list(inspect.signature(getattr(function, "__wrapped__", function)).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names += [f"arg{i}" for i in range(len(names), len(given))]
    found = []
    for name, tree in zip(names, given, strict=False):
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
            keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
            found.append(".".join([name, *keys]))
    return found
