"""Tables that were measured once and are kept: fitted and compared again, without a GPU, as the model changes."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from vcluster.calibration.gpu.calibration import Calibration, compared
from vcluster.calibration.gpu.fits import fit
from vcluster.calibration.gpu.measuring import Tables
from vcluster.calibration.gpu.stack_file import write_stack

_FOLDER = "tables"


def kept_names() -> tuple[str, ...]:
    """The names of the tables that are kept: a GPU each."""
    found = (entry.name for entry in files("vcluster.calibration.gpu").joinpath(_FOLDER).iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in found if name.endswith(".json")))


def kept(name: str) -> Tables:
    """The tables of this name, or of a file that ends in ``.json``.

    ``ValueError`` if there are none; ``OSError`` for a file that cannot be read.
    """
    if name.endswith(".json"):
        return Tables.read(Path(name).read_text(encoding="utf-8"), name)
    if name not in kept_names():
        raise ValueError(
            f"no measured tables {name!r}; there is {', '.join(kept_names())}, or name a file that ends in .json"
        )
    return Tables.read(
        files("vcluster.calibration.gpu").joinpath(_FOLDER, f"{name}.json").read_text("utf-8"), name
    )


def again(name: str, output: Path | None = None) -> Calibration:
    """Fits the constants of tables anew and predicts the steps that were measured with them.

    The stack is written to ``output`` if one is given.  ``ValueError`` as `kept` raises it, and where nothing can be
    fitted.
    """
    tables = kept(name)
    found = fit(tables)
    steps = compared(tables, found.hardware)
    if output is not None:
        file = Path(name).name if name.endswith(".json") else f"{name}.json"
        write_stack(output, found, tables.machine, file, steps)
    return Calibration(tables, found, steps)
