"""The config.json of Hugging Face's models: parameters against transformers, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hugging_face_configs import CONFIGS, COUNTS
from hugging_face_losses import LOSSES, loss_of

from parallelism import models
from parallelism.kernels import RotaryScaling
from parallelism.models import from_config, transformer
from parallelism.models.hugging_face.architectures import ARCHITECTURES
from parallelism.models.hugging_face.released import RELEASED


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_that_transformers_counts(name):
    assert from_config(CONFIGS[name]).parameters == COUNTS[name]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RELEASED)
def test_parameters_of_published_models_are_those_that_transformers_counts(name):
    count = COUNTS.get(name, 315_684_820_992)  # transformers has no Grok 1: published are 314 billion
    assert transformer(name).parameters == from_config(RELEASED[name][1]).parameters == count


def test_every_architecture_is_compared():
    kinds = {fields["model_type"] for fields in [*CONFIGS.values(), *(fields for _, fields in RELEASED.values())]}
    assert {*ARCHITECTURES} - kinds == {"cohere2"}
    assert from_config({"model_type": "cohere2"}).parameters == 34_980_831_232


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", LOSSES)
def test_the_loss_is_that_of_transformers(kind):
    assert loss_of(kind) == pytest.approx(LOSSES[kind], abs=2e-6)


def test_the_loss_of_every_architecture_is_compared():
    assert {*ARCHITECTURES} - {*LOSSES} == {"grok1"}  # transformers has none


@pytest.mark.parametrize(("name", "billions"), [
    ("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39), ("deepseek-v2", 21), ("deepseek-v3", 37), ("qwen3-30b-a3b", 3.3),
    ("qwen3-235b-a22b", 22), ("grok1-314b", 0.25 * 314), ("kimi-k2", 32), ("glm4.5", 32), ("qwen3-coder-480b-a35b", 35),
])
def test_active_parameters_are_those_published(name, billions):
    assert transformer(name).active_parameters == pytest.approx(billions * 1e9, rel=0.07)


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13), ("deepseek-v2-lite", 2.4)])
def test_active_parameters_are_published_without_the_first_table_for_some(name, billions):
    """gpt-oss: model card, table 1, whose note leaves the embedding out."""
    spec = transformer(name)
    assert spec.active_parameters - spec.vocabulary * spec.width == pytest.approx(billions * 1e9, rel=0.025)


def test_names_of_repositories_are_those_of_models():
    for name, (repository, _) in RELEASED.items():
        if repository.count("/") == 1 and name not in ("nemotron-340b", "grok1-314b", "phi3-mini", "bloom-176b"):
            assert transformer(repository) is transformer(name), repository
    assert transformer("meta-llama/Meta-Llama-3-8B") is transformer("llama3-8b")
    assert transformer("mistralai/Mistral-7B-v0.1") is transformer("mistral-7b")
    with pytest.raises(ValueError, match="there is no Transformer 'Qwen/Qwen9-8B'"):
        transformer("Qwen/Qwen9-8B")


def test_modules_for_further_tokens_are_left_out_and_said():
    spec = from_config({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1})
    assert any("num_nextn_predict_layers=1 is left out" in remark for remark in spec.remarks)
    assert replace(spec, next_tokens=1).next_token_parameters > 0


def test_of_a_multimodal_model_the_language_model_is_read_and_said():
    text = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101, "head_dim": 8}
    spec = from_config({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}})
    assert spec == from_config({"model_type": "gemma3_text", **text})
    assert "its text_config is read" in spec.remarks[0] and "gemma3" in spec.remarks[0]


def test_whether_tables_are_tied_is_asked_of_the_whole_multimodal_model():
    text = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101}
    outside = {"model_type": "gemma3", "vision_config": {"hidden_size": 8}}
    for of_text, of_all in ((True, False), (False, True)):
        inner = {**text, "tie_word_embeddings": of_text}
        assert from_config({**outside, "text_config": inner, "tie_word_embeddings": of_all}).tied is of_all
        assert from_config({**outside, "text_config": inner}).tied is of_text


def test_fields_are_read_as_figures():
    gemma = transformer("gemma3-27b")
    assert (gemma.window, gemma.full_attention_every, gemma.window_rotary_base) == (1024, 6, 10_000.0)
    assert (gemma.query_key_norm, gemma.norm_places, gemma.rotary_base) == ("head", "both", 1_000_000.0)
    assert gemma.attention_scale == 168**-0.5 and gemma.embedding_scale == 5376**0.5
    assert transformer("gemma2-9b").attention_softcap == 50 and transformer("gemma2-9b").logit_softcap == 30
    oss = transformer("gpt-oss-20b")
    assert (oss.window, oss.full_attention_every, oss.head_width, oss.attention_sinks) == (128, 2, 64, True)
    deepseek = transformer("deepseek-v3")
    assert deepseek.experts == models.Experts(
        count=256, chosen=8, width=2048, shared_width=2048, dense_layers=3, router="sigmoid", scale=2.5, groups=8,
        groups_chosen=4, group_best=2, balance_bias=True)
    assert deepseek.attention == models.LatentAttention()
    assert from_config(CONFIGS["phi-2"]).rotated == 32
    qwen = from_config({"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 3})
    assert [qwen.window_of(layer) for layer in range(4)] == [None, None, None, 4096]
    smollm = transformer("smollm3-3b")
    assert [smollm.is_rotated(layer) for layer in range(5)] == [True, True, True, False, True]
    scout = from_config(CONFIGS["llama4-maverick-text"])
    assert [scout.experts.at(layer) for layer in range(3)] == [False, True, False]


def test_rotary_fields_of_transformers_5_are_those_of_older_files():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}
    old = from_config({"model_type": "llama", "rope_theta": 5e5, "rope_scaling": scaling})
    new = from_config({"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, **scaling}})
    assert old == new and old.rotary_scaling == "llama3:8.0,1.0,4.0,8192.0" and old.rotary_base == 5e5
    nested = {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
              "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}
    assert from_config({"model_type": "gemma3_text", "rope_parameters": nested}) == from_config(
        {"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8.0}})


def test_scalings_of_frequencies_are_those_of_transformers():
    """Numbers of its 5.24.0 for 8 features and base 10,000, of a factor of 4 and 64 tokens before."""
    assert RotaryScaling.parse("linear:4").frequencies(1e4, 8).tolist() == [0.25, 0.025, 0.0025, 0.00025]
    llama = RotaryScaling.parse("llama3:4,1,4,64").frequencies(1e4, 8)
    np.testing.assert_allclose(llama, [1, 0.02546479, 0.0025, 0.00025], rtol=1e-6)
    yarn = RotaryScaling.parse("yarn:4,32,1,64,1").frequencies(1e4, 8)
    np.testing.assert_allclose(yarn, [1, 0.0625, 0.0025, 0.00025], rtol=1e-6)
    exact = RotaryScaling.parse("yarn:4,32,1,64,0").frequencies(1e4, 8)
    np.testing.assert_allclose(exact, [1, 0.02559525, 0.0025, 0.00025], rtol=1e-6)
    with pytest.raises(ValueError, match="a scaling of rotary positions is a kind and its numbers"):
        RotaryScaling.parse("yarn:4,32")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("fields", "message"), [
    ({"model_type": "mamba"}, "the architecture 'mamba' is not known"),
    ({}, "the config says no model_type; the architectures are llama,"),
    ({"model_type": 7}, "model_type must be a word, got 7"),
    ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "is no causal language model"),
    ({"model_type": "llama", "hidden_size": "4096"}, "hidden_size must be a whole number from 1 to .*, got '4096'"),
    ({"model_type": "llama", "hidden_size": True}, "hidden_size must be a whole number from 1 to .*, got True"),
    ({"model_type": "llama", "num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 10,000"),
    ({"model_type": "llama", "rms_norm_eps": float("nan")}, "rms_norm_eps must be a number, got nan"),
    ({"model_type": "llama", "attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
    ({"model_type": "llama", "hidden_act": "mish"}, "hidden_act must be one of gelu, .*, got 'mish'"),
    ({"model_type": "llama", "rope_scaling": [1]}, "rope_scaling must be an object, got a list of 1"),
    ({"model_type": "llama", "rope_scaling": {"rope_type": "3d"}}, "rope_type='3d' changes the arithmetic"),
    ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types must be a list of 32, got a list of 1"),
    ({"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["linear_attention"]},
     "layer_types has 'linear_attention', which is not modelled"),
    ({"model_type": "olmo", "clip_qkv": 8.0}, "clip_qkv=8.0 changes the arithmetic and is not modelled; it can be null"),
    ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True changes"),
    ({"model_type": "gpt2", "embd_pdrop": 0.0}, "embd_pdrop=0 must be resid_pdrop=0.1"),
    ({"model_type": "mpt", "attn_config": {"alibi": False}}, "attn_config: alibi=False changes the arithmetic"),
    ({"model_type": "llama4_text"}, "attention_chunk_size=8192: chunked attention is not modelled"),
    ({"model_type": "llama4_text", "attention_chunk_size": None}, "attn_temperature_tuning is not modelled"),
    ({"model_type": "llama", "text_config": [1]}, "text_config must be an object, got list"),
    ({"model_type": "llama", "num_key_value_heads": 5}, "key_value_heads must divide heads"),
])
def test_what_cannot_be_read_is_told_in_a_line(fields, message):
    with pytest.raises(ValueError, match=message) as told:
        from_config(fields)
    assert "\n" not in str(told.value) and len(str(told.value)) < 1500


def test_chunks_that_are_longer_than_a_sequence_change_nothing():
    spec = from_config({"model_type": "llama4_text"}, sequence=4096)
    assert spec.sequence == 4096 and spec.parameters == COUNTS["llama4-scout-text"]


def test_a_file_and_a_folder_are_read(tmp_path):
    wanted = from_config(CONFIGS["olmo-1b"])
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["olmo-1b"]))
    assert from_config(tmp_path) == from_config(str(tmp_path / "config.json")) == wanted
    with pytest.raises(OSError, match="absent"):
        from_config(tmp_path / "absent.json")


@pytest.mark.parametrize(("content", "message"), [
    (b"[1, 2]", "must be an object of fields, as config.json of a model, got list"),
    (b"{", "is no JSON: "),
    (b"\xff\xfe\xfa", "is no JSON: "),
    (b"[" * 100_000, "is no JSON: it is nested too deeply"),
    (b'{"a": ' + b"1" * 10_000 + b"}", "is no JSON: "),
    (b" " * (1 << 20) + b"{}", "has 1,048,578 bytes; the config of a model has at most 1,048,576"),
])
def test_a_file_that_is_no_config_is_told_in_a_line(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as told:
        from_config(path)
    assert "\n" not in str(told.value) and len(str(told.value)) < 400 + len(str(path))
