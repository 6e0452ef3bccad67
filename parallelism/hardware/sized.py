"""Hardware of as many devices as a training run has."""

from __future__ import annotations

from os import PathLike

from parallelism.hardware.hardware import Hardware
from parallelism.hardware.stacks import split_name


def sized_hardware(hardware: Hardware | str | PathLike[str], devices: int | None = None) -> Hardware:
    """A hardware (as `Hardware.of` takes it) with room for so many devices; None: for all that it has.

    A preset is taken with as few nodes as there must be.  If the name says how many there are (``dgx-h100:8`` is 8
    nodes of 8 devices), it must agree with ``devices``.  A file and a `Hardware` stay as they are.

    ``ValueError`` where there are fewer devices, and where two numbers are given that differ.

    >>> sized_hardware("dgx-h100", 20).devices
    24
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
            return found.resized(-(-devices // found.inside(len(found.links) - 1)))
    if devices > found.ranks:
        more = (
            "; its name may say how many it has, as in tpu-v4:4x4x8"
            if len(found.links[-1].extents) > 1
            else ""
        )
        raise ValueError(f"{found.name} has {found.ranks} devices, fewer than {devices}{more}")
    return found
