"""ONNX's own tests of its nodes, run on programs: what passes, and what is refused and why.

    python tests/support/onnx_backend.py            prints the table of docs/onnx-operators.md
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from parallelism import ir
from parallelism.interop import InteropError, UnsupportedError, from_onnx


class Outcome(NamedTuple):
    name: str
    operator: str
    result: str
    """passed, refused, wrong, or other: its types are not those of programs, or its shapes depend on values."""
    reason: str = ""


@cache
def cases() -> list[Any]:
    with warnings.catch_warnings(action="ignore"):
        from onnx.backend.test.case.node import collect_testcases

        return sorted(collect_testcases(None), key=lambda case: case.name)


def outcome(case: Any) -> Outcome:
    operator = _operator(case)
    for inputs, expected in case.data_sets:
        try:
            found = run(case.model, inputs, expected)
        except UnsupportedError as error:
            return Outcome(case.name, operator, "other" if is_other(case, str(error)) else "refused", str(error))
        except InteropError as error:
            return Outcome(case.name, operator, "other" if is_other(case, str(error)) else "refused", str(error))
        except Exception as error:
            return Outcome(case.name, operator, "wrong", repr(error)[:200])
        if len(found) != len(expected):
            return Outcome(case.name, operator, "wrong", f"{len(found)} outputs in place of {len(expected)}")
        for ours, theirs in zip(found, expected, strict=True):
            if (message := difference(ours, np.asarray(_array(theirs)), case)) is not None:
                return Outcome(case.name, operator, "wrong", message)
    return Outcome(case.name, operator, "passed")


def run(model: Any, inputs: list[Any], expected: Any = ()) -> tuple[Any, ...]:
    """The outputs.  Inputs that must be known, as shapes, are given when that is asked for, and so are counts of elements
    that depend on numbers: those of the expected outputs."""
    names = [value.name for value in model.graph.input]
    given = {name: _array(x) for name, x in zip(names, inputs, strict=False) if x is not None}
    known: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    if any(isinstance(x, list) for x in given.values()):
        raise UnsupportedError("an input that is sequence_type is not supported")
    for _ in range(3):
        try:
            program, weights = from_onnx(model, known=known, sizes=sizes)
            break
        except UnsupportedError as error:
            if "give it, as sizes" in str(error) and not sizes:
                sizes = {value.name: _array(x).shape[int(_counts_columns(model))]
                         for value, x in zip(model.graph.output, expected, strict=False)}
                continue
            small = {name: np.asarray(x) for name, x in given.items() if np.asarray(x).size <= 64 and (
                np.asarray(x).dtype.kind in "iub" or name in ("roi", "scales") or np.asarray(x).size == 1)}
            if known or not small or not any(word in str(error) for word in ("must be known", "turns depends", "is not "
                                                                            "known")):
                raise
            known = small
    plain = {value.name for value in program.inputs}
    arrays = {name: np.asarray(x) for name, x in given.items() if name in plain} | weights
    with np.errstate(all="ignore"):
        return ir.interpret(program, arrays).outputs


def _counts_columns(model: Any) -> bool:
    """Whether a count is that of columns, as in NonZero; else it is that of rows."""
    return any(node.op_type == "NonZero" for node in model.graph.node)


def _array(x: Any) -> Any:
    """A tensor as an array; a list stays a list."""
    import onnx

    return onnx.numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x


def difference(ours: Any, theirs: Any, case: Any) -> str | None:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{ours.dtype}{list(ours.shape)} in place of {theirs.dtype}{list(theirs.shape)}"
    a, b = (x.astype(np.float64) if x.dtype.kind not in "iub" else x for x in (ours, theirs))
    narrow = ours.dtype.itemsize < 4 and ours.dtype.kind not in "iub"
    ulp = 2.0 ** (-7 if ours.dtype.name == "bfloat16" else -10) if narrow else 0
    of_sums = 1e-6 * np.abs(b).max() if _operator(case) in _SUMS else 0
    if not np.allclose(a, b, rtol=case.rtol + 2 * ulp, atol=max(case.atol, 1e-6, of_sums) + ulp / 2, equal_nan=True):
        return f"off by {np.nanmax(np.abs(a.astype(float) - b.astype(float))):.3g}"
    return None


_SUMS = ("DFT", "STFT")
"""Operators whose numbers are sums of all elements, of which some are near zero."""
_RANDOM = ("Bernoulli", "RandomUniformLike")


def is_other(case: Any, reason: str) -> bool:
    """Whether a refusal is for what programs do not have: other types, shapes that depend on values, random numbers."""
    words = ("an input that is", "a tensor of", "complex", "string", "sequence", "optional", "float4", "float8", "int4",
             "int2", "uint4")
    return any(word in reason.lower() for word in words) or _operator(case) in _DYNAMIC or _types(case)


_DYNAMIC = ("NonZero", "Unique", "Compress", "NonMaxSuppression", "StringNormalizer", "StringConcat", "StringSplit",
            "RegexFullMatch", "TfIdfVectorizer", "ImageDecoder", "SequenceMap", "SplitToSequence", *_RANDOM)


def _types(case: Any) -> bool:
    """Whether the types of the model are not all tensors of numbers that programs have."""
    import onnx

    names = ("FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "BOOL", "FLOAT16", "DOUBLE", "UINT32",
             "UINT64", "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2")
    values = [*case.model.graph.input, *case.model.graph.output]
    return any(value.type.WhichOneof("value") != "tensor_type" or onnx.TensorProto.DataType.Name(
        value.type.tensor_type.elem_type) not in names for value in values)


def _operator(case: Any) -> str:
    """The operator that a case is named after: that of its only node, or the longest that its name has."""
    nodes = case.model.graph.node
    if len(nodes) == 1:
        return nodes[0].op_type
    return f"{case.name.removeprefix('test_').removesuffix('_expanded')} (expanded)"


def outcomes(every: int = 1, start: int = 0) -> list[Outcome]:
    return [outcome(case) for case in cases()[start::every]]


def table(found: list[Outcome]) -> str:
    """The table of operators in Markdown."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, str] = {}
    for each in found:
        if each.operator.endswith("(expanded)"):
            continue
        counts[each.operator][each.result] += 1
        if each.result != "passed":
            reasons.setdefault(each.operator, each.reason.split(": ")[-1][:90])
    lines = ["| operator | passed | refused | why |", "|---|---|---|---|"]
    for name, count in sorted(counts.items()):
        lines.append(f"| {name} | {count['passed'] or ''} | {count['refused'] + count['other'] or ''} | "
                     f"{reasons.get(name, '').replace('|', '/')} |")
    return "\n".join(lines)


HEAD = """# Operators of ONNX

`from_onnx` reads these operators. The table is made by `python tests/support/onnx_backend.py`, which runs ONNX's own
tests of its nodes (of the package onnx {version}): {passed} of {total} pass, none is wrong. Of those that are refused,
{other} are about types that programs do not have (strings, sequences, complex numbers, floats of 4 bits), or
about shapes that depend on values. Others have an operator that is not read, or an opset before 7.

Operators that ONNX composes of others are read as these, whether they are in the table or not.

"""

if __name__ == "__main__":
    import onnx

    made = outcomes()
    totals = Counter(each.result for each in made)
    print(dict(totals), f"{totals['passed'] / (len(made) - totals['other']):.1%}", file=sys.stderr)
    if "-v" in sys.argv:
        for each in made:
            if each.result != "passed":
                print(each.result, each.operator, each.name, each.reason[:150], file=sys.stderr)
    counts = {"passed": totals["passed"], "total": len(made), "other": totals["other"]}
    print(HEAD.format(version=onnx.__version__, **counts), end="")
    print(table(made))
