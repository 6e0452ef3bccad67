"""Mixed precision: the model in a narrow dtype; the optimizer and its main copy of the weights in a wide one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from parallelism.dtypes import is_floating
from parallelism.ir.core import Builder, Function, Op, TensorType, Value, checked_dtype, dtype_text
from parallelism.ir.core.derived import renamed_value, with_values
from parallelism.ir.operators.losses import FUSED_LOSS, READING_LOGITS
from parallelism.kernels.scaled_numbers import RECIPES
from parallelism.layouts.localization.local_program import free_name
from parallelism.layouts.propagation.annotation import laid_out
from parallelism.transforms.parts import NEXT, UPDATE, Parts
from parallelism.transforms.scaled_products import FORMATS, ScaledProducts
from parallelism.transforms.training import MAIN, MEAN, SQUARE
from parallelism.transforms.words import word

STATE = {"main": MAIN, "mean": MEAN, "square": SQUARE}
"""The parts of the state that have dtypes of their own, and the prefixes of their names."""

_KNOWN: dict[str, Collection[str | None]] = {
    "products": (None, *FORMATS),
    "recipe": RECIPES,
    "gathers": ("bfloat16", "float8"),
    "amax": ("max", "most_recent"),
}
"""What these fields may be."""
_OF_PRODUCTS = {
    "products": "products",
    "recipe": "recipe",
    "gathers": "gathers",
    "history": "history",
    "amax": "amax",
    "first": "first_blocks",
    "last": "last_blocks",
}
"""The fields about products in 8 or 4 bits, by their words in a text."""
_WITHOUT_PRODUCTS: dict[str, Any] = {
    "products": None,
    "recipe": "tensor",
    "gathers": "bfloat16",
    "history": 0,
    "amax": "max",
    "first_blocks": 0,
    "last_blocks": 0,
}
"""These fields, where no product is in few bits."""
_WORDS = {
    "float8": "f8",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_hybrid": "f8hybrid",
    "float4": "f4",
    "bfloat16": "bf16",
}
"""The words of values of these fields."""


def fields_of_products(precision: MixedPrecision) -> dict[str, Any]:
    """The fields about products in float8 that are not as without these."""
    given = {name: getattr(precision, name) for name in _WITHOUT_PRODUCTS}
    return {name: value for name, value in given.items() if value != _WITHOUT_PRODUCTS[name]}


def _field(name: str, text: str) -> Any:
    """The value of a field from its word."""
    if name in ("first", "last", "history"):
        return int(text) if text.isdecimal() else text
    return {word: value for value, word in _WORDS.items()}.get(text, text) if name in _OF_PRODUCTS else text


@dataclass(frozen=True)
class MixedPrecision:
    """Weights and activations in ``dtype``; the optimizer works on a main copy of the weights in their dtype of before.

    The loss, which is what comes after the last use of a weight, is computed in the dtype of before, too, and batches
    are given in it.  ``gradients`` is the dtype in which gradients are kept for the update, and added up: over the
    microbatches of a pipeline, and over devices.  The program has one more array of state for each parameter p,
    ``main.p``.

    ``main``, ``mean`` and ``square`` are the dtypes in which main copies and the means and squares of `Adam` are kept from
    one step to the next; None is their dtype of before, in which the optimizer computes in any case.  A step goes on with
    what it keeps.  No scale is kept with them: in float16 squares below 6e-8 become 0.

    Memory of float32 models under Adam, for each parameter: 2 + 4 + 12 = 18 bytes for bfloat16 and gradients in
    float32, as in Megatron-LM; 2 + 2 + 12 = 16 bytes with gradients in bfloat16 (Rajbhandari et al., *ZeRO*, 2020,
    arXiv:1910.02054, section 3.1; Micikevicius et al., *Mixed Precision Training*, 2018, arXiv:1710.03740).  With means and
    squares in bfloat16 4 bytes less: 2 + 4 + 8 (DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024, arXiv:2412.19437, section
    3.3.3).

    ``products="float8"``: the products of the blocks with their weights are in float8, with scales by the ``recipe``, and
    nothing else is (`parallelism.transforms.scaled_products`).  Recipes are ``tensor``, a scale for each tensor;
    ``block``, one for 1 x 128 elements of activations and 128 x 128 of weights; and ``mx``, one for 32
    (`parallelism.ir.operators.scaled_products`).  Gradients of results are in e5m2 with ``tensor``, else in e4m3;
    ``products="float8_e4m3fn"`` or ``"float8_hybrid"`` says e4m3, or e5m2, for all recipes.  ``products="float4"`` has
    the recipe ``nvfp4``: 4 bits, e2m1, with a scale in e4m3 for 16 elements, 16 x 16 of weights, and one for the tensor.
    With the recipe ``tensor`` a ``history`` of so many steps gives scales of earlier steps: from the largest size that a
    tensor had in them, or with ``amax="most_recent"`` in the last one.  Then it is one scale on all devices.
    ``gathers="float8"``: these weights are there in float8 alone, and ZeRO gathers them so.  ``first_blocks`` and
    ``last_blocks`` stay in ``dtype``.

    ``ValueError`` for a program without an update, or with layouts on activations or state, and for a ``dtype`` that
    is not narrower than that of the parameters.
    """

    dtype: npt.DTypeLike = "bfloat16"
    gradients: npt.DTypeLike = "float32"
    main: npt.DTypeLike | None = None
    mean: npt.DTypeLike | None = None
    square: npt.DTypeLike | None = None
    products: str | None = None
    recipe: str = "tensor"
    gathers: str = "bfloat16"
    history: int = 0
    amax: str = "max"
    first_blocks: int = 0
    last_blocks: int = 0
    phase: ClassVar[int] = 5

    def __post_init__(self) -> None:
        self._check_products()
        for name in ("dtype", "gradients", *STATE):
            if name in STATE and getattr(self, name) is None:
                continue
            dtype = checked_dtype(getattr(self, name))
            if not is_floating(dtype):
                raise ValueError(f"the {name} of MixedPrecision must be floating-point, got {dtype}")
            object.__setattr__(self, name, dtype.name)

    def _check_products(self) -> None:
        """``ValueError`` for words of products that do not exist, or that say nothing without products in float8."""
        for name, known in _KNOWN.items():
            given = getattr(self, name)
            if given not in known:
                wanted = ", ".join(map(str, known))
                raise ValueError(f"{name} of MixedPrecision is one of {wanted}; got {given!r}")
        for name in ("history", "first_blocks", "last_blocks"):
            given = getattr(self, name)
            if type(given) is not int or given < 0:
                raise ValueError(f"{name} of MixedPrecision must be a number of at least 0, got {given!r}")
        if self.products is None and fields_of_products(self) != {}:
            name, given = next(iter(fields_of_products(self).items()))
            raise ValueError(f"{name}={given} of MixedPrecision needs products='float8'")
        if self.products is not None and (self.products == "float4") != RECIPES[self.recipe].pairs:
            raise ValueError(
                f"products='float4' of MixedPrecision and recipe='nvfp4' need each other, got {self.products!r} and "
                f"{self.recipe!r}"
            )
        if self.recipe != "tensor" and self.history:
            raise ValueError(
                f"history={self.history} of MixedPrecision needs recipe='tensor', got {self.recipe!r}"
            )
        if not self.history and self.amax != "max":
            raise ValueError(f"amax={self.amax!r} of MixedPrecision needs a history")
        if self.products == "float4" and self.gathers == "float8":
            raise ValueError(
                "gathers='float8' of MixedPrecision needs products in float8: weights are gathered in float4 as copies"
            )

    @classmethod
    def parse(cls, text: str) -> MixedPrecision:
        """From the value of its word: ``bf16``, ``bf16,f32``, ``bf16,mean:bf16``, ``bf16,products:f8,recipe:block``."""
        plain = [part for part in text.split(",") if ":" not in part]
        named = [part.partition(":") for part in text.split(",") if ":" in part]
        if not 1 <= len(plain) <= 2:
            raise ValueError(f"precision is followed by one dtype, or by two with a comma, got {len(plain)}")
        known = (*STATE, *_OF_PRODUCTS)
        if wrong := [name for name, _, _ in named if name not in known]:
            raise ValueError(
                f"behind the dtypes of precision stand {', '.join(known)}, as mean:bf16; got {wrong[0]!r}"
            )
        fields: dict[str, Any] = {
            _OF_PRODUCTS.get(name, name): _field(name, value) for name, _, value in named
        }
        if len(fields) < len(named):
            raise ValueError(f"precision names a part of it twice: {text!r}")
        fields |= zip(("dtype", "gradients"), plain, strict=False)
        return cls(**fields)

    @property
    def products_dtype(self) -> str:
        """The dtype of the products of the blocks: ``float8`` or ``float4``, whatever the format; else `dtype`."""
        return str(self.dtype) if self.products is None else self.products.partition("_")[0]

    @property
    def of_products(self) -> str:
        """What is said of products in float8: ``products of blocks in float8 (block)``."""
        gathers = ", gathered in float8" if self.gathers == "float8" else ""
        return f"products of blocks in {self.products} ({self.recipe}{gathers})"

    @property
    def steps(self) -> tuple[Any, ...]:
        """The transforms that it consists of, which a `Strategy` applies in their phases."""
        if self.products is None:
            return (self,)
        of_history = self.history, self.amax == "most_recent"
        scaled = ScaledProducts(
            self.products, self.recipe, self.gathers, self.first_blocks, self.last_blocks, *of_history
        )
        return replace(self, **_WITHOUT_PRODUCTS), scaled

    def of_state(self, name: str, before: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype in which an array of the optimizer's state is kept, by its name."""
        part = next((part for part, prefix in STATE.items() if name.startswith(prefix)), None)
        kept = None if part is None else getattr(self, part)
        return before if kept is None else checked_dtype(kept)

    def __call__(self, function: Function) -> Function:
        parts = Parts.of(function)
        if parts.update is None:
            raise ValueError(
                f"{self}: @{function.name} has no optimizer; train_step(loss, optimizer) makes a training "
                "step of it"
            )
        if any(value.name.startswith(MAIN) for value in parts.state):
            raise ValueError(
                f"{self}: @{function.name} has main copies of its weights already; a transform is applied "
                "once"
            )
        laid = [
            value for op in parts.forward.ops if op.kind != "reshard" for value in op.outputs if value.layout
        ]
        laid += [value for value in (*parts.gradients, *parts.state) if value.layout]
        laid += [value for op in parts.update.ops if op.kind == "reshard" for value in op.inputs]
        if laid:
            raise ValueError(
                f"{self}: %{laid[0].name} of @{function.name} has a layout; {self} comes before "
                "SequenceParallel and Zero, or all in one Strategy"
            )
        narrow = checked_dtype(self.dtype)
        wide = {value.type.dtype for value in parts.weights}
        if len(wide) > 1 or min(dtype.itemsize for dtype in wide) <= narrow.itemsize:
            raise ValueError(
                f"{self}: the parameters of @{function.name} must be of one dtype wider than {narrow}, "
                f"got {' and '.join(sorted(map(str, wide)))}"
            )
        forward = _Narrowed(parts, narrow, wide.pop()).function()
        narrowed = replace(parts, forward=forward, update=_on_main_copies(parts, forward, self)).joined()
        for step in self.steps[1:]:
            narrowed = step(narrowed)
        return narrowed

    def __str__(self) -> str:
        texts = [dtype_text(checked_dtype(self.dtype)) or ""]
        if self.gradients != "float32":
            texts.append(dtype_text(checked_dtype(self.gradients)) or "")
        for name in STATE:
            if getattr(self, name) is not None:
                texts.append(f"{name}:{dtype_text(checked_dtype(getattr(self, name)))}")
        words = {field: name for name, field in _OF_PRODUCTS.items()}
        texts += [
            f"{words[name]}:{_WORDS.get(given, given)}" for name, given in fields_of_products(self).items()
        ]
        return word("precision", value=",".join(texts))


