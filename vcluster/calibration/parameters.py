"""Numbers of a hardware by name, as a table of published runs names those that are fitted to it.

``flops_efficiency`` is a field of `Hardware`, or of what the first links reach; ``reached.infiniband.base_seconds`` one
of what the links of this name reach; ``flops_efficiencies.float8`` that of a dtype, ``products.grouped`` a field of
`Products`; ``kernels.attention.efficiency`` that of the first attention rate of this kernel, with which the others change
in proportion, and ``kernels.gelu.times`` a field of the kernel.
``kernels.attention&attention_gradient.efficiency`` is one number for both.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from parallelism.hardware import Hardware
from parallelism.hardware.kernels import AttentionRate, Kernel
from parallelism.hardware.links import Link

_OF_RATES = {field.name for field in fields(AttentionRate)}
_BY_DTYPE, _PRODUCTS = "flops_efficiencies", "products"


def parameter(hardware: Hardware, name: str) -> float:
    """The value of the parameter; of attention rates that of the first."""
    where, _, field = name.rpartition(".")
    if where.startswith("kernels."):
        kernel = hardware.kernels[_names(where)[0]]
        return float(getattr(kernel.rates[0] if field in _OF_RATES else kernel, field))
    if where == _BY_DTYPE:
        return hardware.flops_efficiencies[field]
    if where == _PRODUCTS:
        return float(getattr(hardware.products, field))
    link = _link(hardware, where)
    return float(getattr(link.reached if where or _reaches(link, field) else hardware, field))


def with_parameter(hardware: Hardware, name: str, value: float) -> Hardware:
    """The hardware with another value of the parameter."""
    where, _, field = name.rpartition(".")
    changed: dict[str, Any] = {field: value}
    if where.startswith("kernels."):
        kernels = {name: _with_field(hardware.kernels[name], field, value) for name in _names(where)}
        return replace(hardware, kernels={**hardware.kernels, **kernels})
    if where == _BY_DTYPE:
        return replace(hardware, flops_efficiencies={**hardware.flops_efficiencies, **changed})
    if where == _PRODUCTS and hardware.products is not None:
        return replace(hardware, products=replace(hardware.products, **changed))
    link = _link(hardware, where)
    if link.reached is None or not (where or _reaches(link, field)):
        return replace(hardware, **changed)
    links = list(hardware.links)
    links[links.index(link)] = replace(link, reached=replace(link.reached, **changed))
    return replace(hardware, links=tuple(links))


def _names(where: str) -> list[str]:
    """The kernels that are meant."""
    return where.removeprefix("kernels.").split("&")


def _link(hardware: Hardware, where: str) -> Link:
    """The links that ``reached.NAME`` means; the first ones if none are named."""
    name = where.removeprefix("reached.")
    return next((link for link in hardware.links if link.name == name), hardware.links[0])


def _reaches(link: Link, field: str) -> bool:
    return hasattr(link.reached, field)


def _with_field(kernel: Kernel, field: str, value: float) -> Kernel:
    changed: dict[str, Any] = {field: value}
    if field not in _OF_RATES:
        return replace(kernel, **changed)
    first: float = getattr(kernel.rates[0], field)
    rates = []
    for rate in kernel.rates:
        own: float = getattr(rate, field)
        changed = {field: value if own == first else value * own / first}
        rates.append(replace(rate, **changed))
    return replace(kernel, rates=tuple(rates))
