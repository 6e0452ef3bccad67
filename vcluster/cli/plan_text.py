"""What `plan` found, in 80 columns."""

import re
from collections.abc import Mapping, Sequence
from math import ceil, inf
from pathlib import Path
from textwrap import wrap
from typing import Any

from parallelism.display import WIDTH, in_columns
from parallelism.display.quantities import count, fit, plural, seconds
from parallelism.hardware import Reserve
from parallelism.planning.explanation import SAME_PROGRAM, Need, need_text, why
from parallelism.planning.promising import leaves_some_out
from parallelism.trace import Trace
from vcluster.cli.plan_document import account, why_not_text
from vcluster.cli.serving.cache_words import cache_text
from vcluster.cli.training import gigabytes

LEAST_TOLD = 0.0005
"""Parts of a smaller share of each step are not told."""
NAMES = {
    "products": "prod",
    "attention": "attn",
    "elementwise": "elem",
    "recompute": "again",
    "update": "upd",
    "communication": "comm",
}
"""Short names of parts, as heads of columns."""
MEANINGS = {
    "prod": "products",
    "attn": "attention",
    "elem": "other ops",
    "upd": "update",
    "again": "recomputed",
    "comm": "communication",
    "zero=": "ZeRO stage",
    "cp=": "context parallel",
    "sp": "sequence parallel",
    "x": "chunks a device",
    "balanced": "the last stage has fewer layers, for the head",
    "mb=": "rows of a microbatch",
}
"""What the short words of the tables mean."""


def plan_text(document: Mapping[str, Any], *, again: bool) -> str:
    """The whole document; with ``again``, the `simulate` lines of the front, too."""
    plans = document["plans"]
    lines = [*_search(document), ""]
    if plans:
        lines += [
            *_table(plans),
            *_same_programs(document),
            "",
            *_parts(plans),
            *_legend(document),
            "",
            *_front(document["front"], plans),
            "",
        ]
        answers = [_why_not_text(each, plans[0]) for each in document["why_not"]]
        lines += [*wrap(f"Of the first, {document['stages']}.", WIDTH), ""] if document.get("stages") else []
        lines += [
            line for text in document.get("remarks", ()) for line in (*wrap(fit(text, 1000), WIDTH), "")
        ]
        imperfect = document.get("imperfect")
        lines += [*wrap(imperfect["text"], WIDTH, break_on_hyphens=False), ""] if imperfect else []
        lines += [*_why(plans), *(line for answer in answers for line in (*wrap(answer, WIDTH), ""))]
        lines += [_verified_text(document), ""] if document.get("verified") else []
        lines += [*wrap(cache_text(document["cache"]), WIDTH), ""] if document.get("cache") else []
        lines += [*_commands(document, again), ""]
    if "all_seconds" in document:
        lines += [
            f"{document['all_seconds']:.1f} s in all, {document['elapsed_seconds']:.1f} s of them the search"
        ]
    return "\n".join(lines).rstrip()


def _lines(start: str, text: str) -> list[str]:
    """A text of any length behind ``start``, without what a terminal might obey; further lines begin below it."""
    return wrap(
        fit(text, max(len(text), 3)),
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,
    ) or [start.rstrip()]


def _stacked(document: Mapping[str, Any]) -> str:
    """The hardware with its stack."""
    return "+".join(name for name in (document["hardware"], document.get("stack")) if name)


def _heading(document: Mapping[str, Any]) -> list[str]:
    """What is planned for, and what is assumed."""
    tokens = f", {document['tokens']}" if "tokens" in document else ""
    text = (
        f"{document['model']}, {count(document['parameters'])} parameters{tokens}: {document['batch']} sequences a "
        f"step on {plural(document['devices'], 'device')} of {_stacked(document)}, "
        f"{gigabytes(document['memory_bytes'])} GB each"
    )
    reserve = _reserve(document)
    text += f", with a reserve of {reserve.text}" if reserve else ""
    lines = [text, *([f"assumed: {document['assumed']}"] if "assumed" in document else [])]
    return [
        *lines,
        *([f"compared with {document['validation']['text']}"] if "validation" in document else []),
    ]


def _search(document: Mapping[str, Any]) -> list[str]:
    gap = document["gap"]
    proof = "the first is the best of all"
    if leaves_some_out(document["refused"]):
        proof = "the first is the best of those that were timed"
    if not document["plans"]:
        proof = "none fits"
    elif gap:
        proof = f"the first may be up to {gap:.1%} slower than the best: --simulations stopped the proof"
    refused = document["refused"]
    lines = [
        *(line for text in _heading(document) for line in wrap(text, WIDTH)),
        "",
        *wrap(
            f"{document['considered']} combinations: {sum(refused.values())} refused, {document['timed']} timed, "
            f"{document['simulated']} simulated in {document['elapsed_seconds']:.1f} s; {proof}",
            WIDTH,
        ),
    ]
    alone = {f"simulated one by one: {why}": count for why, count in document.get("one_by_one", {}).items()}
    counts = [*refused.items(), *alone.items()]
    return lines + [line for reason, number in counts for line in _lines(f"  {number:>8}  ", reason)]


