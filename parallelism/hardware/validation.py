"""What the seconds of a hardware and a stack were compared with: told beside every plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from parallelism.hardware import fields as checked

NOTHING = "nothing: errors of 10 to 30 % are usual"
"""What is told where no measurement stands behind the seconds."""

UNKNOWN_ERROR = 0.1
"""The error that is taken for the seconds of hardware that was compared with nothing: the least of those that are usual."""
HIGHEST_MFU = {
    ("dgx-h100", "bfloat16"): 0.646,
    ("dgx-a100", "bfloat16"): 0.641,
    ("dgx-a100-40", "bfloat16"): 0.594,
}
"""By hardware and dtype, the highest of the published runs of training (`vcluster.calibration.training_runs`)."""


@dataclass(frozen=True)
class Validation:
    """A table of measurements beside the predictions of a stack: how many rows of ``what``, and their mean error.

    ``mean_error`` is without signs, as a part: 0.05 for 5 %.  ``held_out`` says that no constant was fitted to the rows.
    ``products`` is the dtype of the products of the rows, if it is one of 8 or 4 bits; empty: a wider one.  ``experts`` says
    that they are of models with experts.
    """

    table: str
    what: str
    rows: int
    mean_error: float
    held_out: bool
    products: str = ""
    experts: bool = False

    def __post_init__(self) -> None:
        checked.check(
            self,
            table=checked.text,
            what=checked.text,
            rows=checked.whole_number,
            mean_error=checked.number,
            held_out=checked.switch,
            products=checked.text_or_none,
            experts=checked.switch,
        )

    def __str__(self) -> str:
        products = f" in {self.products}" if self.products else ""
        return (
            f"{self.rows} {self.what}{products} of {self.table}, {'held out' if self.held_out else 'fitted'}: "
            f"{self.mean_error:.1%} in the mean"
        )


def compared_in(
    dtype: str, validation: Sequence[Validation], *, experts: bool = False
) -> Sequence[Validation]:
    """The comparisons that say something of steps whose products have this dtype, of a model with ``experts`` or without:
    of narrow products only those in the same."""
    narrow = dtype if dtype in ("float8", "float4") else ""
    return tuple(each for each in validation if each.products == narrow and each.experts == experts)


def validation_text(validation: Sequence[Validation]) -> str:
    """All comparisons in words, or that there is none."""
    return "; ".join(map(str, validation)) or NOTHING


def validation_json(validation: Sequence[Validation]) -> dict[str, Any]:
    """The comparisons as JSON has them, the same in words under ``text``."""
    return {"compared": [asdict(each) for each in validation], "text": validation_text(validation)}


def usual_error(validation: Sequence[Validation]) -> float:
    """How far off seconds are on average: by the rows that nothing was fitted to, or if there are none by all."""
    told = [each for each in validation if each.held_out] or validation
    if not told:
        return UNKNOWN_ERROR
    return sum(each.rows * each.mean_error for each in told) / sum(each.rows for each in told)


def mfu_remark(hardware: str, dtype: str, mfu: float) -> str:
    """That an MFU is above all published ones that are known, in a sentence; empty if it is not."""
    highest = HIGHEST_MFU.get((hardware, dtype))
    if highest is None or mfu <= highest:
        return ""
    return (
        f"An MFU of {mfu:.1%} is above {highest:.1%}, the highest of the published runs on {hardware} in {dtype} "
        "that are known here: do not count on it."
    )
