"""Stacks: what a software reaches on a hardware, as constants on top of a preset.

    Hardware.preset("dgx-a100:8+megatron-a100")     8 nodes, with the constants of Megatron-LM on A100s
    Hardware.of("dgx-h100+ours.toml")               with those of a file, as calibrate --gpu writes it

The datasheet says what a device could do, and benchmarks what it does in one library at a time.  How a training
software launches, fuses and multiplies is in a file of its own, ``presets/stacks``: a table with fields of `Hardware`,
``reached`` by the names of links, and ``kernels`` by the names of ops.  The source of each number begins with what it
is: from a ``datasheet``, ``measured`` (where), ``fitted`` (on which table, by which command), or an ``estimate``.  A
stack with ``default = true`` (of serving: ``"serving"``) is that of plans and simulations of Transformers on its
``hardware``, where their words name none (`with_usual_stack`); ``dgx-h100+plain`` is the hardware without a stack.
``fitted_on`` has the tables of published runs that the stack was fitted to: they cannot tell how good its predictions
are (`vcluster.calibration.published`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from importlib.resources import files
from os import PathLike
from typing import TYPE_CHECKING, Any

from parallelism.hardware import fields as checked
from parallelism.hardware.files import HardwareFileError, build, by_name, list_of, presets, read
from parallelism.hardware.kernels import AttentionRate, Kernel
from parallelism.hardware.links import HostLink
from parallelism.hardware.rates import Products, Reached
from parallelism.hardware.validation import Validation
from parallelism.spelling import did_you_mean

if TYPE_CHECKING:
    from parallelism.hardware.hardware import Hardware

MARKS = ("datasheet", "measured", "fitted", "estimate")
"""Where a number of a stack is from: the first word of its source."""
SERVING = "serving"
"""The ``default`` of a stack that is that of plans of serving."""
_FOLDER = "presets/stacks"
_OWN = (
    "name",
    "title",
    "fitted_on",
    "sources",
    "reached",
    "products",
    "host",
    "kernels",
    "hardware",
    "default",
    "measured",
)
"""What a stack has beside fields of `Hardware` as they are.  ``hardware`` names the preset that a file is for, and
``measured`` tells of the machine; both are for people."""
_REQUIRED = ("name", "title", "sources")
PLAIN = "plain"
"""What stands behind a hardware and a plus for no stack at all."""


def stack_names() -> tuple[str, ...]:
    """The names of the stacks."""
    found = (entry.name for entry in files("parallelism.hardware").joinpath(_FOLDER).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


def read_stack(name: str) -> dict[str, Any]:
    """The table of a stack, or of a stack file, if the name ends in ``.toml``.

    ``ValueError`` for a name that is none, `HardwareFileError`, which is one, for a file that is none.
    """
    if name.endswith(".toml"):
        return _read_file(name)
    if name not in stack_names():
        close = did_you_mean(name, stack_names()) or f"; there is {', '.join(stack_names())}"
        raise ValueError(f"no stack {checked.shown(name)}{close}")
    return tomllib.loads(
        files("parallelism.hardware").joinpath(_FOLDER, f"{name}.toml").read_text(encoding="utf-8")
    )


def fitted_on(name: str) -> tuple[str, ...]:
    """The tables of published runs that a stack was fitted to."""
    return tuple(read_stack(name).get("fitted_on", ()))


def on_stack(hardware: Hardware, name: str) -> Hardware:
    """The hardware with the constants of a stack, or of a stack file, in place of its own."""
    table = read_stack(name)
    try:
        return _replaced(hardware, table, name)
    except HardwareFileError:
        raise
    except (ValueError, TypeError) as error:
        raise HardwareFileError(f"{name}: {error}") from None


def _replaced(hardware: Hardware, table: Mapping[str, Any], origin: str) -> Hardware:
    changed: dict[str, Any] = {field: value for field, value in table.items() if field not in _OWN}
    known = {field.name for field in fields(hardware)}
    for field in changed:
        if field not in known:
            raise ValueError(f"{checked.shown(field)} is no field of a stack{did_you_mean(field, known)}")
    name = table["name"]
    sources = checked.texts("sources", table["sources"], 500)
    told = {_in_hardware(field): f"{name}, {source}"[:500] for field, source in sources.items()}
    described: dict[str, type[Any]] = {"products": Products, "host": HostLink}
    for field, kind in described.items():
        if field in table:
            changed[field] = build(kind, table[field], origin, f"{field}.", parts={})
    if "kernels" in table:
        changed["kernels"] = by_name(
            Kernel, table["kernels"], origin, "kernels", parts={"rates": [AttentionRate]}
        )
    compared = list_of(Validation, table.get("validation", []), origin, "validation", parts={})
    changed["validation"] = compared if table.get("hardware", hardware.name) == hardware.name else ()
    reached = table.get("reached", {})
    if not isinstance(reached, Mapping):
        raise TypeError(f"reached must be a table with the names of links; got {checked.shown(reached)}")
    links = list(hardware.links)
    for level, link in enumerate(links):
        if link.name in reached:
            own = build(Reached, reached[link.name], origin, f"reached.{link.name}.", parts={})
            links[level] = replace(link, reached=own)
    title = f"{hardware.title}, {table['title']}" if hardware.title else table["title"]
    return replace(
        hardware,
        **changed,
        links=tuple(links),
        stack=name,
        title=title[:200],
        sources={**hardware.sources, **told},
    )


def _read_file(path: str) -> dict[str, Any]:
    """The table of a stack file: it has a name, a title and the sources of its numbers."""
    table = read(path)
    for field in _REQUIRED:
        if field not in table:
            raise HardwareFileError(
                f"{path}: {field} is missing; a stack has {', '.join(_REQUIRED)}, and constants of a hardware"
            )
    return table


def _in_hardware(field: str) -> str:
    """The name in a `Hardware` of a field of a stack: of ``reached.nvlink.base_seconds`` that of the link."""
    first, _, rest = field.partition(".")
    link, _, own = rest.partition(".")
    return f"links.{link}.{first}.{own}" if first == "reached" else field


def split_name(name: str) -> tuple[str, str]:
    """The name of a preset and that of a stack, from ``dgx-a100:8+megatron-a100``; "" if no stack is named."""
    preset, _, stack = name.partition("+")
    return preset, stack


def with_usual_stack(name: str, *, serving: bool = False, experts: bool = False) -> str:
    """The name of a preset with the stack that training of Transformers has there, or ``serving``; others as they are.

    Of models with ``experts``, if runs of such models were compared with it.

    >>> with_usual_stack("dgx-a100:2"), with_usual_stack("dgx-a100+plain"), with_usual_stack("tpu-v4")
    ('dgx-a100:2+megatron-a100', 'dgx-a100+plain', 'tpu-v4')
    >>> with_usual_stack("dgx-h100", experts=True), with_usual_stack("dgx-a100", experts=True)
    ('dgx-h100+megatron-core-h100', 'dgx-a100')
    """
    usual = _usual_stacks(SERVING if serving else True, experts).get(name.partition(":")[0])
    return f"{name}+{usual}" if usual and "+" not in name else name


@cache
def _usual_stacks(work: str | bool, experts: bool) -> dict[str, str]:
    """By preset, its default stack for a work: training, True, or serving; of those compared with ``experts``, if these."""
    tables = {name: read_stack(name) for name in stack_names()}
    found = {}
    for name, table in tables.items():
        has_experts = any(each.get("experts") for each in table.get("validation", ()))
        if table.get("default") == work and (has_experts or not experts):
            found[str(table["hardware"])] = name
    return found


def stack_file(name: str) -> str:
    """The path of the stack file in ``dgx-h100+ours.toml``; "" where there is none: a path may have a plus, too."""
    preset, stack = split_name(name)
    return stack if preset.partition(":")[0] in presets() and stack.endswith(".toml") else ""


def refuse_stack(table: Mapping[str, Any], path: str | PathLike[str]) -> None:
    """`HardwareFileError` for the table of a stack file, where a whole hardware is expected."""
    if "fitted_on" in table and "links" not in table:
        preset = table.get("hardware", "dgx-h100")
        raise HardwareFileError(
            f"{path} is a stack and no whole hardware; write it behind one, as {preset}+{path}"
        )
