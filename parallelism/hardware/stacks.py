"""Stacks: what a software reaches on a hardware, as constants on top of a preset.

    Hardware.preset("dgx-a100:8+megatron-a100")     8 nodes, with the constants of Megatron-LM on A100s

The datasheet says what a device could do, and benchmarks what it does in one library at a time.  How a training
software launches, fuses and multiplies is in a file of its own, ``presets/stacks``: a table with fields of `Hardware`,
and ``reached`` by the names of links.  The source of each number begins with what it is: from a ``datasheet``,
``measured`` (where), ``fitted`` (on which table, by which command), or an ``estimate``.  ``fitted_on`` has the tables
of published runs that the stack was fitted to: they cannot tell how good its predictions are
(`vcluster.calibration.published`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from parallelism.hardware import fields as checked
from parallelism.hardware.rates import Products, Reached
from parallelism.spelling import did_you_mean

if TYPE_CHECKING:
    from parallelism.hardware.hardware import Hardware

MARKS = ("datasheet", "measured", "fitted", "estimate")
"""Where a number of a stack is from: the first word of its source."""
_FOLDER = "presets/stacks"
_OWN = ("name", "title", "fitted_on", "sources", "reached", "products")


def stack_names() -> tuple[str, ...]:
    """The names of the stacks."""
    found = (entry.name for entry in files("parallelism.hardware").joinpath(_FOLDER).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


def read_stack(name: str) -> dict[str, Any]:
    """The table of a stack.  ``ValueError`` for a name that is none."""
    if name not in stack_names():
        close = did_you_mean(name, stack_names()) or f"; there is {', '.join(stack_names())}"
        raise ValueError(f"no stack {checked.shown(name)}{close}")
    return tomllib.loads(files("parallelism.hardware").joinpath(_FOLDER, f"{name}.toml").read_text(encoding="utf-8"))


def fitted_on(name: str) -> tuple[str, ...]:
    """The tables of published runs that a stack was fitted to."""
    return tuple(read_stack(name).get("fitted_on", ()))


def on_stack(hardware: Hardware, name: str) -> Hardware:
    """The hardware with the constants of a stack in place of its own."""
    table = read_stack(name)
    changed: dict[str, Any] = {field: value for field, value in table.items() if field not in _OWN}
    sources = {_in_hardware(field): f"{name}, {source}" for field, source in table["sources"].items()}
    if "products" in table:
        changed["products"] = Products(**table["products"])
    reached: Mapping[str, Any] = table.get("reached", {})
    links = tuple(replace(link, reached=Reached(**reached[link.name])) if link.name in reached else link
                  for link in hardware.links)
    title = f"{hardware.title}, {table['title']}" if hardware.title else table["title"]
    return replace(hardware, **changed, links=links, stack=name, title=title[:200],
                   sources={**hardware.sources, **sources})


def _in_hardware(field: str) -> str:
    """The name in a `Hardware` of a field of a stack: of ``reached.nvlink.base_seconds`` that of the link."""
    first, _, rest = field.partition(".")
    link, _, own = rest.partition(".")
    return f"links.{link}.{first}.{own}" if first == "reached" else field


def split_name(name: str) -> tuple[str, str]:
    """The name of a preset and that of a stack, from ``dgx-a100:8+megatron-a100``; "" if no stack is named."""
    preset, _, stack = name.partition("+")
    return preset, stack

