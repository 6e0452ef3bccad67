"""Products of the blocks in 8 or 4 bits with scales: what `MixedPrecision` does with ``products``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from parallelism.arrays import Array
from parallelism.dtypes import as_dtype, limits_of
from parallelism.ir.core import (
    Attributes,
    Builder,
    Expression,
    Function,
    Op,
    TensorType,
    Value,
    frozen_attributes,
)
from parallelism.ir.core.table import meaning, operator
from parallelism.ir.operators.contractions import ProductTerms, matmul_equation, unpacked_shape
from parallelism.ir.operators.scaled_products import Scaling, scaling_of
from parallelism.ir.passes.frozen import FROZEN, with_frozen
from parallelism.ir.passes.gradients import DELAYED, GRADIENT
from parallelism.kernels.scaled_numbers import RECIPES, quantized_by
from parallelism.layouts.localization.local_program import free_name
from parallelism.layouts.propagation.annotation import laid_out
from parallelism.sharding import TensorSharding
from parallelism.transforms.parts import NEXT, UPDATE, Parts
from parallelism.transforms.products import product_of

HISTORY, MAXIMUM = "history.", "maximum."
"""The prefixes of the names of the maxima of earlier steps from which a scale is, and of that of this step."""
SCALES, TENSOR_SCALES = "scales.", "tensor_scales."
"""The prefixes of the names of a weight's scales, and of the scales of these."""
FORMATS = {"float8": None, "float8_e4m3fn": "float8_e4m3fn", "float8_hybrid": "float8_e5m2", "float4": None}
"""What ``products`` may be, and the format of gradients; None: that of the recipe."""
_OUTSIDE = frozenset(("router", "gate", "lora"))
"""Regions of a block whose products decide where tokens go, and those of adapters: they stay in 16 bits."""


@dataclass(frozen=True)
class ScaledProducts:
    """The products of the blocks with their weights are in few bits, with scales by a `Recipe`.

    Blocks are the regions with a number, ``block.0``; in a program without such regions all products but the last one
    belong to them.  The head, embeddings, norms, attention and the router stay as they are.  Of a weight there is a copy
    in few bits, with its scales, which the update makes once a step.  A frozen weight is there in few bits alone.  What
    ZeRO 3 splits is gathered so, in each pass.  With ``gathers="float8"`` weights are there in float8 alone, rounded
    from their main copies, and the update gathers them so, too.

    ``first`` and ``last`` blocks stay in 16 bits.

    With a ``history`` of so many steps a tensor has one scale on all devices, from the largest sizes that it had in these
    steps; with ``newest`` from that of the last one.  Scales and histories are arrays of the state, which the update
    replaces.  Of activations and of gradients of results it gets the largest sizes as the gradients of scales (`DELAYED`).
    """

    products: str
    recipe: str
    gathers: str = "bfloat16"
    first: int = 0
    last: int = 0
    history: int = 0
    newest: bool = False
    phase: ClassVar[int] = 55

    def __call__(self, function: Function) -> Function:
        parts = Parts.of(function)
        chosen = [*self._chosen(parts)]
        if not chosen:
            raise ValueError(
                f"{self}: @{function.name} has no product of a weight inside of a block, so nothing is in {self.bits}"
            )
        return _Scaled(self, parts, chosen).parts().joined()

    @property
    def bits(self) -> str:
        """``float8`` or ``float4``."""
        return self.products.partition("_")[0]

    @property
    def forward(self) -> np.dtype[Any]:
        """The format of weights and activations."""
        return as_dtype(RECIPES[self.recipe].forward)

    @property
    def backward(self) -> np.dtype[Any]:
        """The format of the gradients of results."""
        return as_dtype(FORMATS[self.products] or RECIPES[self.recipe].backward)

    def _chosen(self, parts: Parts) -> Iterator[ScaledProduct]:
        """The products that are scaled."""
        found = [product for op in parts.forward.ops if (product := ScaledProduct.of(op, parts)) is not None]
        blocks = sorted({product.block for product in found if product.block is not None})
        if not blocks:
            yield from found[:-1]
            return
        inside = {*blocks[self.first : len(blocks) - self.last]}
        for product in found:
            if product.block in inside and _OUTSIDE.isdisjoint((product.op.region or "").split(".")):
                yield product

    def __str__(self) -> str:
        return f"products in {self.products} by the recipe {self.recipe}"