class _Narrowed:
    """A forward with another dtype for parameters and activations, up to the loss."""

    def __init__(self, parts: Parts, narrow: np.dtype[Any], wide: np.dtype[Any]) -> None:
        self.forward, self.narrow, self.wide = parts.forward, narrow, wide
        self.parameters, self.attributes = {*parts.weights}, parts.attributes
        self.builder = Builder()
        self.values: dict[Value, Value] = {}
        self.constants = {op.outputs[0]: op for op in self.forward.ops if op.kind == "constant"}
        self.converted: dict[tuple[Value, np.dtype[Any]], Value] = {}

    def function(self) -> Function:
        forward, layouts = self.forward, {}
        for value in forward.inputs:
            type = TensorType(self.narrow, value.type.shape) if value in self.parameters else value.type
            self.values[value] = self.builder.input(value.name, type, value.layout)
        before_loss = self._before_loss()
        fused = FUSED_LOSS in dict(self.attributes)
        for op in forward.ops:
            if op.kind == "constant":
                continue  # made in the dtype in which it is used
            dtype = self.narrow if op in before_loss else self.wide
            with self.builder.region(op.region, op.line):
                inputs = [self._as(value, dtype) for value in op.inputs]
                if fused and op not in before_loss and op.kind in READING_LOGITS:
                    inputs[0] = self.values[op.inputs[0]]
                outputs = self.builder.emit(op.kind, inputs, self._attributes(op, dtype))
            self.values.update(zip(op.outputs, outputs, strict=True))
        results = [self._as(value, self.wide) for value in forward.outputs]
        for old, new in self.values.items():
            layouts[new.name] = old.layout
        return laid_out(
            self.builder.function(forward.name, results, prune=True),
            {name: kept for name, kept in layouts.items() if kept is not None},
        )

    def _before_loss(self) -> set[Op]:
        """The ops from which a parameter is still to come: they read one, or an op that uses their values does."""
        found: set[Op] = set()
        needed: set[Value] = set()
        for op in reversed(self.forward.ops):
            if not (self.parameters.isdisjoint(op.inputs) and needed.isdisjoint(op.outputs)):
                found.add(op)
                needed.update(op.inputs)
        return found

    def _as(self, value: Value, dtype: np.dtype[Any]) -> Value:
        """The new value of an old one; if that had the wide dtype, in ``dtype``."""
        if value in self.constants:
            op = self.constants[value]
            return self.builder.emit("constant", [], self._attributes(op, dtype))[0]
        new = self.values[value]
        if value.type.dtype != self.wide or new.type.dtype == dtype:
            return new
        if (new, dtype) not in self.converted:
            (self.converted[new, dtype],) = self.builder.emit("convert", [new], {"dtype": dtype})
        return self.converted[new, dtype]

    def _attributes(self, op: Op, dtype: np.dtype[Any]) -> dict[str, Any]:
        attributes = dict(op.attributes)
        for name, value in op.attributes:
            if isinstance(value, np.dtype) and value == self.wide:
                attributes[name] = dtype
        return attributes


