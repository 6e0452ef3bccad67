"""The fields of dense Transformers: their programs against plain NumPy on whole arrays, gradients, and communication."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import erf

import numpy as np
import pytest
from numpy.testing import assert_allclose
from transformed import DENSE, arrays, dense, transformer

from parallelism import Mesh, ir
from parallelism.ir.operators.attention import hidden_flops
from parallelism.kernels import Scores
from parallelism.kernels.scores import alibi_slopes
from parallelism.layouts import localize
from parallelism.models import LoRA
from parallelism.models.figures import GATED
from parallelism.transforms import SGD, Strategy, train_step

FIELDS = {
    "head_width": {"head_width": 6}, "query_key_norm": {"query_key_norm": True, "norm": "rms"},
    "query_key_norm of layer": {"query_key_norm": True}, "all_heads": {"query_key_norm": "all_heads", "norm": "rms"},
    "all_heads of layer": {"query_key_norm": "all_heads"},
    "without_weights": {"query_key_norm": "without_weights", "positions": "rotary", "unrotated_every": 2, "layers": 2},
    "qkv biases": {"biases": "qkv"}, "head bias": {"biases": ("out", "head"), "logit_scale": 0.5},
    "window": {"window": 2, "full_attention_every": 2, "layers": 3},
    "softcaps": {"attention_softcap": 0.5, "logit_softcap": 1.5},
    "listed windows": {"window": 3, "full_attention_every": (False, True), "layers": 2, "positions": "rotary",
                       "window_rotary_base": 7.0},
    "sinks": {"attention_sinks": True}, "alibi": {"positions": "alibi", "alibi_scale": 0.7},
    "no positions": {"positions": "none"}, "parallel without biases": {"parallel": True, "biases": False},
    "partial": {"positions": "rotary", "rotary_width": 2, "rotary_scaling": "linear:4", "rotary_factor": 1.5},
    "yarn": {"positions": "rotary", "rotary_scaling": "yarn:4,32,1,4,0", "rotary_factor": 1.2},
    "norm weights": {"norm_parameters": "weights"}, "no norm weights": {"norm_parameters": "none"},
    "no rms weights": {"norm_parameters": "none", "norm": "rms"}, "after": {"norm_places": "after"},
    "both": {"norm_places": "both", "norm": "rms"}, "parallel": {"parallel": True}, "one_norm": {"parallel": "one_norm"},
    "scales": {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 0.25, "attention_scale": 0.3},
    "embedding_norm": {"embedding_norm": True},
    **{name: {"activation": name} for name in (
        "gelu_exact", "relu2", "silu", "geglu", "geglu_exact", "reglu", "clamped_swiglu")},
    **DENSE,
}
FIELDS["bloom"] = FIELDS["bloom"] | {"attention_dropout": 0.0}
FIELDS["neox"] = FIELDS["neox"] | {"hidden_dropout": 0.0}

_CDF = np.vectorize(lambda z: (1 + erf(z / np.sqrt(2))) / 2)


def _gelu(z):
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


def _sigmoid(z):
    return 1 / (1 + np.exp(-z))


PLAIN = {
    "gelu": _gelu, "gelu_exact": lambda z: z * _CDF(z), "relu": lambda z: np.where(z > 0, z, 0),
    "relu2": lambda z: np.where(z > 0, z, 0) ** 2, "silu": lambda z: z * _sigmoid(z),
    "swiglu": lambda g, z: g * _sigmoid(g) * z, "geglu": lambda g, z: _gelu(g) * z,
    "geglu_exact": lambda g, z: g * _CDF(g) * z, "reglu": lambda g, z: np.where(g > 0, g, 0) * z,
    "clamped_swiglu": lambda g, z: (np.clip(z, -7, 7) + 1) * np.minimum(g, 7) * _sigmoid(1.702 * np.minimum(g, 7)),
}


class Plain:
    """The forward of a spec in NumPy, a head and a row at a time where that says more."""

    def __init__(self, spec, p):
        self.spec, self.p = spec, p

    def loss(self, tokens, targets):
        spec, p = self.spec, self.p
        x = p["tokens"][tokens] * spec.embedding_scale
        if spec.positions == "learned":
            x = x + p["positions"]
        if spec.embedding_norm:
            x = self.norm(x, "embedding_norm")
        for layer in range(spec.layers):
            x = self.block(x, layer)
        x = self.norm(x, "norm")
        logits = x @ p["tokens" if spec.tied else "head"].T
        logits = (logits + p.get("head_bias", 0)) * spec.logit_scale
        if spec.logit_softcap:
            logits = spec.logit_softcap * np.tanh(logits / spec.logit_softcap)
        log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return -np.mean(np.take_along_axis(log, targets[..., None], -1))

    def block(self, x, i):
        spec = self.spec
        before, after = spec.norm_places != "after", spec.norm_places != "before"
        normed = self.norm(x, f"{i}.norm1") if before else x
        made = self.attention(normed, i)
        made = spec.residual_scale * (self.norm(made, f"{i}.norm1_after") if after else made)
        other = x if spec.parallel else x + made
        if spec.parallel != "one_norm":
            normed = self.norm(other, f"{i}.norm2") if before else other
        gate = [self.product(normed, f"{i}.gate")] if spec.activation in GATED else []
        more = self.product(PLAIN[spec.activation](*gate, self.product(normed, f"{i}.up")), f"{i}.down")
        more = spec.residual_scale * (self.norm(more, f"{i}.norm2_after") if after else more)
        return x + made + more

    def product(self, x, name):
        return x @ self.p[name] + self.p.get(f"{name}_bias", 0)

    def norm(self, x, name):
        return self.normalized(x, self.p.get(name, 1), self.p.get(f"{name}_bias", 0))

    def normalized(self, x, weight, bias, rms=False):
        if self.spec.norm == "layer" and not rms:
            x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.spec.epsilon) * weight + bias

    def attention(self, x, i):
        spec, w = self.spec, int(self.spec.head_width)
        each = spec.heads // spec.groups
        if spec.key_value_copies > 1:
            q = self.product(x, f"{i}.query").reshape(*x.shape[:2], spec.heads, w)
            k, v = np.moveaxis(self.product(x, f"{i}.key_value").reshape(*x.shape[:2], spec.groups, 2, w), 3, 0)
        else:
            joined = self.product(x, f"{i}.qkv").reshape(*x.shape[:2], spec.groups, each + 2, w)
            q = joined[..., :each, :].reshape(*x.shape[:2], spec.heads, w)
            k, v = joined[..., each, :], joined[..., each + 1, :]
        if spec.query_key_norm == "head":
            q, k = self.norm(q, f"{i}.query_norm"), self.norm(k, f"{i}.key_norm")
        if spec.query_key_norm == "all_heads":
            q, k = (self.norm(each.reshape(*x.shape[:2], -1), f"{i}.{name}_norm").reshape(each.shape)
                    for each, name in ((q, "query"), (k, "key")))
        if spec.is_rotated(i):
            q, k = self.rotated(q, i), self.rotated(k, i)
            if spec.query_key_norm == "without_weights":
                q, k = (self.normalized(each, 1, 0, rms=True) for each in (q, k))
        mixed = np.empty_like(q)
        for head in range(spec.heads):
            mixed[:, :, head] = self.head(q[:, :, head], k[:, :, head // each], v[:, :, head // each], i, head)
        return self.product(mixed.reshape(*x.shape[:2], -1), f"{i}.out")

    def head(self, q, k, v, i, head):
        spec = self.spec
        scores = np.einsum("bqd,bkd->bqk", q, k) * (spec.attention_scale or spec.head_width**-0.5)
        if spec.attention_softcap:
            scores = spec.attention_softcap * np.tanh(scores / spec.attention_softcap)
        places = np.arange(scores.shape[1])
        distance = places[None, :] - places[:, None]
        if spec.positions == "alibi":
            scores = scores + spec.alibi_scale * 2.0 ** (-8 * (head + 1) / spec.heads) * distance
        window = spec.window_of(i)
        allowed = (distance <= 0) & (distance > -(window or len(places)))
        powers = np.where(allowed, np.exp(scores), 0)
        sink = np.exp(self.p[f"{i}.sinks"][head]) if spec.attention_sinks else 0
        return powers / (powers.sum(-1, keepdims=True) + sink) @ v

    def rotated(self, x, i):
        spec, n = self.spec, self.spec.rotated
        base = spec.window_rotary_base if spec.window_of(i) and spec.window_rotary_base else spec.rotary_base
        angles = base ** (-np.arange(0, n, 2) / n)
        match (spec.rotary_scaling or "").partition(":")[::2]:
            case "linear", factor:
                angles = angles / float(factor)
            case "yarn", _:  # low and high end of 32 and 1 turns in 4 tokens, of a factor of 4
                ends = [n * np.log(4 / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (32, 1)]
                low, high = max(ends[0], 0), min(ends[1], n - 1)
                mixed = np.clip((np.arange(n // 2) - low) / (high - low if high != low else 0.001), 0, 1)
                angles = angles * (1 - mixed) + angles / 4 * mixed
        turned = x.copy()
        a, b = x[..., 0:n:2], x[..., 1:n:2]
        turns = np.arange(x.shape[1])[:, None, None] * angles
        turned[..., 0:n:2] = (a * np.cos(turns) - b * np.sin(turns)) * spec.rotary_factor
        turned[..., 1:n:2] = (a * np.sin(turns) + b * np.cos(turns)) * spec.rotary_factor
        return turned


@pytest.mark.sampled(21)
@pytest.mark.parametrize("name", FIELDS)
def test_a_program_is_what_plain_numpy_computes_with_its_gradients(name):
    """Gradients by central differences of plain NumPy."""
    spec = transformer(**{"epsilon": 0.1} | FIELDS[name])
    loss = spec.function(3)
    weights = [value.name for value in loss.inputs if value.name.startswith("p.")]
    given = arrays(loss.inputs, np.random.default_rng(0))
    if spec.activation == "clamped_swiglu":
        given["p.0.up"], given["p.0.gate"] = 3 * given["p.0.up"], 3 * given["p.0.gate"]  # beyond the limit, too
    value, *grads = ir.interpret(ir.gradient(loss, weights, keep_outputs=True), given).outputs
    plain = {name.removeprefix("p."): given[name] for name in weights}

    def at(along, size):
        moved = {name: array + size * along[name] for name, array in plain.items()}
        return Plain(spec, moved).loss(given["tokens"], given["targets"])

    assert_allclose(value, at(dict.fromkeys(plain, 0), 0), rtol=1e-12)
    rng = np.random.default_rng(1)
    for of, grad in zip(plain, grads, strict=True):
        along = {other: rng.normal(size=array.shape) if other == of else 0 for other, array in plain.items()}
        slope = (at(along, 1e-5) - at(along, -1e-5)) / 2e-5
        assert_allclose((grad * along[of]).sum(), slope, rtol=2e-5, atol=2e-8, err_msg=of)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FIELDS)
def test_the_program_has_the_parameters_and_the_flops_of_the_figures(name):
    spec = transformer(**FIELDS[name])
    loss = spec.function(3)
    weights = {value.name[2:]: value.type.shape for value in loss.inputs if value.name.startswith("p.")}
    assert weights == spec.weights
    products = sum(op.flops + hidden_flops(op) for op in loss.ops if op.kind in ("matmul", "einsum", "attention"))
    assert products == spec.forward_flops(3 * spec.sequence)


def test_the_scores_of_a_text_read_back():
    for text in ("causal", "causal:3", "causal;cap=50.0", "causal:3;cap=2.0;alibi=8x0.5", "whole;alibi=6x1.0"):
        assert str(Scores.parse(text)) == text
    for text in ("causal;cap=0", "causal;cap=x", "causal;alibi=8", "causal;other=1.0", "causal;cap=inf", "causal;" * 99):
        with pytest.raises(ValueError, match=r"scores have a mask|a mask is"):
            Scores.parse(text)


def test_slopes_of_heads_are_those_of_bloom_and_mpt():
    assert_allclose(alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    assert_allclose(alibi_slopes(6), 2.0 ** -np.array([2, 4, 6, 8, 1, 3]))


# -- communication -----------------------------------------------------------------------------------------------------


def sums_over_tp(name, words="tp=2"):
    """The sums over devices of a step, by the shapes that they have on a device."""
    strategy, mesh = Strategy.parse_on_mesh(words)
    step = strategy(train_step(dense(name)(4) if name in DENSE else transformer(**FIELDS[name]).function(4), SGD(0.1)))
    program = localize(step, mesh).program(0)
    ops = [op for op in program.ops if "group" in op.operator.attributes and op.kind != "all_slice"]
    return Counter((op.kind, op.inputs[0].type.shape) for op in ops)


STREAM = ("all_reduce", (4, 6, 16))


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("name", "sums"), [
    # two sums of the stream forward and two backward in a layer, one for the embedding and one for the head
    ("head_width", 6), ("window", 14), ("softcaps", 6), ("sinks", 10), ("alibi", 6), ("both", 6), ("geglu", 6),
    ("granite", 6), ("qwen", 6), ("gemma", 10),
    # without a norm before the gate and the product beside it, their gradients are two sums
    ("olmo", 7),
    # attention and feed-forward together: one sum forward, unless dropout needs each, and behind one norm one backward
    ("parallel without biases", 5), ("neox", 6), ("one_norm", 5),
])
def test_a_field_adds_no_sum_of_the_stream(name, sums):
    assert sums_over_tp(name)[STREAM] == sums


def test_copies_of_heads_are_gathered_and_their_gradients_are_summed_once():
    """Of each layer, over tp: what the product of keys and values makes, and its gradient; nothing else is added."""
    found = sums_over_tp("copied", "tp=4")
    made = (4, 6, 2 * 2 * 6)                                     # 2 heads of a key and a value of 6 features
    assert found["all_gather", (*made[:2], made[2] // 4)] == found["reduce_scatter", made] == 2
    assert found[STREAM] == 2 * 4 + 2
    assert {kind for kind, _ in found} == {"all_reduce", "all_gather", "reduce_scatter"}
    one_key = sums_over_tp("one key", "tp=3")                    # each device computes the single head
    assert one_key["all_reduce", (4, 6, 2 * 6)] == 1 and one_key[STREAM] == 6


def test_copies_change_no_number():
    """The parameters are those of the model alone, in two parts, and so are their gradients."""
    alone = transformer(**DENSE["qwen"] | {"heads": 8})
    copied = alone.for_tensor_parallel(4)
    assert copied.key_value_copies == 2 and copied.parameters == alone.parameters
    assert copied.flops(7) == alone.flops(7)
    given = arrays(alone.function(3).inputs, np.random.default_rng(0))

    def apart(p):
        """With the columns of queries, and of keys and values, as parameters of their own."""
        found = {}
        for name, array in p.items():
            of_heads = array.reshape(*array.shape[:-1], 2, 6, 6) if ".qkv" in name else None  # 2 heads: 4, a key, a value
            if of_heads is None:
                found[name] = array
                continue
            for part, own in (("query", of_heads[..., :4, :]), ("key_value", of_heads[..., 4:, :])):
                found[name.replace("qkv", part)] = own.reshape(*array.shape[:-1], -1)
        return found

    found = []
    for spec, inputs in ((alone, given), (copied, apart(given))):
        loss = spec.function(3)
        weights = [value.name for value in loss.inputs if value.name.startswith("p.")]
        value, *grads = ir.interpret(ir.gradient(loss, weights, keep_outputs=True), inputs).outputs
        found.append({"loss": value, **dict(zip(weights, grads, strict=True))})
    expected = apart(found[0])
    assert {*expected} == {*found[1]}
    for name, array in expected.items():
        assert_allclose(found[1][name], array, rtol=1e-12, atol=1e-14, err_msg=name)


def test_copies_are_made_where_devices_are_more_than_the_heads_and_deal_them_evenly():
    spec = transformer(heads=8, key_value_heads=2)
    assert [spec.for_tensor_parallel(devices).key_value_copies for devices in (1, 2, 3, 4, 8, 16)] == [1, 1, 1, 2, 4, 1]
    assert transformer().for_tensor_parallel(8) == transformer()
    adapted = replace(spec, lora=LoRA(2, products=("out", "qkv"))).for_tensor_parallel(4)
    assert adapted.lora.products == ("query", "key_value", "out") and "0.key_value.up" in adapted.adapters
    for wrong, said in ((0, "an integer of at least 1"), (3, "3 copies of 2 heads of keys and values must divide the 8")):
        with pytest.raises(ValueError, match=said):
            replace(spec, key_value_copies=wrong)


def test_a_norm_of_all_heads_reduces_one_number_for_each_token():
    found = sums_over_tp("olmo")
    assert found["all_reduce", (4, 6, 1, 1)] == 4          # of queries and of keys, forward and backward
    assert sums_over_tp("query_key_norm")["all_reduce", (4,)] == 2   # the gradients of two weights of a head's width


def test_a_window_and_a_cap_are_priced_as_attention():
    """Scores that a window hides are not computed, and a cap adds no op."""
    plain = transformer(layers=2).function(2)
    for figures in ({"attention_softcap": 3.0}, {"positions": "alibi"}, {"attention_scale": 2.0}):
        found = transformer(layers=2, **figures).function(2)
        cores = [found.region("block.1.attention.core"), plain.region("block.1.attention.core")]
        assert [op.kind for op in cores[0].ops] == [op.kind for op in cores[1].ops] == ["attention"]
        assert cores[0].ops[0].flops == cores[1].ops[0].flops
    tokens, of_all = transformer().sequence, plain.region("block.1.attention.core").ops[0].flops
    loss = transformer(layers=3, window=2, full_attention_every=3).function(2)
    found = [op.flops * tokens * (tokens + 1) for op in loss.ops if op.kind == "attention"]
    windowed, whole = of_all * 2 * (2 * tokens - 1), of_all * tokens * (tokens + 1)
    assert found == [windowed, windowed, whole]


@pytest.mark.parametrize("figures", [{"positions": "alibi"}, {"attention_sinks": True}])
def test_attention_that_keeps_its_scores_has_no_alibi_and_no_sinks(figures):
    with pytest.raises(ValueError, match="has a program with fused_attention=True only"):
        transformer(**figures, fused_attention=False).function(2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["softcaps", "window", "partial"])
def test_attention_with_and_without_scores_gives_the_same_numbers(name):
    found = []
    for fused in (True, False):
        loss = transformer(**FIELDS[name], fused_attention=fused).function(2)
        found.append(ir.interpret(ir.gradient(loss), arrays(loss.inputs, np.random.default_rng(0))).outputs)
    for one, other in zip(*found, strict=True):
        assert_allclose(one, other, rtol=1e-9, atol=1e-11)


def test_mesh_of_one_device_changes_nothing():
    strategy, mesh = Strategy.parse_on_mesh("tp=1")
    assert mesh == Mesh(tp=1)
    step = strategy(train_step(dense("gemma")(2), SGD(0.1)))
    assert not [op for op in localize(step, mesh).program(0).ops if "group" in op.operator.attributes and op.bytes_received]
