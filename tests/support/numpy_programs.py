"""Random NumPy programs as source text: views, changes in place, dtypes, arrays without dims and numbers.

A program is drawn line by line, and NumPy runs each line at once: a line that NumPy refuses is left out, so that what
remains is a right program.  Its numbers are small multiples of 1/8, so sums are exact in every order.  Results that
are not such multiples (means, roots) are returned and not used again.
"""

from __future__ import annotations

import linecache
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np

from parallelism import ir

EXTENTS = (1, 2, 2, 3, 4)
DTYPES = ("?", "i1", "u1", "i2", "i4", "i8", "u4", "f2", "f4", "f8", "f8", "f8")
SPELLINGS = (
    "'i8'", "'i1'", "'i2'", "'i4'", "'u1'", "'f2'", "'f4'", "'f8'", "'?'", "'b'", "'B'", "'h'", "'l'", "'d'", "'e'",
    "'int8'", "'float32'", "'int'", "'float'", "'bool'", "'<i4'", "'=f8'", "int", "float", "bool", "np.int16",
    "np.float32", "np.uint8", "np.dtype('i8')", "np.dtype('f2')",
)
MOST_ELEMENTS = 200
_numbers = count()


class Drawing:
    """A program that is being drawn: its lines, and the values that NumPy has made so far."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.lines: list[str] = []
        self.values: dict[str, Any] = {}
        self.results: list[str] = []
        """Names whose values are not exact: they are returned only."""
        self.inputs: dict[str, np.ndarray] = {}

    # -- choices -------------------------------------------------------------------------------------------------------

    def one(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, of: float) -> bool:
        return bool(self.rng.random() < of)

    def name(self, fits: Callable[[Any], Any] = lambda x: True) -> str:
        """The name of a value that fits; ``LookupError`` if none does."""
        names = [name for name, x in self.values.items() if fits(x)]
        if not names:
            raise LookupError
        return str(self.one(*names[-4:], *names))

    def array(self, least: int = 0) -> str:
        return self.name(lambda x: isinstance(x, np.ndarray) and x.ndim >= least)

    def axis(self, name: str) -> int:
        ndim = self.values[name].ndim
        return int(self.rng.integers(-ndim, ndim))

    def axes(self, name: str) -> Any:
        """An axis, several, or None."""
        ndim = self.values[name].ndim
        if not ndim or self.chance(0.3):
            return None
        if self.chance(0.2):
            chosen = self.rng.permutation(ndim)[:int(self.rng.integers(1, ndim + 1))]
            return tuple(chosen.tolist())
        return self.axis(name)

    def dtype(self) -> str:
        if self.chance(0.2):
            return f"{self.name()}.dtype"
        return str(self.one(*SPELLINGS))

    def scalar(self) -> str:
        return str(self.one("2", "1", "3", "-1", "0.5", "True", "2.0", "np.float32(2)", "np.int8(3)", "np.float64(0.5)",
                            "np.int64(2)", "np.bool_(True)", "np.float16(1.5)", "np.uint8(2)"))

    def key(self, name: str) -> str:
        """An index of numbers, slices, new dims and dots."""
        parts = []
        for extent in self.values[name].shape[:int(self.rng.integers(0, self.values[name].ndim + 1))]:
            parts.append(self.one(
                ":", ":", "::-1", "::2", "1:", ":-1", "0:1", str(self.rng.integers(-extent, extent) if extent else 0)))
        if self.chance(0.15):
            parts.insert(int(self.rng.integers(len(parts) + 1)), "None")
        if self.chance(0.15) or not parts:
            parts.insert(int(self.rng.integers(len(parts) + 1)), "...")
        return ", ".join(parts)

    def shape(self, size: int) -> str:
        """A shape with so many elements; one extent may be -1."""
        extents: list[int] = []
        while size > 1 and len(extents) < 3 and self.chance(0.7):
            extent = self.one(*[n for n in range(1, size + 1) if size % n == 0])
            extents.append(extent)
            size //= extent
        extents.append(size)
        if self.chance(0.3):
            extents.insert(int(self.rng.integers(len(extents))), 1)
        if self.chance(0.3):
            extents[int(self.rng.integers(len(extents)))] = -1
        return str(tuple(extents)) if len(extents) > 1 or self.chance(0.5) else str(extents[0])

    def plain(self, shape: Any = None) -> str:
        """An array of numbers."""
        if shape is None:
            shape = tuple(self.one(*EXTENTS) for _ in range(int(self.rng.integers(0, 3))))
        numbers = self.rng.integers(0, 5, shape).tolist()
        return f"np.array({numbers}, {self.one(*DTYPES)!r})"

    # -- lines ---------------------------------------------------------------------------------------------------------

    def add_input(self, name: str) -> None:
        shape = tuple(self.one(*EXTENTS) for _ in range(self.one(0, 1, 2, 2, 2, 3)))
        dtype = np.dtype(self.one(*DTYPES))
        low = 0 if dtype.kind in "ub" else -6
        self.inputs[name] = self.rng.integers(low, 7, shape).astype(dtype)
        self.values[name] = self.inputs[name].copy()

    def add(self, line: str) -> bool:
        """Run a line and keep it, unless NumPy refuses it or its numbers are not exact."""
        kept = {name: _frozen(x) for name, x in self.values.items()}
        names = dict(self.values)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                exec(line, {"np": np}, names)
        except Exception:
            self._restore(kept)
            return False
        names.pop("row", None)
        new = {name: x for name, x in names.items() if name not in self.values}
        changed = [x for name, x in names.items() if name in self.values]
        if not all(map(_is_exact, changed)) or not all(map(_is_kept, new.values())):
            self._restore(kept)
            return False
        self.values = names
        self.lines.append(line)
        for name, x in new.items():
            if not _is_exact(x):
                self.results.append(name)
                del self.values[name]
        return True

    def _restore(self, kept: dict[str, Any]) -> None:
        for name, numbers in kept.items():
            x = self.values[name]
            if isinstance(x, np.ndarray) and not np.array_equal(x, numbers, equal_nan=True):
                with suppress(ValueError):          # x is a read-only view of another one, which is restored
                    x[...] = numbers





def _frozen(x: Any) -> Any:
    return x.copy() if isinstance(x, np.ndarray) else x


def _is_kept(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "biuf" and x.size <= MOST_ELEMENTS \
        and x.dtype.itemsize <= 8 and x.ndim <= 5


def _is_exact(x: Any) -> bool:
    if x.dtype.kind != "f":
        return True
    most = {2: 64, 4: 2**12, 8: 2**30}[x.dtype.itemsize]
    with np.errstate(all="ignore"):
        return bool(np.all(np.abs(x) <= most) and np.all(x * 8 == np.rint(x * 8)))


# -- lines that make values --------------------------------------------------------------------------------------------


def _view(d: Drawing) -> str:
    a = d.array()
    x = d.values[a]
    if d.chance(0.3):
        return f"{a}[{d.key(a)}]"
    if d.chance(0.4):
        flat = (f"{a}.reshape({d.shape(x.size)})", f"np.reshape({a}, {d.shape(x.size)})", f"{a}.ravel()",
                f"np.ravel({a})", f"{a}.reshape(-1)", f"{a}.T.reshape({d.shape(x.size)})", f"{a}.flatten()")
        return str(d.one(*flat))
    letters = "ijkl"[:x.ndim]
    turned = "".join(letters[i] for i in d.rng.permutation(x.ndim))
    order = tuple(d.rng.permutation(x.ndim).tolist())
    if not x.ndim:
        return str(d.one(f"{a}.T", f"{a}[...]", f"{a}[()]", f"np.transpose({a})", f"np.squeeze({a})", f"np.flip({a})",
                         f"{a}.reshape(())", f"{a}.reshape(1)", f"np.atleast_1d({a})", f"{a}[None]", f"{a}.copy()",
                         f"np.broadcast_to({a}, ())", f"np.einsum('->', {a})", f"{a}.ravel()", a))
    axis, other = d.axis(a), d.axis(a)
    return str(d.one(
        a, f"{a}.T", f"{a}.transpose({order})", f"np.transpose({a}, {order})", f"np.permute_dims({a}, {order})",
        f"np.swapaxes({a}, {axis}, {other})", f"{a}.swapaxes({axis}, {other})", f"np.moveaxis({a}, {axis}, {other})",
        f"np.expand_dims({a}, {axis})", f"np.squeeze({a})", f"{a}.squeeze()", f"np.flip({a}, {axis})",
        f"np.flip({a})", f"np.flipud({a})", f"np.fliplr({a})", f"np.rot90({a}, {d.one(0, 1, 2, 3)})",
        f"np.diagonal({a})", f"np.diag({a})", f"{a}.diagonal()", f"np.matrix_transpose({a})", f"{a}.mT",
        f"np.broadcast_to({a}, {(d.one(1, 2), *x.shape)})", f"np.broadcast_to({a}, {x.shape})",
        f"np.broadcast_arrays({a}, {d.array()})[{d.one(0, 1)}]", f"np.rollaxis({a}, {axis})",
        f"np.split({a}, [1], {axis})[{d.one(0, 1)}]", f"np.array_split({a}, 2, {axis})[{d.one(0, 1)}]",
        f"np.split({a}, 1)[0]", f"np.hsplit({a}, 1)[0]", f"np.vsplit({a}, 1)[0]", f"np.unstack({a}, axis={axis})[0]",
        f"np.einsum('{letters}->{turned}', {a})", f"np.einsum('{letters}', {a})", f"np.einsum('...{letters[-1]}->"
        f"{letters[-1]}...', {a})", f"np.lib.stride_tricks.sliding_window_view({a}, 2, {axis})",
        f"np.atleast_1d({a})", f"np.atleast_2d({a})", f"{a}.astype({a}.dtype, copy=False)",
        f"np.astype({a}, {d.dtype()}, copy=False)", f"{a}.astype({d.dtype()}, copy=False)", f"next(iter({a}))",
        f"{a}.view()", f"np.asarray({a})", f"np.ascontiguousarray({a})", f"{a}.real",
    ))


def _copied(d: Drawing) -> str:
    a = d.name()
    return str(d.one(f"{a}.copy()", f"np.copy({a})", f"+{a}", f"{a}.astype({a}.dtype)", f"np.round({a})",
                     f"np.nan_to_num({a})", f"np.clip({a}, None, None)", f"np.positive({a})", f"{a}.flatten()",
                     f"{a}[()]", f"{a}[...]", f"np.array({a})", f"{a}.copy('F')", f"{a}.round()"))


def _arithmetic(d: Drawing) -> str:
    a, b = d.name(), d.one(d.scalar, d.name, d.name, d.plain)()
    if d.chance(0.2):
        a, b = b, a
    if d.chance(0.3):
        function = d.one("add", "subtract", "multiply", "maximum", "minimum", "less", "equal", "floor_divide",
                         "remainder", "power", "logical_and", "bitwise_and", "left_shift", "fmod", "divide",
                         "not_equal", "hypot", "logical_xor", "arctan2", "matmul", "greater_equal")
        dtype = f", dtype={d.dtype()}" if d.chance(0.4) else ""
        return f"np.{function}({a}, {b}{dtype})"
    operator = d.one("+", "-", "*", "+", "-", "*", "/", "//", "%", "**", "<", ">=", "==", "!=", "&", "|", "^", "@")
    return f"{a} {operator} {b}"


def _unary(d: Drawing) -> str:
    a = d.name()
    function = d.one("negative", "abs", "square", "sign", "floor", "ceil", "rint", "trunc", "logical_not", "invert",
                     "sqrt", "exp2", "fabs", "isnan", "isfinite", "tanh", "reciprocal", "exp")
    dtype = f", dtype={d.dtype()}" if d.chance(0.2) else ""
    return str(d.one(f"np.{function}({a}{dtype})", f"np.{function}({a})", f"-{a}", f"abs({a})", f"~{a}",
                     f"np.round({a}, {d.one(0, 1, -1)})", f"{a}.clip(-1, 2)", f"np.clip({a}, {d.scalar()}, "
                     f"{d.scalar()})", f"divmod({a}, 2)[{d.one(0, 1)}]", f"np.divmod({a}, {d.scalar()})[0]"))


def _converted(d: Drawing) -> str:
    a, dtype = d.name(), d.dtype()
    return str(d.one(
        f"{a}.astype({dtype})", f"{a}.astype({dtype})", f"np.zeros_like({a}, {dtype})",
        f"np.ones_like({a}, dtype={dtype})", f"np.full_like({a}, {d.scalar()}, dtype={dtype})", f"np.full_like({a}, 2)",
        f"np.zeros_like({a})", f"np.ones_like({a})", f"np.zeros_like({a}, shape=(2, 3))",
        f"np.ones_like({a}, shape={d.values[a].shape[::-1]})",
        f"np.full_like({a}, {d.name()}, {dtype})", f"{a}.astype(np.result_type({a}, {dtype}))",
        f"{a}.astype(np.result_type({a}, {d.name()}, {d.scalar()}))",
        f"{a} + np.zeros({d.values[a].shape}, {dtype})",
        f"{a} * np.arange({d.values[a].size}, dtype={dtype}).reshape({d.values[a].shape})",
        f"{a} + np.can_cast({a}.dtype, {dtype})", f"{a} * ({a}.dtype == {dtype})",
        f"{a}.astype({dtype}).itemsize * {a}",
        f"{a} + np.asarray(1, {dtype})", f"{a} + np.dtype({dtype}).itemsize", f"np.zeros(3, {dtype})",
        f"{a} * np.can_cast({a}, {dtype})", f"{a} + np.promote_types({a}.dtype, {dtype}).itemsize",
        f"np.astype({a}, {dtype})",
    ))


def _reduced(d: Drawing) -> str:
    a = d.name()
    axis = d.axes(a)
    options = f", axis={axis}" if axis is not None or d.chance(0.2) else ""
    function = d.one("sum", "prod", "sum", "cumsum", "mean", "var", "std", "max", "min", "any", "all", "argmax",
                     "argmin", "ptp", "count_nonzero", "average", "amax", "cumprod", "median")
    if d.chance(0.25) and "cum" not in function:
        options += ", keepdims=True"
    if d.chance(0.4) and function in ("sum", "prod", "cumsum", "mean", "var", "std"):
        options += f", dtype={d.dtype()}"
    if d.chance(0.2):
        mask = d.name(lambda x: x.dtype == bool) if d.chance(0.5) else f"({a} > 0)"
        options += f", where={mask}"
    if d.chance(0.2):
        options += f", initial={d.one('1', '0', '2', '0.5', '-1')}"
    if d.chance(0.15) and function in ("var", "std"):
        options += ", ddof=1"
    if d.chance(0.4) and hasattr(np.ndarray, function):
        return f"{a}.{function}({options[2:]})"
    if d.chance(0.1):
        ufunc = d.one("add", "multiply", "maximum", "minimum")
        return f"np.{ufunc}.{d.one('reduce', 'accumulate')}({a}{f', axis={axis}' if axis is not None else ''})"
    return f"np.{function}({a}{options})"


def _product(d: Drawing) -> str:
    a, b = d.array(), d.array()
    x, y = d.values[a], d.values[b]
    left, right = "ijkl"[:x.ndim], "mnop"[:y.ndim]
    kept = "".join(letter for letter in left if d.chance(0.5))
    kept = "".join(kept[i] for i in d.rng.permutation(len(kept)))
    both = "".join((left + right)[i] for i in d.rng.permutation(x.ndim + y.ndim))
    return str(d.one(
        f"np.einsum('{left}->{kept}', {a})", f"np.einsum('{left},{right}->{both}', {a}, {b})",
        f"np.einsum('{left},{left}->{kept}', {a}, {a})", f"{a} @ {b}", f"{a} @ {a}.T", f"np.dot({a}, {b})",
        f"np.outer({a}, {b})", f"np.tensordot({a}, {b}, 0)", f"np.inner({a}, {a})", f"np.vdot({a}, {a})",
        f"np.multiply.outer({a}, {b})", f"np.matmul({a}, {b}, dtype={d.dtype()})", f"np.tensordot({a}, {a}, {x.ndim})",
        f"np.average({a}, weights={d.name(lambda w: w.shape == x.shape)}, axis={d.axes(a)})",
        f"np.average({b}, weights={b})",
        f"np.trace({a})", f"np.linalg.norm({a})", f"np.vecdot({a}, {a})",
    ))


def _joined(d: Drawing) -> str:
    a, b = d.name(), d.name()
    axis = d.one(0, 0, -1, 1, "None")
    return str(d.one(
        f"np.concatenate([{a}, {b}], axis={axis})", f"np.concatenate([{a}, {a}], axis={axis})",
        f"np.stack([{a}, {a}], {d.one(0, -1)})", f"np.hstack([{a}, {b}])", f"np.vstack([{a}, {b}])",
        f"np.column_stack([{a}, {b}])", f"np.append({a}, {b})", f"np.append({a}, {d.scalar()})",
        f"np.where({a} > 0, {a}, {b})", f"np.where({a} > 1, {d.scalar()}, {a})",
        f"np.where({a} > {b}, {d.scalar()}, {d.scalar()})", f"np.select([{a} > 1, {a} > 0], [{a}, {d.scalar()}], "
        f"{d.scalar()})", f"np.where({a}, {a}, {b})", f"np.tile({a}, {d.one(1, 2, (2, 1))})",
        f"np.repeat({a}, 2, {axis})", f"np.roll({a}, 1, {axis})", f"np.roll({a}, 1)", f"np.pad({a}, 1)",
        f"np.pad({a}, 1, mode={d.one('edge', 'wrap', 'reflect')!r})", f"np.pad({a}, 1, constant_values=3)",
        f"np.tril({a})", f"np.triu({a}, 1)", f"np.diff({a})", f"np.diff({a}, axis=0)", f"np.stack([{a}, {b}])",
        f"np.concatenate([{a}, {d.plain()}])", f"np.concatenate([{a}])",
    ))


def _picked(d: Drawing) -> str:
    a = d.array(1)
    indices = d.one("[0]", "[0, -1]", "[[0], [0]]", "np.array([0, 0])", "np.array(0)", "np.int64(0)")
    axis = d.axis(a)
    x = d.values[a]
    mask = f"np.arange({x.shape[0]}) % 2 == 0"
    return str(d.one(
        f"{a}[{indices}]", f"{a}[:, {indices}]", f"{a}[..., {indices}]", f"np.take({a}, {indices}, axis={axis})",
        f"np.take({a}, {indices})", f"{a}.take({indices}, {axis})", f"np.sort({a}, {axis})", f"np.argsort({a}, {axis}, "
        f"kind='stable')", f"{a}[{mask}]", f"np.take_along_axis({a}, np.argmax({a}, {axis}, keepdims=True), {axis})",
        f"{a}[[0], [-1]]", f"{a}[{indices}, ..., 0]", f"np.sort({a}, None)", f"{a}[np.argmax({a}) * 0]",
        f"{a}[{a}.argmax(0)]" if x.ndim == 1 else f"{a}[:, None, [0]]",
    ))


MAKERS = (_view, _view, _view, _copied, _arithmetic, _arithmetic, _unary, _converted, _reduced, _reduced, _product,
          _joined, _picked)


# -- lines that change values ------------------------------------------------------------------------------------------


def _augmented(d: Drawing) -> str:
    a = d.name() if d.chance(0.2) else d.array()
    operator = d.one("+=", "-=", "*=", "+=", "//=", "%=", "/=", "|=", "&=", "^=", "**=", "@=", "<<=")
    other = d.one(d.scalar, d.scalar, d.name, d.plain)()
    key = f"[{d.key(a)}]" if d.chance(0.3) else ""
    return f"{a}{key} {operator} {other}"


def _written(d: Drawing) -> str:
    a = d.array()
    value = d.one(d.scalar, d.name, d.plain)()
    x = d.values[a]
    if d.chance(0.15) and x.ndim:
        i, j = (int(d.rng.integers(x.shape[0])) if x.shape[0] else 0 for _ in range(2))
        return str(d.one(f"{a}[{i}], {a}[{j}] = {a}[{j}], {a}[{i}]", f"for row in {a}: row += {value}",
                         f"{a}[1:] = {a}[:-1]", f"{a}[::-1] = {a}", f"{a}[...] = {a}.T", f"{a}[{i}] += {a}[{j}]",
                         f"{a}[1:] += {a}[:-1]", f"for row in {a}: row[...] = {a}[{j}] + row"))
    if d.chance(0.6) or not x.ndim:
        return f"{a}[{d.key(a)}] = {value}"
    return str(d.one(f"{a}[{a} > 0] = {d.scalar()}", f"{a}[[0]] = {value}",
                     f"{a}[np.arange({x.shape[0]}) < 1] = {value}",
                     f"{a}[:, [0, -1]] = {value}", f"{a}[{a} > {d.name()}] = {d.scalar()}", f"{a}[...] = {value}",
                     f"{a}[[0]] += {value}"))


def _filled(d: Drawing) -> str:
    a, b, c = d.array(), d.name(), d.name()
    axis = d.axes(b)
    function = d.one("add", "multiply", "subtract", "maximum")
    if d.chance(0.3) and d.values[a].ndim:
        a = f"{a}[{d.key(a)}]"
    mask = d.name(lambda x: x.dtype == bool) if d.chance(0.3) else f"({b} > 0)"
    return str(d.one(
        f"np.{function}({b}, {c}, out={a})", f"np.{function}({b}, {d.scalar()}, out={a})",
        f"np.{function}({b}, {c}, {a})", f"np.{function}({b}, {c}, out={a}, where={mask})",
        f"np.sum({b}, axis={axis}, out={a})", f"np.sum({b}, axis={axis}, out={a}, dtype={d.dtype()})",
        f"np.prod({b}, axis={axis}, out={a})", f"np.mean({b}, axis={axis}, out={a})",
        f"np.max({b}, axis={axis}, out={a})",
        _running(d, a, b, axis), f"np.clip({b}, -1, 1, out={a})",
        f"{a}.fill({d.scalar()})", f"{a}.sort()",
        f"{a}.sort(0)", f"np.concatenate([{b}, {c}], out={a})", f"np.negative({a}, out={a})", f"np.copyto({a}, {b})",
        f"np.add.reduce({b}, out={a})", f"np.exp2({b}, out={a})", f"np.any({b}, axis={axis}, out={a})",
        f"np.take({b}, [0], out={a})", f"np.matmul({b}, {c}, out={a})", f"np.round({b}, out={a})",
    ))


def _running(d: Drawing, a: str, b: str, axis: Any) -> str:
    if "[" in a or not d.values[a].ndim:            # NumPy 2.4 crashes
        raise LookupError
    return f"np.cumsum({b}, axis={axis}, out={a})"


CHANGES = (_augmented, _augmented, _written, _written, _filled)


def turned(d: Drawing, line: str) -> str:
    """The line, at times with an array read in another order of its elements in memory."""
    names = list(re.finditer(r"\b[vx]\d+\b(?! =)", line))
    if not names or not d.chance(0.3):
        return line
    name = d.one(*names)
    view = d.one(".T", ".T", "[::-1]", "[..., ::-1]", "[:, :2]", "[::2]", ".swapaxes(0, -1)", "[:1]", "[None]")
    return f"{line[:name.end()]}{view}{line[name.end():]}"


def draw(seed: int) -> Program:
    """The program of this seed."""
    d = Drawing(np.random.default_rng(seed))
    for i in range(d.one(1, 2, 2)):
        d.add_input(f"x{i}")
    wanted = d.one(3, 5, 8, 12)
    for number in range(wanted * 8):
        if len(d.lines) >= wanted:
            break
        try:
            d.add(turned(d, d.one(*CHANGES)(d) if d.chance(0.4) else f"v{number} = {d.one(*MAKERS)(d)}"))
        except (LookupError, ValueError):   # nothing here has such a shape or dtype
            continue
    return Program(seed, d)


class Program:
    """Lines of NumPy that read and change the inputs, and return all that they have."""

    def __init__(self, seed: int, drawing: Drawing) -> None:
        self.seed, self.lines, self.inputs = seed, tuple(drawing.lines), drawing.inputs
        self.results = tuple(drawing.results)
        self.names = (*drawing.values, *drawing.results)
        body = [*self.lines, f"return ({', '.join(self.names)},)"]
        self.source = "\n".join([f"def program({', '.join(self.inputs)}):", *(f"    {line}" for line in body)]) + "\n"
        self.file = f"<numpy program {seed}.{next(_numbers)}>"

    @property
    def function(self) -> Any:
        names: dict[str, Any] = {"np": np}
        linecache.cache[self.file] = (len(self.source), None, self.source.splitlines(keepends=True), self.file)
        exec(compile(self.source, self.file, "exec"), names)
        return names["program"]

    def without(self, number: int) -> Program:
        """The program without a line, counted from 0, and without those that NumPy refuses then."""
        d = Drawing(np.random.default_rng(0))
        d.inputs = self.inputs
        d.values = {name: x.copy() for name, x in self.inputs.items()}
        for line in (*self.lines[:number], *self.lines[number + 1:]):
            d.add(line)
        return Program(self.seed, d)

    def __str__(self) -> str:
        given = [f"{name}: {x.dtype}{x.shape} = {x.tolist()}" for name, x in self.inputs.items()]
        return "\n".join([f"seed {self.seed}", *given, self.source])


# -- the law -----------------------------------------------------------------------------------------------------------


def refusals(program: Program) -> list[str]:
    """Check that the program, recorded and run, makes what NumPy makes.

    A line that is refused is left out, and the rest is checked.  Returns what was refused, each with its line.
    """
    refused = []
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                recorded = ir.record(program.function, *(
                    ir.TensorType(x.dtype, x.shape) for x in program.inputs.values()))
            break
        except ir.RecordError as error:
            number = _line_of(error, program)
            refused.append(str(error))
            lines = len(program.lines)
            if number < lines:
                program = program.without(number)
            else:                           # a value that is returned: it was refused when it was looked at
                program = program.without(lines - 1)
    _check(program, recorded)
    return refused


def _line_of(error: Exception, program: Program) -> int:
    place, _, text = str(error).splitlines()[-1].strip().removeprefix(f"{program.file}:").partition(": ")
    number = int(place) - 2
    assert text == (program.source.splitlines()[number + 1]).strip(), f"{error}\n{program}"
    return number


def _check(program: Program, recorded: Any) -> None:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        expected = program.function(*(x.copy() for x in program.inputs.values()))
        found = ir.interpret(recorded, [x.copy() for x in program.inputs.values()]).outputs
    for name, a, b in zip(program.names, found, expected, strict=True):
        b = np.asarray(b)
        kinds = [f"{x.dtype}{x.shape}" for x in (a, b)]
        assert kinds[0] == kinds[1], f"{name} is {kinds[0]}, not {kinds[1]}:\n{program}"
        if name in program.results and b.dtype.kind == "f":
            tolerance = {2: 1e-2, 4: 1e-5, 8: 1e-12}[b.dtype.itemsize]
            equal = np.allclose(a.astype(float), b.astype(float), tolerance, tolerance, equal_nan=True)
        else:
            equal = np.array_equal(a, b, equal_nan=b.dtype.kind == "f")
        assert equal, f"{name} is {a.tolist()}, not {b.tolist()}:\n{program}"