def _on_main_copies(parts: Parts, forward: Function, precision: MixedPrecision) -> Function:
    """The update with a main copy in place of each parameter; the parameter is rounded from that."""
    assert parts.update is not None
    narrow = {value.name: value for value in forward.inputs}
    mains = {value.name: Value(f"{MAIN}{value.name}", value.type) for value in parts.parameters}
    kept = _Kept(precision, {value.name: value for value in parts.update.values})
    gradient_names = {value.name for value in parts.gradients}
    inputs = []
    for value in parts.update.inputs:
        if value.name in mains:
            inputs.append(narrow[value.name])
        elif value.name in gradient_names:
            inputs.append(kept.read(value, checked_dtype(precision.gradients), is_state=False))
        else:
            inputs.append(kept.read(value, precision.of_state(value.name, value.type.dtype)))
    own = {
        name: kept.read(main, precision.of_state(main.name, main.type.dtype)) for name, main in mains.items()
    }
    kept.values |= {name: kept.values.get(main.name, main) for name, main in mains.items()}
    nexts = {value.name: value for value in parts.update.outputs}
    outputs = dict(nexts)
    for name in nexts:
        owner = name.removeprefix(NEXT)
        if owner in mains:
            outputs[f"{NEXT}{MAIN}{owner}"] = kept.write(
                nexts[name], f"{NEXT}{MAIN}{owner}", own[owner].type.dtype
            )
            outputs[name] = kept.rounded(nexts[name], Value(name, narrow[owner].type))
        else:
            outputs[name] = kept.write(nexts[name], name, precision.of_state(owner, nexts[name].type.dtype))
    update = with_values(parts.update, kept.values)
    ops = (*kept.before, *kept.going_on(update.ops), *kept.after)
    named = {value.name: value for value in update.outputs}
    whole = Function(
        UPDATE,
        (*inputs, *own.values()),
        ops,
        tuple(named.get(name, value) for name, value in outputs.items()),
    )
    if not kept.before and not kept.state:
        return whole
    owners = {value.name: parts.owner(value) for value in (*parts.gradients, *parts.state)}
    owners |= {name: name for name in mains} | {main.name: name for name, main in mains.items()}
    return _one_by_one(whole, owners)


