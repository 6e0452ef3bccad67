"""Parameters and operations of the Transformers of today, against counts of released weights and closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallelism.models import Experts, LatentAttention, TransformerSpec

LLAMA = {"activation": "swiglu", "norm": "rms", "positions": "rotary", "biases": False, "tied": False}
SMALL = {"layers": 3, "width": 24, "heads": 4, "vocabulary": 11, "sequence": 5}

MIXTRAL = TransformerSpec(layers=32, width=4096, heads=32, key_value_heads=8, feed_forward=14_336, vocabulary=32_000,
                          sequence=32_768, experts=Experts(count=8, chosen=2), **LLAMA)
DEEPSEEK = TransformerSpec(
    layers=61, width=7168, heads=128, feed_forward=18_432, vocabulary=129_280, sequence=4096, attention=LatentAttention(),
    experts=Experts(count=256, chosen=8, width=2048, shared_width=2048, dense_layers=3, router="sigmoid", groups=8,
                    groups_chosen=4, group_best=2, scale=2.5, balance_bias=True), **LLAMA)
GPT_OSS = TransformerSpec(
    layers=24, width=2880, heads=64, key_value_heads=8, head_width=64, vocabulary=201_088, sequence=131_072,
    attention_sinks=True, window=128, full_attention_every=2, experts=Experts(count=32, chosen=4, width=2880),
    **LLAMA | {"activation": "clamped_swiglu", "biases": ("qkv", "out", "router", "expert_gate", "expert_up", "expert_down")})


@pytest.mark.parametrize(("spec", "parameters", "idle"), [
    (MIXTRAL, 46_702_792_704, 32 * 6 * 3 * 4096 * 14_336),
    (DEEPSEEK, 671_026_404_352, 58 * 248 * 3 * 7168 * 2048),
    (GPT_OSS, 20_914_757_184, 24 * 28 * 3 * (2880 * 2880 + 2880)),
], ids=["mixtral", "deepseek", "gpt-oss"])
def test_parameters_are_those_of_the_released_weights(spec, parameters, idle):
    """Counted by transformers 5.24.0 from MixtralConfig(), DeepseekV3Config() and a GptOssConfig of 24 layers."""
    assert (spec.parameters, spec.active_parameters) == (parameters, parameters - idle)


def test_modules_that_predict_further_tokens_are_counted_apart():
    further = replace(DEEPSEEK, next_tokens=1)
    assert further.parameters == DEEPSEEK.parameters
    h = 7168
    block = sum(_size(shape) for name, shape in DEEPSEEK.weights.items() if name.startswith("60."))
    assert further.next_token_parameters == 2 * h * h + 3 * h + block      # two norms, a product, a block, a norm
    head, of_block = 2 * h * 129_280, DEEPSEEK.forward_flops(1) - replace(DEEPSEEK, layers=60).forward_flops(1)
    assert further.forward_flops(1) == DEEPSEEK.forward_flops(1) + head + of_block + 4 * h * h


def _size(shape):
    size = 1
    for extent in shape:
        size *= extent
    return size


def test_flops_of_experts_are_those_that_a_token_takes():
    h, f, kv, v, s = 4096, 14_336, 1024, 32_000, 32_768
    block = 2 * (2 * h * h + 2 * h * kv + 8 * h + 2 * 3 * h * f) + 4 * s * h
    assert MIXTRAL.flops(7) == 3 * 7 * (32 * block + 2 * h * v)


def test_flops_of_latent_attention_are_those_of_its_products():
    h, heads, s = 7168, 128, 4096
    projections = h * 1536 + 1536 * heads * 192 + h * 576 + 512 * heads * 256 + heads * 128 * h
    scores = s * heads * (192 + 128)
    dense, chosen = 3 * h * 18_432, h * 256 + 9 * 3 * h * 2048
    products = 61 * (projections + scores) + 3 * dense + 58 * chosen + h * 129_280
    assert DEEPSEEK.forward_flops(1) == 2 * products


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("figures", "more"), [
    ({"head_width": 10}, 3 * (24 * 3 * 40 + 40 * 24 + 3 * 40 - 4 * 24 * 24 - 3 * 24)),
    ({"query_key_norm": True}, 3 * 4 * 6),                      # a weight and a bias, for queries and for keys
    ({"query_key_norm": "all_heads"}, 3 * 4 * 24),
    ({"query_key_norm": "without_weights"}, 0),
    ({"biases": "qkv"}, -3 * (24 + 96 + 24)),
    ({"biases": ("qkv", "head")}, 11 - 3 * (24 + 96 + 24)),
    ({"norm_parameters": "weights"}, -7 * 24),
    ({"norm_parameters": "none"}, -14 * 24),
    ({"norm_places": "both"}, 3 * 4 * 24),
    ({"norm_places": "after"}, 0),
    ({"parallel": True}, 0),
    ({"parallel": "one_norm"}, -3 * 2 * 24),
    ({"embedding_norm": True}, 48),
    ({"attention_sinks": True}, 3 * 4),
    ({"positions": "alibi"}, -5 * 24),
    ({"activation": "geglu"}, 3 * (24 * 96 + 96)),
    ({"activation": "relu2"}, 0),
    ({"window": 2, "full_attention_every": 3, "attention_softcap": 50.0, "logit_softcap": 30.0}, 0),
    ({"experts": Experts(count=4, chosen=2, width=7, shared_width=5, shared_gate=True, every=2)},
     24 * 4 + 4 * (2 * 24 * 7 + 7 + 24) + 2 * 24 * 5 + 5 + 24 + 24 - (2 * 24 * 96 + 96 + 24)),
])
def test_each_field_changes_the_parameters_as_it_says(figures, more):
    assert TransformerSpec(**SMALL | figures).parameters - TransformerSpec(**SMALL).parameters == more


def test_the_width_of_a_head_is_a_number_that_follows_the_width_unless_it_was_given():
    spec = TransformerSpec(**SMALL)
    assert spec.head_width == 6 and replace(spec, width=48).head_width == 12
    own = replace(spec, head_width=6)
    assert own == spec and replace(own, width=25).head_width == 6
    assert DEEPSEEK.head_width == 192 and replace(DEEPSEEK, width=24).head_width == 192


def test_layers_have_the_windows_and_experts_that_are_said():
    spec = TransformerSpec(**SMALL | {"layers": 6}, window=2, full_attention_every=3)
    assert [spec.window_of(layer) for layer in range(6)] == [2, 2, None, 2, 2, None]
    listed = replace(spec, full_attention_every=(True, False) * 3)
    assert [listed.window_of(layer) for layer in range(6)] == [None, 2] * 3
    experts = Experts(count=4, chosen=1, dense_layers=1, every=2)
    assert [experts.at(layer) for layer in range(6)] == [False, True] * 3
    assert [replace(experts, layers=(1, 0, 0)).at(layer) for layer in range(3)] == [True, False, False]


@pytest.mark.parametrize(("figures", "message"), [
    ({"head_width": 0}, "head_width must be an integer of at least 1, got 0"),
    ({"window": 0}, "window must be a number of tokens, at least 1, or None, got 0"),
    ({"full_attention_every": (True,)}, "full_attention_every must have an entry for each of the 3 layers, got 1"),
    ({"full_attention_every": "ab"}, "full_attention_every must be an integer of at least 1, or a bool for each layer"),
    ({"positions": "rotary", "rotary_width": 3}, "rotary positions need an even width of a head, got 3"),
    ({"rotary_width": 8}, "rotary_width must be at most the 6 of a head, got 8"),
    ({"next_tokens": -1}, "next_tokens must be an integer of at least 0, got -1"),
    ({"attention": LatentAttention()}, "latent attention has rotary positions or none"),
])
def test_figures_that_do_not_fit_are_refused(figures, message):
    with pytest.raises(ValueError, match=message):
        TransformerSpec(**SMALL | figures)


@pytest.mark.parametrize(("figures", "message"), [
    ({"chosen": 5}, "a token can choose at most the 4 experts of 1 groups"),
    ({"groups": 3}, "groups must divide the count of experts"),
    ({"count": 0}, "count of experts must be an integer of at least 1, got 0"),
    ({"router": "hash"}, "router must be one of softmax, sigmoid, got 'hash'"),
    ({"capacity": 0}, "capacity of experts must be a positive number, or None, got 0"),
    ({"load": 0.5}, "load of the fullest expert must be a number of at least 1, got 0.5"),
    ({"latent": 0}, "latent features of an expert must be an integer of at least 1, or None, got 0"),
    ({"width": 0}, "width of an expert must be an integer of at least 1, or None, got 0"),
])
def test_experts_that_do_not_fit_are_refused(figures, message):
    with pytest.raises(ValueError, match=message):
        Experts(**{"count": 4, "chosen": 2} | figures)
