"""Programs of inference: with a cache they compute what they compute without one, and the cache has the published bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.testing import assert_allclose
from served_models import SERVED, VOCABULARY, logits_of, parameters_of

from parallelism import Executable, Mesh, ir, models
from parallelism.ir.passes import with_room
from parallelism.models import LatentAttention, TransformerSpec
from parallelism.models.inference import engine_step
from parallelism.transforms import Strategy

LENGTHS = np.array([9, 3, 1, 7])


def empty(function, **numbers):
    """A cache that holds no number yet."""
    types = [value.type for value in function.inputs if value.name.startswith("cache.")]
    return [np.full([int(ir.specialized(each, numbers)) for each in type.shape], np.nan, type.dtype) for type in types]


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "numbers"), [
    ("gpt2", 2 * 12 * 768),  # 2 layers-wise keys and values of all heads: 2 n_layer n_embd
    ("llama3-8b", 2 * 32 * 8 * 128),  # grouped queries: 2 layers groups head_width (arXiv:2305.13245)
    ("llama3.1-70b", 2 * 80 * 8 * 128),
    ("mixtral-8x7b", 2 * 32 * 8 * 128),
    ("deepseek-v3", 61 * (512 + 64)),  # arXiv:2405.04434, table 1: (d_c + d_h^R) l
])
def test_bytes_of_a_token_are_those_of_the_published_formula(name, numbers):
    spec = models.transformer(name)
    assert spec.cache_bytes(1) == 2 * numbers
    assert spec.cache_bytes(1000, "float8_e4m3fn") == 1000 * numbers
    assert spec.cache_bytes(3, "int4") == 3 * numbers // 2


def test_layers_with_a_window_keep_the_window():
    spec = models.transformer("gemma3-27b")  # five layers with 1,024 tokens before each that keeps all
    full = sum(spec.window_of(layer) is None for layer in range(spec.layers))
    each = 2 * spec.groups * spec.head_width * 2
    assert (full, spec.layers) == (10, 62)
    assert spec.cache_bytes(1000) == 62 * 1000 * each
    assert spec.cache_bytes(5000) == (10 * 5000 + 52 * 1024) * each
    tokens = ir.symbol("n")
    assert ir.specialized(spec.cache_bytes(tokens), {"n": 5000}) == spec.cache_bytes(5000)


@pytest.mark.parametrize("tokens", [-1, 2.5, True, "3"])
def test_a_number_of_tokens_is_a_whole_one(tokens):
    with pytest.raises(ValueError, match=f"tokens must be an integer of at least 0, got {tokens!r}"):
        models.transformer("gpt2").cache_bytes(tokens)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SERVED)
def test_a_program_holds_a_cache_of_these_bytes(name):
    spec = SERVED[name]
    function = spec.decode(5, 11)
    held = sum(value.type.nbytes for value in function.inputs if value.name.startswith("cache."))
    assert held == 5 * spec.cache_bytes(11, np.float64)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SERVED)
def test_prefill_and_decode_compute_what_is_computed_without_a_cache(name):
    spec = SERVED[name]
    parameters, total = parameters_of(spec), 14
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (len(LENGTHS), total))
    expected = logits_of(spec, parameters, tokens)
    B, T, C = ir.symbols("B T C")
    prefill, decode = spec.prefill(B, T, C), spec.decode(B, C)
    prompts = np.where(np.arange(9) < LENGTHS[:, None], tokens[:, :9], 0)
    cache = empty(prefill, B=len(LENGTHS), C=total)
    logits, *cache = ir.interpret(prefill, [*parameters.values(), *cache, prompts, LENGTHS]).outputs
    rows = np.arange(len(LENGTHS))
    assert_allclose(logits[:, 0], expected[rows, LENGTHS - 1], atol=1e-12)
    for step in range(5):
        at = LENGTHS + step
        logits, *cache = ir.interpret(decode, [*parameters.values(), *cache, tokens[rows, at][:, None], at]).outputs
        assert logits.shape == (len(LENGTHS), 1, VOCABULARY)
        assert_allclose(logits[:, 0], expected[rows, at], atol=1e-12)


def chunks_of(rng, total):
    """Cuts of a sequence into parts of random sizes."""
    cuts = [0]
    while cuts[-1] < total:
        cuts.append(min(total, cuts[-1] + int(rng.integers(1, 6))))
    return list(pairwise(cuts))


def run_in_pages(spec, seed, page_tokens):
    """Two sequences whose chunks go through steps of an engine together, in pages that lie anywhere."""
    rng = np.random.default_rng(seed)
    parameters, total = parameters_of(spec), 13
    tokens = rng.integers(0, VOCABULARY, (2, total))
    expected = logits_of(spec, parameters, tokens)
    kinds = {"full": -(-total // page_tokens), "window": -(-((spec.window or 1) + 5) // page_tokens)}
    kinds |= {"states": 1} if spec.linear_attention else {}
    pages = {kind: (2 * each + 1, each) for kind, each in kinds.items()}
    dealt = {kind: rng.permutation(2 * each + 1)[: 2 * each].reshape(2, each) for kind, each in kinds.items()}
    B, R, S = ir.symbols("t R S")
    program = engine_step(spec, B, pages=pages, page_tokens=page_tokens, read=dict.fromkeys(kinds, R), picked=None,
                          scored=dict.fromkeys(kinds, S))
    program = program.specialize(R=3, S=3)  # what is counted changes no number
    cache = empty(program)
    names = [value.name for value in program.inputs]
    plans = [chunks_of(rng, total) for _ in range(2)]
    while any(plans):
        rows = []
        for sequence, plan in enumerate(plans):
            if plan and (rng.random() < 0.7 or not any(plans[:sequence] + plans[sequence + 1:])):
                start, stop = plan.pop(0)
                rows += [(sequence, position, stop) for position in range(start, stop)]
        if not rows:
            continue
        rows.append((0, -1, 0))  # a place for a token that is none
        of, positions, ends = map(np.array, zip(*rows, strict=True))
        given = {"tokens": np.where(positions < 0, 0, tokens[of, positions])[None], "at.positions": positions[None],
                 "at.ends": ends[None]} | {f"at.{kind}_table": dealt[kind][of][None] for kind in kinds}
        given = {name: array for name, array in given.items() if name in names}
        logits, *cache = ir.interpret(program, [*parameters.values(), *cache, *(given[name] for name in names
                                                                               if name in given)]).outputs
        assert_allclose(logits[0, :-1], expected[of, positions][:-1], atol=1e-12)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SERVED)
def test_chunks_of_sequences_in_pages_compute_what_is_computed_without_a_cache(name):
    run_in_pages(SERVED[name], seed=3, page_tokens=3)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), page_tokens=st.integers(1, 14), name=st.sampled_from([*SERVED]))
def test_pages_of_any_size_hold_any_chunks(seed, page_tokens, name):
    run_in_pages(SERVED[name], seed, page_tokens)


# -- figures -----------------------------------------------------------------------------------------------------------


def test_a_decode_reads_the_cache_once_and_writes_one_token():
    spec = TransformerSpec(layers=1, width=12, heads=6, key_value_heads=2, head_width=4, vocabulary=17, sequence=40,
                           positions="rotary", dtype="bfloat16")
    function = spec.decode(5, 11)
    by_kind = {op.kind: op for op in function.ops}
    attention, write = by_kind["cached_attention"], by_kind["write_cache"]
    numbers = 5 * 2 * 4  # of each place: the groups and features of all sequences
    assert attention.flops == 2 * 5 * 6 * 11 * (4 + 4)
    queries, places = 2 * 5 * 6 * 4 * 2, 5 * (1 + 1 + 1) * 8
    assert attention.nbytes == 2 * numbers * 11 * 2 + queries + places
    assert write.nbytes == 2 * numbers * 2


def test_a_latent_decode_reads_one_vector_of_each_token():
    spec = TransformerSpec(layers=1, width=12, heads=6, vocabulary=17, sequence=40, positions="rotary", dtype="bfloat16",
                           attention=LatentAttention(query_rank=5, key_value_rank=7, head_width=3, rotary_width=4))
    attention = next(op for op in spec.decode(5, 11).ops if op.kind == "cached_latent_attention")
    assert attention.flops == 2 * 5 * 6 * 11 * (11 + 7)  # scores of rank + rotary features, values of rank features
    assert attention.nbytes == 5 * 11 * 11 * 2 + 5 * 6 * (11 + 7) * 2 + 5 * 3 * 8


# -- layouts -----------------------------------------------------------------------------------------------------------


def layouts_of(function, text, mesh):
    """The layouts of the inputs of a program under a strategy, by name."""
    executable = Executable(with_room(Strategy.parse(text)(function)), mesh, donate="cache")
    names = (value.name for value in executable.programs.function.inputs)
    return dict(zip(names, (layout.short() for layout in executable.programs.inputs), strict=True))


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_heads_of_a_cache_are_split_with_the_products_and_its_sequences_with_the_batch(kind):
    spec = SERVED["llama3"]
    function = spec.decode(4, 8) if kind == "decode" else spec.prefill(4, 8)
    found = layouts_of(function, "dp tp", Mesh(dp=2, tp=2))
    assert found["cache.0.keys"] == found["cache.2.values"] == "[dp, None, None, tp, None]"
    assert (found["p.0.qkv"], found["p.0.out"], found["tokens"]) == ("[None, tp]", "[tp, None]", "[dp, None]")


def test_a_latent_cache_is_whole_on_every_device_of_tensor_parallelism():
    found = layouts_of(SERVED["deepseek-v3"].decode(4, 8), "tp", Mesh(tp=2))
    assert found["cache.0.latent"] == "[None, None, None, None, None]"
    assert (found["p.0.query_up"], found["p.0.key_value_up"]) == ("[None, tp]", "[None, tp]")


def test_a_program_writes_the_cache_in_its_place():
    spec = SERVED["llama3"]
    function = spec.decode(4, 8)
    arrays = [np.zeros([int(each) for each in value.type.shape], value.type.dtype) for value in function.inputs]
    cache = sum(array.nbytes for value, array in zip(function.inputs, arrays, strict=True) if "cache" in value.name)
    inputs = sum(array.nbytes for array in arrays)
    assert ir.interpret(function, arrays).peak_bytes < inputs + cache / 2  # no second cache beside the first


def test_symbols_and_numbers_are_one_program():
    B, C = ir.symbols("B C")
    for spec in (SERVED["gemma3"], replace(SERVED["deepseek-v3"], dtype="float32")):
        symbolic = spec.decode(B, C).specialize(B=3, C=9)
        plain = spec.decode(3, 9)
        assert [value.type for value in symbolic.inputs] == [value.type for value in plain.inputs]
        assert [op.flops for op in symbolic.ops if "attention" in op.kind] == [
            op.flops for op in plain.ops if "attention" in op.kind
        ]


def test_cuts_are_all_of_a_sequence():
    parts = chunks_of(np.random.default_rng(0), 13)
    assert list(accumulate(stop - start for start, stop in parts))[-1] == 13