class _Kept:
    """The values of an update of which some are kept in other dtypes than those in which it computes."""

    def __init__(self, precision: MixedPrecision, values: dict[str, Value]) -> None:
        self.precision, self.values = precision, values
        self.before: list[Op] = []
        self.after: list[Op] = []
        self.stored: dict[Value, tuple[Value, Value]] = {}
        """By value that is kept in another dtype: it as it is kept, and that in the dtype of before."""
        self.state: dict[Value, tuple[Value, int]] = {}
        """By array of the state in the dtype of before: it as it was kept, and how often it was widened."""

    def read(self, value: Value, dtype: np.dtype[Any], *, is_state: bool = True) -> Value:
        """The input in place of ``value``, kept in ``dtype``."""
        if value.type.dtype == dtype:
            self.values[value.name] = value
            return value
        given = Value(value.name, TensorType(dtype, value.type.shape))
        wide = self.values[value.name] = Value(f"wide.{value.name}", value.type)
        if is_state:
            self.state[wide] = given, 0
        else:
            self.before.append(_convert(given, wide))
        return given

    def write(self, old: Value, name: str, dtype: np.dtype[Any]) -> Value:
        """The output ``name`` in place of ``old``, kept in ``dtype``."""
        if old.type.dtype == dtype:
            self.values[old.name] = renamed_value(old, name)
            return self.values[old.name]
        self.values[old.name] = renamed_value(old, f"wide.{name}")
        made = Value(name, TensorType(dtype, old.type.shape))
        self.stored[self.values[old.name]] = made, renamed_value(old, f"kept.{name}")
        return made

    def going_on(self, ops: Iterable[Op]) -> Iterator[Op]:
        """The ops of the update: what is kept in another dtype is rounded where it is made, and used as rounded.

        Each op that reads such an array of the state widens it for itself, so that nothing wide lies between kernels.
        """
        used: dict[Value, Value] = {}
        for op in ops:
            inputs = list[Value]()
            for value in op.inputs:
                if value in self.state:
                    yield from self._widened(value, inputs)
                else:
                    inputs.append(used.get(value, value))
            yield op.with_values(tuple(inputs), op.outputs)
            for value in op.outputs:
                if value in self.stored:
                    made, used[value] = self.stored[value]
                    yield _convert(value, made)
                    yield _convert(made, used[value])

    def _widened(self, value: Value, inputs: list[Value]) -> Iterator[Op]:
        """The op that widens an array of the state once more, whose result is the next of the ``inputs``."""
        given, count = self.state[value]
        self.state[value] = given, count + 1
        inputs.append(renamed_value(value, f"{value.name}.{count}") if count else value)
        yield _convert(given, inputs[-1])

    def rounded(self, old: Value, made: Value) -> Value:
        """The output that is rounded from ``old``."""
        value = self.values[old.name]
        self.after.append(_convert(self.stored[value][1] if value in self.stored else value, made))
        return made


