"""Why one plan is faster than another, and what memory the smallest needs: sentences of the figures of plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from parallelism.display.markup import Markup, figure, folded_away, table
from parallelism.display.quantities import decimal_bytes, rate, seconds

MOST_PARTS = 5
LEAST_SHARE = 5e-4
"""A part that differs by a smaller share of the step is not told."""
ROUNDING = 1e-9
"""Steps that differ by no larger share take as long: sums of the same seconds in another order."""
SAME_PROGRAM = "zero=1 and zero=2 are the same program: one row tells both"
"""What is said of lists of plans, where both have been searched."""
LEAST_EXPOSED = 0.02
"""Links are told of the axes whose collectives take at least this share of the step."""


class Account(NamedTuple):
    """What is told of a plan."""

    split: str
    """Its settings, as `parallelism.planning.settings.split_text` writes them."""
    seconds: float
    parts: Mapping[str, float]
    """Seconds by part of the step."""
    links: Mapping[str, Mapping[str, Any]]
    """By axis, as `parallelism.training.Figures.links`."""


class Need(NamedTuple):
    """The memory of the fullest device of a plan."""

    split: str
    stage: int
    """The place of this device in the pipeline."""
    memory: Mapping[str, int]
    """Its bytes by category when it holds most."""
    setting: Mapping[str, Any] = MappingProxyType({})
    """What was asked for to need less, such as ``zero=3``."""

    @property
    def nbytes(self) -> int:
        """The bytes of all categories together."""
        return sum(self.memory.values())


def settings_text(fixed: Mapping[str, Any]) -> str:
    """Settings as they are given: ``tp=8 zero=0,1``."""
    texts = []
    for name, value in fixed.items():
        values = value if isinstance(value, list | tuple) else [value]
        texts.append(f"{name}={','.join(map(str, values))}")
    return " ".join(texts)


def refusals_text(refused: Mapping[str, int]) -> str:
    """Why no plan is possible: the reasons, the most frequent first, with their counts."""
    reasons = sorted(refused.items(), key=lambda item: -item[1])
    return f"no plan is possible: {', '.join(f'{reason} ({number})' for reason, number in reasons)}"


def why(first: Account, second: Account) -> str:
    """Why the first plan is before the second."""
    return f"the second ({second.split}) takes {longer_text(second, first)}"


def why_not(asked: str, other: Account, first: Account) -> str:
    """What the best plan with the settings that are ``asked`` for costs more, and the links that it crosses."""
    text = f"the best plan with {asked} ({other.split}) takes {longer_text(other, first)}"
    for axis, crossed in other.links.items():
        of_zero = other.parts.get("zero", 0.0) if axis == "dp" else 0.0
        if other.parts.get(axis, 0.0) + of_zero >= LEAST_EXPOSED * other.seconds:
            speed = rate(crossed["bytes"] / crossed["seconds"])
            text += (
                f". Its collectives over {axis} cross {crossed['level']}, where a device receives {speed} in "
                "calls of such sizes"
            )
    return text


def longer_text(plan: Account, first: Account) -> str:
    """By how much a plan takes longer than the first, and in which parts: the words behind "takes"."""
    more = plan.seconds - first.seconds
    names = dict.fromkeys([*plan.parts, *first.parts])
    parts = {name: plan.parts.get(name, 0.0) - first.parts.get(name, 0.0) for name in names}
    largest = sorted(parts, key=lambda name: -abs(parts[name]))[:MOST_PARTS]
    told = []
    for name in largest:
        if abs(parts[name]) >= LEAST_SHARE * first.seconds:
            sign = "+" if parts[name] > 0 else "-"
            told.append(f"{name} {sign}{seconds(abs(parts[name]))}")
    text = "as long"
    if abs(more) > ROUNDING * first.seconds:
        word = "more" if more >= 0 else "less"
        text = f"{seconds(abs(more))} ({abs(more) / first.seconds:.1%}) {word}"
    return f"{text}: {', '.join(told)}" if told else text


def need_text(needs: Sequence[Need], memory: float, reserved: str = "") -> str:
    """The memory that the smallest plan needs, by category, of the ``memory`` of a device; and what needs less.

    ``reserved`` says what tensors cannot use of the memory.
    """
    least, *others = needs
    parts = ", ".join(
        f"{name} {decimal_bytes(nbytes)}"
        for name, nbytes in sorted(least.memory.items(), key=lambda item: -item[1])
        if nbytes
    )
    text = (
        f"the smallest ({least.split}) needs {decimal_bytes(least.nbytes)} of {decimal_bytes(memory)}"
        f"{reserved and f', which are reserved in part ({reserved}),'} on stage {least.stage}: {parts}"
    )
    return text + "".join(
        f"; with {settings_text(each.setting)}: {decimal_bytes(each.nbytes)}"
        for each in others
        if each.nbytes < least.nbytes
    )


def plans_html(
    title: str,
    plans: Sequence[tuple[float, int, bool, str, bool]],
    memory: float,
    refused: Mapping[str, int],
) -> str:
    """The first plans for a notebook: seconds, bytes, whether it was simulated, words, and whether on the front."""

    def bar(share: float, colour: str) -> Markup:
        return Markup(
            f'<svg width="110" height="12" role="img"><rect width="110" height="12" fill="var(--panel)"/>'
            f'<rect width="{110 * min(share, 1):.1f}" height="12" fill="var(--{colour})" '
            f'stroke="var(--quiet)" stroke-width=".5"/></svg>'
        )

    longest = max((time for time, *_ in plans), default=0.0)
    rows = []
    for time, peak, exact, split, front in plans:
        at_least = "" if exact else "≥"
        rows.append(
            (
                split,
                "yes" if front else "",
                f"{at_least}{seconds(time)}",
                bar(time / (longest or 1.0), "forward"),
                decimal_bytes(peak),
                bar(peak / memory, "weights"),
            )
        )
    heads = ("plan", "front", "step", f"of {seconds(longest)}", "memory", f"of {decimal_bytes(memory)}")
    reasons = [(reason, str(count)) for reason, count in sorted(refused.items(), key=lambda each: -each[1])]
    return figure(
        table(rows, heads, left=2) if rows else "",
        folded_away("combinations that are refused, by reason", table(reasons)) if reasons else "",
        title=title,
    )
