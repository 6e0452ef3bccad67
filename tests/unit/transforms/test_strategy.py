"""Strategies as values: their text, their order, and what is refused."""

from __future__ import annotations

import warnings
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from transformed import MODELS, model_step

from parallelism import Executable, Mesh, ir
from parallelism.layouts import annotate
from parallelism.transforms import (
    SGD,
    Adam,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Fused,
    LocalLayers,
    MixedPrecision,
    Overlap,
    Pipeline,
    Recompute,
    SequenceParallel,
    Strategy,
    TensorParallel,
    WholeWeights,
    Zero,
    train_step,
)
from vcluster.__main__ import main
from vcluster.cli.command_line import serve

STEP = model_step("gpt", 4, Adam())
TRANSFORMS = [
    DataParallel(), DataParallel("outer"), TensorParallel(), TensorParallel("x", ["block.*.attention", "head"]),
    TensorParallel(regions="block.?.feed_forward"), SequenceParallel(), SequenceParallel("x"), Zero(1),
    Zero(3, "outer"), ContextParallel(), ContextParallel("dp"), ExpertParallel("outer"), ExpertParallel(),
    MixedPrecision(), MixedPrecision("float16", "float16"), Recompute("block.*"),
    Recompute(["block.*", "head"], keep="block.?.attention.core"),
    Pipeline("pp", 4, "interleaved_1f1b", 2, ("a", "b.0", "c"), "N"), Pipeline("x", 8, "ZB_H1", recompute=True),
    LocalLayers(["block.*", "layer.0"]), Overlap(), Overlap(3 * 2**10, 0), Fused(),
]


@given(st.lists(st.sampled_from(TRANSFORMS), unique=True), st.randoms(use_true_random=False))
def test_a_strategy_is_read_from_its_text(transforms, random):
    strategy, mesh = Strategy(*transforms), Mesh(outer=2, dp=3, tp=4, x=5, cp=6, ep=7, pp=2)
    axes = {each.axis for each in transforms if hasattr(each, "axis") and not isinstance(each, SequenceParallel | Zero)}
    if sum(isinstance(each, Pipeline) for each in transforms) > 1:
        with pytest.raises(ValueError, match="got 2 pp and 2 schedules"):
            Strategy.parse(str(strategy))
        return
    assert Strategy.parse(str(strategy)) == strategy and eval(repr(strategy)) == strategy
    text = strategy.text_on(mesh)
    if {each.axis for each in transforms if hasattr(each, "axis")} - axes or not axes:
        with pytest.raises(ValueError, match="which has no size" if axes else "names no axis with its size"):
            Strategy.parse_on_mesh(text)
        return
    again, found = Strategy.parse_on_mesh(text)
    assert again == strategy and {**found.shape} == {axis: mesh.shape[axis] for axis in axes}
    words = text.split()
    others = [word for word in words if not word.startswith("dp")]
    random.shuffle(others)      # of data parallelism over several axes, the order says which is outermost
    mixed = [*others, *(word for word in words if word.startswith("dp"))]
    assert Strategy.parse_on_mesh(" ".join(mixed)) == (strategy, found)
    assert Strategy.parse_on_mesh(again.text_on(found)) == (again, found)


def test_the_words_of_a_strategy():
    assert str(Strategy()) == ""
    assert str(Strategy(Zero(2), SequenceParallel(), DataParallel(), TensorParallel())) == "dp tp sp zero=2"
    assert Strategy.parse("tp:model@block.*,head dp:rows") == Strategy(
        TensorParallel("model", regions=("head", "block.*")), DataParallel("rows"))
    assert Strategy.parse_on_mesh("tp=8 sp dp=4 zero=1") == (Strategy.parse("tp sp dp zero=1"), Mesh(dp=4, tp=8))
    assert Strategy(Strategy.parse("tp"), DataParallel()) == Strategy.parse("dp tp")
    assert Strategy.parse("dp:a dp:b") != Strategy.parse("dp:b dp:a")


