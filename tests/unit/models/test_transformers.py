"""Transformers by their figures: published counts, what their programs compute, and what devices send and keep."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from drawn import up_to
from hypothesis import given, settings, strategies as st
from kept_bytes import kept_bytes
from localized_runs import run_everywhere
from numpy.testing import assert_allclose, assert_array_equal

from parallelism import Mesh, TensorSharding as S, ir, models
from parallelism.ir.operators.attention import hidden_flops
from parallelism.ir.passes import MARK
from parallelism.kernels import Mask
from parallelism.layouts import annotate, localize, partition
from parallelism.layouts.stages.laid_out_stages import laid_out_stages
from parallelism.models import TRANSFORMERS, TransformerSpec, transformer
from parallelism.models.layers import attention

B = ir.symbol("B")

# -- figures -----------------------------------------------------------------------------------------------------------

PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616, "llama-65b": 65_285_660_672, "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800, "mistral-7b": 7_241_732_096,
}
"""The elements of the weights that were released."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_released_weights(name):
    assert transformer(name).parameters == PUBLISHED[name]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in TRANSFORMERS if name.startswith(("gpt2", "gpt3", "megatron", "mpt-70b"))])
def test_parameters_and_flops_of_a_gpt_are_the_published_formulas(name):
    spec = transformer(name)
    n, h, v, s = spec.layers, spec.width, spec.vocabulary, spec.sequence
    assert spec.parameters == n * (12 * h**2 + 13 * h) + v * h + s * h + 2 * h
    # Narayanan et al., arXiv:2104.04473, section 5.1, without recomputation; Korthikanti et al., arXiv:2205.05198, A
    assert spec.flops(s) * 12 == 72 * s * n * h**2 * 12 + 144 * s * n * h * s + 72 * s * h * v


def test_the_size_in_a_name_is_that_of_the_model():
    for name, spec in TRANSFORMERS.items():
        if sizes := [part for part in name.split("-")[1:] if re.fullmatch(r"[0-9.]+[mb]", part)]:
            size = float(sizes[0][:-1]) * {"m": 1e6, "b": 1e9}[sizes[0][-1]]
            assert spec.parameters == pytest.approx(size, rel=0.3 if size <= 1e9 else 0.09), name


def test_flops_of_llama_are_those_of_its_products():
    spec = transformer("llama3-405b")
    h, f, kv, v, s, n = 16_384, 53_248, 8 * 128, 128_256, 8192, 126
    token = n * (2 * h * h * 2 + 2 * h * kv * 2 + 3 * 2 * h * f + 4 * s * h) + 2 * h * v
    assert spec.flops(16) == 3 * 16 * token


@pytest.mark.parametrize(("figures", "message"), [
    ({"heads": 5}, "heads must divide width, and key_value_heads must divide heads, got width=24, heads=5"),
    ({"key_value_heads": 3, "heads": 4}, "got width=24, heads=4 and key_value_heads=3"),
    ({"layers": 0}, "layers must be an integer of at least 1, got 0"),
    ({"feed_forward": 2.5}, "feed_forward must be an integer of at least 1, got 2.5"),
    ({"norm": "batch"}, "norm must be one of layer, rms, got 'batch'"),
    ({"dropout": 1}, r"dropout must be in \[0, 1\), got 1"),
    ({"positions": "rotary", "heads": 8}, "rotary positions need an even width of a head, got 3"),
])
def test_figures_that_do_not_fit_are_refused(figures, message):
    with pytest.raises(ValueError, match=message):
        TransformerSpec(**{"layers": 2, "width": 24, "heads": 4, "vocabulary": 9, "sequence": 5, **figures})


def test_a_name_is_read_in_any_case_and_a_wrong_one_told():
    assert transformer("GPT3_175B") is TRANSFORMERS["gpt3-175b"]
    with pytest.raises(ValueError, match="there is no Transformer 'llama4-7b'; did you mean"):
        transformer("llama4-7b")