def _one_by_one(update: Function, owners: Mapping[str, str | None]) -> Function:
    """The update that does all for one parameter, then all for the next, so that one has a wide gradient at a time.

    ``owners`` has the parameter that an input belongs to, by its name.  What depends on several parameters, as the norm
    of all gradients, is made before.  What that needs of a parameter is not kept: it is made again for the parameter.
    """
    owner = _owners(update, owners)
    ordered = _Ordered(update, owner)
    for op in update.ops:
        if owner[op.outputs[0]] is None and any(owner[value] is not None for value in op.inputs):
            for value in op.inputs:
                ordered.make([value])  # one term after the other
            ordered.make(op.outputs)
    for name in dict.fromkeys([None, *(owner[value] for value in update.outputs)]):
        ordered.make(value for value in update.outputs if owner[value] == name)
    outputs = tuple(ordered.kept[value] for value in update.outputs)
    return Function(update.name, update.inputs, tuple(ordered.ops), outputs)


class _Ordered:
    """The ops of an update in another order, in which some run several times."""

    def __init__(self, update: Function, owner: Mapping[Value, str | None]) -> None:
        self.update, self.owner, self.ops = update, owner, list[Op]()
        self.kept = {value: value for value in update.inputs}
        """By value of the update: the one that is made for all that need it."""
        self._maker = {value: number for number, op in enumerate(update.ops) for value in op.outputs}
        self._taken = {value.name for value in update.inputs}
        known = {value.name for value in update.values}
        self._numbers_left = (name for name in map(str, count()) if name not in known)

    def make(self, results: Iterable[Value]) -> None:
        """Makes these results, and whatever they need and is not there."""
        wanted, values = {*results}, dict[Value, Value]()
        for number in sorted(self._needed(wanted)):
            op = self.update.ops[number]
            for value in op.outputs:
                values[value] = self._named(value)
                if value in wanted or self.owner[value] is None:
                    self.kept[value] = values[value]
            inputs = tuple(values.get(value) or self.kept[value] for value in op.inputs)
            self.ops.append(op.with_values(inputs, tuple(values[value] for value in op.outputs)))

    def _needed(self, wanted: Iterable[Value]) -> set[int]:
        """The numbers of the ops that make these values and what they need, as far as it is not kept."""
        numbers, behind = set[int](), [*wanted]
        while behind:
            value = behind.pop()
            if value not in self.kept and self._maker[value] not in numbers:
                numbers.add(self._maker[value])
                behind += self.update.ops[self._maker[value]].inputs
        return numbers

    def _named(self, value: Value) -> Value:
        """The value with a name that is free: its own, if it is not taken."""
        again = value.name in self._taken and value.name.isdecimal()
        name = next(self._numbers_left) if again else value.name
        return renamed_value(value, free_name(name, self._taken))


def _owners(update: Function, owners: Mapping[str, str | None]) -> dict[Value, str | None]:
    """The only parameter that each value of an update depends on; None if it depends on none, or on several."""
    owner = {value: owners.get(value.name) for value in update.inputs}
    several = set[Value]()
    for op in update.ops:
        own = {owner[value] for value in op.inputs} - {None}
        joins = len(own) > 1 or (not own and not several.isdisjoint(op.inputs))
        owner.update(dict.fromkeys(op.outputs, None if joins else next(iter(own), None)))
        several.update(op.outputs if joins else ())
    return owner


def _convert(before: Value, after: Value) -> Op:
    return Op("convert", (before,), (("dtype", after.type.dtype),), (after,), UPDATE)
