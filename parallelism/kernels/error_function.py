"""The error function, by the rational functions of Cephes (S. L. Moshier, *Methods and Programs for Mathematical
Functions*, 1989, ``ndtr.c``), with an error below 4e-16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from parallelism.arrays import Array

ERFC_BELOW_8 = (
    (
        2.46196981473530512524e-10,
        5.64189564831068821977e-1,
        7.46321056442269912687,
        4.86371970985681366614e1,
        1.96520832956077098242e2,
        5.26445194995477358631e2,
        9.34528527171957607540e2,
        1.02755188689515710272e3,
        5.57535335369399327526e2,
    ),
    (
        1.0,
        1.32281951154744992508e1,
        8.67072140885989742329e1,
        3.54937778887819891062e2,
        9.75708501743205489753e2,
        1.82390916687909736289e3,
        2.24633760818710981792e3,
        1.65666309194161350182e3,
        5.57535340817727675546e2,
    ),
)
ERFC_FROM_8 = (
    (
        5.64189583547755073984e-1,
        1.27536670759978104416,
        5.01905042251180477414,
        6.16021097993053585195,
        7.40974269950448939160,
        2.97886665372100240670,
    ),
    (
        1.0,
        2.26052863220117276590,
        9.39603524938001434673,
        1.20489539808096656605e1,
        1.70814450747565897222e1,
        9.60896809063285878198,
        3.36907645100081516050,
    ),
)
"""The coefficients of two polynomials, the highest power first: ``erfc(x) * exp(x * x)`` is their quotient, for x from 1
to 8, and for x from 8 on."""

_T = (
    9.60497373987051638749e0,
    9.00260197203842689217e1,
    2.23200534594684319226e3,
    7.00332514112805075473e3,
    5.55923013010394962768e4,
)
_U = (
    1.0,
    3.35617141647503099647e1,
    5.21357949780152679795e2,
    4.59432382970980127987e3,
    2.26290000613890934246e4,
    4.92673942608635921086e4,
)


def _ratio(above: tuple[float, ...], below: tuple[float, ...], x: Any) -> Any:
    top, bottom = x * 0 + above[0], x * 0 + below[0]
    for a in above[1:]:
        top = top * x + a
    for b in below[1:]:
        bottom = bottom * x + b
    return top / bottom


def erf(x: Array) -> Array:
    """``2 / sqrt(pi)`` times the integral of ``exp(-t*t)`` from 0 to each element, in the dtype of ``x``."""
    wide = np.asarray(x, np.float64)
    near = np.clip(wide, -1, 1)
    size = np.clip(np.abs(wide), 1, 6)
    far = np.copysign(1 - np.exp(-size * size) * _ratio(*ERFC_BELOW_8, size), wide)
    result: Array = np.where(np.abs(wide) <= 1, near * _ratio(_T, _U, near * near), far).astype(x.dtype)
    return result
