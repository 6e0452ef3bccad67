"""`calibrate --gpu` from end to end: measure, fit, write a stack, then train small models and compare.

The tables, the stack and the comparison are made by the same code whoever measures: `Device` through PyTorch, or
anything else that is a `Bench`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from parallelism.hardware import Hardware, HardwareFileError
from vcluster.calibration.gpu import parts
from vcluster.calibration.gpu.bases import one_node
from vcluster.calibration.gpu.fits import Fit, fit
from vcluster.calibration.gpu.items import COMPILED, COMPILED_OPS, DECODE, KERNELS, LAYERS, Item, items
from vcluster.calibration.gpu.measuring import (
    Budget,
    Row,
    Say,
    Tables,
    measure_all,
    of_tables,
    reason_of,
)
from vcluster.calibration.gpu.models import MODELS, QUICK_MODELS, Model, Sizes
from vcluster.calibration.gpu.stack_file import write_stack
from vcluster.calibration.gpu.training import HeldOut, predicted, table

BESIDES = (LAYERS, DECODE, COMPILED_OPS, COMPILED)
"""Tables that no constant is from: they come last."""
TRAINING_PART = 0.3
"""The part of the time that is kept for the models and for what comes after them."""
COMPILING = 45.0
"""The seconds that must be left for the compiler to begin."""
STEPS, QUICK_STEPS = 10, 3


class Bench(Protocol):
    """What measures a GPU: PyTorch on a real one, or recorded figures in a test."""

    def machine(self) -> dict[str, Any]:
        """The machine that is measured, in words."""

    def measure(self, item: Item) -> Mapping[str, Any]:
        """The figures of an item."""

    def step(self, model: Model, steps: int) -> Mapping[str, Any]:
        """The seconds of a step of training; its kernels under ``kernels``, if they were recorded."""


@dataclass
class Calibration:
    """The result of a calibration: the measured tables, and the constants that explain them."""

    tables: Tables
    found: Fit | None = None
    """The constants; None where too little was measured for a stack."""
    steps: list[HeldOut] = field(default_factory=list)
    why: str = ""
    """Why there is no stack."""

    def __str__(self) -> str:
        told = [self.why] if self.found is None else [str(self.found.hardware), "", _constants(self.found)]
        if self.found is not None:
            told += ["", parts.told(self.tables, self.found.hardware)]
        told += ["", "a step of training, predicted by these constants and measured", table(self.steps)]
        return "\n".join(told)


def calibrate(
    bench: Bench,
    output: Path,
    *,
    seconds: float = 300.0,
    quick: bool = False,
    say: Say = print,
    devices: int = 1,
) -> Calibration:
    """Measures, and writes the stack to ``output`` and its tables beside it, as ``.json``.

    ``seconds`` is what all of it may take: what does not fit into them is left out.  ``devices`` are those of the job,
    between which collectives are measured.  After an interrupt a stack is made of what was measured.
    """
    budget, tables = Budget(seconds), Tables(bench.machine())
    found = Calibration(tables)
    every = items(quick=quick, devices=devices)
    beside = tables_beside(output)

    def keep() -> None:
        tables.save(beside)

    first = [item for item in every if item.table not in BESIDES]
    say(f"{tables.machine['gpu']}: {len(every)} items, at most {seconds:.0f} s")
    measure_all(tables, first, bench.measure, budget, reserve=TRAINING_PART * seconds, say=say, keep=keep)
    try:
        found.found = fit(tables)
    except ValueError as error:
        found.why = f"no stack: {error}"
        say(f"\n{found}\n")
        return found
    tables.notes["preset"] = found.found.preset
    tables.notes["constants"] = {name: _plain(value) for name, value in found.found.values.items()}
    tables.notes["elementwise_factors"] = parts.factors(tables, found.found.hardware)
    tables.notes["attention_parts_of_peak"] = parts.attention_parts(tables, found.found.hardware)
    write_stack(output, found.found, tables.machine, beside.name)
    if not tables.interrupted:
        with _interruptible(tables, say):
            _train(
                bench,
                found,
                on_file(found.found.preset, output),
                budget,
                QUICK_MODELS if quick else MODELS,
                QUICK_STEPS if quick else STEPS,
                say,
            )
        write_stack(output, found.found, tables.machine, beside.name, found.steps)
    keep()
    say(f"\n{found}\n")
    for name in BESIDES:
        if not tables.interrupted:
            measure_all(
                tables,
                of_tables(every, name),
                bench.measure,
                budget,
                reserve=COMPILING if name in (COMPILED, COMPILED_OPS) else 0.0,
                say=say,
                keep=keep,
            )
    return found


def tables_beside(output: Path) -> Path:
    """The file with the tables of a stack file."""
    return output.with_suffix(".json")


def on_file(preset: str, stack: Path) -> Hardware:
    """One node of a preset, with the constants of a stack file."""
    return one_node(Hardware.of(f"{preset}+{stack}"))


@contextmanager
def _interruptible(tables: Tables, say: Say) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        tables.interrupted = True
        say("interrupted")


def _train(
    bench: Bench,
    found: Calibration,
    hardware: Hardware,
    budget: Budget,
    models: Sequence[Model],
    steps: int,
    say: Say,
) -> None:
    """Trains each model for some steps and predicts a step of it."""
    notes: list[Row] = []
    found.tables.notes["training"] = notes
    for model in models:
        note: Row = {
            "name": model.name,
            "layers": model.layers,
            "vocabulary": model.vocabulary,
            "tokens": model.tokens,
            "microbatch": model.microbatch,
            "microbatches": model.microbatches,
            **vars(model.sizes),
        }
        notes.append(note)
        if budget.left < 0:
            note["not_measured"] = "out of time"
            continue
        say(f"{budget.spent:4.0f} s  training {model.name}")
        try:
            measured = dict(bench.step(model, steps))
            for row in measured.pop(KERNELS, ()):
                found.tables.rows.setdefault(KERNELS, []).append({"model": model.name, **row})
            note |= measured
            held = predicted(model, hardware, note["seconds"])
        except HardwareFileError:
            raise
        except Exception as error:  # one that needs too much memory, say: the others go on
            note["not_measured"] = reason_of(error)
            say(f"{budget.spent:4.0f} s  not measured: {model.name}: {note['not_measured']}")
            continue
        found.steps.append(held)
        note |= {
            "predicted_seconds": held.predicted,
            "model_flops": held.flops,
            "mfu": held.mfu,
            "held_out": True,
        }


def compared(tables: Tables, hardware: Hardware) -> list[HeldOut]:
    """The steps that were measured with these tables, predicted anew."""
    found = []
    for note in tables.notes.get("training", ()):
        if "seconds" in note:
            sizes = Sizes(
                *(note[name] for name in ("style", "width", "heads", "key_value_heads", "feed_forward"))
            )
            model = Model(
                note["name"],
                sizes,
                *(note[name] for name in ("layers", "vocabulary", "tokens", "microbatch", "microbatches")),
            )
            found.append(predicted(model, hardware, note["seconds"]))
    return found


def _plain(value: Any) -> Any:
    """A constant by values that JSON has."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return asdict(value)


def _constants(found: Fit) -> str:
    """The constants, each with what it was found by."""
    notes: dict[str, list[str]] = {}
    for name, note in found.notes.items():
        notes.setdefault(note, []).append(name)
    return "\n".join(f"{', '.join(names)}\n    {note}" for note, names in notes.items())
