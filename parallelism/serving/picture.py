"""Pictures of a search for ways to serve: the front, and the requests of one plan over time."""

from __future__ import annotations

from parallelism.display.chart import Chart
from parallelism.display.markup import Markup, broad_or_narrow, figure, note
from parallelism.display.point_chart import PointChart
from parallelism.display.quantities import count, plural, seconds
from parallelism.serving.plans import ServingPlan, ServingPlans

WIDTH, NARROW, MARGIN = 560.0, 232.0, 64.0
SHOWN = 24
"""The requests of a timeline."""
BAR, GAP = 9.0, 3.0
TOGETHER = "light-dark(hsl(210,75%,36%),hsl(210,75%,70%))"
APART = "light-dark(hsl(20,80%,38%),hsl(20,85%,68%))"
FIRST, LATER = APART, TOGETHER


def pictures(plans: ServingPlans) -> Markup:
    """The front, and the timeline of the first plan, as HTML; empty without rows."""
    if not plans.front:
        return Markup("")
    shown = plans.plans[0] if plans.plans else plans.beyond[0]
    return figure(
        note("Tokens a second of a user against those of a device: the plans that no other beats in both."),
        broad_or_narrow(_front(plans, WIDTH), _front(plans, NARROW)),
        note(
            f"{plural(min(SHOWN, len(shown.answered)), 'request')} of {shown.words}, from the middle of the workload."
        ),
        broad_or_narrow(_timeline(shown, WIDTH), _timeline(shown, NARROW)),
        title=f"Serving on {plural(plans.task.devices, 'device')} of {plans.task.hardware.name}",
    )


def _front(plans: ServingPlans, width: float) -> str:
    front = [plan for plan in plans.front if plan.token_seconds]
    chart = PointChart(
        "the front",
        across="tokens/s of a user",
        up="tokens/s of a device",
        furthest=max((1 / plan.token_seconds for plan in front), default=1.0),
        highest=max((plan.tokens_per_second_per_device for plan in front), default=1.0),
        width=width,
        margin=MARGIN,
    )
    points = [(1 / plan.token_seconds, plan.tokens_per_second_per_device) for plan in front]
    chart.line(points, "var(--quiet)")
    for (across, up), plan in zip(points, front, strict=True):
        tip = f"{plan.words}: {count(plan.tokens_per_second)} tokens/s, a token in {seconds(plan.token_seconds)}"
        chart.point(across, up, TOGETHER if plan.prefill is None else APART, tip)
    slowest = plans.task.token_seconds
    if slowest is not None and 1 / slowest <= chart.span:
        chart.limit(1 / slowest, f"limit: {seconds(slowest)} a token")
    entries = [(TOGETHER, "", "prompts and answers on the same devices")]
    if any(plan.prefill is not None for plan in front):
        entries.append((APART, "", "prefill on devices of its own"))
    chart.legend(entries)
    return chart.svg(alone=False)


def _timeline(plan: ServingPlan, width: float) -> str:
    """A bar for each of some requests: until its first token, and until its last."""
    middle = max(0, (len(plan.answered) - SHOWN) // 2)
    shown = plan.answered[middle : middle + SHOWN]
    begin = min(each.arrival_seconds for each in shown)
    end = max(each.last_token_seconds for each in shown)
    chart = Chart("requests over time", begin=begin, span=end - begin, width=width, margin=MARGIN)
    chart.text(8, chart.y + 12, "request", quiet=True)
    chart.y += 20
    for number, each in enumerate(shown):
        first, last = chart.at(each.first_token_seconds), chart.at(each.last_token_seconds)
        arrival = chart.at(each.arrival_seconds)
        waited = seconds(each.waited_seconds)
        chart.rect(arrival, chart.y, first - arrival, BAR, FIRST, tip=f"its first token after {waited}")
        told = f"{plural(each.tokens, 'token')}, each in {seconds(each.token_seconds)}"
        chart.rect(first, chart.y, last - first, BAR, LATER, tip=told)
        if number % 4 == 0:
            chart.text(MARGIN - 6, chart.y + BAR, f"{middle + number}", anchor="end", quiet=True, size=11)
        chart.y += BAR + GAP
    chart.y += 4
    chart.axis(lambda time: f"{time:g} s")
    chart.legend([(FIRST, "", "waits, and its prompt is computed"), (LATER, "", "tokens after the first")])
    return chart.svg(alone=False)
