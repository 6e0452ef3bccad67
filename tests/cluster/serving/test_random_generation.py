"""Random models of the served families, on random meshes, split by random strategies, with ragged requests that come and go;
some have weights of 8 or 4 bits.

Tokens are those of one process without a cache, logits are so to 1e-10, and each step is what its simulation says.
"""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from numpy.testing import assert_allclose
from served_models import SERVED, VOCABULARY, logits_of, parameters_of
from test_generation import assert_same

from parallelism import Mesh, simulate
from parallelism.models.figures import with_layers
from parallelism.models.inference.caches import kinds_of
from parallelism.serving import Engine, EngineSettings, Request, ServedModel, run_engine
from parallelism.serving.placement import Placement
from parallelism.serving.quantized import QuantizedWeights
from parallelism.serving.serve import on_cluster
from parallelism.serving.served_model import numbers_of
from parallelism.transforms import Strategy
from vcluster import VirtualCluster

FAMILIES = ("gpt2", "llama3", "mixtral", "deepseek-v3", "gemma3", "nemotron-h", "qwen3-next", "falcon-h1", "lfm2",
            "kimi-linear")


def drawn_model(rng):
    """A model of a family, with some figures drawn anew."""
    name = rng.choice(FAMILIES)
    spec = SERVED[name]
    layers = range(rng.choice([2, 3, 4])) if spec.linear_attention is None else rng.choices(range(spec.layers), k=3)
    spec = replace(with_layers(spec, layers), vocabulary=rng.choice([VOCABULARY, 24]))
    if name == "llama3":
        spec = replace(spec, key_value_heads=rng.choice([1, 2, 3, 6]), head_width=rng.choice([2, 4]))
    if name == "gemma3":
        spec = replace(spec, window=rng.choice([1, 3, 7]), full_attention_every=rng.choice([2, 3]))
    if name == "gpt2":
        spec = replace(spec, tied=rng.random() < 0.5)
    return spec


def is_dealt(spec, devices):
    """Whether tensor parallelism splits or copies all heads evenly."""
    return spec.heads % devices == 0 and (spec.linear_attention is None or spec.linear_attention.is_dealt(devices))


def drawn_placement(rng, spec):
    """A mesh of at most 8 devices with its axes in any order, and a strategy over them."""
    usable = ["tp", "dp", "pp", "cp"] + ["ep"] * (spec.experts is not None)
    while True:
        sizes = {axis: rng.choice([1, 1, 2, 2, 3, 4]) for axis in usable}
        if prod(sizes.values()) <= 8 and sizes["pp"] <= spec.layers and is_dealt(spec, sizes["tp"]):
            break
    axes = [axis for axis, size in sizes.items() if size > 1] or ["tp"]
    rng.shuffle(axes)
    microbatches = rng.choice([1, 2, 3])
    named = {axis: rng.choice([axis, f"x_{axis}"]) for axis in axes}
    texts = [f"pp{'' if named[axis] == axis else ':' + named[axis]} 1f1b:{microbatches}" if axis == "pp"
             else axis if named[axis] == axis else f"{axis}:{named[axis]}" for axis in axes]
    mesh = Mesh(**{named[axis]: sizes[axis] for axis in axes})
    return Placement(spec, mesh, Strategy.parse(" ".join(texts))), microbatches if "pp" in axes else 1


def drawn_requests(rng, spec):
    return [Request(tuple(rng.randrange(spec.vocabulary) for _ in range(rng.choice([1, 2, 4, 7, 11]))), rng.randint(1, 5),
                    arrival_seconds=rng.choice([0.0, 0.0, 1e-4, 1e-3])) for _ in range(rng.randint(1, 7))]


def drawn_settings(rng, placement, microbatches, requests):
    batch, page_tokens = rng.randint(1, 4), rng.choice([1, 2, 3, 5, 16])
    chunk = rng.randint(-(-batch // microbatches), 9)
    most = max(request.cached_tokens for request in requests)
    first = EngineSettings(batch, chunk, page_tokens, dict.fromkeys(kinds_of(placement.spec), 1), 1, microbatches)
    pages = {kind: first.table_pages(placement.spec, kind, most) * rng.randint(1, batch) + rng.randint(0, 2)
             for kind in kinds_of(placement.spec)}
    return EngineSettings(batch, chunk, page_tokens, pages, placement.replicas, microbatches)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(80))
def test_random_requests_on_random_splits_are_answered_as_without_a_cache(seed):
    rng = random.Random(seed)
    spec = drawn_model(rng)
    placement, microbatches = drawn_placement(rng, spec)
    requests = drawn_requests(rng, spec)
    settings = drawn_settings(rng, placement, microbatches, requests)
    given = parameters_of(spec, seed)
    quantized = rng.choice([None, None, QuantizedWeights(rng.choice(["int8", "int4"]), rng.choice([None, 1, 3, 5, 64]))])
    parameters = given if quantized is None else quantized.dequantized(given)
    engine = Engine(placement.spec, settings, requests)
    served, runs, simulated = ServedModel(placement, settings, quantized=quantized), [], {}
    with VirtualCluster(placement.mesh, backend="thread", hardware="dgx-h100", compute="modelled") as cluster:
        run = on_cluster(cluster, served, given, runs)

        def checked(engine, step):
            tokens, seconds = run(engine, step)
            for work, logits in zip(step, runs[-1].result, strict=True):
                for replica, rows in enumerate(work.rows):
                    for place, row in enumerate(row for row in rows if row.samples):
                        context = np.array([engine.context(row.request)])
                        expected = logits_of(spec, parameters, context)[0, -1]
                        assert_allclose(logits[replica, place], expected, rtol=0, atol=1e-10 * np.abs(expected).max())
                        assert tokens[row.request] == expected.argmax()
            assert_simulated(placement, settings, served, step, runs[-1].trace, simulated)
            return tokens, seconds

        answered = run_engine(engine, checked)
    assert [len(engine.answers[number]) for number in range(len(requests))] == [each.new_tokens for each in engine.requests]
    assert answered.steps == len(runs)
    for pages in engine.pages:
        assert all(each.free == each.count for each in pages.values())


def assert_simulated(placement, settings, served, step, trace, known):
    """A step is what it is simulated to be; each different one is simulated once."""
    program = served.simulated([numbers_of(placement, settings, work) for work in step])
    if program.numbers not in known:
        known[program.numbers] = simulate(program, "dgx-h100")
    assert_same(trace, known[program.numbers], placement.mesh)
