"""Functions that differ in names alone: one form, and what is derived from one is renamed for the other."""

from dataclasses import replace

import pytest

from parallelism import ir, models
from parallelism.ir import Function, gradient, parse
from parallelism.ir.passes import Form, Renaming
from parallelism.ir.passes.renaming import names_between


def renamed(function: Function) -> Function:
    """The function with other names: inputs and numbers, as they would be further down in a program."""
    names = {value.name: str(int(value.name) + 7) if value.name.isdecimal() else f"other.{value.name}"
             for value in function.values}
    regions = {op.region: f"far.{op.region}" for op in function.ops if op.region}
    return Renaming(names, regions).function(function, "other")


@pytest.fixture(scope="module")
def function() -> Function:
    return models.gpt(11, 8, 2, 2, 3, ir.symbol("B"))


def test_form_ignores_names_only(function: Function) -> None:
    other = renamed(function)
    assert str(other) != str(function)
    assert Form([function]) == Form([other])
    assert hash(Form([function])) == hash(Form([other]))
    assert Form([function], more=1) != Form([other])
    assert Form([function, other]) != Form([function, function])    # which names are shared counts
    assert Form([function], [[function.inputs[0].name]]) != Form([function], [[function.inputs[1].name]])
    assert Form([function.specialize(B=3)]) != Form([function.specialize(B=4)])


@pytest.mark.parametrize(("one", "other"), [
    ('"constant"() {dtype = f64, shape = [], value = 1}', '"constant"() {dtype = f64, shape = [], value = 1.0}'),
    ('"constant"() {dtype = f64, shape = [], value = 1}', '"constant"() {dtype = f64, shape = [], value = 2}'),
])
def test_form_keeps_attributes(one: str, other: str) -> None:
    text = "func @f(%x: tensor<f64>) -> (tensor<f64>) {{\n  %0 = {} : () -> tensor<f64>\n  return %0\n}}\n"
    assert Form([parse(text.format(one))]) != Form([parse(text.format(other))])


def test_form_keeps_layouts_and_use() -> None:
    text = "func @f(%a: tensor<4xf64>{}, %b: tensor<4xf64>) -> (tensor<4xf64>) {{\n" \
           '  %0 = "subtract"({}) : (tensor<4xf64>, tensor<4xf64>) -> tensor<4xf64>\n  return %0\n}}\n'
    plain = Form([parse(text.format("", "%a, %b"))])
    assert plain != Form([parse(text.format("", "%b, %a"))])
    assert plain != Form([parse(text.format(" [tp]", "%a, %b"))])


def test_the_gradient_of_a_renamed_function_is_the_renamed_gradient(function: Function) -> None:
    """Also its new names: the k-th free number of one becomes the k-th free number of the other."""
    other = renamed(function)
    to = Renaming.between([function], [other])
    assert str(to.function(gradient(function), "other.gradient")) == str(gradient(other))


def test_a_renamed_function_is_verified_as_the_old_one(function: Function) -> None:
    other = renamed(function)
    assert parse(str(other)) == other
    assert names_between([function], [other]) == {
        a.name: b.name for a, b in zip(function.values, other.values, strict=True)}


def test_two_values_with_one_name_are_refused() -> None:
    function = models.mlp((3, 4, 5), 2)
    first, second = (value.name for value in function.inputs[:2])
    names = {value.name: value.name for value in function.values} | {first: second}
    with pytest.raises(ValueError, match=f"two values of @{function.name} would have the same name"):
        Renaming(names, {op.region: op.region for op in function.ops if op.region}).function_later(function, "f")


def dropouts(first: int, second: int) -> Function:
    def op(seed: int) -> str:
        return f'"dropout"(%x, %step) {{rate = 0.5, seed = {seed}, starts = [0], whole = [4]}}'

    types = "(tensor<4xf64>, tensor<i64>) -> (tensor<4xf64>, tensor<4xi1>)"
    return parse(
        "func @f(%x: tensor<4xf64>, %step: tensor<i64>) -> (tensor<4xf64>, tensor<4xf64>) {\n"
        f"  %0, %1 = {op(first)} : {types}\n  %2, %3 = {op(second)} : {types}\n  return %0, %2\n}}\n")


def test_seeds_are_names_which_are_equal_counts() -> None:
    assert Form([dropouts(3, 4)]) == Form([dropouts(4, 0)])
    assert Form([dropouts(3, 3)]) != Form([dropouts(3, 4)])
    assert Renaming.between([dropouts(3, 4)], [dropouts(4, 0)]).function(dropouts(3, 4), "f") == dropouts(4, 0)


def test_the_place_of_a_mask_is_no_symbol_of_the_work() -> None:
    step = gradient(models.TransformerSpec(
        layers=1, width=8, heads=2, vocabulary=12, sequence=3, dropout=0.1).function(ir.symbol("B")))
    assert step.symbols == step.symbols_of_work == {"B"}
    op = next(op for op in step.ops if op.kind == "dropout")
    moved = replace(op, attributes=tuple({**dict(op.attributes), "starts": (ir.symbol("C"), 0, 0)}.items()))
    step = replace(step, ops=tuple(moved if each is op else each for each in step.ops))
    assert step.symbols == {"B", "C"} and step.symbols_of_work == {"B"}