class ScaledProduct(NamedTuple):
    """A product of an activation with a weight."""

    op: Op
    x: Value
    weight: Value
    """The weight, or a view of it."""
    is_parameter: bool
    """Whether it is the weight itself."""
    terms: ProductTerms
    """The letters of ``x``, of the weight, and of the result."""
    apart: str
    """The letters of rows of the batch, and of experts: see `scaling_of`."""
    parameter: str
    """The name of the weight, also where the product reads a view of it."""

    @classmethod
    def of(cls, op: Op, parts: Parts) -> ScaledProduct | None:
        """None if the op is no product of one activation with one weight."""
        if op.kind not in ("einsum", "matmul") or len(op.inputs) != 2:
            return None
        product = product_of(op, parts.views)
        equation = matmul_equation(*op.types) if op.kind == "matmul" else op["equation"]
        if product is None or "1" in equation or not product.letters:
            return None
        terms, (x, weight) = ProductTerms.of(equation), op.inputs
        if product.operand is x:
            terms, x, weight = ProductTerms(terms.b, terms.a, terms.result), weight, x
        shared = {*terms.a} & {*terms.b} & {*terms.result}
        rows = {
            letter
            for dim, (letter, extent) in enumerate(zip(terms.a, x.type.shape, strict=True))
            if isinstance(extent, Expression) or parts.classes.of(x, dim) == parts.rows
        }
        apart = "".join(letter for letter in terms.a if letter in shared | (rows - {*terms.b}))
        return cls(op, x, weight, weight is product.weight, terms, apart, product.weight.name)

    @property
    def block(self) -> int | None:
        """The number of its block."""
        return next((int(each) for each in (self.op.region or "").split(".") if each.isdecimal()), None)


def names_of(weight: str, recipe: str, copy: str = "") -> tuple[str, ...]:
    """The names of a weight in few bits, of its scales, and of the scales of these if the recipe has such."""
    names = f"{copy}{weight}", f"{SCALES}{weight}", f"{TENSOR_SCALES}{weight}"
    return names if RECIPES[recipe].nested else names[:2]