# -- programs ----------------------------------------------------------------------------------------------------------


@st.composite
def specs(draw, dropout=True):
    groups, each, width = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    rate = st.sampled_from([0.0, 0.25]) if dropout else st.just(0.0)
    return TransformerSpec(
        layers=draw(st.integers(1, 2)), width=2 * width * groups * each, heads=groups * each, key_value_heads=groups,
        feed_forward=draw(st.sampled_from([None, 5, 8])), vocabulary=draw(st.sampled_from([6, 7, 8])),
        sequence=draw(st.sampled_from([1, 3, 4])), activation=draw(st.sampled_from(["gelu", "relu", "swiglu"])),
        norm=draw(st.sampled_from(["layer", "rms"])), positions=draw(st.sampled_from(["learned", "rotary"])),
        biases=draw(st.booleans()), tied=draw(st.booleans()), attention_dropout=draw(rate), hidden_dropout=draw(rate),
        fused_attention=draw(st.booleans()), dtype="f64", epsilon=0.1)


def arrays_of(function, seed=0, bound=6):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=v.type.shape) if v.type.dtype.kind == "f" else rng.integers(0, bound, v.type.shape)
            for v in function.inputs]


SMALL = TransformerSpec(layers=2, width=24, heads=4, vocabulary=11, sequence=5, dtype="f64")
PRODUCTS = {"matmul", "einsum", "attention", "attention_gradient"}


def products(function):
    """The flops of products, with those of scores that masks hide."""
    return sum(op.flops + hidden_flops(op) for op in function.ops if op.kind in PRODUCTS)


@up_to(10)
@given(specs())
def test_the_program_has_the_parameters_and_the_flops_of_the_figures(spec):
    loss = spec.function(3)
    weights = [value for value in loss.inputs if value.name.startswith("p.")]
    assert sum(value.type.size for value in weights) == spec.parameters
    assert {value.name[2:]: value.type.shape for value in weights} == spec.weights
    tokens = 3 * spec.sequence
    again = 2 * tokens * spec.sequence * spec.width * spec.layers if spec.fused_attention else 0
    both = ir.gradient(loss, [value.name for value in weights], keep_outputs=True)
    assert (products(loss), products(both)) == (spec.forward_flops(tokens), spec.flops(tokens) + again)
    assert ir.parse(str(both)) == both


def test_regions_go_down_to_the_core_of_attention():
    found = SMALL.function(B).regions
    assert {"embedding", "block.1.attention.core", "block.0.feed_forward.activation", "head", "loss"} <= {*found}
    core = SMALL.function(B).region("block.1.attention.core")
    assert [op.kind for op in core.ops] == ["attention"]
    core = replace(SMALL, fused_attention=False, dropout=0.1).function(B).region("block.1.attention.core")
    assert [op.kind for op in core.ops if not op.operator.view] == ["einsum", "attention_weights", "dropout", "einsum"]


@up_to(6, by_day=3)
@given(specs(), st.integers(0, 9))
def test_attention_with_and_without_scores_gives_the_same_numbers(spec, seed):
    found = []
    for fused in (True, False):
        gradient = ir.gradient(replace(spec, fused_attention=fused).function(2), keep_outputs=True)
        found.append(ir.interpret(gradient, arrays_of(gradient, seed)).outputs)
    for one, other in zip(*found, strict=True):
        assert_allclose(one, other, rtol=1e-9, atol=1e-11)


@up_to(5)
@given(specs(), st.integers(0, 9))
def test_gradients_by_central_differences(spec, seed):
    loss = spec.function(2)
    gradient = ir.gradient(loss)
    arrays = arrays_of(loss, seed)
    rng = np.random.default_rng(seed)
    along = [rng.normal(size=x.shape) if x.dtype.kind == "f" else np.zeros_like(x) for x in arrays]
    sides = [ir.interpret(loss, [x + (sign * 1e-6 * d).astype(x.dtype) for x, d in zip(arrays, along, strict=True)])
             .outputs[0] for sign in (1, -1)]
    slope = sum(float((g * d).sum()) for g, d in zip(ir.interpret(gradient, arrays).outputs, along, strict=False))
    # at a corner of relu the two sides differ
    if spec.activation != "relu":
        assert_allclose(slope, (sides[0] - sides[1]) / 2e-6, rtol=1e-5, atol=1e-7)


