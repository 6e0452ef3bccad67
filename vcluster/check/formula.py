"""`check_formula`: a formula that a student wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from parallelism.display.quantities import shortened
from vcluster.check.answer import Answer
from vcluster.check.limited import limited, raised


def check_formula(
    mine: Callable[..., Any],
    reference: Callable[..., float],
    cases: Iterable[tuple[Any, ...]],
    *,
    mistakes: Mapping[str, Callable[..., float]] | None = None,
    rtol: float = 1e-9,
) -> Answer:
    """Check a function of numbers against ``reference``, which measures or counts, at each of ``cases``.

    ``mistakes`` are usual wrong formulas, by the sentence that names them.  The `Answer` tells a case that
    differs, and the mistake whose formula agrees with ``mine`` at all cases.  ``ValueError`` if there are no cases.

    >>> check_formula(lambda n: n, lambda n: n - 1, [(1,), (2,)], mistakes={"one too many": lambda n: n}).likely
    'one too many'
    """
    given = list(cases)
    name = getattr(mine, "__name__", "a function")
    subject = f"formula {name}"
    if not given:
        raise ValueError("check_formula needs at least one case, got none")
    results: list[float] = []
    for case in given:
        if not isinstance(case, tuple | list):
            raise TypeError(
                f"each case must be a tuple of arguments, such as ({shortened(case)},); got {shortened(case)}"
            )
        result = _result(mine, f"{name}({', '.join(map(repr, case))})", case, subject)
        if isinstance(result, Answer):
            return result
        results.append(result)
    wanted = [float(reference(*case)) for case in given]
    wrong = [place for place in range(len(given)) if not _agree(results[place], wanted[place], rtol)]
    if not wrong:
        return Answer(True, subject, f"right in all {len(given)} cases", cases=len(given))
    first = wrong[len(wrong) // 2]  # the smallest cases often agree with more than one formula
    arguments = ", ".join(map(str, given[first]))
    differ = "differs" if len(wrong) == 1 else "differ"
    return Answer(
        False,
        subject,
        f"{len(wrong)} of {len(given)} cases {differ}. {name}({arguments}) gives "
        f"{results[first]:.6g}, and {wanted[first]:.6g} is measured",
        likely=_likely(mistakes or {}, given, results, rtol),
        cases=len(given),
    )


def _result(mine: Callable[..., Any], call: str, case: tuple[Any, ...], subject: str) -> float | Answer:
    """What a formula gives at a case; an answer where it raises or gives no number."""
    try:
        result = limited(mine, *case)
    except Exception as error:
        said = raised(call, error)
        return Answer(False, subject, said.sentence, said.details, said.likely)
    number = _number(result)
    if number is not None:
        return number
    likely = ""
    if result is None:
        likely = "the function returns nothing: a return is missing"
    elif isinstance(result, str):
        likely = "the function returns a text of a number"
    return Answer(False, subject, f"{call} returns {result!r}, and should return a number", likely=likely)


def _likely(
    mistakes: Mapping[str, Callable[..., float]],
    cases: Sequence[tuple[Any, ...]],
    results: Sequence[float],
    rtol: float,
) -> str:
    """The mistake whose formula gives these results at all cases; empty if there is none."""
    for sentence, formula in mistakes.items():
        given = zip(cases, results, strict=True)
        if all(_agree(float(formula(*case)), result, rtol) for case, result in given):
            return sentence
    return ""


def _agree(one: float, other: float, rtol: float) -> bool:
    return math.isclose(one, other, rel_tol=rtol, abs_tol=1e-12)


def _number(result: Any) -> float | None:
    """What a formula returned as a number; None if it is none."""
    if isinstance(result, str | bytes | bytearray):  # float would read them
        return None
    try:
        return float(result)
    except (TypeError, ValueError):
        return None
