"""Published runs of serving beside their predictions: ``python -m vcluster.calibration.serving``.

The constants of decode were fitted to every second run of the first table, from the first on, by least squares of the
logarithms of token, throughput and, with a tenth of the weight, first token, with 7 constants
(`parallelism/hardware/presets/stacks`); the other runs are held out.  Of the runs at maximum load each is left out in turn.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from parallelism.display import in_columns
from parallelism.hardware import Hardware
from parallelism.mesh import Mesh
from parallelism.models import transformer
from parallelism.serving.engine import Engine, EngineSettings, padded
from parallelism.serving.placement import (
    ALONE,
    PICKED,
    READ,
    SCORED,
    TABLE,
    TOKENS,
    Placement,
    usual_strategy,
)
from parallelism.serving.precision import Precision
from parallelism.serving.prices import StepParts, StepPrices
from parallelism.serving.workloads import PricedRun, Workload

A100 = "dgx-a100+tensorrt-llm-a100"
H100 = "dgx-h100+tensorrt-llm-h100"
CHUNK, PAGE_TOKENS, WAVES = 16_384, 64, 2
"""The tokens of a step, those of a page, and how many requests each client sends: nobody published them."""
LOADED_CHUNK, MOST_REQUESTS, CACHE_SHARE, BUFFERS = 8192, 2048, 0.9, 1.5e9
"""At maximum load, by the defaults of TensorRT-LLM: the tokens of a step, the most requests, and the part of the free memory
that the cache may have; and an estimate of the bytes of buffers."""
NAMES = ("first token", "token", "throughput")


@dataclass(frozen=True)
class ServedRun:
    """A published run: lengths, clients, and what was measured, in seconds and tokens a second."""

    number: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    measured: tuple[float, float, float]
    """Time to the first token, time of a token, and tokens a second."""

    @property
    def held_out(self) -> bool:
        """Whether no constant was fitted to it."""
        return self.number % 2 == 1


@dataclass(frozen=True)
class LoadedRun:
    """A published run at maximum load: as many requests as fit, all the time."""

    input_tokens: int
    output_tokens: int
    tokens_per_second: float


def _rows(kind: str) -> list[dict[str, str]]:
    text = files("vcluster.calibration").joinpath("tables/serving_runs.csv").read_text(encoding="utf-8")
    return [row for row in csv.DictReader(text.splitlines()) if row["kind"] == kind]


def runs() -> tuple[ServedRun, ...]:
    """The runs of Llama 3 8B on two A100s under NVIDIA NIM."""
    return tuple(
        ServedRun(
            number,
            int(row["input_tokens"]),
            int(row["output_tokens"]),
            int(row["concurrency"]),
            (
                float(row["first_token_ms"]) / 1e3,
                float(row["token_ms"]) / 1e3,
                float(row["tokens_per_second"]),
            ),
        )
        for number, row in enumerate(_rows("serving"))
    )


def loaded_runs() -> tuple[LoadedRun, ...]:
    """The runs of Llama 3.1 8B on an H100 under TensorRT-LLM."""
    return tuple(
        LoadedRun(int(row["input_tokens"]), int(row["output_tokens"]), float(row["tokens_per_second"]))
        for row in _rows("max throughput")
    )


@lru_cache(maxsize=4)
def _prices(hardware: Hardware) -> StepPrices:
    mesh = Mesh(tp=2)
    spec = replace(transformer("llama3-8b"), dtype="float16")
    settings = EngineSettings(1, CHUNK, PAGE_TOKENS, {"full": 1})
    return StepPrices(Placement(spec, mesh, usual_strategy(mesh)), settings, hardware)


@lru_cache(maxsize=4)
def _loaded_prices(hardware: Hardware) -> StepPrices:
    spec = replace(transformer("llama3.1-8b"), dtype="bfloat16")
    settings = EngineSettings(1, LOADED_CHUNK, PAGE_TOKENS, {"full": 1})
    placement = Placement(spec, ALONE, usual_strategy(ALONE))
    return StepPrices(placement, settings, hardware, precision=Precision.parse("fp8"))


def _work(tokens: int, picked: int, read: int, scored: int) -> dict[str, int]:
    """The numbers of a step: its tokens, those that have a next one, the places of the cache that it reads, its scores."""
    return {
        TOKENS: padded(tokens),
        PICKED: padded(picked),
        TABLE: 1,
        f"{READ}_full": read,
        f"{SCORED}_full": scored,
    }


def parts(run: ServedRun, hardware: Hardware | None = None) -> StepParts:
    """What a step is predicted to spend its seconds on in which every client has its next token, with its prompt and half of
    its answer in the cache."""
    clients = run.concurrency
    read = clients * (run.input_tokens + run.output_tokens // 2)
    return _prices(hardware or Hardware.preset(A100)).parts(_work(clients, clients, read, read))


def loaded_throughput(run: LoadedRun, hardware: Hardware | None = None) -> float:
    """Tokens a second in the long run of as many requests as fit, at most `MOST_REQUESTS`.

    A token takes its part of a step of all of them, with half of their answers in the cache, and its share of the prompts:
    what one more token of a prompt takes in a large step.
    """
    prices = _loaded_prices(hardware or Hardware.preset(H100))
    found, spec = prices.hardware, prices.placement.spec
    free = found.memory_bytes - prices.weights_bytes() - BUFFERS
    tokens = CACHE_SHARE * free / spec.cache_bytes(1, "float8_e4m3fn")
    prompt, new = run.input_tokens, run.output_tokens
    batch = int(max(1, min(MOST_REQUESTS, tokens // (prompt + new))))
    context = prompt + new // 2
    most = max(LOADED_CHUNK, 2 * batch)

    def seconds(tokens: int, picked: int, read: int, scored: int) -> float:
        work = _work(tokens, picked, read, scored)
        return float(prices.stage_seconds({TOKENS: work[TOKENS], PICKED: work[PICKED]}, [work]).max())

    host = prices.host_seconds([{"r": padded(batch)}])
    alone = seconds(batch, batch, batch * context, batch * context) + host
    more = (seconds(most, 8, most, most * prompt // 2) - seconds(8, 8, 0, 0)) / (most - 8)
    return 1 / (alone / batch + prompt / new * more)


def predicted(run: ServedRun, hardware: Hardware | None = None) -> tuple[float, float, float]:
    """The predicted seconds to the first token and of a later token, and the tokens per second."""
    prices = _prices(hardware or Hardware.preset(A100))
    pages = -(-(run.input_tokens + run.output_tokens) // PAGE_TOKENS) * run.concurrency
    settings = replace(prices.settings, batch=run.concurrency, pages={"full": pages})
    workload = Workload(((run.input_tokens, run.output_tokens),), concurrency=run.concurrency)
    engine = Engine(prices.placement.spec, settings)
    served = PricedRun(engine, prices.with_settings(settings), workload, WAVES * run.concurrency).served()
    requests = served.requests
    gaps = sum(each.last_token_seconds - each.first_token_seconds for each in requests)
    return (
        sum(each.waited_seconds for each in requests) / len(requests),
        gaps / sum(each.tokens - 1 for each in requests),
        served.tokens_per_second,
    )


def errors(
    own: Sequence[ServedRun], hardware: Hardware | None = None
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The relative errors of first token, token and throughput, ``(runs, 3)``."""
    return np.array([np.divide(predicted(run, hardware), run.measured) - 1 for run in own])


