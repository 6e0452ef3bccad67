"""What a block of compute declares: numbers that have a price."""

from math import inf


def declared_work(
    name: str, flops: float, nbytes: float, seconds: float | None
) -> tuple[float, float, float | None]:
    """The flops, bytes and seconds of ``device.compute(name, ...)``; ``ValueError`` if one is below 0 or not finite."""
    flops = float(flops)
    nbytes = float(nbytes)
    seconds = None if seconds is None else float(seconds)
    if 0 <= flops < inf and 0 <= nbytes < inf and (seconds is None or 0 <= seconds < inf):
        return flops, nbytes, seconds
    what, number = next(
        (what, number)
        for what, number in (("flops", flops), ("nbytes", nbytes), ("seconds", seconds))
        if number is not None and not 0 <= number < inf
    )
    raise ValueError(f"compute({name!r}) takes {what} that are finite and at least 0, got {number}")
