"""Calls of NumPy as programs make them: which are recorded, and which are refused with what to write instead.

A line is what the call returns; with ``;`` statements come before it.  The names are those of `ARRAYS`, each an input of the
program.  A line with ``!`` is refused, and what follows is in the message.
"""

import re

import numpy as np

RNG = np.random.default_rng(11)
X, Y = RNG.normal(size=(2, 3, 4))
HOLES = X.copy()
HOLES[0, 1:3] = HOLES[2, 0] = np.nan
SQUARE = RNG.normal(size=(4, 4)) + 3 * np.eye(4)
ARRAYS = {
    "x": X, "y": Y, "c": RNG.normal(size=(3, 4, 5)), "v": RNG.normal(size=4), "w": RNG.normal(size=4),
    "u": RNG.uniform(0.1, 0.9, (3, 4)), "h": HOLES, "m": SQUARE, "s": SQUARE @ SQUARE.T, "z": RNG.normal(size=(2, 3, 3)),
    "i": RNG.integers(-9, 9, (3, 4)), "j": RNG.integers(1, 9, (3, 4)), "p": np.array([2, 0]), "q": np.array([1, -1]),
    "b": X > 0, "d": Y > 0, "f": X.astype(np.float32), "e": np.array([[0, -np.inf, 2], [np.inf, np.nan, -1]]),
    "k": np.array(2), "o": RNG.integers(0, 4, (3, 2)),
}

