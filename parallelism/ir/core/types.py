"""The type of a tensor: its dtype and shape, written as in MLIR."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from parallelism.display.quantities import shortened
from parallelism.dtypes import NARROW_FLOATS, NARROW_INTEGERS, as_dtype, like_half
from parallelism.ir.core.extents import Expression, Extent, names_in, product, specialized

_NAMES = {
    "i1": "bool",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    **{f"i{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"ui{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    **NARROW_FLOATS,
    **NARROW_INTEGERS,
}
"""The names of dtypes in programs, and in NumPy."""
_SHORT = {name: short for short, name in _NAMES.items()}
_USUAL = frozenset(
    type(np.dtype(name))
    for name, short in _SHORT.items()
    if short not in NARROW_FLOATS and short not in NARROW_INTEGERS
)
"""The classes of NumPy's own dtypes that programs have."""


class _Dtypes(Mapping[str, np.dtype[Any]]):
    """A dtype is made when it is asked for, because narrow floats need another package."""

    def __getitem__(self, name: str) -> np.dtype[Any]:
        return as_dtype(_NAMES[name])

    def __contains__(self, name: object) -> bool:
        return name in _NAMES

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


DTYPES: Mapping[str, np.dtype[Any]] = _Dtypes()
"""The dtypes of programs by the names of MLIR in small letters: ``i1`` is a bool, ``ui8`` a ``uint8``, ``bf16`` a
bfloat16, ``f8e4m3fn`` a ``float8_e4m3fn``, ``i4`` an ``int4``: NumPy's letters ``i4`` mean other numbers."""
MOST_DIMS, MOST_EXTENT, MOST_BYTES = 26, 2**62, 2**60
"""Bytes are counted in 64 bits: so many leave room for their sums."""

BARE = re.compile(r"[A-Z][A-Z0-9_]*")
"""Symbols that a type writes without parentheses: they contain no x, which separates extents."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """A dtype and one extent for each dim.  An extent is an integer or an `Expression`.

    >>> print(TensorType(np.float32, (8, 16)))
    tensor<8x16xf32>
    """

    dtype: np.dtype[Any]
    shape: tuple[Extent, ...]

    if TYPE_CHECKING:

        def __init__(self, dtype: npt.DTypeLike, shape: Iterable[Any]) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", checked_dtype(self.dtype))
        object.__setattr__(self, "shape", checked_shape(self.shape))

    def __hash__(self) -> int:
        """That of the shape: few types have equal shapes, and the hash of a dtype takes longer."""
        return hash(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Extent:
        """The number of elements."""
        return product(self.shape)

    @property
    def nbytes(self) -> Extent:
        return self.size * self.dtype.itemsize

    @property
    def symbols(self) -> frozenset[str]:
        """The names of the symbols in its extents."""
        return frozenset().union(*map(names_in, self.shape))

    def specialize(self, numbers: Mapping[str, Extent]) -> TensorType:
        """The type with symbols replaced by ``numbers``.  ``ValueError`` for more than `MOST_BYTES`."""
        if all(type(extent) is int for extent in self.shape):
            return self
        found = TensorType(self.dtype, tuple(specialized(extent, numbers) for extent in self.shape))
        if isinstance(found.nbytes, int) and found.nbytes > MOST_BYTES:
            raise ValueError(f"an array must have at most 2**60 bytes, got {found}")
        return found

    def __str__(self) -> str:
        return (
            f"tensor<{''.join(f'{extent_text(extent)}x' for extent in self.shape)}{dtype_text(self.dtype)}>"
        )

    __repr__ = __str__


@lru_cache(maxsize=4096)
def resolved(ufunc: np.ufunc, *dtypes: Any) -> tuple[np.dtype[Any], ...]:
    """The dtypes of inputs and outputs of a ufunc.  ``int`` or ``float`` stands for a Python scalar."""
    return tuple(like_half(lambda *given: ufunc.resolve_dtypes((*given, *[None] * ufunc.nout)), *dtypes))


@lru_cache(maxsize=256)
def dtype_text(dtype: np.dtype[Any]) -> str | None:
    """The name of a dtype in programs; None if programs do not have it."""
    return _SHORT.get(dtype.name) if dtype.isnative else None


def checked_dtype(dtype: Any) -> np.dtype[Any]:
    """``dtype`` as a NumPy dtype; ``TypeError`` if the IR does not have it."""
    if (
        isinstance(dtype, np.dtype) and type(dtype) in _USUAL and dtype.isnative
    ):  # most are; a name takes longer
        return dtype
    try:
        result = DTYPES[dtype] if isinstance(dtype, str) and dtype in DTYPES else as_dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # NumPy reads some texts as Python
        raise TypeError(f"a dtype must be one of {', '.join(DTYPES)}, got {shortened(dtype)}") from None
    result = result.newbyteorder("=")
    if dtype_text(result) is None:
        raise TypeError(f"a dtype must be one of {', '.join(DTYPES)}, got {result}")
    return result


def checked_shape(shape: Iterable[Any]) -> tuple[Extent, ...]:
    """``shape`` as a tuple of extents."""
    if type(shape) is tuple and len(shape) <= MOST_DIMS:  # most are, and of integers
        for extent in shape:
            if type(extent) is not int or not 0 <= extent <= MOST_EXTENT:
                break
        else:
            return shape
    if isinstance(shape, int | np.integer | Expression):
        shape = (shape,)
    extents = tuple(map(_extent, shape))
    if len(extents) > MOST_DIMS:
        raise ValueError(f"a tensor has at most {MOST_DIMS} dims, got {len(extents)}")
    for extent in extents:
        if isinstance(extent, int) and not 0 <= extent <= MOST_EXTENT:
            raise ValueError(f"an extent must be at least 0 and at most 2**62, got {extent}")
    return extents


def _extent(extent: Any) -> Extent:
    if type(extent) is int or isinstance(extent, Expression):
        return extent
    if isinstance(extent, bool | np.bool_) or not hasattr(extent, "__index__"):
        raise TypeError(f"an extent must be an integer or an expression of symbols, got {extent!r}")
    return int(extent)


def extent_text(extent: Extent) -> str:
    """The text of an extent in a type."""
    text = str(extent)
    return text if isinstance(extent, int) or BARE.fullmatch(text) else f"({text})"
