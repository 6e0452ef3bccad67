"""A stack file with what was measured of a GPU: `Hardware.of` takes it behind a preset, ``dgx-h100+h100.toml``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from parallelism.hardware import Kernel, Validation
from parallelism.whole_files import written_whole
from vcluster.calibration.gpu.fits import Fit
from vcluster.calibration.gpu.training import HeldOut, mean_error


def source(machine: Mapping[str, Any], note: str) -> str:
    """Where a number is from: measured, on what, when, by which software; a note that calls it an estimate stands."""
    if note.startswith("estimate: "):
        return note
    driver = machine.get("nvidia_smi.driver_version")
    on = f"on {machine['gpu']}, {machine['date']}, PyTorch {machine['torch']}"
    on += f", driver {driver}" if driver else ""
    return f"measured: {on}, by python -m vcluster calibrate --gpu; {note}"[:480]


def write_stack(
    path: Path, found: Fit, machine: Mapping[str, Any], tables: str, steps: Sequence[HeldOut] = ()
) -> None:
    """Writes the stack.  ``tables`` is the name of the file with the tables; its ``steps`` are the stack's validation."""
    with written_whole(path, encoding="utf-8") as file:
        file.write(stack_text(path.stem, found, machine, tables, steps))


def stack_text(
    name: str, found: Fit, machine: Mapping[str, Any], tables: str, steps: Sequence[HeldOut] = ()
) -> str:
    """The stack as TOML."""
    plain = {
        field: value for field, value in found.values.items() if not _is_table(value) and "." not in field
    }
    nested = {
        field: _fields(value)
        for field, value in found.values.items()
        if _is_table(value) and field != "kernels"
    }
    lines = [
        f"# Measured by python -m vcluster calibrate --gpu. Use it as {found.preset}+{name}.toml",
        "",
        _line("name", name),
        _line("title", f"under PyTorch {machine['torch']}, measured {machine['date']}"),
        "fitted_on = []",
        _line("hardware", found.preset),
        *(_line(*each) for each in plain.items()),
    ]
    for field, table in nested.items():
        lines += ["", f"[{field}]", *(_line(*each) for each in table.items())]
    for kernel, each in found.values.get("kernels", {}).items():
        lines += ["", f"[kernels.{_key(kernel)}]", *_of_kernel(each)]
    for link, table in _reached(found.values).items():
        lines += ["", f"[reached.{_key(link)}]", *(_line(*each) for each in table.items())]
    if steps:
        compared = Validation(
            tables, "steps of training on one GPU", len(steps), mean_error(steps), held_out=True
        )
        lines += ["", "[[validation]]", *_set_fields(compared)]
    lines += [
        "",
        "[measured]       # the machine; its tables are beside this file",
        *(_line(*each) for each in {**machine, "tables": tables}.items() if each[1] is not None),
    ]
    lines += ["", "[sources]", *(_line(field, source(machine, note)) for field, note in found.notes.items())]
    return "\n".join([*lines, ""])


def _reached(values: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The rates of links by the names of links."""
    found: dict[str, dict[str, float]] = {}
    for field, value in values.items():
        if field.startswith("reached."):
            link, _, name = field.removeprefix("reached.").rpartition(".")
            found.setdefault(link, {})[name] = value
    return found


def _of_kernel(kernel: Kernel) -> list[str]:
    """The fields of a kernel that differ from those of any other one."""
    lines = _set_fields(kernel, but="rates")
    if kernel.rates:
        lines.append("rates = [")
        for rate in kernel.rates:
            fields = ", ".join(_line(*each) for each in asdict(rate).items())
            lines.append(f"    {{{fields}}},")
        lines.append("]")
    return lines


def _set_fields(value: Kernel | Validation, but: str = "") -> list[str]:
    """The fields that differ from their defaults, without the one named ``but``."""
    return [
        _line(each.name, getattr(value, each.name))
        for each in fields(value)
        if each.name != but and getattr(value, each.name) != each.default
    ]


def _is_table(value: Any) -> bool:
    return is_dataclass(value) or isinstance(value, Mapping)


def _fields(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else asdict(value)


def _line(field: str, value: Any) -> str:
    return f"{_key(field)} = {_shown(value)}"


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value) if isinstance(value, int) else json.dumps(str(value))
