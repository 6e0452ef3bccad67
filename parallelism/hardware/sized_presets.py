"""Hardware of as many devices as a training run has."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike

from parallelism.hardware.hardware import Hardware
from parallelism.hardware.stacks import split_name

_WHOLE = 8
"""Of a rack that is not used as a whole, a multiple of so many devices is: whole hosts, and groups of ``tp`` in it."""


def sized_hardware(hardware: Hardware | str | PathLike[str], devices: int | None = None) -> Hardware:
    """A hardware (as `Hardware.of` takes it) with room for so many devices; None: for all that it has.

    A preset is taken with as few nodes as there must be.  Of racks of more than 8 devices equally many are used of each, if
    these are a multiple of 8: 128 devices of racks of 72 are two times 64, as schedulers give them.  If the name says how
    many there are (``dgx-h100:8`` is 8 nodes of 8 devices), it must agree with ``devices``.  A file and a `Hardware` stay as
    they are.

    ``ValueError`` where there are fewer devices, and where two numbers are given that differ.

    >>> sized_hardware("dgx-h100", 20).devices, sized_hardware("gb200-nvl72", 128).devices
    (24, 128)
    """
    found = Hardware.of(hardware)
    if devices is None:
        return found
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices must be an integer of at least 1, got {devices!r}")
    preset = split_name(hardware)[0] if isinstance(hardware, str) else ""
    if isinstance(hardware, str) and preset.partition(":")[0] in Hardware.presets():
        if ":" in hardware and devices != found.devices:
            raise ValueError(
                f"{hardware} has {found.devices} devices, and {devices} are asked for; leave out one of "
                "the two numbers"
            )
        if ":" not in hardware and len(found.links[-1].extents) == 1:
            return _of_units(found, devices)
    if devices > found.ranks:
        more = (
            "; its name may say how many it has, as in tpu-v4:4x4x8"
            if len(found.links[-1].extents) > 1
            else ""
        )
        raise ValueError(f"{found.name} has {found.ranks} devices, fewer than {devices}{more}")
    return found


def _of_units(found: Hardware, devices: int) -> Hardware:
    """The hardware with as few units of its outermost level as have room for so many devices, evenly used."""
    room = found.inside(len(found.links) - 1)
    units = -(-devices // room)
    used, left = divmod(devices, units)
    if units > 1 and used < room and not left and not used % _WHOLE and len(found.links) == 2:
        inner, outer = found.links
        found = replace(found, links=(replace(inner, extents=(used,)), outer))
    return found.resized(units)
