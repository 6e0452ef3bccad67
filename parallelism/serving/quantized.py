"""Weights in 8 or 4 bits with a scale for each group, and programs that dequantize them where their product reads them.

A weight of shape ``(..., in, out)`` has a scale for every ``group`` rows of each column: ``(..., in / group, out)``, rounded
up, or one for the whole column.  The scale of a group is its largest absolute value, divided by the largest number of the
dtype (absmax quantization: Dettmers et al., *LLM.int8()*, 2022, arXiv:2208.07339, section 2.1; groups of 128 rows in 4 bits:
Frantar et al., *GPTQ*, 2022, arXiv:2210.17323, section 4, "Additional Tricks").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.dtypes import as_dtype, bits_of, is_floating, is_integer, limits_of
from parallelism.ir.core import Function, Op, TensorType, Value, frozen_attributes
from parallelism.kernels.scaled_numbers import PAIRS, packed_codes, unpacked_integers
from parallelism.layouts.localization.local_program import free_name
from parallelism.models.figures import is_product
from parallelism.sharding import TensorSharding

PARAMETER, SCALE = "p.", ".scale"
_INTEGERS = np.dtype(np.int64)


@dataclass(frozen=True)
class QuantizedWeights:
    """The dtype of the weights of products in blocks, and how many rows share a scale; None: all of a column.

    Embeddings, the head, norms, biases and routers stay as they are.  ``ValueError`` for a dtype of more than 8 bits, and for
    a group of no rows.
    """

    dtype: str
    group: int | None = None

    def __post_init__(self) -> None:
        try:
            dtype = as_dtype(self.dtype)
        except TypeError:
            raise ValueError(
                f"weights_dtype must be one of 8 or fewer bits, as int8, got {self.dtype!r}"
            ) from None
        is_signed = (is_integer(dtype) and not dtype.name.startswith("u")) or is_floating(dtype)
        if not is_signed or bits_of(dtype) > 8:
            raise ValueError(
                f"weights_dtype must be one of signed numbers in 8 or fewer bits, as int8, int4 or float8_e4m3fn, "
                f"got {self.dtype!r}"
            )
        if self.group is not None and (type(self.group) is not int or self.group < 1):
            raise ValueError(f"group must be an integer of at least 1, or None, got {self.group!r}")

    @property
    def largest(self) -> float:
        """The largest number, of which the negative is there, too."""
        dtype = as_dtype(self.dtype)
        return float(limits_of(dtype).max) if is_floating(dtype) else float(2 ** (bits_of(dtype) - 1) - 1)

    def quantizes(self, name: str, dims: int) -> bool:
        """Whether a parameter is the weight of a product in a block."""
        return is_product(name, dims)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a weight."""
        rows = 1 if self.group is None else -(-shape[-2] // self.group)
        return (*shape[:-2], rows, shape[-1])

    # -- arrays --------------------------------------------------------------------------------------------------------

    def arrays(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        """The parameters with weights rounded, and their scales, in the dtype of the weight, as ``NAME.scale``."""
        found: dict[str, Array] = {}
        for name, array in parameters.items():
            if self.quantizes(name, array.ndim):
                narrow, found[f"{name}{SCALE}"] = self.rounded(array)
                pairs = self.packs(array.shape[-2])
                found[name] = packed_codes(narrow.view(PAIRS), array.ndim - 2) if pairs else narrow
            else:
                found[name] = array
        return found

    def rounded(self, weight: Array) -> tuple[Array, Array]:
        """A weight in the narrow dtype, and its scales."""
        dtype, rows = as_dtype(self.dtype), weight.shape[-2]
        first_of_groups = np.arange(0, rows, self.group or rows)
        largest = np.maximum.reduceat(np.abs(weight), first_of_groups, axis=-2)
        scales = np.where(largest == 0, 1, largest / self.largest).astype(weight.dtype)
        shares = np.clip(weight / self._spread(scales, rows), -self.largest, self.largest)
        if not is_floating(dtype):
            shares = np.rint(shares)
        return shares.astype(dtype), scales

    def packs(self, rows: Any) -> bool:
        """Whether two numbers of a column lie in a byte: integers of 4 bits, in a weight with so many rows."""
        return self.dtype == "int4" and isinstance(rows, int) and rows % 2 == 0

    def dequantized(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        """The parameters that a run computes with: rounded, and multiplied with their scales."""
        given = self.arrays(parameters)
        found: dict[str, Array] = {}
        for name, array in parameters.items():
            found[name] = given[name]
            if (scales := given.get(f"{name}{SCALE}")) is None:
                continue
            rows = array.shape[-2]
            if self.packs(rows):
                found[name] = unpacked_integers(given[name], array.ndim - 2, array.dtype)
            found[name] = found[name].astype(array.dtype) * self._spread(scales, rows)
        return found

    def _spread(self, scales: Array, rows: int) -> Array:
        """The scale of each row and column."""
        return scales if self.group is None else np.take(scales, np.arange(rows) // self.group, axis=-2)

    # -- programs ------------------------------------------------------------------------------------------------------

    def program(self, function: Function) -> Function:
        """A program whose weights are narrow, with their scales behind each of them; it keeps all layouts.

        A weight is dequantized right before the first op that reads it, in that op's region.  Of a weight that is split by
        rows every device has all scales of its columns.
        """
        taken = {value.name for value in function.values}
        narrow = dict[Value, tuple[Value, Value]]()
        inputs = list[Value]()
        for value in function.inputs:
            name = value.name.removeprefix(PARAMETER)
            if name != value.name and self.quantizes(name, len(value.type.shape)):
                narrow[value] = self._narrow(value)
                inputs += narrow[value]
            else:
                inputs.append(value)
        whole: dict[Value, Value] = {}
        ops: list[Op] = []
        for op in function.ops:
            for value in dict.fromkeys(op.inputs):
                if value in narrow and value not in whole:
                    whole[value] = Value(free_name(f"{value.name}.whole", taken), value.type, value.layout)
                    ops += self._dequantizing(whole[value], *narrow[value], taken, op.region)
            ops.append(op.with_values(tuple(whole.get(value, value) for value in op.inputs), op.outputs))
        return Function(function.name, tuple(inputs), tuple(ops), function.outputs, function.attributes)

    def _narrow(self, value: Value) -> tuple[Value, Value]:
        """The inputs in place of a weight: it in the narrow dtype, and its scales."""
        shape = value.type.shape
        layout = None
        if value.layout is not None:
            dims = [dim.axes or None for dim in value.layout.dims]
            dims[-2] = None
            layout = TensorSharding(*dims)
        rows: Any = 1 if self.group is None else self.scale_shape(tuple(map(int, shape)))[-2]
        type = TensorType(as_dtype(self.dtype), shape)
        if self.packs(shape[-2]):
            type = TensorType(PAIRS, (*shape[:-2], shape[-2] // 2, shape[-1]))
        return (
            Value(value.name, type, value.layout),
            Value(
                f"{value.name}{SCALE}", TensorType(value.type.dtype, (*shape[:-2], rows, shape[-1])), layout
            ),
        )

    def _dequantizing(
        self, whole: Value, weight: Value, scales: Value, taken: set[str], region: str | None
    ) -> list[Op]:
        """The ops that make a weight whole."""
        ops: list[Op] = []

        def op(kind: str, inputs: tuple[Value, ...], type: TensorType, **attributes: Any) -> Value:
            value = Value(free_name(f"{weight.name}.{kind}", taken), type)
            ops.append(Op(kind, inputs, frozen_attributes(attributes), (value,), region))
            return value

        dtype, shape = whole.type.dtype, whole.type.shape
        if weight.type.dtype == PAIRS:
            wide = op("unpacked", (weight,), TensorType(dtype, shape), dtype=dtype, packed=len(shape) - 2)
        else:
            wide = op("convert", (weight,), TensorType(dtype, shape), dtype=dtype)
        if self.group is not None:
            order = TensorType(_INTEGERS, (shape[-2],))
            rows = op("iota", (), order, shape=order.shape, dim=0, starts=(0,), dtype=_INTEGERS)
            each = op("constant", (), TensorType(_INTEGERS, ()), dtype=_INTEGERS, shape=(), value=self.group)
            groups = op("floor_divide", (rows, each), order)
            scales = op("take", (scales, groups), TensorType(dtype, shape), axis=len(shape) - 2)
        ops.append(Op("multiply", (wide, scales), (), (whole,), region))
        return ops
