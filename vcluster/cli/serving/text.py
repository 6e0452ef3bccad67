"""What `serve` found, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap

from parallelism.display import WIDTH, in_columns
from parallelism.display.quantities import count, seconds
from parallelism.hardware import validation_text
from parallelism.serving.plans import ServingPlan, ServingPlans
from vcluster.cli.training import gigabytes

COLUMNS = (
    "tp",
    "pp",
    "ep",
    "replicas",
    "batch",
    "first token",
    "token",
    "tokens/s",
    "a device",
    "cache tokens",
)


def serving_text(
    name: str, plans: ServingPlans, commands: Mapping[ServingPlan, str], top: int, answers: Mapping[str, str]
) -> str:
    """The plans, the front, the reason of the first, its memory and its command."""
    lines = [*_asked(name, plans), ""]
    shown = plans.plans[:top] or plans.beyond[:1]
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
        lines += [*_memory(shown[0], plans), ""]
    lines += [*_front(plans), *_left_out(plans), ""]
    if plans.plans:
        lines += ["The first again:", f"  {commands[plans.plans[0]]}", ""]
    return "\n".join([*lines, f"{plans.elapsed_seconds:.1f} s"])


def _asked(name: str, plans: ServingPlans) -> list[str]:
    task = plans.task
    (prompt, new), *more = task.workload.lengths
    lengths = (
        f"requests of {prompt} tokens in and {new} out"
        if not more
        else f"{len(more) + 1} lengths of requests"
    )
    come = "as many as a plan takes at a time"
    if not task.is_loaded:
        come = (
            f"{task.workload.rate:g} a second"
            if task.workload.concurrency is None
            else f"from {task.workload.concurrency} clients"
        )
    hits = f", {task.workload.hits:.0%} of prompts in the cache" if task.workload.hits else ""
    limits = [
        f"{what} in {seconds(limit)}"
        for what, limit in (("a first token", task.first_token_seconds), ("a token", task.token_seconds))
        if limit is not None
    ]
    told = (
        f"{name}: {count(task.spec.parameters)} parameters in {task.precision} on {task.devices} devices of "
        f"{task.hardware.name}; {lengths}, {come}{hits}"
        + (f"; within {' and '.join(limits)}" if limits else "")
    )
    compared = f"compared with {validation_text(task.hardware.validation)}"
    return [*wrap(told, WIDTH), *wrap(compared, WIDTH)]


def _table(plans: tuple[ServingPlan, ...]) -> list[str]:
    priced = plans[0].price is not None
    rows = [(*COLUMNS, *["$/M tokens"] * priced)]
    for plan in plans:
        cost = plan.cost_per_million_tokens
        rows.append(
            (
                *(str(getattr(plan, name)) for name in COLUMNS[:5]),
                seconds(plan.first_token_seconds),
                seconds(plan.token_seconds),
                count(plan.tokens_per_second),
                count(plan.tokens_per_second_per_device),
                count(plan.cache_tokens),
                *([] if cost is None else [f"{cost:.2f}"]),
            )
        )
    return in_columns(rows, 0)


def _memory(plan: ServingPlan, plans: ServingPlans) -> list[str]:
    parts = ", ".join(f"{name} {gigabytes(nbytes)}" for name, nbytes in plan.memory.items())
    token = plans.task.spec.cache_bytes(1, "float8_e4m3fn" if plans.task.precision == "fp8" else "bfloat16")
    return wrap(
        f"GB of a device of {plan.words}: {parts}. A token takes {token / 1e3:.3g} kB of cache in all layers, over all "
        f"devices of a replica; {count(plan.cache_tokens)} tokens fit.",
        WIDTH,
    )


def _front(plans: ServingPlans) -> list[str]:
    """The front as bars: tokens a second for a user, and of a device."""
    if not plans.front:
        return []
    most = max(plan.tokens_per_second_per_device for plan in plans.front)
    rows = in_columns(
        [("tokens/s of a user", "of a device", "")]
        + [
            (
                f"{1 / plan.token_seconds:.1f}" if plan.token_seconds else "-",
                count(plan.tokens_per_second_per_device),
                plan.words,
            )
            for plan in plans.front
        ],
        0,
    )
    bars = ["", *("#" * max(1, round(14 * plan.tokens_per_second_per_device / most)) for plan in plans.front)]
    return [f"{row}  {bar}".rstrip() for row, bar in zip(rows, bars, strict=True)]


def _left_out(plans: ServingPlans) -> list[str]:
    reasons = [f"{reason}: {number}" for reason, number in plans.refused.items()]
    if plans.left_out:
        reasons.append(f"too slow, by a bound: {plans.left_out}")
    return ["", *wrap(f"Rows without figures: {'; '.join(reasons)}.", WIDTH)] if reasons else []