def report() -> str:
    """All runs beside their predictions, and the mean errors."""
    own = runs()
    found = errors(own)
    lines: list[tuple[str, ...]] = [("in", "out", "clients", *NAMES, "")]
    for run, each in zip(own, found, strict=True):
        figures = (f"{error:+.1%}" for error in each)
        held = "held out" if run.held_out else "fitted"
        lines.append((f"{run.input_tokens}", f"{run.output_tokens}", f"{run.concurrency}", *figures, held))
    told = in_columns(lines, 0)
    for title, is_held_out in (("fitted", False), ("held out", True)):
        mean = np.abs(found[np.array([run.held_out == is_held_out for run in own])]).mean(axis=0)
        told.append(
            f"{title}: " + ", ".join(f"{name} {error:.1%}" for name, error in zip(NAMES, mean, strict=True))
        )
    told += ["", "What a step with a token of each client spends its milliseconds on", ""]
    told += in_columns([("in", "out", "clients", *StepParts._fields), *map(_parts_row, own)], 0)
    told += ["", f"Llama 3.1 8B in fp8 at maximum load, {H100}: throughput", ""]
    loaded: list[tuple[str, ...]] = [("in", "out", NAMES[2])]
    for each in loaded_runs():
        error = loaded_throughput(each) / each.tokens_per_second - 1
        loaded.append((f"{each.input_tokens}", f"{each.output_tokens}", f"{error:+.1%}"))
    told += in_columns(loaded, 0)
    return "\n".join([f"Llama 3 8B on two A100s, {A100}: predicted by measured, less 1", "", *told])


def _parts_row(run: ServedRun) -> tuple[str, ...]:
    spent = (f"{1e3 * each:.2f}" for each in parts(run))
    return f"{run.input_tokens}", f"{run.output_tokens}", f"{run.concurrency}", *spent


if __name__ == "__main__":
    print(report())
