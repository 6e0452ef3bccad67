"""`generate`: the tokens that follow prompts, on one process or split over a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.arrays import Array, Ints
from parallelism.dtypes import is_floating
from parallelism.ir.core import checked_dtype
from parallelism.models import TransformerSpec
from parallelism.models.inference.caches import kinds_of
from parallelism.serving.engine import Engine, EngineSettings
from parallelism.serving.placement import ALONE, Placement, usual_strategy
from parallelism.serving.quantized import QuantizedWeights
from parallelism.serving.requests import Request, Sampling, checked_prompts
from parallelism.serving.serve import on_cluster, on_this_process, run_engine
from parallelism.serving.served_model import ServedModel
from parallelism.transforms import Pipeline, Strategy

STOPPED = -1
"""What stands behind the last token of an answer that stopped early."""


def generate(
    spec: TransformerSpec,
    parameters: Mapping[str, Array],
    prompts: Iterable[Any],
    new_tokens: int,
    cluster: Any = None,
    strategy: Strategy | str | None = None,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Iterable[int] = (),
    page_tokens: int = 16,
    pages: int | None = None,
    batch: int | None = None,
    chunk: int | None = None,
    cache_dtype: npt.DTypeLike | None = None,
    weights_dtype: str | None = None,
    group: int | None = None,
    runs: list[Any] | None = None,
) -> Ints:
    """The tokens that follow each prompt, ``(prompts, new_tokens)``; the most likely ones, if ``temperature`` is 0.

    >>> import numpy as np
    >>> from parallelism import models
    >>> spec = models.TransformerSpec(layers=1, width=8, heads=2, vocabulary=11, sequence=16)
    >>> rng = np.random.default_rng(0)
    >>> parameters = {name: rng.normal(size=shape).astype("f4") for name, shape in spec.weights.items()}
    >>> models.generate(spec, parameters, [[1, 2, 3], [4]], 3).shape
    (2, 3)

    ``parameters`` are arrays by the names of ``spec.weights``.  ``prompts`` may have different lengths.  With a ``cluster``
    the model is split by ``strategy``, a `Strategy` or its text; None: by the names of the axes of the mesh, ``tp``, ``pp``,
    ``dp`` and ``ep``.  The tokens are the same on any mesh.  ``temperature``, ``top_k``, ``top_p`` and ``seed`` are those of
    a `Sampling`; a token of ``stop`` ends an answer, and behind it stands -1.

    The cache lies in pages of ``page_tokens`` tokens, ``pages`` for each replica; None: enough for all.  ``batch`` requests
    of a replica run at a time (None: all), and a step has ``chunk`` tokens of a replica and microbatch (None: at least 256).
    ``runs`` gets the run of each step.

    ``weights_dtype``, as ``"int8"``, ``"int4"`` or ``"float8_e4m3fn"``, rounds the weights of products in blocks; ``group``
    rows of a column share a scale (None: all), and each weight is dequantized where its product reads it.

    **Communication**: that of `ServedModel`, in each step.

    ``ValueError`` or ``TypeError``, before anything runs, for tokens outside of the vocabulary, an empty prompt, nothing to
    generate, parameters that do not fit, a strategy that does not, and what does not fit the positions or the pages.
    """
    given = checked_prompts(prompts, spec.vocabulary)
    sampling = Sampling(temperature, top_k, top_p, seed)
    ends = frozenset(map(int, stop))
    requests = [Request(prompt, new_tokens, ends, sampling) for prompt in given]
    check_parameters(spec, parameters)
    placement = placed(spec, cluster, strategy)
    settings = settings_for(placement, requests, page_tokens, pages, batch, chunk)
    engine = Engine(placement.spec, settings, requests)
    if weights_dtype is None and group is not None:
        raise ValueError(f"group={group} is for weights_dtype=, which is not given")
    if cache_dtype is not None and not is_floating(checked_dtype(cache_dtype)):
        raise ValueError(
            f"cache_dtype must be floating-point, as float8_e4m3fn, since the cache has no scales; got {cache_dtype!r}"
        )
    quantized = None if weights_dtype is None else QuantizedWeights(weights_dtype, group)
    served = ServedModel(placement, settings, cache_dtype=cache_dtype, quantized=quantized)
    if cluster is None:
        run_engine(engine, on_this_process(served, parameters))
    else:
        run_engine(engine, on_cluster(cluster, served, parameters, runs))
    answers = np.full((len(requests), new_tokens), STOPPED, np.int64)
    for number, tokens in engine.answers.items():
        answers[number, : len(tokens)] = tokens
    return answers


def placed(spec: TransformerSpec, cluster: Any, strategy: Strategy | str | None) -> Placement:
    """The model on the mesh of a cluster, or alone."""
    if cluster is None:
        if strategy is not None:
            raise ValueError("strategy= says how a cluster runs a model; give cluster=, too")
        return Placement(spec, ALONE, Strategy())
    if isinstance(strategy, str):
        strategy = Strategy.parse(strategy)
    return Placement(spec, cluster.mesh, usual_strategy(cluster.mesh) if strategy is None else strategy)


def settings_for(
    placement: Placement,
    requests: list[Request],
    page_tokens: int = 16,
    pages: int | None = None,
    batch: int | None = None,
    chunk: int | None = None,
) -> EngineSettings:
    """The settings of an engine for these requests, where they are not given."""
    each = -(-len(requests) // placement.replicas)
    batch = batch or each
    transforms = placement.strategy.transforms
    microbatches = max((each.microbatches for each in transforms if isinstance(each, Pipeline)), default=1)
    if microbatches == 1:
        microbatches = min(placement.stages, batch)
    chunk = chunk or max(256, batch)
    first = EngineSettings(
        batch,
        chunk,
        page_tokens,
        dict.fromkeys(kinds_of(placement.spec), 1),
        placement.replicas,
        microbatches,
    )
    most = max(request.cached_tokens for request in requests)
    counts = {
        kind: pages or batch * first.table_pages(placement.spec, kind, most)
        for kind in kinds_of(placement.spec)
    }
    return EngineSettings(batch, chunk, page_tokens, counts, placement.replicas, microbatches)


def check_parameters(spec: TransformerSpec, parameters: Mapping[str, Array]) -> None:
    """``ValueError`` for parameters that are missing, or of another shape or dtype."""
    if not isinstance(parameters, Mapping):
        raise TypeError(f"parameters must be arrays by name, got {type(parameters).__name__}")
    for name, shape in spec.weights.items():
        if name.startswith("next."):
            continue
        if name not in parameters:
            raise ValueError(f"parameters lack {name!r}, of shape {shape}")
        array = np.asarray(parameters[name])
        if array.shape != shape or array.dtype != spec.dtype:
            raise ValueError(
                f"parameter {name!r} must be of shape {shape} and {spec.dtype}, got {array.shape} of {array.dtype}"
            )
