"""Pictures of a search for ways to serve: the front, and the requests of one plan over time."""

from __future__ import annotations

from html import escape

from parallelism.display.chart import LETTER, Chart, ticks
from parallelism.display.markup import Markup, figure, note, wide
from parallelism.display.quantities import count, given, plural, seconds
from parallelism.serving.plans import ServingPlan, ServingPlans

WIDTH, HEIGHT, MARGIN = 560.0, 280.0, 64.0
ROOM = 1.08
"""The axes end so many times as far as the last point."""
SHOWN = 24
"""The requests of a timeline."""
BAR, GAP = 9.0, 3.0
TOGETHER, APART = (
    "light-dark(hsl(210,75%,36%),hsl(210,75%,70%))",
    "light-dark(hsl(20,80%,38%),hsl(20,85%,68%))",
)
FIRST, LATER = APART, TOGETHER


def pictures(plans: ServingPlans) -> Markup:
    """The front, and the timeline of the first plan, as HTML; empty without rows."""
    if not plans.front:
        return Markup("")
    shown = plans.plans[0] if plans.plans else plans.beyond[0]
    return figure(
        note("Tokens a second of a user against those of a device: the plans that no other beats in both."),
        wide(_front(plans)),
        note(
            f"{plural(min(SHOWN, len(shown.answered)), 'request')} of {shown.words}, from the middle of the workload."
        ),
        wide(_timeline(shown)),
        title=f"Serving on {plural(plans.task.devices, 'device')} of {plans.task.hardware.name}",
    )


def _front(plans: ServingPlans) -> str:
    front = [plan for plan in plans.front if plan.token_seconds]
    across = ROOM * max((1 / plan.token_seconds for plan in front), default=1.0)
    most = ROOM * max((plan.tokens_per_second_per_device for plan in front), default=1.0)
    chart = Chart("the front", begin=0.0, span=across, width=WIDTH, margin=MARGIN)
    chart.text(8, chart.y + 12, "tokens/s of a device", quiet=True)
    floor = chart.y + 24 + HEIGHT
    for tick in ticks(most, 5):
        y = floor - tick / most * HEIGHT
        chart.add(f'<path d="M{MARGIN} {y:.1f}h{WIDTH}" stroke="var(--line)"/>')
        chart.text(MARGIN - 6, y + 4, given(tick).strip(), anchor="end", quiet=True)
    last = -1e9
    for tick in ticks(across, 7):
        last = chart.tick(chart.at(tick), floor, f"{tick:g}", last)
    chart.text(MARGIN + WIDTH, floor + 34, "tokens/s of a user", anchor="end", quiet=True)
    points = [
        (chart.at(1 / plan.token_seconds), floor - plan.tokens_per_second_per_device / most * HEIGHT)
        for plan in front
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    chart.add(f'<polyline points="{path}" fill="none" stroke="var(--quiet)" stroke-width="1.5"/>')
    for (x, y), plan in zip(points, front, strict=True):
        tip = escape(
            f"{plan.words}: {count(plan.tokens_per_second)} tokens/s, a token in {seconds(plan.token_seconds)}"
        )
        ink = TOGETHER if plan.prefill is None else APART
        chart.add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{ink}"><title>{tip}</title></circle>')
    if plans.task.token_seconds is not None:
        _limit(chart, 1 / plans.task.token_seconds, floor, across)
    chart.y = floor + 46
    entries = [(TOGETHER, "", "prompts and answers on the same devices")]
    if any(plan.prefill is not None for plan in front):
        entries.append((APART, "", "prefill on devices of its own"))
    chart.legend(entries)
    return chart.svg(alone=False)


def _limit(chart: Chart, least: float, floor: float, across: float) -> None:
    """A line where the limit of a token is."""
    if least > across:
        return
    x, words = chart.at(least), f"limit: {seconds(1 / least)} a token"
    chart.add(f'<path d="M{x:.1f} {floor:.1f}v{-HEIGHT:.1f}" stroke="var(--quiet)" stroke-dasharray="4 3"/>')
    has_room = x + 4 + len(words) * LETTER < chart.margin + chart.width
    chart.text(
        x + (4 if has_room else -4),
        floor - HEIGHT + 10,
        words,
        anchor="start" if has_room else "end",
        quiet=True,
    )


def _timeline(plan: ServingPlan) -> str:
    """A bar for each of some requests: until its first token, and until its last."""
    middle = max(0, (len(plan.answered) - SHOWN) // 2)
    shown = plan.answered[middle : middle + SHOWN]
    begin = min(each.arrival_seconds for each in shown)
    end = max(each.last_token_seconds for each in shown)
    chart = Chart("requests over time", begin=begin, span=end - begin, width=WIDTH, margin=MARGIN)
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
