"""`check_schedule`: the order of a pipeline's work that a student wrote."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from parallelism.display.quantities import plural
from parallelism.operation import ranks_in_words
from parallelism.pipelining import Pipeline, Schedule
from parallelism.pipelining.schedule import counts
from parallelism.pipelining.timing import SLOTS
from vcluster.check.answer import Answer
from vcluster.check.failures import Finding
from vcluster.check.limited import limited, raised

_KNOWN = ("gpipe", "1f1b")
_OTHER_SIZES = ((2, 3), (3, 2), (1, 2), (4, 1), (3, 7))
_TOO_LONG = (
    "the warm-up is too long, or behind it a forward stands before the backward of its pair: the backward "
    "comes first"
)
_EXCHANGED = {"F": "B", "B": "F"}
_WORDS = {"F": "forwards", "B": "backwards"}
Rows = list[list[Any]]


class _Wrong(Exception):
    """What the function returns is no schedule."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.sentence)
        self.finding = finding


def check_schedule(
    mine: Callable[..., Iterable[Any]] | Schedule | Sequence[Sequence[Any]],
    *,
    stages: int = 4,
    microbatches: int = 8,
    like: str | None = None,
) -> Answer:
    """Check the order of work of a pipeline.

    ``mine``
        a function ``(rank, stages, microbatches)`` that returns the actions of a rank, one stage on each; or the rows
        of all ranks; or a `Schedule`.  An action is ``"2F0"`` (stage 2, forward, microbatch 0) or, where a rank has one
        stage, ``"F0"``.
    ``stages``, ``microbatches``
        the size that is shown.  A function is checked at other sizes, too.
    ``like``
        the name of a schedule, such as ``"1f1b"``: ``mine`` may have no larger bubble and keep no more microbatches on
        any rank.  By default every order that can run will do.

    The `Answer` tells the rank, the step, and the likely mistake.  It compares cycles (an F or a B takes one; messages
    take none), bubble and memory with known schedules, and shows the schedule if it can run.

    ``ValueError`` for sizes below 1 and for a name that there is not.

    >>> check_schedule(lambda rank, stages, microbatches: [f"F{k}" for k in range(microbatches)], stages=2).likely
    'the backwards are missing'
    """
    counts(stages=stages, microbatches=microbatches)
    wanted = None if like is None else Pipeline(stages, microbatches, like).schedule
    subject = f"schedule by {getattr(mine, '__name__', getattr(mine, 'name', 'rows of actions'))}"
    function = mine if callable(mine) and not isinstance(mine, Schedule) else None
    sizes = [(stages, microbatches), *(_OTHER_SIZES if function is not None else ())]
    shown: Schedule | None = None
    for count, (p, m) in enumerate(sizes, 1):
        try:
            schedule = _schedule(mine, p, m, like)
            if shown is None:
                shown = schedule
            if like is not None:
                _compare(schedule, Pipeline(p, m, like).schedule)
        except _Wrong as wrong:
            finding = wrong.finding
            likely = finding.likely
            if count > 1 and not likely:
                likely = f"it is right with {plural(stages, 'stage')} and {_microbatches(microbatches)}"
            return Answer(
                False,
                subject,
                f"with {plural(p, 'stage')} and {_microbatches(m)}, {finding.sentence}",
                finding.details,
                likely,
                cases=count,
            )
    assert shown is not None
    known = _KNOWN[:1] if like == "gpipe" else _KNOWN
    names = dict.fromkeys(known if like is None else (*known, like))
    others = [Pipeline(stages, microbatches, name).schedule for name in names]
    figures = (
        ("", "cycles", "bubble", "microbatches kept, by rank"),
        _row("yours", shown),
        *(_row(each.name, each) for each in others),
    )
    sentence = f"it can run at all {len(sizes)} sizes" if function is not None else "it can run"
    if wanted is not None:
        sentence += f", with the bubble and the memory of {wanted.name}"
    return Answer(
        True,
        subject,
        sentence,
        tuple(str(shown).split("\n")),
        "",
        figures,
        len(sizes),
        picture=shown.timeline(SLOTS)._repr_html_(),
    )


def _microbatches(count: int) -> str:
    return "1 microbatch" if count == 1 else f"{count} microbatches"


def _row(name: str, schedule: Schedule) -> tuple[str, ...]:
    return (
        name,
        str(schedule.makespan()),
        f"{schedule.idle_fraction():.1%}",
        " ".join(map(str, schedule.peak_live())),
    )


