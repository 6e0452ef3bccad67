"""`check_formula`: a formula that a student wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
    given, name = list(cases), getattr(mine, "__name__", "a function")
    subject = f"formula {name}"
    if not given:
        raise ValueError("check_formula needs at least one case, got none")
    results: list[float] = []
    for case in given:
        call = f"{name}({', '.join(map(repr, case))})"
        try:
            result = limited(mine, *case)
        except Exception as error:
            said = raised(call, error)
            return Answer(False, subject, said.sentence, said.details, said.likely)
        number = _number(result)
        if number is None:
            return Answer(
                False,
                subject,
                f"{call} returns {result!r}, and should return a number",
                likely=(
                    "the function returns nothing: a return is missing"
                    if result is None
                    else "the function returns a text of a number"
                    if isinstance(result, str)
                    else ""
                ),
            )
        results.append(number)
    wanted = [float(reference(*case)) for case in given]
    wrong = [
        place
        for place, (one, other) in enumerate(zip(results, wanted, strict=True))
        if not math.isclose(one, other, rel_tol=rtol, abs_tol=1e-12)
    ]
    if not wrong:
        return Answer(True, subject, f"right in all {len(given)} cases", cases=len(given))
    first = wrong[len(wrong) // 2]  # the smallest cases often agree with more than one formula
    likely = next(
        (
            sentence
            for sentence, formula in (mistakes or {}).items()
            if all(
                math.isclose(float(formula(*case)), one, rel_tol=rtol, abs_tol=1e-12)
                for case, one in zip(given, results, strict=True)
            )
        ),
        "",
    )
    arguments = ", ".join(map(str, given[first]))
    differ = "differs" if len(wrong) == 1 else "differ"
    return Answer(
        False,
        subject,
        f"{len(wrong)} of {len(given)} cases {differ}. {name}({arguments}) gives "
        f"{results[first]:.6g}, and {wanted[first]:.6g} is measured",
        likely=likely,
        cases=len(given),
    )


def _number(result: Any) -> float | None:
    """What a formula returned as a number; None if it is none."""
    if isinstance(result, str | bytes | bytearray):  # float would read them
        return None
    try:
        return float(result)
    except (TypeError, ValueError):
        return None