TEXT = """
x + y
x - 2
2 * x / y
x // y
x % y
-x
+x
abs(x)
x ** 2
u ** 0.5
u ** y
divmod(x, y)[1]
x @ m
v @ w
x < y
(x < y) & b
b | d
b ^ d
~b
i << 1
i >> 1
i & j
i // j
x.T @ y
np.add(x, y)
np.subtract(x, y)
np.multiply(x, y)
np.divide(x, y)
np.true_divide(x, y)
np.floor_divide(i, j)
np.power(u, y)
np.float_power(u, y)
np.mod(x, y)
np.remainder(i, j)
np.fmod(x, y)
np.divmod(i, j)[0]
np.negative(x)
np.positive(x)
np.absolute(x)
np.fabs(x)
np.sign(x)
np.signbit(x)
np.copysign(x, y)
np.nextafter(x, y)!numpy.nextafter
np.spacing(x)!numpy.spacing
np.modf(x)[0]
np.modf(x)[1]
np.frexp(x)[0]!numpy.frexp
np.ldexp(x, i)
np.sqrt(u)
np.cbrt(x)
np.square(x)
np.reciprocal(x)
np.exp(x)
np.exp2(x)
np.expm1(x)
np.log(u)
np.log2(u)
np.log10(u)
np.log1p(u)
np.logaddexp(x, y)
np.logaddexp2(x, y)
np.sin(x)
np.cos(x)
np.tan(x)
np.arcsin(u)
np.arccos(u)
np.arctan(x)
np.arctan2(x, y)
np.hypot(x, y)
np.sinh(x)
np.cosh(x)
np.tanh(x)
np.arcsinh(x)
np.arccosh(u + 1)
np.arctanh(u)
np.deg2rad(x)
np.rad2deg(x)
np.degrees(x)
np.radians(x)
np.sinc(x)
np.i0(x)!numpy.i0
np.unwrap(v)!numpy.unwrap
np.floor(x)
np.ceil(x)
np.trunc(x)
np.rint(x)
np.fix(x)
np.round(x, 2)
np.around(x)
np.clip(x, -1, 1)
np.clip(x, None, y)
np.maximum(x, y)
np.minimum(x, 0)
np.fmax(h, y)
np.fmin(h, y)
np.isnan(h)
np.isinf(e)
np.isfinite(e)
np.isposinf(e)
np.isneginf(e)
np.nan_to_num(h)
np.nan_to_num(e, nan=1.0, posinf=9.0, neginf=-9.0)
np.where(np.isnan(h), np.nan, x)
np.heaviside(x, 0.5)
np.equal(i, j)
np.not_equal(i, j)
np.greater(x, y)
np.greater_equal(x, y)
np.less_equal(x, y)
np.logical_and(b, d)
np.logical_or(x, y)
np.logical_xor(b, d)
np.logical_not(b)
np.invert(i)
np.bitwise_and(i, j)
np.bitwise_or(i, j)
np.bitwise_xor(i, j)
np.bitwise_count(j)!numpy.bitwise_count
np.left_shift(i, 2)
np.gcd(i, j)!numpy.gcd
np.lcm(i, j)!numpy.lcm
np.isclose(x, y)
np.allclose(x, y)!numpy.isclose(...).all()
np.array_equal(x, y)!(a == b).all()
np.sum(x)
np.sum(x, axis=1, keepdims=True)
np.sum(x, axis=0, where=b)
np.prod(x, axis=1)
np.mean(x, axis=0)
np.mean(x, where=b)
np.std(x)
np.std(x, axis=1, ddof=1)
np.var(x, axis=(0, 1))
np.average(x, axis=1, weights=u)
np.average(x, axis=1, weights=v)
np.max(x, axis=1)
np.min(x)
np.amax(x)
np.ptp(x, axis=0)
np.any(b, axis=1)
np.all(b)
np.argmax(x, axis=1)
np.argmin(x)
np.count_nonzero(i, axis=0)
np.nansum(h, axis=1)
np.nanprod(h)
np.nanmean(h, axis=0)
np.nanvar(h)
np.nanstd(h, axis=1)
np.nanmax(h, axis=1)
np.nanmin(h)
np.nanargmax(h, axis=1)
np.nanargmin(h, axis=1)
np.nancumsum(h, axis=1)
np.nancumprod(h, axis=1)
np.nanmedian(h, axis=1)
np.nanquantile(h, 0.3, axis=1)
np.nanpercentile(h, 30, axis=1)
np.median(x, axis=1)
np.quantile(x, 0.3)
np.quantile(x, [0.25, 0.5, 0.75], axis=1)
np.quantile(x, 0.3, axis=1, method="lower")
np.percentile(x, 30, axis=0)
np.percentile(x, [10, 90])
np.cumsum(x, axis=1)
np.cumprod(x, axis=1)
np.add.accumulate(x, axis=1)
np.multiply.accumulate(x, axis=1)
np.maximum.accumulate(x, axis=1)
np.minimum.accumulate(x, axis=0)
np.cumulative_sum(x, axis=1)
np.cumulative_prod(x, axis=1)
np.add.reduce(x, axis=1)
np.maximum.reduce(x)
np.logical_or.reduce(b, axis=1)
np.add.outer(v, w)
np.multiply.outer(v, w)
np.add.reduceat(v, [0, 2])!numpy.add.reduceat
np.diff(x, axis=1)
np.diff(x, n=2)
np.ediff1d(v)
np.gradient(v)
np.gradient(x, axis=1)
np.trapezoid(x, dx=0.5)
np.trapezoid(x, x=np.array([0.0, 1.0, 3.0, 4.0]))
np.interp(u, np.array([0.0, 0.5, 1.0]), np.array([1.0, 2.0, 5.0]))
np.convolve(v, np.array([1.0, 2.0]))
np.convolve(v, w, mode="same")
np.correlate(v, np.array([1.0, 2.0]), mode="valid")
np.polyval(np.array([1.0, 2.0, 3.0]), x)
np.cov(x)
np.corrcoef(x)
np.histogram(x)!numpy.histogram
np.digitize(x, np.array([-1.0, 0.0, 1.0]))
np.searchsorted(np.array([-1.0, 0.0, 1.0]), x)
np.bincount(i)!minlength
np.bincount(p, minlength=4)
np.sort(x, axis=1)
np.sort(x, axis=None)
np.argsort(x)
np.partition(x, 2, axis=1)[:, 2]
np.argpartition(x, 2, axis=1)[:, 2]
np.lexsort((v, w))
np.unique(i)!values
np.nonzero(i)!values
np.flatnonzero(i)!values
np.argwhere(i)!values
np.where(b)!values
np.extract(b, x)!values
np.compress(b[0], x, axis=1)!values
np.compress([True, False, True], x, axis=0)
np.isin(i, [1, 2, 3])
np.dot(x, m)
np.dot(v, w)
np.dot(x, c)
np.vdot(x, y)
np.inner(x, y)
np.outer(v, w)
np.matmul(x, m)
np.vecdot(x, y)
np.matvec(m, v)
np.vecmat(v, m)
np.tensordot(x, c, axes=([0, 1], [0, 1]))
np.einsum("ij,kj->ik", x, y)
np.einsum("ii->i", m)
np.einsum("ii", m)
np.einsum("ijj->i", z)
np.einsum("ij,ij->", x, y)
np.einsum("ii,ij->j", m, m)
np.einsum("...ij,...jk->...ik", z, z)
np.einsum(x, [0, 1], m, [1, 2], [0, 2])
np.linalg.norm(x)
np.linalg.norm(x, axis=1)
np.linalg.norm(x, ord=1, axis=1)
np.linalg.norm(x, ord=np.inf, axis=1)
np.linalg.norm(x, ord="fro")
np.linalg.norm(x, ord="nuc")!numpy.linalg.norm
np.linalg.solve(m, v)
np.linalg.solve(m, x.T)
np.linalg.inv(m)
np.linalg.inv(z)
np.linalg.det(m)
np.linalg.det(z)
np.linalg.slogdet(s)[1]
np.linalg.cholesky(s)
np.linalg.matrix_power(m, 3)
np.linalg.multi_dot([x, m, m])
np.linalg.trace(m)
np.linalg.diagonal(z)
np.linalg.lstsq(x.T, v)!numpy.linalg.solve
np.linalg.pinv(x)!numpy.linalg.solve
np.linalg.eigh(s)!numpy.linalg.eigh
np.linalg.eig(m)!numpy.linalg.eig
np.linalg.svd(x)!numpy.linalg.svd
np.linalg.qr(x)!numpy.linalg.qr
np.kron(x, m)
np.cross(x[:, :3], y[:, :3])
np.trace(m)
np.diagonal(m)
np.diagonal(m, 1)
np.diagonal(z, axis1=1, axis2=2)
np.diag(v)
np.diag(m, -1)
np.diagflat(v)
np.tril(m)
np.triu(m, 1)
np.vander(v, 3)
np.fill_diagonal(m, 0.0); m
np.reshape(x, (2, 6))
x.reshape(-1)
np.ravel(x)
x.flatten()
np.transpose(c, (2, 0, 1))
np.swapaxes(c, 0, 2)
np.moveaxis(c, 0, -1)
np.rollaxis(c, 2)
np.expand_dims(x, 1)
np.squeeze(x[None])
np.broadcast_to(v, (3, 4))
np.broadcast_arrays(x, v)[1]
np.atleast_1d(x)
np.atleast_2d(v)
np.atleast_3d(x)
np.concatenate([x, y], axis=1)
np.concat([x, y])
np.stack([x, y], axis=1)
np.vstack([x, v])
np.hstack([x, y])
np.dstack([x, y])
np.column_stack([v, w])
np.block([[x, y], [y, x]])
np.append(x, y, axis=0)
np.insert(x, 1, 5.0, axis=1)
np.delete(x, 1, axis=0)
np.split(x, 2, axis=1)[1]
np.array_split(x, 3, axis=1)[0]
np.vsplit(m, 2)[0]
np.hsplit(x, 2)[1]
np.dsplit(c[..., :4], 2)[1]
np.repeat(x, 2, axis=1)
np.repeat(x, [1, 2, 0], axis=0)
np.tile(x, (2, 1))
np.roll(x, 1, axis=1)
np.rot90(x)
np.flip(x, 1)
np.flipud(x)
np.fliplr(x)
np.pad(x, 1)
np.pad(x, ((1, 0), (0, 2)), mode="edge")
np.pad(x, 1, mode="reflect")
np.pad(x, 1, mode="symmetric")
np.pad(x, ((1, 0), (0, 2)), constant_values=(1.0, 2.0))
np.resize(x, (2, 3))
np.lib.stride_tricks.sliding_window_view(v, 2)
np.meshgrid(v, w)[0]
np.zeros_like(x) + 1
np.ones_like(x)
np.full_like(x, 3.0)
np.empty_like(x).shape[0] * x
np.take(x, p, axis=0)
np.take(x, [0, 5])
np.take(x, p, axis=0, mode="clip")
np.take_along_axis(x, o, axis=1)
np.put_along_axis(x, np.array([[1], [0], [3]]), 9.0, axis=1); x
np.choose(p, [v[:2], w[:2], x[0, :2]])
np.select([b, d], [x, y], 0.0)
np.piecewise(x, [b, ~b], [1.0, 2.0])
np.copyto(x, y); x
np.copyto(x, 0.0, where=b); x
np.putmask(x, b, 0.0); x
np.place(x, b, [0.0]); x
np.put(x, [1, 2], 0.0); x
np.add.at(x, p, 1.0); x
np.add.at(x, (p, q), v[:2]); x
np.subtract.at(x, p, y[:2]); x
np.maximum.at(x, p, y[:2]); x
np.multiply.at(v, [0, 0, 1], 2.0); v
x[b] *= 2; x
x[b] = 0; x
x[x > 1] = 1.0; x
x[b] = y[b]; x
x[b] += y[b]; x
x[b].sum()
x[b].mean()
np.max(x[b])
np.log(u[b]).sum()
x[b]!where
x[p]
x[:, p]
x[p, q]
x[p, 1:]
x[k]
x[p] = 7.0; x
x[p] = y[:2]; x
x[:, p] = 0.0; x
x[p, q] = v[:2]; x
x[p] += 1.0; x
x[k] = v; x
x[k, 1] = 0.0; x
x[k, 1:3] = 0.0; x
x[1:, p] = 1.0; x
x[[0, 2]] = 0.0; x
x[0] += 1.0; x
x[:, ::2] = 0.0; x
x[::-1]
x[..., None]
x[1, 2]
x[np.array([True, False, True])]
x.sum(axis=0)
x.mean()
x.argmax(axis=1)
x.astype(np.float32)
x.clip(0, 1)
x.cumsum(axis=1)
x.dot(m)
x.repeat(2)
x.squeeze()
x.ravel()
m.trace()
m.diagonal()
x.round(1)
x.prod()
x.std()
x.any()
x.take(p, axis=0)
x.swapaxes(0, 1)
x.conj()
x.real
x.copy()
x.fill(2.0); x
x.sort(); x
x.tolist()!tolist
x.item()!item()
x.nonzero()!values
x.dtype.itemsize * x
len(x) * x
np.asarray(x) + 1
np.array(x)
np.array([v, w])
np.array([v.sum(), w.max()])
np.asarray(x, dtype=np.float32)
np.ascontiguousarray(x)
np.asanyarray(x)
np.float32(k)!astype
float(k)!float()
int(k)!int()
bool(k)!decision
np.real(x)
np.imag(x)
np.conj(x)
np.angle(x)!numpy.angle
np.fft.fft(v)!numpy.fft.fft
np.apply_along_axis(np.sum, 1, x)!axis=
np.vectorize(float)(x)!numbers
np.array_equiv(x, y)!(a == b).all()
np.isscalar(x) * x + x
np.shape(x)[0] * x
np.iterable(x) * x
np.result_type(x, f).type(1) * x
np.tri(3) @ x
np.exp(x - np.max(x, axis=1, keepdims=True)) / np.sum(np.exp(x - np.max(x, axis=1, keepdims=True)), axis=1, keepdims=True)
np.intersect1d(i, j)!values
np.setdiff1d(i, j)!values
np.union1d(i, j)!values
np.trim_zeros(v)!values
np.random.permutation(v)!x[permutation]
np.save("x", x)!numbers
"""
CALLS = {text: message for text, _, message in (line.partition("!") if "!=" not in line else (line, "", "") for line in
                                                TEXT.strip().splitlines())}


def names_in(text):
    """The names of the arrays that a line uses."""
    return [name for name in ARRAYS if re.search(rf"(?<![\w.\"'])\b{name}\b(?!\w*[\"'(=])", text)]


def returned(text, given):
    """What a line returns for the arrays by their names."""
    *statements, result = text.split("; ")
    names = {"np": np, **given}
    for statement in statements:
        exec(statement, names)
    return eval(result, names)