def frozen_in_float8(parts: Parts) -> dict[str, Attributes]:
    """How each frozen weight that is there in few bits alone is quantized, by its name."""
    frozen = {value.name for value in parts.frozen}
    found = dict[str, Attributes]()
    for op in parts.forward.ops if parts.frozen else ():
        if op.kind != "scaled_einsum":
            continue
        weight, *scales = op.inputs[len(op.inputs) // 2 :]
        scales = [value for value in scales if not value.name.startswith(DELAYED)]
        if {weight.name, *(value.name for value in scales)} <= frozen and not scales[0].type.ndim:
            found[weight.name] = frozen_attributes({"dtype": weight.type.dtype})
        elif {weight.name, *(value.name for value in scales)} <= frozen:
            terms, recipe = ProductTerms.of(op["equation"]), op["recipe"]
            packed = dict(op.attributes).get("packed", (None, None))[1]
            shape = unpacked_shape(weight.type.shape, packed)
            scaling = scaling_of(terms.b, shape, terms.contracted, recipe, op["apart"], weight=True)
            how = {**scaling.attributes, "dtype": weight.type.dtype, "recipe": recipe}
            found[weight.name] = frozen_attributes(how)
    return found


def quantized_once(name: str, weight: Array, how: Attributes) -> dict[str, Array]:
    """A frozen weight in few bits and its scales, by their names."""
    given = dict(how)
    if "recipe" in given:
        return dict(
            zip(names_of(name, given["recipe"]), operator("quantize").run([weight], how), strict=True)
        )
    most = np.float32(limits_of(given["dtype"]).max)
    scale = np.asarray(np.abs(weight).max(initial=0) / most or 1, np.float32)
    return {name: quantized_by(weight, scale, given["dtype"])[0], f"{SCALES}{name}": scale}


class _Scaled:
    """The parts of a step, with products in few bits."""

    def __init__(self, how: ScaledProducts, before: Parts, products: list[ScaledProduct]) -> None:
        self.how, self.before = how, before
        self.products = {product.op: product for product in products}
        self.builder = Builder()
        self.taken = {value.name for value in before.forward.values}
        self.values: dict[Value, Value] = {}
        self.kept: dict[Any, tuple[Value, ...]] = {}
        """What is quantized already, by value and scaling."""
        self.first: dict[Value, ScaledProduct] = {}
        """By weight of which there is a copy in few bits, the first product that uses it."""
        for product in products:
            if product.is_parameter and before.update is not None:
                self.first.setdefault(product.weight, product)
        self.frozen = {weight for weight in self.first if weight in before.frozen}
        readers = self._readers_of_weights()
        only_scaled = {weight for weight in self.first if self._is_only_scaled(readers[weight])}
        if mixed := [weight for weight in self.first if weight in self.frozen - only_scaled]:
            raise ValueError(
                f"{how}: %{mixed[0].name} is frozen, and other products or ops read it in 16 bits; a frozen weight is there "
                f"in {how.bits} alone"
            )
        self.narrow = {weight for weight in only_scaled if how.gathers == "float8" or weight in self.frozen}
        """The weights that are there in few bits alone."""
        self.delayed: list[tuple[Value, np.dtype[Any]]] = []
        """The scales from earlier steps that are in no copy, and the formats of their numbers."""
        self.copies: dict[Value, tuple[Value, ...]] = {}
        """By weight: it in few bits, and its scales."""

    def parts(self) -> Parts:
        """The parts."""
        forward = self.before.forward
        for value in forward.inputs:
            if value not in self.narrow:
                self.values[value] = self.builder.input(value.name, value.type, value.layout)
        for weight in self.first:
            self.copies[weight] = self._copy(weight)
        for op in forward.ops:
            with self.builder.region(op.region, op.line):
                product = self.products.get(op)
                if product is not None:
                    outputs: Sequence[Value] = [self._scaled(product)]
                else:
                    inputs = [self.values[value] for value in op.inputs]
                    outputs = self.builder.emit(op.kind, inputs, dict(op.attributes))
            self.values.update(zip(op.outputs, outputs, strict=True))
        made = self.builder.function(forward.name, [self.values[value] for value in forward.outputs])
        layouts = {new.name: old.layout for old, new in self.values.items() if old.layout is not None}
        layouts |= {
            value.name: value.layout for both in self.copies.values() for value in both if value.layout
        }
        layouts |= {scale.name: TensorSharding() for scale, _ in self.delayed}
        return replace(
            self.before,
            forward=laid_out(made, layouts),
            update=self._update(),
            attributes=self._attributes(),
        )

    def _attributes(self) -> Attributes:
        """Those of the step, in which scales of frozen weights are frozen, too."""
        attributes = self.before.attributes
        names = dict(attributes).get(FROZEN, ()) if self.frozen else ()
        return with_frozen(
            attributes, [each for name in names for each in names_of(name, self.how.recipe)[1:]]
        )

    def _readers_of_weights(self) -> dict[Value, list[Op]]:
        """The ops that read each weight of which there is a copy in few bits."""
        readers: dict[Value, list[Op]] = {weight: [] for weight in self.first}
        for op in self.before.forward.ops:
            for value in dict.fromkeys(op.inputs):
                if value in readers:
                    readers[value].append(op)
        return readers

    def _is_only_scaled(self, readers: Sequence[Op]) -> bool:
        """Whether all that reads a weight are products that take it with the same scales."""
        hows = [self._how(self.products[op], weight=True) for op in readers if op in self.products]
        return len(hows) == len(readers) and all(how == hows[0] for how in hows)

    def _scaling(self, product: ScaledProduct, *, weight: bool) -> Scaling:
        """How an operand of a product is scaled."""
        term, value = (product.terms.b, product.weight) if weight else (product.terms.a, product.x)
        return scaling_of(
            term, value.type.shape, product.terms.contracted, self.how.recipe, product.apart, weight=weight
        )

    def _how(self, product: ScaledProduct, *, weight: bool) -> dict[str, Any]:
        """The attributes with which an operand is quantized."""
        scaling = self._scaling(product, weight=weight)
        return {**scaling.attributes, "dtype": self.how.forward, "recipe": self.how.recipe}

    def _copy(self, weight: Value) -> tuple[Value, ...]:
        """The inputs for a weight in few bits and for its scales."""
        types = self._types_of_copy(weight)
        names = names_of(weight.name, self.how.recipe, "" if weight in self.narrow else f"{self.how.bits}.")
        copies = []
        for name, type in zip(names, types, strict=True):
            layout = weight.layout if type.ndim else TensorSharding()
            copies.append(self.builder.input(name, type, layout))
        if weight in self.narrow:
            self.values[weight] = copies[0]
        return tuple(copies)

    def _types_of_copy(self, weight: Value) -> Sequence[TensorType]:
        if self.how.history:
            return TensorType(self.how.forward, weight.type.shape), _SCALAR
        attributes = frozen_attributes(self._how(self.first[weight], weight=True))
        return meaning("quantize", (weight.type,), attributes).outputs

    def _scaled(self, product: ScaledProduct) -> Value:
        x, weight = (self._scaling(product, weight=each).packed for each in (False, True))
        operands = [*self._quantized(product, weight=False), *self._of_weight(product)]
        if self.how.history:
            operands.append(self._delayed("gradient", product, self.how.backward))
        (result,) = self.builder.emit(
            "scaled_einsum",
            operands,
            {
                "apart": product.apart,
                "backward": self.how.backward,
                "dtype": product.op.outputs[0].type.dtype,
                "equation": f"{product.terms.a},{product.terms.b}->{product.terms.result}",
                "recipe": self.how.recipe,
                **({} if x is None else {"packed": (x, weight)}),
            },
        )
        return result

    def _of_weight(self, product: ScaledProduct) -> tuple[Value, ...]:
        """The weight of a product, and its scales."""
        weight = product.weight
        first = self.first.get(weight)
        if first is None or self._how(product, weight=True) != self._how(first, weight=True):
            return self._quantized(product, weight=True)
        if weight in self.narrow:
            return self.copies[weight]
        if weight not in self.kept:
            copy, *scales = self.copies[weight]
            (stands,) = self.builder.emit("standing_for", [copy, self.values[weight]], {})
            self.kept[weight] = stands, *scales
        return self.kept[weight]

    def _quantized(self, product: ScaledProduct, *, weight: bool) -> tuple[Value, ...]:
        value = product.weight if weight else product.x
        how = self._how(product, weight=weight)
        key = value, self._scaling(product, weight=weight)
        if key not in self.kept and self.how.history:
            scale = self._delayed("weight" if weight else "input", product, self.how.forward)
            q, _ = self.builder.emit("quantize_by", [self.values[value], scale], {"dtype": self.how.forward})
            self.kept[key] = q, scale
        elif key not in self.kept:
            self.kept[key] = tuple(self.builder.emit("quantize", [self.values[value]], how))
        return self.kept[key]

    def _delayed(self, what: str, product: ScaledProduct, format: np.dtype[Any]) -> Value:
        """The input for a scale from earlier steps."""
        name = free_name(f"{DELAYED}{what}.{product.parameter}", self.taken)
        scale = self.builder.input(name, _SCALAR, TensorSharding())
        self.delayed.append((scale, format))
        return scale

    # -- the update ----------------------------------------------------------------------------------------------------

    def _update(self) -> Function | None:
        """The update, which also makes the copies and the scales of the next step."""
        update = self.before.update
        made_anew = {weight: both for weight, both in self.copies.items() if weight not in self.frozen}
        if update is None or not (made_anew or self.delayed):
            return update
        nexts = {value.name: value for value in update.outputs}
        maker = {value: op for op in update.ops for value in op.outputs}
        new: dict[str, Value] = {}
        """The values that are not those of before, by name."""
        added = _Added()
        for weight, (copy, *scales) in made_anew.items():
            outputs = tuple(Value(f"{NEXT}{value.name}", value.type) for value in (copy, *scales))
            before = nexts[f"{NEXT}{weight.name}"]
            if weight in self.narrow:
                before = _rounded_from(maker[before], before)
                new |= {weight.name: Value(weight.name, copy.type), outputs[0].name: outputs[0]}
            else:
                added.copies.append(Value(copy.name, copy.type))
            for scale in scales:
                added.copies.append(scale if scale.type.ndim == 0 else replace(scale, layout=None))
            if self.how.history:
                added.by_history(before, outputs, added.copies[-1], self.how)
            else:
                attributes = frozen_attributes(self._how(self.first[weight], weight=True))
                added.ops.append(Op("quantize", (before,), attributes, outputs, UPDATE))
        for scale, format in self.delayed:
            added.delayed(replace(scale, layout=TensorSharding()), format, self.how)
        made = {value.name: value for op in added.ops for value in op.outputs if value.name.startswith(NEXT)}
        kept = []
        for op in update.ops:
            if made.keys().isdisjoint(value.name for value in op.outputs):
                kept.append(op)
        count = len(self.before.parameters)
        inputs = [new.get(value.name, value) for value in update.inputs]
        outputs = tuple(made.pop(value.name, value) for value in update.outputs)
        return Function(
            update.name,
            (*inputs[:count], *added.scales, *added.copies, *inputs[count:], *added.maxima, *added.histories),
            (*kept, *added.ops),
            (*outputs, *made.values()),
        )


def _rounded_from(op: Op, value: Value) -> Value:
    """What a weight, the ``value`` that an op of the update makes, is rounded from."""
    if op.kind != "convert":
        raise ValueError(
            f"the update makes {value} by {op.kind}; a weight in float8 is rounded from its main copy"
        )
    return op.inputs[0]


_SCALAR = TensorType(np.float32, ())


class _Added:
    """The results of the update besides parameters and their state."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.copies: list[Value] = []
        self.scales: list[Value] = []
        self.maxima: list[Value] = []
        self.histories: list[Value] = []

    def by_history(self, weight: Value, outputs: Sequence[Value], scale: Value, how: ScaledProducts) -> None:
        """The copy of a weight with a scale from the history before, in which it is recorded then."""
        maximum = Value(f"{MAXIMUM}{scale.name}", _SCALAR, TensorSharding())
        history = self._history(scale, how)
        self._scale_of(history, scale, outputs[1], how.forward, how)
        attributes = frozen_attributes({"dtype": how.forward})
        self.ops.append(Op("quantize_by", (weight, outputs[1]), attributes, (outputs[0], maximum), UPDATE))
        self._record(maximum, history)

    def delayed(self, scale: Value, format: np.dtype[Any], how: ScaledProducts) -> None:
        """The next scale of activations or gradients, of which the largest size is the gradient of the scale."""
        maximum = Value(f"{GRADIENT}{scale.name}", _SCALAR)
        history = self._history(scale, how)
        self.scales.append(scale)
        self.maxima.append(maximum)
        longer = self._record(maximum, history)
        self._scale_of(longer, scale, Value(f"{NEXT}{scale.name}", _SCALAR), format, how)

    def _history(self, scale: Value, how: ScaledProducts) -> Value:
        type = TensorType(np.float32, (how.history,))
        self.histories.append(Value(f"{HISTORY}{scale.name}", type, TensorSharding(None)))
        return self.histories[-1]

    def _record(self, maximum: Value, history: Value) -> Value:
        longer = Value(f"{NEXT}{history.name}", history.type)
        self.ops.append(Op("recorded", (history, maximum), (), (longer,), UPDATE))
        return longer

    def _scale_of(
        self, history: Value, scale: Value, made: Value, format: np.dtype[Any], how: ScaledProducts
    ) -> None:
        given = frozen_attributes({"most": float(limits_of(format).max), "newest": how.newest})
        self.ops.append(Op("scale_of", (history, scale), given, (made,), UPDATE))