@pytest.mark.parametrize(("text", "means", "mesh"), [
    ("fsdp=64", "dp zero=3 overlap", Mesh(dp=64)), ("fsdp:x=2 tp=3", "dp:x tp zero:x=3 overlap", Mesh(x=2, tp=3)),
    ("hsdp=8x4", "dp:replica dp zero=3 overlap", Mesh(replica=8, dp=4)),
    ("hsdp=2x3 overlap=ahead:2 pp=2 1f1b:4", "dp:replica dp zero=3 overlap=ahead:2 pp 1f1b:4", Mesh(pp=2, replica=2, dp=3)),
])
def test_words_of_fully_sharded_data_parallelism_stand_for_others(text, means, mesh):
    strategy, found = Strategy.parse_on_mesh(text)
    assert str(strategy) == means and found == mesh and [*found.shape] == [*mesh.shape]
    sizes = ("=64", "=2", "=3", "=8x4", "=2x3")
    unsized = " ".join(word.partition("=")[0] if word.endswith(sizes) and word[0] in "fhtp" else word
                       for word in text.split())
    assert Strategy.parse(unsized) == strategy and Strategy.parse_on_mesh(strategy.text_on(mesh)) == (strategy, mesh)


def test_meshes_of_stages_are_the_sizes_in_a_text():
    text = "dp tp zero=1 overlap=1KB pp@layer.1,layer.2 1f1b:2,meshes=dp=2.tp=2|dp=3|tp=1"
    strategy, mesh = Strategy.parse_on_mesh(text)
    assert strategy == Strategy.parse(text) and mesh == Mesh(devices=8) == strategy.pipeline.of_all
    assert strategy.text_on(mesh) == strategy.text_on(Mesh(any=8)) == str(strategy) == text
    assert strategy.pipeline.meshes == (Mesh(dp=2, tp=2), Mesh(dp=3), Mesh(tp=1))
    assert [strategy.pipeline.position(mesh, rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 2]
    for wrong, message in [
        ("dp=2 pp", "the meshes of the stages give the sizes of the axes; leave out =2 behind 'dp'"),
        ("dp pp=2", "leave out =2 behind 'pp'"),
        ("tp dp pp", "tp needs an axis 'tp', which no mesh of the stages has; their axes are dp"),
    ]:
        with pytest.raises(ValueError, match=message):
            Strategy.parse_on_mesh(f"{wrong} 1f1b:2,meshes=dp=2|dp=3")
    with pytest.raises(ValueError, match=r"needs 8 devices, 4 [+] 3 [+] 1; Mesh.dp=7. has 7"):
        strategy.text_on(Mesh(dp=7))


def test_a_strategy_gets_another_pipeline():
    strategy = Strategy.parse("dp pp 1f1b:4 zero=1")
    changed = strategy.with_pipeline(microbatches=8, batch="rows")
    assert str(changed) == "dp zero=1 pp 1f1b:8,batch=rows"
    assert strategy.pipeline.microbatches == 4                        # the strategy itself is as it was
    without = Strategy.parse("dp tp")
    assert without.with_pipeline(batch="rows") == without
    with pytest.raises(ValueError, match="microbatches"):
        strategy.with_pipeline(microbatches=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chosen", [
    [DataParallel(), TensorParallel(), SequenceParallel(), Zero(1)],
    [DataParallel(), TensorParallel("x", regions="head"), TensorParallel(regions="block.*"), Zero(3)],
])
def test_order_does_not_matter_or_is_refused(chosen):
    expected, refused = Strategy(*chosen)(STEP), []
    for order in permutations(chosen):
        assert Strategy(*order) == Strategy(*chosen)
        step = STEP
        try:
            for transform in order:
                step = transform(step)
        except ValueError as error:
            refused.append(f"{error}")
        else:
            assert step == expected
    assert [each for each in refused if " comes before " not in each and " comes after " not in each] == []
    assert 0 < len(refused) < 23


def test_of_several_axes_of_data_the_first_is_the_outermost():
    step = Strategy.parse("dp:a dp:b")(STEP)
    tokens, = (value for value in step.inputs if value.name == "tokens")
    assert tokens.layout.short() == "[(a, b), None]"


