"""An op knows the line that it was recorded from: refusals and reports name it, and nothing else depends on it."""

from __future__ import annotations

import inspect
import pickle
import re

import numpy as np
import pytest

from parallelism import Mesh, ir
from parallelism.execution.placing import operation_on
from parallelism.ir.core.lines import Line
from parallelism.transforms import SGD, Parts, Strategy, train_step

B, = ir.symbols("B")
T = ir.TensorType


def linear(x, w):
    return x @ w.T


def loss(p, x):
    with ir.region("one"):
        h = np.tanh(linear(x, p["a"]))
    with ir.region("two"):
        gates = ir.apply("softmax", h @ p["gates"], axis=1)
        return np.mean((h * gates) ** 2) / np.sum(h)


def place(function, text):
    """The number of the line of a function of this file in which a text stands."""
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


def recorded(function=loss):
    return ir.record(function, {"a": T("f64", (8, 4)), "gates": T("f64", (8, 8))}, T("f64", (B, 4)), name="loss")


def lines(function, kind):
    return [op.line and op.line.number for op in function.ops if op.kind == kind]


def test_each_op_has_the_innermost_line_of_the_user():
    function = recorded()
    assert {op.line.file for op in function.ops} == {__file__}
    assert lines(function, "matmul") == [place(linear, "x @ w.T"), place(loss, "h @ p")]
    assert lines(function, "softmax") == [place(loss, "softmax")] and lines(function, "divide")[-1] == place(loss, "/ np.sum")
    assert str(function.ops[0].line) == f"{__file__}:{place(linear, 'x @ w.T')}: return x @ w.T"


def test_a_line_is_no_part_of_a_program():
    def again(p, x):
        return loss(p, x)

    one, two = recorded(), ir.record(lambda p, x: again(p, x), {"a": T("f64", (8, 4)), "gates": T("f64", (8, 8))},
                                     T("f64", (B, 4)), name="loss")
    read = ir.parse(str(one))
    assert one == two == read and hash(one) == hash(read) and str(one) == str(read) and repr(one) == repr(read)
    assert [op.line for op in read.ops] == [Line("", number) for number in range(2, 2 + len(read.ops))]
    copied = pickle.loads(pickle.dumps(one))  # noqa: S301
    assert copied == one and all(op.line is None for op in copied.ops)
    bare = ir.Function(one.name, one.inputs, tuple(
        ir.Op(op.kind, op.inputs, op.attributes, op.outputs, op.region) for op in one.ops), one.outputs)
    assert len(pickle.dumps(bare)) == len(pickle.dumps(one))
    # Equal programs are placed once, wherever they were recorded.
    assert operation_on(one.specialize(B=2), Mesh(dp=1)) is operation_on(two.specialize(B=2), Mesh(dp=1))


@pytest.mark.parametrize("text", ["dp tp sp zero=1", "precision=bf16 dp zero=3", "tp recompute=one", "local=one,two", "cp"])
def test_transforms_keep_the_lines_of_a_forward(text):
    if text == "cp":
        function = ir.record(lambda p, x: np.mean(linear(x, p["a"]) ** 2), {"a": T("f64", (8, 4))}, T("f64", (B, 6, 4)))
    else:
        function = ir.record(lambda p, x: np.mean(np.tanh(linear(loss_free(p, x), p["b"])) ** 2),
                             {"a": T("f64", (8, 4)), "b": T("f64", (4, 8))}, T("f64", (B, 4)))
    forward = Parts.of(Strategy.parse(text)(train_step(function, SGD(0.1)))).forward
    products = [op for op in forward.ops if op.kind == "matmul"]
    assert products and {op.line.number for op in products if op.line} == {place(linear, "x @ w.T")}
    made = [op for op in forward.ops if op.line is None]
    assert all(op.kind in ("reshard", "convert", "widen", "local_loss", "reshape") or "local" in text for op in made), made