def _table(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [["", "step", "tokens/s", "MFU", "GB"]]
    for place, plan in enumerate(plans, 1):
        rate = plan.get("tokens_per_second")  # a program's rows have no known number of tokens
        rows.append(
            [
                str(place),
                seconds(plan["seconds"]),
                "" if rate is None else count(rate),
                f"{plan['mfu']:.1%}",
                gigabytes(plan["peak_bytes"]),
            ]
        )
    if not any(row[2] for row in rows[1:]):
        rows = [[*row[:2], *row[3:]] for row in rows]
    splits = ["plan", *(plan["split"] for plan in plans)]
    cells = in_columns(rows, 0)
    return [line for start, split in zip(cells, splits, strict=True) for line in _lines(f"{start}  ", split)]


def _same_programs(document: Mapping[str, Any]) -> list[str]:
    return wrap(SAME_PROGRAM, WIDTH) if {1, 2} <= {*document["all"]["columns"].get("zero", ())} else []


def _parts(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    """The percentages of the step of each part, by plan."""
    told = _told_parts(plans)
    parts = dict.fromkeys(name for plan in plans for name in plan["parts"])
    names = [name for name in parts if name in told]
    rows = [("%", *(NAMES.get(name, name) for name in names))]
    for place, plan in enumerate(plans, 1):
        shares = [f"{100 * plan['parts'].get(name, 0) / plan['seconds']:.1f}" for name in names]
        rows.append((str(place), *shares))
    return ["the step by part, on the device that waits least for others", *in_columns(rows, 0)]


def _told_parts(plans: Sequence[Mapping[str, Any]]) -> set[str]:
    return {
        name for plan in plans for name, own in plan["parts"].items() if own >= LEAST_TOLD * plan["seconds"]
    }


def _legend(document: Mapping[str, Any]) -> list[str]:
    """What the short words mean that the tables have."""
    plans = document["plans"]
    words = {NAMES.get(name, name) for name in _told_parts(plans)}
    for each in (*plans, *_shown(document["front"])):
        words.update(re.findall(r"\b(?:zero=|cp=|sp\b|mb=|balanced\b)|(?<=[a-z])x(?=\d)", each["split"]))
    told = []
    for word, meaning in MEANINGS.items():
        if word in words:
            told.append(f"{'x2' if word == 'x' else word.removesuffix('=')} {meaning}")
    return wrap(f"({', '.join(told)}; docs/glossary.md)", WIDTH, break_on_hyphens=False)


def _front(front: Sequence[Mapping[str, Any]], plans: Sequence[Mapping[str, Any]]) -> list[str]:
    """At most eight plans, spread over the front, under the names of `_names`."""
    shown = _shown(front)
    names = _names(front, plans)
    cells = []
    for each in shown:
        at_least = "" if each.get("simulated", True) else ">= "
        time = at_least + seconds(each["seconds"])
        cells.append((names[each["split"]], time, f"{gigabytes(each['peak_bytes'])} GB"))
    rows = in_columns(cells, 0)
    part = "" if len(shown) == len(front) else f", {len(rows)} of {len(front)}"
    return [
        f"no plan is both faster and smaller than these{part}:",
        *(
            line
            for row, each in zip(rows, shown, strict=True)
            for line in _lines(f"  {row}  ", each["split"])
        ),
    ]


def _shown(front: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    chosen = (
        sorted({round(i * (len(front) - 1) / 7) for i in range(8)}) if len(front) > 8 else range(len(front))
    )
    return [front[i] for i in chosen]


def _names(front: Sequence[Mapping[str, Any]], plans: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Names of the plans that are shown, by their settings: numbers of the best, and letters of others on the front."""
    names = {plan["split"]: str(place) for place, plan in enumerate(plans, 1)}
    others = [each["split"] for each in _shown(front) if each["split"] not in names]
    return names | dict(zip(others, "abcdefgh", strict=False))


def _why(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    return [line for text in _why_text(plans) for line in (*wrap(text, WIDTH), "")]


def _why_text(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"Why the first: {why(*map(account, plans[:2]))}."] if len(plans) > 1 else []


def _why_not_text(each: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    return f"Why not {each['question']}: {why_not_text(each, first)}."


def _commands(document: Mapping[str, Any], every: bool) -> list[str]:
    """The `simulate` line of the first, and for the others what all have in common, then the words of each.

    The others are those of the table, those that were asked for, and with ``every`` those of the front.
    """
    plans, front = document["plans"], document["front"]
    flags = {each["split"]: each.get("flags", "") for each in front} | {
        plan["split"]: plan["flags"] for plan in plans
    }
    names = {
        split: name
        for split, name in _names(front, plans).items()
        if split != plans[0]["split"] and (every or name.isdigit())
    }
    others = [
        line
        for split, name in names.items()
        if flags[split]
        for line in _wrapped(flags[split], f"{name:>4}  ")
    ]
    for each in document["why_not"]:
        if each.get("plan") and not each["answer"]:
            others += [*_lines("  ", f"with {each['question']}:"), *_wrapped(each["plan"]["flags"], "      ")]
    lines = ["The first plan again:", *_wrapped(plans[0]["command"], "  ")]
    if others:
        bound = " (the seconds behind >= are a bound, without shared links)" if every else ""
        lines += [f"The others again{bound}:", *_wrapped(f"{document['prefix']} ...", "  "), *others]
    if not every and any(name.isalpha() for name in _names(front, plans).values()):
        lines += wrap(
            "--again prints the commands of the front, too. --save FILE keeps this answer, and --load FILE prints it again, "
            "without a search.",
            WIDTH,
        )
    return lines


def _wrapped(words: str, start: str) -> list[str]:
    """A command on several lines, each but the last with a backslash at its end, as a shell takes it.

    Quotes are double ones, in which a shell takes a line that goes on, too.  A word that is longer than a line is
    broken behind a comma, and goes on where the next line begins.
    """
    together = re.sub(
        r"(--[a-z-]+) (?!--)", "\\1\0", words.replace("'", '"')
    )  # a flag stands beside its value
    lines = [
        line.replace("\0", " ")
        for line in wrap(
            together,
            WIDTH - 2,
            initial_indent=start,
            subsequent_indent=" " * (len(start) + 2),
            break_on_hyphens=False,
            break_long_words=False,
        )
    ]
    broken = []
    for line in lines:
        while len(line) > WIDTH - 2 and (comma := line.rfind(",", 0, WIDTH - 2)) > 0:
            broken.append(f"{line[: comma + 1]}\\")
            line = line[comma + 1 :]
        broken.append(f"{line} \\")
    return [*broken[:-1], broken[-1].removesuffix(" \\")]


def needs_text(document: Mapping[str, Any]) -> str:
    """Why nothing fits, on one line: the least memory that is needed, by category."""
    needs = [
        Need(each["split"], each["stage"], each["memory"], each["setting"]) for each in document["needs"]
    ]
    needed = need_text(needs, document["memory_bytes"], _reserve(document).text)
    devices = document["devices"]
    times = ceil(min(need.nbytes for need in needs) / document["memory_bytes"])
    more = f". Try --devices {times * devices}, or hardware with more memory" if times > 1 else ""
    return f"no plan fits: {needed}{more}"


def _reserve(document: Mapping[str, Any]) -> Reserve:
    """What tensors cannot use; nothing in a document from before there was a reserve."""
    return Reserve(**document.get("reserve", {}))


# -- the page ----------------------------------------------------------------------------------------------------------


def write_page(document: Mapping[str, Any], trace: Trace | None, path: Path) -> None:
    """Writes the page of a document, with the timeline and the memory of the first plan if there is a ``trace``."""
    plans, found = document["plans"], document["all"]
    search = "; ".join(_heading(document))
    notes = [search] if plans else []
    verdict = [] if plans else [search, needs_text(document)]
    if plans:
        first = plans[0]
        verdict = [
            f"Best: {first['split']}, {seconds(first['seconds'])} a step, MFU {first['mfu']:.1%}, "
            f"{gigabytes(first['peak_bytes'])} GB on the fullest device.",
            *_why_text(plans),
        ]
        if document.get("verified"):
            verdict.append(" ".join(_verified_text(document).split()))
    facts = [
        ("combinations", f"{document['considered']:,}"),
        ("refused", f"{sum(document['refused'].values()):,}"),
        ("timed", f"{document['timed']:,}"),
        ("simulated", f"{document['simulated']:,}"),
        ("seconds of search", f"{document['elapsed_seconds']:.1f}"),
        ("gap", "0, proved" if not document["gap"] else f"at most {document['gap']:.1%}"),
    ]
    answers = [
        (_why_not_text(each, plans[0]), (each.get("plan") or {}).get("command", ""))
        for each in document["why_not"]
    ]
    answers += [("The first plan again:", plans[0]["command"])] if plans else []
    from vcluster.report import plan_html

    plan_html(
        path,
        title=f"Plans of {document['model']} on {plural(document['devices'], 'device')} of {_stacked(document)}",
        verdict=verdict,
        facts=facts,
        plans=found,
        front=_front_of(found),
        rows=plans,
        refused=sorted(document["refused"].items(), key=lambda item: -item[1]),
        answers=answers,
        notes=notes,
        trace=trace,
    )


def _verified_text(document: Mapping[str, Any]) -> str:
    """What a run of the first plan on processes showed."""
    from vcluster.runs.verified import verified_text

    return verified_text(document["verified"])


def _front_of(found: Mapping[str, Any]) -> list[int]:
    """The plans than which no other is both faster and smaller, the fastest first."""
    least, front = inf, []
    for i in sorted(range(len(found["seconds"])), key=lambda i: (found["seconds"][i], found["peaks"][i])):
        if found["peaks"][i] < least:
            least = found["peaks"][i]
            front.append(i)
    return front