def test_a_layout_that_is_given_stays():
    step = annotate(STEP, {"p.0.up": "[tp, None]", "p.0.out": "[None, None]"})
    laid = {value.name: value.layout and value.layout.short() for value in Strategy.parse("dp tp")(step).inputs}
    assert laid["p.0.up"] == "[tp, None]" and laid["p.0.out"] == "[None, None]"
    assert laid["p.0.qkv"] == "[None, tp]"
    assert laid["p.0.down"] is None     # its activation is whole now, and a norm needs its result whole


def test_a_loss_without_an_optimizer_is_split_too():
    loss = Strategy.parse("dp tp sp")(MODELS["gpt"](4))
    laid = {value.name: value.layout.short() for value in loss.inputs if value.layout}
    assert laid["p.0.up"] == "[None, tp]" and laid["tokens"] == "[dp, None]"


def product(*names):
    types = {name: ir.TensorType("f64", (4, 4)) for name in names}
    return ir.record(lambda p: np_sum(p), types)


def np_sum(p):
    total = 0
    for weight in p.values():
        total = total + (weight * weight).sum()
    return total


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("build", "message"), [
    (lambda: Strategy(DataParallel(), DataParallel()), r"DataParallel\(axis='dp'\) is given twice"),
    (lambda: DataParallel()(DataParallel()(STEP)), "dp: %tokens of @transformer.step is split over 'dp' already"),
    (lambda: Strategy.parse("tp")(Strategy.parse("tp")(STEP)), "tp: no weight of @transformer.step is left"),
    (lambda: Strategy.parse("dp:x tp:x")(STEP), r"tp:x: %tokens of @transformer.step is split over 'x' already, \[x, "),
    (lambda: Strategy.parse("sp")(Strategy.parse("tp sp")(STEP)), "sp: no activation of @transformer.step is left"),
    (lambda: Strategy.parse("zero=1")(Strategy.parse("dp zero=2")(STEP)),
     "zero=1: %.* of @transformer.step is split over 'dp' already"),
    (lambda: Strategy.parse("dp zero:x=1")(STEP),
     "zero:x=1: no input of @transformer.step is split over 'x', so no gradient is summed over it"),
    (lambda: Strategy.parse("dp zero=1")(MODELS["gpt"](4)), "zero=1: @transformer has no optimizer"),
    (lambda: Strategy.parse("sp")(STEP), "sp: no product of @transformer.step is split over 'tp'"),
    (lambda: Strategy.parse("dp")(train_step(product("a"), SGD(1))), "dp: the inputs of @.* have no rows to split"),
    (lambda: Strategy.parse("tp")(train_step(product("a"), SGD(1))), "tp: no weight of @.* is left to be split"),
    (lambda: Strategy.parse("tp@blok.*")(STEP), r"has no region 'blok.\*'; did you mean 'block"),
    (lambda: Strategy.parse("tp@nothing")(STEP), "has no region 'nothing'; its regions are embedding, block"),
    (lambda: TensorParallel(regions="a b"), "a pattern of regions consists of names"),
    (lambda: Executable(Strategy.parse("dp tp")(STEP), Mesh(dp=2)), "names axis 'tp', but the axes of"),
    (lambda: Strategy.parse("dp tp").text_on(Mesh(dp=2)), "tp needs an axis 'tp'; the axes of .* are 'dp'"),
    (lambda: Zero(4), "the stage of Zero must be 1, 2 or 3, got 4"),
    (lambda: DataParallel("a b"), "the axis of DataParallel must be the name of a mesh axis, got 'a b'"),
    (lambda: Pipeline(4, 8), r"a mesh axis, got 4; parallelism.Pipeline\(stages, microbatches\) is a schedule, and this is"),
    (lambda: Strategy.parse("dq"), "no transform is written 'dq'; did you mean 'dp'?"),
    (lambda: Strategy.parse("fdsp"), "no transform is written 'fdsp'; did you mean 'fsdp'?"),
    (lambda: Strategy.parse_on_mesh("hsdp=64"), "hsdp is followed by the number of replicas .* hsdp=8x4; got '64'"),
    (lambda: Strategy.parse_on_mesh("fsdp=x"), "the size of the axis of 'dp' must be a number of at least 1, got 'x'"),
    (lambda: Strategy.parse_on_mesh("fsdp=2 dp=4"), "the axis 'dp' is given twice|is given twice"),
    (lambda: Strategy.parse("warp"), "no transform is written 'warp'; they are pp, dp, "),
    (lambda: Strategy.parse("dp=2"), "'dp' has no value here, got '2'"),
    (lambda: Strategy.parse("zero"), "'zero' must be followed by = and a value"),
    (lambda: Strategy.parse("zero=x"), "the stage of Zero must be 1, 2 or 3, got 'x'"),
    (lambda: Strategy.parse("dp@block.0"), "'dp' has no regions, got @block.0"),
    (lambda: Strategy.parse("TP!"), "a word of a strategy is a name"),
    (lambda: Strategy.parse_on_mesh("dp"), "'dp' must be followed by = and the size of its axis"),
    (lambda: Strategy.parse_on_mesh("dp=0"), "the size of the axis of 'dp' must be a number of at least 1, got '0'"),
    (lambda: Strategy.parse_on_mesh("tp=2 tp@head=3"), "the axis 'tp' is given twice, with 2 and with 3 devices"),
])
def test_what_does_not_fit_is_refused_on_the_host(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("given", [3, [1], "dp"])
def test_a_strategy_consists_of_transforms(given):
    with pytest.raises(TypeError, match="a Strategy consists of transforms"):
        Strategy(given)
    with pytest.raises(TypeError, match="a strategy is read from text"):
        Strategy.parse(5)


# -- weights that stay whole -------------------------------------------------------------------------------------------


def stacked(apply, count, weight):
    """Layers that read their weights in some way, and two that tensor parallelism splits."""
    def loss(p, x):
        for i in range(count):
            x = apply(x, p[f"a{i}"])
        return np.mean(np.maximum(x @ p["up"], 0) @ p["down"])

    types = {f"a{i}": ir.TensorType("f64", weight) for i in range(count)}
    types |= {"up": ir.TensorType("f64", (4, 8)), "down": ir.TensorType("f64", (8, 4))}
    return train_step(ir.record(loss, types, ir.TensorType("f64", (6, 4)), name="stacked"), SGD(0.1))


@pytest.mark.parametrize(("apply", "weight", "reason"), [
    (lambda x, w: x @ np.tanh(w), (4, 4), "a tanh is between it and its product"),
    (lambda x, w: x @ np.flip(w), (4, 4), "a flip is between it and its product; store it as the product reads it"),
    (lambda x, w: ir.apply("softmax", x @ w, axis=1), (4, 4), "the softmax behind it needs its result whole"),
])
def test_tensor_parallelism_that_leaves_nearly_all_weights_whole_says_which_and_why(apply, weight, reason):
    with pytest.warns(WholeWeights) as caught:
        Strategy.parse("tp")(stacked(apply, 7, weight))
    assert [str(each.message) for each in caught] == [
        "tp: 7 of the 9 weights that products of @stacked.step read stay whole on each device of 'tp'; "
        f"%p.a0, %p.a1, %p.a2 and 4 more: {reason} ({__file__}:{apply.__code__.co_firstlineno})"]


def test_tensor_parallelism_of_a_region_says_nothing_of_others():
    step = stacked(lambda x, w: ir.apply("softmax", x @ w, axis=1), 2, (4, 4))
    assert TensorParallel()(step).inputs[2].layout is not None      # two of four are split: no warning is raised


@pytest.mark.takes_seconds
def test_a_command_tells_weights_that_stay_whole_in_one_line(tmp_path, capsys):
    step = stacked(lambda x, w: ir.apply("softmax", x @ w, axis=1), 7, (4, 4))
    (tmp_path / "step.mlir").write_text(str(step))
    words = ["simulate", str(tmp_path / "step.mlir"), "--hardware", "dgx-h100", "--strategy", "tp=2"]
    with warnings.catch_warnings(action="default"):
        assert serve("vcluster", main, words) == 0
    told, = [line for line in capsys.readouterr().err.splitlines() if "whole" in line]
    assert told.startswith("vcluster: tp: 7 of the 9 weights")
    assert told.endswith(" behind it needs its result whole (line 2 of its text)")