def _schedule(mine: Any, stages: int, microbatches: int, like: str | None) -> Schedule:
    """The schedule, which can run; `_Wrong` if there is none."""
    if isinstance(mine, Schedule):
        schedule = mine
        rows = _texts(mine)
    else:
        rows = _rows(mine, stages, microbatches)
        if callable(mine):
            _check_counts(rows, microbatches, like)
        chunks = max(1, stages // max(1, len(rows)))
        try:
            schedule = Schedule("mine", rows, stages, microbatches, chunks)
        except (ValueError, TypeError) as error:
            raise _Wrong(Finding(str(error))) from None
    try:
        schedule.validate()
    except ValueError as error:
        if uneven := _uneven(schedule):
            raise _Wrong(uneven) from None
        text = re.sub(r"^schedule '[^']*', ", "", str(error)).replace("schedule 'mine'", "your schedule")
        text = re.sub(r" \((\w+)\) for (\w+)", r": its \1 needs \2", text)
        text = re.sub(r"its \d+([FBIW]\d+) needs", r"its \1 needs", text)
        if callable(mine) and " needs " not in text:  # one stage on each rank: its number says nothing
            text = re.sub(r"\b\d+([FBIW]\d)", r"\1", text)
        raise _Wrong(
            Finding(text.split("\n")[0], tuple(text.split("\n")[1:]), _why(rows, text, like))
        ) from None
    return schedule


def _rows(mine: Any, stages: int, microbatches: int) -> Rows:
    if not callable(mine):
        return [_with_stage(row, rank) for rank, row in enumerate(mine)]
    rows = []
    for rank in range(stages):
        try:
            given = limited(mine, rank, stages, microbatches)
            if isinstance(given, str):
                given = [given]
            row = None if given is None else list(given)
        except Exception as error:
            found = raised(f"for rank {rank}", error)
            if isinstance(error, TypeError) and "argument" in str(error):
                found = found._replace(likely="the function is called as mine(rank, stages, microbatches)")
            raise _Wrong(found) from None
        if row is None:
            raise _Wrong(Finding(f"rank {rank} returns None", likely="a return is missing"))
        rows.append(_with_stage(row, rank))
    return rows


def _texts(schedule: Schedule) -> Rows:
    return [list(map(str, row)) for row in schedule.actions]


def _with_stage(row: Iterable[Any], rank: int) -> list[Any]:
    """The actions of a rank.  An action without a stage, such as ``"F0"``, is of the stage with the rank's number."""
    found = []
    for action in row:
        is_bare = isinstance(action, str) and re.match(r"[FBIW]-?\d", action)
        found.append(f"{rank}{action}" if is_bare else action)
    return found


def _parts(action: Any) -> tuple[int, str, int]:
    found = re.fullmatch(r"(\d+)([FBIW])(-?\d+)", action) if isinstance(action, str) else None
    if found is not None:
        return int(found[1]), found[2], int(found[3])
    if isinstance(action, tuple) and len(action) == 3:
        return action
    shown = re.sub(r"^\d+(?=[FBIW])", "", action) if isinstance(action, str) else action
    raise _Wrong(
        Finding(
            f"{shown!r} is no action",
            likely="an action is a kind and a microbatch, 'F0' for the forward "
            "of microbatch 0 or 'B0' for its backward; a list has one text for each",
        )
    )


def _microbatches_of(kind: str, row: Iterable[Any]) -> list[int]:
    """The microbatches of the actions of a kind, in their order."""
    return [k for _, own_kind, k in map(_parts, row) if own_kind == kind]


def _check_counts(rows: Rows, microbatches: int, like: str | None) -> None:
    """`_Wrong` if actions are missing or doubled, or of other stages."""
    for rank, (row, warm_up) in enumerate(zip(rows, _warm_ups(rows), strict=True)):
        actions = [_parts(action) for action in row]
        if (
            like != "gpipe"
            and warm_up > microbatches
            and any(k < 0 or k >= microbatches for _, _, k in actions)
        ):
            wrong = next(f"{kind}{k}" for _, kind, k in actions if k < 0 or k >= microbatches)
            raise _Wrong(
                Finding(
                    f"rank {rank} begins with {plural(warm_up, 'forward')} and has {wrong}, where microbatches are 0 to "
                    f"{microbatches - 1}",
                    likely=f"the warm-up of stage {rank} is too long for so few microbatches: it is not limited to their "
                    "number",
                )
            )
        if other := [action for action in actions if action[0] != rank]:
            stage, kind, k = other[0]
            raise _Wrong(
                Finding(
                    f"rank {rank} has {stage}{kind}{k}, and it holds stage {rank} only",
                    likely="the stage and the microbatch are exchanged, or a rank lists the work of "
                    "another one",
                )
            )
        by_kind = {kind: _microbatches_of(kind, actions) for kind in "FBIW"}
        if not by_kind["F"] and not actions:
            raise _Wrong(
                Finding(f"rank {rank} has no actions", likely="the rank is left out, or its loops are empty")
            )
        if sorted(by_kind["F"]) == list(range(1, microbatches + 1)):
            raise _Wrong(
                Finding(
                    f"rank {rank} has forwards of microbatches 1 to {microbatches}",
                    likely="microbatches are counted from 0",
                )
            )
        _check_kind(rank, "F", by_kind["F"], microbatches)
        if not any(by_kind[kind] for kind in "BIW"):
            raise _Wrong(
                Finding(
                    f"rank {rank} has {plural(microbatches, 'forward')} and no backward",
                    likely="the backwards are missing",
                )
            )
        if by_kind["I"] and not by_kind["W"]:
            raise _Wrong(
                Finding(
                    f"rank {rank} has backwards for the input (I) and none for the weights (W)",
                    likely="each I needs its W",
                )
            )
        _check_kind(rank, "B", by_kind["B"] + by_kind["I"], microbatches)


def _check_kind(rank: int, kind: str, found: list[int], microbatches: int) -> None:
    beyond = sorted({k for k in found if not 0 <= k < microbatches})
    missing = sorted(set(range(microbatches)) - set(found))
    doubled = sorted(k for k, count in Counter(found).items() if count > 1)
    if beyond:
        raise _Wrong(
            Finding(
                f"rank {rank} has {kind}{beyond[0]}, and microbatches are 0 to {microbatches - 1}",
                likely="a loop begins below microbatch 0"
                if beyond[0] < 0
                else "off by one: a loop runs a step too far",
            )
        )
    if doubled:
        raise _Wrong(
            Finding(
                f"rank {rank} has {kind}{doubled[0]} twice",
                likely=_why_twice(kind, found, doubled[0], missing),
            )
        )
    if missing:
        names = ", ".join(f"{kind}{k}" for k in missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise _Wrong(Finding(f"rank {rank} lacks {names}", likely=_why_missing(kind, missing, microbatches)))


def _why_twice(kind: str, found: list[int], doubled: int, missing: list[int]) -> str:
    if len(set(found)) == 1 < len(found) - 1:
        return "the number of the microbatch does not change in the loop"
    if missing:
        return f"the number of the {_WORDS[kind]} is off: {kind}{missing[0]} is missing"
    if kind == "F" and found[0] == doubled == 0:
        return (
            "the part with a backward and a forward in turn begins at microbatch 0 again, but the warm-up "
            "already ran its forward"
        )
    return f"the ranges of two loops overlap: some {_WORDS[kind]} run in both"


def _why_missing(kind: str, missing: list[int], microbatches: int) -> str:
    if missing == [microbatches - 1]:
        return f"off by one: the last of the {_WORDS[kind]} is left out"
    if missing == [0]:
        return f"the first of the {_WORDS[kind]} is left out"
    if kind == "B" and missing[-1] == microbatches - 1:
        return "part 3 is missing, the backwards that are left: those of the warm-up microbatches"
    return f"some {_WORDS[kind]} are left out"


def _warm_ups(rows: Rows) -> list[int]:
    """By rank, the number of forwards before the first backward."""
    found = []
    for row in rows:
        kinds = [_parts(action)[1] for action in row]
        found.append(next((place for place, kind in enumerate(kinds) if kind != "F"), len(kinds)))
    return found


def _uneven(schedule: Schedule) -> Finding | None:
    """Stages without work, or ranks with more stages than others."""
    held: list[set[int]] = []
    for row in schedule.actions:
        held.append({work.stage for entry in row for work in entry.works})
    if sum(map(len, held)) > len(set().union(*held)):
        return None  # a stage on two ranks, which the validation names
    if lacking := sorted(set(range(schedule.stages)) - set().union(*held)):
        numbers = ", ".join(map(str, lacking))
        rows = "there is 1 row" if schedule.ranks == 1 else f"there are {schedule.ranks} rows"
        idle = [rank for rank, stages in enumerate(held) if not stages]
        word = "stage" if len(lacking) == 1 else "stages"
        likely = "the row of a rank is missing, or the work of one of its stages"
        if idle:
            likely = f"{ranks_in_words(idle)} {'has' if len(idle) == 1 else 'have'} no actions"
        return Finding(f"{rows} of actions, and none has work of {word} {numbers}", likely=likely)
    if any(len(stages) != schedule.chunks for stages in held):
        numbers = ", ".join(str(len(stages)) for stages in held)
        return Finding(f"ranks have work of {numbers} stages, and should have as many each")
    return None


def _why(rows: Rows, text: str, like: str | None) -> str:
    """The likely mistake of an order that cannot run."""
    if "too early" in text:
        if like == "gpipe":
            return "the backwards stand before the forwards: with GPipe all forwards come first"
        if _can_run([list(map(_exchanged, row)) for row in rows]):
            return "F and B are exchanged"
        rank = next((rank for rank, count in enumerate(_warm_ups(rows)) if count == 0 and rows[rank]), None)
        return "a backward comes before the forward of the same microbatch on the same rank" + (
            "" if rank is None else f": rank {rank} begins with a backward, so its warm-up is too short"
        )
    if "cannot go on" not in text:
        return ""
    try:
        ahead = _warm_ups(rows)
        orders = {tuple(_microbatches_of("F", row)) for row in rows}
    except _Wrong:
        return ""
    if len(orders) > 1:
        return "the ranks run their forwards in different orders: each waits for what the other does later"
    if any(before < after for before, after in pairwise(ahead)):
        return (
            f"the warm-up grows with the rank ({', '.join(map(str, ahead))} forwards before the first backward): "
            "a later rank waits for forwards that an earlier one runs only after a backward"
        )
    return "ranks wait for each other in a circle"


def _exchanged(action: Any) -> str:
    stage, kind, k = _parts(action)
    return f"{stage}{_EXCHANGED.get(kind, kind)}{k}"


def _can_run(rows: Rows) -> bool:
    microbatches = 1 + max(k for row in rows for _, _, k in map(_parts, row))
    try:
        Schedule("mine", rows, len(rows), microbatches, 1).validate()
    except ValueError:
        return False
    return True


def _compare(mine: Schedule, wanted: Schedule) -> None:
    """`_Wrong` if ``mine`` takes longer or holds more than ``wanted``."""
    if mine.ranks != wanted.ranks:
        raise _Wrong(Finding(f"it has {mine.ranks} ranks, and {wanted.name} {wanted.ranks}"))
    ahead, usual = _warm_ups(_texts(mine)), _warm_ups(_texts(wanted))
    cycles, least = mine.makespan(), wanted.makespan()
    if wanted.name == "gpipe" and ahead != usual:
        raise _Wrong(
            Finding(
                f"it can run, but rank 0 has a backward after {plural(ahead[0], 'forward')}",
                likely="a backward follows each forward: with GPipe all forwards come first",
            )
        )
    different = next((rank for rank in range(mine.ranks) if ahead[rank] != usual[rank]), None)
    told = (
        ""
        if different is None
        else (
            f"rank {different} runs {plural(ahead[different], 'forward')} before its "
            f"first backward, {wanted.name} runs {usual[different]}"
        )
    )
    if cycles > least:
        raise _Wrong(
            Finding(
                f"it can run and takes {cycles} cycles, where {wanted.name} takes {least}",
                (told,) if told else (),
                _why_longer(ahead, usual, different),
            )
        )
    for rank, (held, most) in enumerate(zip(mine.peak_live(), wanted.peak_live(), strict=True)):
        if held > most:
            every = held == mine.microbatches and held > most + 1
            raise _Wrong(
                Finding(
                    f"it can run, and rank {rank} keeps the activations of {_microbatches(held)}, where {wanted.name} "
                    f"keeps {most}",
                    (told,) if told else (),
                    "all forwards come first: this is gpipe, which keeps every microbatch"
                    if every
                    else _TOO_LONG,
                )
            )


def _why_longer(ahead: list[int], usual: list[int], different: int | None) -> str:
    """Why a step takes longer than usual.  ``different`` is the first rank with another warm-up."""
    if different is None:
        return "the order of the backwards, or of the work behind the warm-up, makes ranks wait"
    if ahead[different] < usual[different]:
        return "the warm-up is too short: later ranks wait for work"
    if len(set(ahead)) == 1 < len(ahead):
        return (
            f"the warm-up is as long on each rank ({plural(ahead[0], 'forward')}): the nearer a rank is to the last "
            "stage, the fewer forwards it needs before its first backward"
        )
    return _TOO_LONG