def loss_free(p, x):
    with ir.region("one"):
        h = np.tanh(linear(x, p["a"]))
    with ir.region("two"):
        return np.tanh(h)


def test_a_backward_has_the_lines_of_its_forward():
    function = ir.gradient(recorded().specialize(B=5))
    backward = [op for op in function.ops if op.region and op.region.startswith("gradient.")]
    products = [op for op in backward if op.kind in ("matmul", "einsum")]
    assert len(backward) > 10 and all(op.line.file == __file__ for op in backward)
    assert {op.line.number for op in products} == {place(linear, "x @ w.T"), place(loss, "h @ p")}


def after(text, **of):
    """The end of an error: the line on which a text stands in a function of this file."""
    (function, part), = of.items()
    number = place(globals()[function], part)
    return re.escape(f"{text}\n  {__file__}:{number}: ") + ".*" + re.escape(part)


def metric(p, x):
    y = linear(x, p["a"])
    return np.sum(y), np.tanh(y)


def mixing(p, x):
    y = linear(x, p["a"])
    return np.sum(y - np.max(y, axis=0))


def of_weights(p, x):
    return np.sum(p["a"] * p["a"])


@pytest.mark.parametrize(("function", "text", "told"), [
    (loss, "pp 1f1b:2", after("as a perplexity, behind it", loss="/ np.sum(h)")),
    (metric, "pp 1f1b:2", after("what is computed from these", metric="np.tanh(y)")),
    (mixing, "pp 1f1b:2", after("the max over all rows is not a sum", mixing="np.max(y, axis=0)")),
    (of_weights, "pp 1f1b:2", after("is not a sum over the rows of the batch B", of_weights="p[\"a\"] * p[\"a\"]")),
])
def test_a_refusal_ends_with_the_line_of_its_op(function, text, told):
    step = train_step(recorded(function), SGD(0.1), parameters=["p.a", *["p.gates"] * (function is loss)])
    with pytest.raises(ValueError, match=told):
        Strategy.parse(text)(step).stages(1)


def test_a_program_of_a_text_is_told_the_line_of_the_text():
    step = train_step(recorded(), SGD(0.1))
    text = str(step)
    with pytest.raises(ValueError, match=r"\n  at line \d+ of its text$") as refused:
        Strategy.parse("pp 1f1b:2")(ir.parse(text)).stages(1)
    number = int(re.search(r"line (\d+) of its text", str(refused.value))[1])
    assert '= "divide"(' in text.splitlines()[number - 1]


def whole(p, x):
    h = np.tanh(linear(x, p["a"]))
    return np.mean(ir.apply("softmax", h @ p["gates"], axis=1))


def test_what_stays_whole_is_told_with_the_line_of_its_product():
    function = ir.record(whole, {"a": T("f64", (8, 4)), "gates": T("f64", (8, 8))}, T("f64", (5, 4)), name="whole")
    report = Strategy.parse("tp").report(train_step(function, SGD(0.1)))
    assert [row.code.number for row in report.rows] == [place(linear, "x @ w.T"), place(whole, "h @ p")]
    assert f"test_lines.py:{place(whole, 'h @ p')}" in str(report).splitlines()[-1]
    only = ir.record(lambda p, x: np.mean(ir.apply("softmax", linear(x, p["a"]), axis=1)), {"a": T("f64", (8, 4))},
                     T("f64", (5, 4)), name="only")
    with pytest.raises(ValueError, match=re.escape(
            f"%p.a: the softmax behind it needs its result whole ({__file__}:{place(linear, 'x @ w.T')})")):
        Strategy.parse("tp")(train_step(only, SGD(0.1)))


def test_a_line_that_is_long_or_gone_is_cut():
    assert str(Line("nowhere.py", 3)) == "at nowhere.py:3"
    assert len(str(Line(__file__, place(test_a_line_is_no_part_of_a_program, "one, two")))) < 200 + len(__file__) + 10
