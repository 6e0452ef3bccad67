"""What the seconds of a hardware and a stack were compared with: told beside every plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from parallelism.hardware import fields as checked

NOTHING = "nothing: errors of 10 to 30 % are usual"
"""What is told where no measurement stands behind the seconds."""


@dataclass(frozen=True)
class Validation:
    """A table of measurements beside the predictions of a stack: how many rows of ``what``, and their mean error.

    ``mean_error`` is without signs, as a part: 0.05 for 5 %.  ``held_out`` says that no constant was fitted to the rows.
    """

    table: str
    what: str
    rows: int
    mean_error: float
    held_out: bool

    def __post_init__(self) -> None:
        checked.check(
            self,
            table=checked.text,
            what=checked.text,
            rows=checked.whole_number,
            mean_error=checked.number,
            held_out=checked.switch,
        )

    def __str__(self) -> str:
        return (
            f"{self.rows} {self.what} of {self.table}, {'held out' if self.held_out else 'fitted'}: "
            f"{self.mean_error:.1%} in the mean"
        )


def validation_text(validation: Sequence[Validation]) -> str:
    """All comparisons in words, or that there is none."""
    return "; ".join(map(str, validation)) or NOTHING


def validation_json(validation: Sequence[Validation]) -> dict[str, Any]:
    """The comparisons as JSON has them, the same in words under ``text``."""
    return {"compared": [asdict(each) for each in validation], "text": validation_text(validation)}
