"""What `serve` found, in the terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from parallelism.display import WIDTH, in_columns
from parallelism.display.quantities import count, decimal_bytes, plural, seconds
from parallelism.hardware import validation_text
from parallelism.serving.plans import SETTINGS, ServingPlan, ServingPlans
from parallelism.serving.serve import percentiles
from vcluster.cli.training import gigabytes

FIGURES = ("first token", "token", "tokens/s", "a device")
LONGEST_BAR = 14


def serving_text(
    name: str, plans: ServingPlans, commands: Mapping[ServingPlan, str], top: int, answers: Mapping[str, str]
) -> str:
    """The plans as text: their table, why the first is best, its memory, the Pareto front, and its command."""
    lines = [*_asked(name, plans), ""]
    shown = _distinct(plans.plans)[:top] or plans.beyond[:1]
    if not plans.plans and shown:
        lines += ["Nothing meets the limits; the nearest is", ""]
    if shown:
        lines += [*_table(shown), ""]
    if plans.plans:
        lines += [*wrap(f"{plans.why()}.", WIDTH), ""]
        lines += [line for answer in answers.values() for line in wrap(f"{answer}.", WIDTH)] + [""] * bool(
            answers
        )
    if shown:
        lines += [
            *_requests(shown[0], plans),
            *_parts(shown[0]),
            *_memory(shown[0], plans),
            *_prefill(shown[0]),
            "",
        ]
    lines += [*_front(plans), *_left_out(plans), ""]
    if plans.plans:
        lines += ["The first again:", *_continued(commands[plans.plans[0]]), ""]
    return "\n".join([*lines, f"{plans.elapsed_seconds:.1f} s"])


def counts_text(tried: Sequence[ServingPlans]) -> str:
    """What each number of devices brings, up to the fewest that suffice."""
    rows = [("devices", "first token", "token", "requests/s", "load", "the best plan")]
    for plans in tried:
        plan, rate = plans.first, plans.task.workload.rate
        if plan is None:
            rows.append((str(plans.task.devices), "-", "-", "-", "-", "nothing fits"))
            continue
        rows.append(
            (
                str(plan.devices),
                seconds(plan.first_token_seconds),
                seconds(plan.token_seconds),
                count(plan.requests_per_second),
                "-" if rate is None else f"{rate / plan.capacity:.0%}",
                _short(plan),
            )
        )
    last = tried[-1]
    told = "None of these numbers of devices is within the limits and answers all that arrive."
    if last.suffices:
        told = f"The fewest within the limits that answer all that arrive: {plural(last.task.devices, 'device')}."
    return "\n".join([*in_columns(rows, 5), "", *wrap(told, WIDTH)])


def _continued(command: str) -> list[str]:
    """A command over lines that a shell reads as one: each but the last ends in a backslash, and none in an option."""
    first, *options = re.split(r" (?=--)", command)
    lines = [f"  {first}"]
    for option in options:
        if len(lines[-1]) + len(option) + 3 <= WIDTH:
            lines[-1] += f" {option}"
        else:
            lines[-1] += " \\"
            lines.append(f"      {option}")
    return lines


def _asked(name: str, plans: ServingPlans) -> list[str]:
    task = plans.task
    (prompt, new), *more = task.workload.lengths
    lengths = (
        f"requests of {prompt} tokens in and {new} out"
        if not more
        else f"{len(more) + 1} lengths of requests"
    )
    come = "as many as a plan takes at a time, the first all at once"
    if not task.is_loaded:
        come = (
            f"{task.workload.rate:g} a second"
            if task.workload.concurrency is None
            else f"from {task.workload.concurrency} clients, who begin at once"
        )
    hits = f", {task.workload.hits:.0%} of prompts in the cache" if task.workload.hits else ""
    limits = [
        f"{what} in {seconds(limit)}"
        for what, limit in (("a first token", task.first_token_seconds), ("a token", task.token_seconds))
        if limit is not None
    ]
    told = (
        f"{name}: {count(task.spec.parameters)} parameters in {task.precision} on {plural(task.devices, 'device')} of "
        f"{task.hardware.name}; {lengths}, {come}{hits}"
        + (f"; within {' and '.join(limits)}" if limits else "")
        + (f" for {task.percentile:g} % of the requests" if limits and task.percentile else "")
    )
    compared = f"compared with {validation_text(task.hardware.validation)}"
    if task.hardware.stack and not task.hardware.validation:  # whose constants are estimates
        compared += f" ({task.hardware.title})"
    return [*wrap(told, WIDTH), *wrap(compared, WIDTH)]


def _distinct(plans: Sequence[ServingPlan]) -> tuple[ServingPlan, ...]:
    """The plans without those that differ from one before by room for more requests alone, which nobody sends."""
    found: dict[Any, ServingPlan] = {}
    for plan in plans:
        seen = plan.first_token_seconds, plan.token_seconds, plan.tokens_per_second
        found.setdefault((plan.layout, plan.prefill, *seen), plan)
    return tuple(found.values())


def _table(plans: tuple[ServingPlan, ...]) -> list[str]:
    """A row for each plan.  Axes that no plan splits, and what none has, have no column; beside pools of prefill there is no
    room for the tokens of the cache."""
    layout = []
    for name in ("pp", "ep"):
        if any(getattr(plan, name) > 1 for plan in plans):
            layout.append(name)
    names = ["tp", *layout, "replicas", "batch"]
    priced = plans[0].price is not None
    pooled = any(plan.prefill is not None for plan in plans)
    rows = [(*names, *FIGURES, *["$/M tokens"] * priced, "prefill" if pooled else "cache tokens")]
    for plan in plans:
        cost = plan.cost_per_million_tokens
        rows.append(
            (
                *(str(getattr(plan, name)) for name in names),
                seconds(plan.first_token_seconds),
                seconds(plan.token_seconds),
                count(plan.tokens_per_second),
                count(plan.tokens_per_second_per_device),
                *([] if cost is None else [f"{cost:.2f}"]),
                _pool(plan) if pooled else count(plan.cache_tokens),
            )
        )
    return in_columns(rows, 0)


def _requests(plan: ServingPlan, plans: ServingPlans) -> list[str]:
    """How the times of requests differ, and how much of that is the chance of arrivals."""
    spread, rate = plans.spread, plans.task.workload.rate
    found = percentiles(plan.answered if spread is None else spread.answered)
    first = [seconds(value) for value in found["first_token_percentiles"].values()]
    token = [seconds(value) for value in found["token_percentiles"].values()]
    told = (
        f"Half of the requests have a first token in {first[0]} and tokens in {token[0]}, 90 % in {first[1]} and {token[1]}, "
        f"99 % in {first[2]} and {token[2]}."
    )
    task = plans.task
    if task.first_token_seconds or task.token_seconds:
        share = task.share_within(plan.answered if spread is None else spread.answered)
        goodput = count(share * plan.requests_per_second)
        told += f" Within the limits are {share:.0%} of them: a goodput of {goodput} requests a second."
    if rate is not None:
        load = rate / plan.capacity
        told += f" In the long run {plan.own_words} answers about {count(plan.capacity)} a second: the load is {load:.0%}."
    if spread is not None:
        ends = f"{_range(spread.first_token_seconds)}, the mean token {_range(spread.token_seconds)}"
        told += f" With {spread.series} series of random arrivals the mean first token takes {ends}."
    return [*wrap(told, WIDTH), ""]


def _range(ends: tuple[float, float]) -> str:
    return f"{seconds(ends[0])} to {seconds(ends[1])}"


def _parts(plan: ServingPlan) -> list[str]:
    """What the time of a token is spent on."""
    if plan.parts is None:
        return []
    spent = (
        f"products and elementwise work {seconds(plan.parts.products)}",
        f"attention over the cache {seconds(plan.parts.attention)}",
        f"messages {seconds(plan.parts.messages)}",
        f"the host {seconds(plan.parts.host)}",
    )
    step = f"A step with a token of each of {plural(plan.batch, 'request')} takes"
    if plan.pp > 1:
        step = "A microbatch of a step with a token of each request takes, through all stages,"
    told = f"{step} {seconds(plan.parts.seconds)}"
    return [*wrap(f"{told}: {', '.join(spent)}.", WIDTH), ""]


def _memory(plan: ServingPlan, plans: ServingPlans) -> list[str]:
    parts = ", ".join(f"{name} {gigabytes(nbytes)}" for name, nbytes in plan.memory.items())
    spec = plans.task.spec
    dtype = plans.task.dtype_of_cache
    states = spec.cache_bytes(0, dtype)
    token = spec.cache_bytes(1, dtype) - states
    told = [f"GB of a device of {plan.words}: {parts}."]
    if token:
        told.append(
            f"A token takes {token / 1e3:.3g} kB of cache in {dtype} in all layers, over all devices of a replica; "
            f"{count(plan.cache_tokens)} tokens fit."
        )
    if states:
        told.append(f"The states of a request take {states / 1e6:.3g} MB, however long it is.")
    return wrap(" ".join(told), WIDTH)


def _pool(plan: ServingPlan) -> str:
    """The devices of prefill in short, as ``3xtp4``."""
    if plan.prefill is None:
        return "-"
    sizes = plan.prefill.layout._asdict()
    inside = [f"{name}{size}" for name, size in sizes.items() if size > 1 and name != "replicas"]
    return f"{plan.prefill.replicas}x{'-'.join(inside) or 'one'}"


def _short(plan: ServingPlan) -> str:
    """The settings of a plan without those that split nothing."""
    words = [
        f"{name}={getattr(plan, name)}"
        for name in SETTINGS
        if name in ("tp", "batch") or getattr(plan, name) > 1
    ]
    return " ".join([*words, *([f"prefill={_pool(plan)}"] if plan.prefill else [])])


def _prefill(plan: ServingPlan) -> list[str]:
    """The devices that compute prompts, and what they send."""
    pool = plan.prefill
    if pool is None:
        return []
    parts = ", ".join(f"{name} {gigabytes(nbytes)}" for name, nbytes in pool.memory.items())
    return wrap(
        f"Prompts are computed by {plural(pool.devices, 'device')} of their own ({pool.words}), {pool.batch} at a time; "
        f"GB of one: {parts}. Each of the others gets {decimal_bytes(pool.moved_bytes)} of cache for a prompt, in "
        f"{seconds(pool.moved_seconds)}.",
        WIDTH,
    )


def _front(plans: ServingPlans) -> list[str]:
    """The front as bars: tokens a second for a user, and of a device."""
    if not plans.front:
        return []
    most = max(plan.tokens_per_second_per_device for plan in plans.front)
    cells = [("tokens/s of a user", "of a device", "")]
    for plan in plans.front:
        of_user = f"{1 / plan.token_seconds:.1f}" if plan.token_seconds else "-"
        cells.append((of_user, count(plan.tokens_per_second_per_device), _short(plan)))
    rows = in_columns(cells, 0)
    longest = max(1, min(LONGEST_BAR, WIDTH - 2 - max(map(len, rows))))
    shares = [plan.tokens_per_second_per_device / most for plan in plans.front]
    bars = ["", *("#" * max(1, round(longest * share)) for share in shares)]
    return [f"{row}  {bar}".rstrip() for row, bar in zip(rows, bars, strict=True)]


def _left_out(plans: ServingPlans) -> list[str]:
    reasons = [f"{reason}: {number}" for reason, number in plans.refused.items()]
    if plans.left_out:
        reasons.append(f"too slow, by a bound: {plans.left_out}")
    return ["", *wrap(f"Rows without figures: {'; '.join(reasons)}.", WIDTH)] if reasons else []