def test_masks_of_dropout_differ_by_layer_and_by_step():
    spec = replace(SMALL, dropout=0.5)
    function = spec.function(2)
    names = [op.outputs[1].name for op in function.ops if op.kind == "dropout"]
    masks = ir.Function("masks", function.inputs, function.ops,
                        tuple(value for value in function.values if value.name in names))
    arrays = arrays_of(function)
    found = []
    for step in (3, 4):
        arrays[-1] = np.asarray(step)
        found += ir.interpret(masks, arrays).outputs
    assert len(found) == 2 * (1 + 2 * SMALL.layers)
    assert len({mask.tobytes() for mask in found}) == len(found)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_the_loss_of_16_bit_logits_is_computed_in_32_bits(dtype):
    spec = replace(SMALL, dtype=dtype)
    loss = spec.function(2)
    assert loss.outputs[0].type.dtype == np.float32
    gradient = ir.gradient(loss)
    assert {value.type.dtype.name for value in gradient.outputs} == {spec.dtype.name}
    found = ir.interpret(loss, [0.2 * x if x.dtype.kind == "f" else x for x in (
        x.astype(v.type.dtype) for x, v in zip(arrays_of(loss), loss.inputs, strict=True))])
    assert np.isfinite(found.outputs[0])


# -- cross-entropy and lookups on a split vocabulary -------------------------------------------------------------------


def megatron(spec, *, sequence=False, rows=None):
    """Layouts of Megatron: columns, then rows; tables by tokens.  ``sequence``: outside of products by rows of it."""
    tables = ["tokens", *([] if spec.tied else ["head"])]
    layouts = {f"p.{name}": S("tp", None) for name in tables}
    for name in spec.weights:
        match name.split(".")[-1]:
            case "qkv" | "gate" | "up":
                layouts[f"p.{name}"] = S(None, "tp")
            case "qkv_bias" | "gate_bias" | "up_bias":
                layouts[f"p.{name}"] = S("tp")
            case "out" | "down":
                layouts[f"p.{name}"] = S("tp", None)
    layouts |= {"tokens": S(rows, None), "targets": S(rows, None)}
    if sequence:
        for op in spec.function(8).ops:
            parts = op.region.split(".")
            if op.kind == "matmul" or (parts == ["head"] and op.kind == "einsum"):
                outside, within = S(rows, "tp", None), S(rows, None, "tp")
                second = parts[-1] in ("out", "down")
                layouts[op.inputs[0].name] = within if second else outside
                layouts[op.outputs[0].name] = outside if second else within
            elif parts == ["embedding"]:
                embedded = op.outputs[0].name
        layouts[embedded] = S(rows, "tp", None)
    return layouts


def collectives(function):
    """The collectives in the program of a device."""
    return [op for op in function.ops if "group" in op.operator.attributes and op.kind != "all_slice"]


