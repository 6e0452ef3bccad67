"""`serve`: how to serve a model on described hardware, under limits of the times that a user sees."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from parallelism.display import progress
from parallelism.display.quantities import seconds_in
from parallelism.hardware import validation_json, with_usual_stack
from parallelism.models import TransformerSpec
from parallelism.models.published import published_positions
from parallelism.serving.picture import pictures
from parallelism.serving.plans import SETTINGS, ServingPlan, ServingPlans
from parallelism.serving.pool_search import PREFILL_SETTINGS
from parallelism.serving.precision import CACHE_DTYPES, PRECISIONS
from parallelism.serving.search import find_serving
from parallelism.serving.workloads import lengths_in
from vcluster.cli.command_line import (
    Arguments,
    Parser,
    WrongWords,
    accessing,
    choice,
    positive,
    whole,
    wholes,
    writable,
)
from vcluster.cli.megatron_words import (
    PLAIN,
    config_path,
    is_model,
    named_model,
    tell_all_devices,
    tell_remarks,
)
from vcluster.cli.serving.text import counts_text, serving_text
from vcluster.report.plain_page import as_shown, write_plain_page

HARDWARE, INPUT, OUTPUT = "dgx-h100", 1000, 300
"""What is taken where nothing is said."""
NO_SECONDS = 10
"""Nobody waits for a token so long: a number without a unit that is as large has lost it."""
_SHARE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)%?", re.ASCII)


def _limit(text: str) -> float:
    """A type for argparse: a time above 0, as ``500ms``, ``1.5s`` or ``30us``; without a unit it is in seconds, of which
    so many as `NO_SECONDS` are meant to be milliseconds."""
    is_bare = text.strip()[-1:].isdigit()
    try:
        value = seconds_in(f"{text}s" if is_bare else text)
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"needs a time above 0, such as 500ms or 1.5s, got {text!r}")
    if is_bare and value >= NO_SECONDS:
        raise argparse.ArgumentTypeError(
            f"needs a unit, as {text.strip()}ms or {text.strip()}s, got {text!r}"
        )
    return value


def share_in(text: str) -> float:
    """A type for argparse: a part, as ``30%`` or ``0.3``."""
    found = _SHARE.fullmatch(text.strip())
    value = 1.0
    if found:
        value = float(found[1]) / (100 if text.strip().endswith("%") else 1)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"needs a part below 1, such as 30% or 0.3, got {text!r}")
    return value


def percent_in(text: str) -> float:
    """A type for argparse: so many of a hundred, as ``99``, ``p99`` or ``99.9%``."""
    try:
        value = float(text.strip().removeprefix("p").removesuffix("%"))
    except ValueError:
        value = 0.0
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"needs so many of a hundred, such as 99, got {text!r}")
    return value


def rate_in(text: str) -> float:
    """A type for argparse: requests a second, as ``3`` or ``3/s``."""
    return positive(text.strip().removesuffix("/s"))


OWN: Arguments = {
    "model": {"metavar": "MODEL", "help": "a published model, or a config.json or a folder with one"},
    "--hardware": {
        "metavar": "NAME",
        "default": HARDWARE,
        "help": f"a preset, or a file (default: {HARDWARE})",
    },
    "--devices": {
        "type": wholes,
        "metavar": "N,N",
        "help": "the number of devices (default: all of the hardware); of several numbers the fewest that are within the "
        "limits and answer all that arrive",
    },
    "--input-tokens": {"type": whole(), "metavar": "N", "help": f"tokens of a prompt (default: {INPUT})"},
    "--output-tokens": {"type": whole(), "metavar": "N", "help": f"tokens of an answer (default: {OUTPUT})"},
    "--requests": {
        "type": Path,
        "metavar": "FILE.json",
        "help": 'the lengths of requests, as [{"input_tokens": 3000, "output_tokens": 300}, ...]',
    },
    "--first-token": {
        "type": _limit,
        "metavar": "500ms",
        "help": "the longest mean time to the first token",
    },
    "--token": {"type": _limit, "metavar": "30ms", "help": "the longest mean time of a token"},
    "--percentile": {
        "type": percent_in,
        "metavar": "99",
        "help": "the limits are for so many requests of a hundred, not for the mean",
    },
    "--concurrency": {
        "type": whole(),
        "metavar": "N",
        "help": "so many clients send one request after the other",
    },
    "--rate": {"type": rate_in, "metavar": "3/s", "help": "so many requests a second arrive by themselves"},
    "--hits": {
        "type": share_in,
        "default": 0.0,
        "metavar": "30%",
        "help": "the part of prompts whose keys and values are in the cache already",
    },
    "--precision": {
        "type": choice(tuple(PRECISIONS)),
        "default": "bf16",
        "metavar": "NAME",
        "help": "bf16; fp16; fp8: weights, products and the cache; int8, int4: weights alone, as mxfp4, nvfp4, AWQ "
        "and GPTQ, with the cache in bf16 (default: bf16)",
    },
    "--kv-cache-dtype": {
        "type": choice(tuple(CACHE_DTYPES)),
        "metavar": "NAME",
        "help": "the dtype of the cache: bf16, fp16, fp8, fp8_e5m2 or int8 (default: as --precision has it)",
    },
    "--max-model-len": {
        "type": whole(),
        "metavar": "N",
        "help": "longer requests are refused (default: the positions in the model's config)",
    },
    "--chunk": {"type": whole(), "metavar": "N", "help": "the most tokens of a step (default: 2048)"},
    "--memory": {"metavar": "72GB", "help": "the memory of a device that may be used (default: all)"},
    "--reserve": {"metavar": "4GB", "help": "memory that no plan may use (default: that of the hardware)"},
    "--price": {
        "type": positive,
        "metavar": "2.50",
        "help": "of a device in an hour, for the cost of tokens",
    },
    **{
        f"--{name}": {"type": wholes, "metavar": "N,N", "help": f"only plans with {words}"}
        for name, words in (
            ("tp", "so many devices of tensor parallelism"),
            ("pp", "so many stages"),
            ("ep", "so many devices of expert parallelism, each with requests of its own"),
            ("replicas", "so many replicas of the model"),
            ("batch", "so many requests of a replica at a time"),
        )
    },
    "--disaggregate": {
        "action": "store_true",
        "help": "also plans in which some devices compute prompts alone, and send the cache to the others",
    },
    "--prefill": {
        "metavar": "SETTINGS",
        "help": "only such plans, with these devices for prompts, as 'tp=4 replicas=2'; the settings above are of the others",
    },
    "--why-not": {
        "action": "append",
        "default": [],
        "metavar": "NAME=VALUE",
        "help": "tell why the best plan with this setting is not the first, as tp=4",
    },
    "--top": {"type": whole(), "default": 5, "metavar": "N", "help": "how many plans to tell (default: 5)"},
    "--json": {"action": "store_true", "help": "print the figures as JSON"},
    "--html": {"type": Path, "metavar": "FILE.html", "help": "write a page that needs no other file"},
}


def _parser(program: str) -> Parser:
    return Parser(
        OWN,
        {
            "--gpus": "--devices",
            "--tensor-parallel-size": "--tp",
            "--pipeline-parallel-size": "--pp",
            "--ttft": "--first-token",
            "--itl": "--token",
            "--tpot": "--token",
            "--max-num-seqs": "--batch",
            "--max-num-batched-tokens": "--chunk",
            "--data-parallel-size": "--replicas",
            "--expert-parallel-size": "--ep",
            "--kv-cache": "--kv-cache-dtype",
            "--cache-dtype": "--kv-cache-dtype",
            "--quantization": "--precision",
            "--dtype": "--precision",
            "--gpu-memory-utilization": "--memory",
            "--max-concurrency": "--concurrency",
            "--request-rate": "--rate",
            "--qps": "--rate",
            "--rps": "--rate",
            "--isl": "--input-tokens",
            "--osl": "--output-tokens",
            "--slo": "--percentile",
            "--goodput": "--percentile",
            "--max-seq-len": "--max-model-len",
            "--enable-prefix-caching": "--hits",
        },
        prog=f"{program} serve",
        description="Finds how to serve a model on described hardware: layouts, requests at a\ntime, and what a user sees.",
        epilog=f"examples:\n  {program} serve llama3.1-70b --hardware dgx-h100 \\\n"
        f"      --devices 8 --input-tokens 3000 --output-tokens 300 \\\n"
        f"      --first-token 500ms --token 30ms\n"
        f"  {program} serve deepseek-v3 --devices 32 \\\n      --precision fp8 --price 2.50",
    )


def served(program: str, words: Sequence[str]) -> int:
    """Find the best ways to serve a model and tell them.  Returns 1 if none is within the limits."""
    arguments = _parser(program).parse(words)
    questions = {text: _settings("--why-not", text, SETTINGS) for text in arguments.why_not}
    given = arguments.prefill
    prefill = None if given is None else _settings("--prefill", given, PREFILL_SETTINGS)
    if arguments.html is not None:
        writable(arguments.html, "html")
    model = _model(arguments.model)
    lengths = _lengths(arguments)
    tried = _tried(arguments, model, lengths, prefill)
    plans = tried[-1]
    tell_remarks(model)
    tell_all_devices(arguments, plans.task.devices)
    answers = {text: plans.why_not(**wanted) for text, wanted in questions.items()} if plans.plans else {}
    commands = {
        plan: command_of(program, arguments, plan) for plan in (*plans.plans[: arguments.top], *plans.front)
    }
    text = serving_text(arguments.model, plans, commands, arguments.top, answers)
    if len(arguments.devices or ()) > 1:
        text = f"{counts_text(tried)}\n\n{text}"
    if arguments.html is not None:
        with accessing(arguments.html):
            write_plain_page(f"Serving {arguments.model}", pictures(plans) + as_shown(text), arguments.html)
    if arguments.json:
        counts = {"by_devices": [_of_count(each) for each in tried]}
        print(json.dumps(document_of(plans, commands, arguments.top, answers) | counts, indent=1))
    else:
        print(text if arguments.html is None else f"{text}\n\nThe page is {arguments.html}")
    if plans.plans and (len(tried) == 1 or plans.suffices):
        return 0
    print(
        plans.why_none if not plans.plans else "no number of devices answers all that arrive", file=sys.stderr
    )
    return 1


def _tried(
    arguments: argparse.Namespace,
    model: TransformerSpec,
    lengths: tuple[tuple[int, int], ...],
    prefill: dict[str, int] | None,
) -> list[ServingPlans]:
    """The plans of each number of devices, the fewest first, up to one that suffices."""
    tried: list[ServingPlans] = []
    for devices in sorted(set(arguments.devices or [])) or [None]:
        try:
            with progress("pricing layouts", alone=True):
                tried.append(_found(arguments, model, lengths, prefill, devices))
        except (ValueError, TypeError, OSError) as error:
            raise WrongWords(str(error)) from None
        if tried[-1].suffices:
            break
    return tried


def _found(
    arguments: argparse.Namespace,
    model: TransformerSpec,
    lengths: tuple[tuple[int, int], ...],
    prefill: dict[str, int] | None,
    devices: int | None,
) -> ServingPlans:
    return find_serving(
        model,
        with_usual_stack(arguments.hardware, serving=True),
        devices,
        lengths=lengths,
        concurrency=arguments.concurrency,
        rate=arguments.rate,
        hits=arguments.hits,
        first_token_seconds=arguments.first_token,
        token_seconds=arguments.token,
        precision=arguments.precision,
        cache_dtype=arguments.kv_cache_dtype,
        positions=arguments.max_model_len or _positions(arguments.model, model),
        chunk=arguments.chunk,
        memory=arguments.memory,
        reserve=arguments.reserve,
        price=arguments.price,
        percentile=arguments.percentile,
        disaggregate=arguments.disaggregate,
        prefill=prefill,
        **{name: getattr(arguments, name) for name in SETTINGS},
    )


def _model(word: str) -> TransformerSpec:
    if not is_model(word):
        with accessing(Path(word), "read"):
            Path(word).open("rb").close()
        raise WrongWords(f"{word} is a program; serve takes a model by its name, or a config.json")
    if word.lower() == PLAIN:
        raise WrongWords(f"{PLAIN} has no figures; serve takes a model by its name, or a config.json")
    try:
        model = named_model(word)
    except ValueError as error:
        raise WrongWords(str(error)) from None
    assert model is not None
    return model


def _positions(word: str, model: TransformerSpec) -> int:
    """The most tokens of a sequence by the config of a model."""
    return model.sequence if config_path(word) is not None else published_positions(word)


def _lengths(arguments: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    if arguments.concurrency is not None and arguments.rate is not None:
        raise WrongWords("--concurrency and --rate are two ways in which requests come; leave out one")
    if arguments.requests is None:
        return ((arguments.input_tokens or INPUT, arguments.output_tokens or OUTPUT),)
    if arguments.input_tokens is not None or arguments.output_tokens is not None:
        raise WrongWords("--requests has the lengths; leave out --input-tokens and --output-tokens")
    with accessing(arguments.requests, "read", "requests"):
        try:
            found = lengths_in(arguments.requests)
        except ValueError as error:
            raise WrongWords(f"--requests: {error}") from None
    if not found:
        raise WrongWords(f"--requests: {arguments.requests} has no request")
    return found


def _settings(option: str, text: str, names: Sequence[str]) -> dict[str, int]:
    """The settings behind an option, as ``tp=4`` or ``"tp=4 pp=2"``."""
    wrong = f"{option} needs settings of {', '.join(names)}, as tp=4; got {text!r}"
    found = {}
    for word in text.split():
        name, _, value = word.partition("=")
        if name not in names or name in found or not value.isdecimal() or int(value) < 1:
            raise WrongWords(wrong)
        found[name] = int(value)
    if not found:
        raise WrongWords(wrong)
    return found


_KEPT = (
    *(
        "hardware",
        "devices",
        "input_tokens",
        "output_tokens",
        "requests",
        "first_token",
        "token",
        "percentile",
        "concurrency",
        "rate",
    ),
    *("hits", "precision", "kv_cache_dtype", "max_model_len", "chunk", "memory", "reserve", "price"),
)


def command_of(program: str, arguments: argparse.Namespace, plan: ServingPlan) -> str:
    """The command that gives the figures of this plan alone."""
    words = [*program.split(), "serve", arguments.model]
    for name in _KEPT:
        value = getattr(arguments, name)
        if name == "devices" and value is not None:
            value = plan.devices
        if value not in (None, 0.0) and not (name == "precision" and value == "bf16"):
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    for name in SETTINGS:
        words += [f"--{name}", str(getattr(plan, name))]
    if plan.prefill is not None:
        words += ["--prefill", plan.prefill.words]
    return shlex.join(words)


def document_of(
    plans: ServingPlans, commands: dict[ServingPlan, str], top: int, answers: dict[str, str]
) -> dict[str, Any]:
    """The fields of ``--json``."""
    return {
        "plans": [_of_plan(plans, plan, commands[plan]) for plan in plans.plans[:top]],
        "front": [_of_plan(plans, plan, commands[plan]) for plan in plans.front],
        "refused": dict(plans.refused),
        "left_out": plans.left_out,
        "why": plans.why() if plans.plans else None,
        "why_not": answers,
        "percentile": plans.task.percentile,
        "arrivals": None if plans.spread is None else plans.spread.json(),
        "nearest": None if plans.plans or not plans.beyond else plans.beyond[0].json(),
        "devices": plans.task.devices,
        "hardware": plans.task.hardware.name,
        "stack": plans.task.hardware.stack,
        "precision": plans.task.precision,
        "cache_dtype": plans.task.dtype_of_cache,
        "validation": validation_json(plans.task.hardware.validation),
        "elapsed_seconds": plans.elapsed_seconds,
    }


def _of_plan(plans: ServingPlans, plan: ServingPlan, command: str) -> dict[str, Any]:
    share = plans.task.share_within(plan.answered)
    goodput = {"share_within_limits": share, "goodput_requests_per_second": share * plan.requests_per_second}
    return plan.json() | goodput | {"command": command}


def _of_count(plans: ServingPlans) -> dict[str, Any]:
    first = plans.first
    return {
        "devices": plans.task.devices,
        "suffices": plans.suffices,
        "first": None if first is None else first.json(),
    }