def of_stream(ops, batch, spec):
    """Those that work on values of the stream between the blocks, by kinds."""
    sequences = (spec.sequence, spec.sequence // 8)
    return [op for op in ops if op.inputs[0].type.ndim == 3 and op.inputs[0].type.shape[1] in sequences
            and op.inputs[0].type.shape[::2] == (batch, spec.width)]


@pytest.mark.sampled(15)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("rows", [None, "dp"])
@pytest.mark.parametrize("changes", [
    {}, {"tied": False, "positions": "rotary", "norm": "rms", "activation": "swiglu", "biases": False},
    {"fused_attention": False, "dropout": 0.1},
])
def test_megatron_gathers_no_table_and_no_logits(sequence, rows, changes):
    spec = replace(transformer("gpt3-175b"), layers=2, vocabulary=51_200, dtype="f16", **changes)
    batch = 8
    function = annotate(spec.function(batch), megatron(spec, sequence=sequence, rows=rows))
    weights = [value.name for value in function.inputs if value.name.startswith("p.")]
    mesh = Mesh(dp=2, tp=8) if rows else Mesh(tp=8)
    program = localize(ir.gradient(function, weights, keep_outputs=True), mesh).program(0)
    part = batch // (2 if rows else 1)
    ops = collectives(program)
    stream = of_stream(ops, part, spec)
    assert {op.kind for op in ops if op not in stream} == {"all_reduce"}
    # forward and backward: one sum for each of attention and feed-forward, for the embedding, and for the head; or in
    # place of each a scatter or a gather, and what was gathered for a product is gathered again for its weights
    halves = 2 * spec.layers
    if sequence:
        assert Counter(op.kind for op in stream) == {"reduce_scatter": 2 * halves + 2, "all_gather": 3 * halves + 3}
    else:
        assert Counter(op.kind for op in stream) == {"all_reduce": 2 * halves + 2}
    nbytes = part * spec.sequence * spec.width * 2
    embedding = [op for op in stream if op.region == "embedding"]
    assert [op.kind for op in embedding] == ["reduce_scatter" if sequence else "all_reduce"]
    assert sum(op.bytes_received for op in embedding) == (1 if sequence else 2) * 7 * nbytes // 8
    sums = [op for op in ops if op.region == "loss" and "tp" in op["axes"]]
    assert [(op["op"], op.inputs[0].type.shape) for op in sums] == [
        ("max", (part, spec.sequence)), ("sum", (part, spec.sequence)), ("sum", ())]


def test_stage_0_of_gpt3_175b_moves_for_its_embedding_one_all_reduce_of_the_activations():
    spec = replace(transformer("gpt3-175b"), vocabulary=51_200, layers=4, dtype="f16")
    stages = partition(annotate(spec.function(B), megatron(spec)), ["block.2"]).specialize(B=1, B_whole=512, B_first=0)
    stage = laid_out_stages(stages, Mesh(tp=8)).functions[0]
    activations = spec.sequence * spec.width * 2
    found = [op for function in (stage.forward, stage.backward)
             for op in collectives(localize(function, Mesh(tp=8)).program(0))
             if (op.region or "").removeprefix(f"{MARK}.") == "embedding"]
    assert [op.kind for op in found] == ["all_reduce"]
    assert sum(op.bytes_received for op in found) == 2 * 7 * activations // 8


@pytest.mark.sampled(6, 2)
@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(tp=3), Mesh(dp=2, tp=2), Mesh(tp=4), Mesh(tp=8), Mesh(tp=1, dp=3)])
@settings(max_examples=1)
@given(specs(), st.booleans(), st.integers(0, 9))
def test_devices_together_compute_what_one_does(mesh, spec, sequence, seed):
    """Also where nothing divides: tokens, heads, rows, the vocabulary."""
    function = spec.function(8)
    rows = "dp" if "dp" in mesh.axes else None
    weights = [value.name for value in function.inputs if value.name.startswith("p.")]
    gradient = ir.gradient(annotate(function, megatron(spec, sequence=sequence, rows=rows)), weights, keep_outputs=True)
    arrays = arrays_of(gradient, seed)
    wanted = ir.interpret(gradient, arrays).outputs
    for found, expected in zip(run_everywhere(localize(gradient, mesh), arrays), wanted, strict=True):
        assert_allclose(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("extents", [(8, 8), (9, 4), (3, 5), (2, 7)])
def test_a_lookup_in_a_split_table_is_exact_and_moves_no_table(extents):
    rows, devices = extents
    table = np.arange(rows * 3.0).reshape(rows, 3)
    indices = np.array([[0, -1, rows - 1], [1, -rows, 0]])
    function = ir.record(lambda table, indices: table[indices], ir.TensorType("f8", table.shape),
                         ir.TensorType("i64", indices.shape))
    localized = localize(annotate(function, {"table": S("tp", None)}), Mesh(tp=devices))
    assert_array_equal(run_everywhere(localized, [table, indices])[0], table[indices])
    assert [op.kind for op in localized.program(0).ops] == ["take_part", "all_reduce"]
    with pytest.raises(IndexError, match=f"index {rows} is out of bounds for a dim of {rows}"):
        run_everywhere(localized, [table, np.full_like(indices, rows)])


def test_a_loss_of_large_logits_on_a_split_vocabulary_is_finite_and_right():
    logits = np.array([[1000.0, -1000, 0, 999], [-1000, -1001, -1002, -1000]])
    classes = np.array([3, -3])
    function = ir.record(models.cross_entropy, ir.TensorType("f64", (2, 4)), ir.TensorType("i64", (2,)))
    gradient = ir.gradient(annotate(function, {"logits": S(None, "tp")}), keep_outputs=True)
    shifted = logits - logits.max(axis=1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    wanted = -(log[0, 3] + log[1, 1]) / 2, (np.exp(log) - np.eye(4)[[3, 1]]) / 2
    localized = localize(gradient, Mesh(tp=2))
    for found, expected in zip(run_everywhere(localized, [logits, classes]), wanted, strict=True):
        assert_allclose(found, expected, rtol=1e-14, atol=1e-16)


# -- memory of activations ---------------------------------------------------------------------------------------------


def block_bytes(spec, batch, mesh, sequence):
    """What a block keeps: the difference between models of two blocks and of one."""
    found = []
    for layers in (2, 1):
        each = replace(spec, layers=layers)
        function = annotate(each.function(batch), megatron(each, sequence=sequence) if "tp" in mesh.axes else {})
        weights = [value.name for value in function.inputs if value.name.startswith("p.")]
        found.append(kept_bytes(localize(ir.gradient(function, weights, keep_outputs=True), mesh).program(0)))
    return found[0] - found[1]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["megatron-22b", "megatron-175b"])
@pytest.mark.parametrize(("t", "sequence"), [(1, False), (8, False), (8, True)])
def test_activations_of_a_block_take_the_memory_of_korthikanti(name, t, sequence):
    """Korthikanti et al., arXiv:2205.05198, equations 1, 2 and 4."""
    spec = replace(transformer(name), dropout=0.1, fused_attention=False, dtype="f16")
    s, b, h, a = spec.sequence, 4, spec.width, spec.heads
    outside = 10 * s * b * h if t > 1 and not sequence else 10 * s * b * h // t
    wanted = outside + (24 * s * b * h + 5 * a * s * s * b) // t
    assert t > 1 or wanted == 34 * s * b * h + 5 * a * s * s * b
    assert block_bytes(spec, b, Mesh(tp=t) if t > 1 else Mesh(one=1), sequence) == wanted


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("t", "sequence"), [(1, False), (8, False), (8, True)])
def test_fused_attention_keeps_the_log_sum_exp_in_place_of_the_scores(t, sequence):
    spec = replace(transformer("megatron-22b"), dropout=0.1, dtype="f16")
    s, b, h, a = spec.sequence, 4, spec.width, spec.heads
    outside = 10 * s * b * h if t > 1 and not sequence else 10 * s * b * h // t
    wanted = outside + (24 * s * b * h + 4 * a * s * b) // t
    assert block_bytes(spec, b, Mesh(tp=t) if t > 1 else Mesh(one=1), sequence) == wanted


@pytest.mark.parametrize("fused", [True, False])
def test_attention_that_is_not_causal_has_no_mask(fused):
    kind = ir.TensorType("float64", (2, 5, 3, 4))
    def text(**given):
        return str(ir.record(lambda q, k, v: attention(q, k, v, fused=fused, **given), kind, kind, kind))
    assert text() == text(causal=True) == text(mask=Mask(causal=True)) != text(causal=False) == text(mask=Mask())
