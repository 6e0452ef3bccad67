"""How devices run a program: they compute while their collectives go on, and chains of elementwise ops are one kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from parallelism.display.quantities import short_errors
from parallelism.ir.core import Function, frozen_attributes
from parallelism.ir.passes import overlapping
from parallelism.ir.passes.chunked_collectives import CHUNKED, chunked_over
from parallelism.transforms.parts import Parts, check_function
from parallelism.transforms.words import checked_axis, word

BUCKET_BYTES = 25 * 2**20
"""The default of PyTorch's DistributedDataParallel, ``bucket_cap_mb=25`` (Li et al., *PyTorch Distributed: Experiences
on Accelerating Data Parallel Training*, 2020, arXiv:2006.15704, section 3.2)."""
AHEAD = 1
_FUSED = "fused"
_SIZES = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
_SIZE = re.compile(r"([0-9]+)(B|KB|MB|GB)")


@dataclass(frozen=True)
class Overlap:
    """A device does not wait for a collective before an op needs its result.

    The program stays as it is, in an order in which one op follows the other: an attribute of the function says that
    devices run it in this way.  A collective starts where its input is ready:

    - Sums of gradients start during the backward.  Several that are ready one after the other are one call, a bucket,
      as soon as they have ``bucket_bytes`` together (MB and MiB both mean 2**20 bytes, as in PyTorch); the last bucket
      of the backward may have fewer.  Larger buckets are fewer calls that start later.
    - Gathers of parameters (`Zero` of stage 3) start ``ahead`` layers before the layer that reads them: 0 starts them
      where it begins.  Those of a layer are one call, and so are the sums of its gradients, whatever their bytes, as in
      FSDP (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: a unit has one array).  Each layer ahead holds its
      gathered parameters.
    - Any other collective starts when the one before it is needed, if its input is ready then.

    A sum of gradients by all_reduce lies in the memory of its terms.  Of reduce_scatters in buckets at most two are
    under way, because their inputs stay in memory, and of those of a layer one, as in FSDP.  Those of gradients that
    several microbatches were added up in are not held back: these buffers are there anyway.  A gradient that is summed in
    each microbatch (`Zero` of stage 3) is added to its buffer when the next sum starts.

    With a `Pipeline` the sums over replicas start in the last backward of each stage, and go on behind it.

    **Communication**: that of the program without `Overlap`, in fewer calls; arrays of one call that cannot be cut evenly
    are padded.  Every result has the same bits.

    ``ValueError`` for a program that is overlapped already.
    """

    bucket_bytes: int = BUCKET_BYTES
    ahead: int = AHEAD
    phase: ClassVar[int] = 80

    def __post_init__(self) -> None:
        for name, least in (("bucket_bytes", 1), ("ahead", 0)):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(
                    f"{name} of Overlap must be a whole number of at least {least}, got {number!r}"
                )

    def __call__(self, function: Function) -> Function:
        check_function(function)
        if (given := self.of(function)) is not None:
            raise ValueError(
                f"{self}: @{function.name} is overlapped already, by {given}; a transform is applied once"
            )
        said = {overlapping.BUCKET_BYTES: self.bucket_bytes, overlapping.AHEAD: self.ahead}
        return _with_attributes(function, said)

    @classmethod
    def of(cls, function: Function) -> Overlap | None:
        """The overlap in the attributes of a function; None if it is not overlapped."""
        said = overlapping.said(function)
        return None if said is None else cls(*said)

    @classmethod
    @short_errors
    def parse(cls, value: str | None) -> Overlap:
        """From the value of its word: ``25MB``, ``ahead:2``, ``25MB,ahead:2``, or None for the defaults."""
        given: dict[str, int] = {}
        for part in value.split(",") if value else ():
            size = _SIZE.fullmatch(part)
            name, number = "ahead", -1
            if size:
                name, number = "bucket_bytes", int(size[1]) * _SIZES[size[2]]
            elif part.startswith("ahead:") and part[6:].isdecimal():
                number = int(part[6:])
            if number < 0 or name in given:
                raise ValueError(
                    "overlap is followed by the bytes of a bucket and by ahead:, a number of layers, such "
                    f"as overlap=25MB,ahead:2; got {value!r}"
                )
            given[name] = number
        return cls(**given)

    def __str__(self) -> str:
        size = self.bucket_bytes
        unit = next(unit for unit in reversed(_SIZES) if size % _SIZES[unit] == 0)
        parts = [f"{size // _SIZES[unit]}{unit}"] if size != BUCKET_BYTES else []
        parts += [f"ahead:{self.ahead}"] if self.ahead != AHEAD else []
        return word("overlap", value=",".join(parts) or None)


@dataclass(frozen=True)
class TensorOverlap:
    """The collectives of `SequenceParallel` over ``axis`` run beside the products that they are for, in chunks.

    What is gathered for a product is cut into as many chunks as the axis has devices: while one is multiplied, the next one
    is gathered.  The columns of a product whose result is reduce-scattered are cut likewise: while one chunk is summed,
    the next one is computed.  So both take as long as the longer of them, and a chunk of the other
    (`parallelism.ir.passes.chunked_collectives`).  A collective beside which another product runs stays whole.  So does
    one that does not divide into chunks, an all_reduce, and one of weights.

    Chunks are waited for later under `Overlap`, and on a hardware whose software is ``overlapping``; else at once.

    **Communication**: the bytes of the program without it, in more calls.  Every result has the same bits, if a product
    adds up the terms of an element in one order, however many rows and columns it has.

    ``ValueError`` for a program whose collectives are cut already.
    """

    axis: str = "tp"
    phase: ClassVar[int] = 82

    def __post_init__(self) -> None:
        checked_axis(self)

    def __call__(self, function: Function) -> Function:
        check_function(function)
        if (given := chunked_over(function)) is not None:
            raise ValueError(
                f"{self}: @{function.name} has chunks over {given!r} already; a transform is applied once"
            )
        return _with_attributes(function, {CHUNKED: self.axis})

    def __str__(self) -> str:
        return word("tp_overlap", self.axis)


@dataclass(frozen=True)
class Fused:
    """On each device chains of elementwise ops and row reductions run as one kernel (`parallelism.ir.passes.fusion`).

    A chain, whose values in between have one user each, costs what it reads and what it writes for others, and has one
    launch; no memory holds the values in between.  Its flops are those of its ops, and its results are the same.
    Chains are found in the program of each device, so collectives end them.

    The program stays as it is, op by op: an attribute of the function says how devices run it.  A hardware with
    ``fused`` runs every program so.  ``ValueError`` for a program that is fused already.
    """

    phase: ClassVar[int] = 85

    def __call__(self, function: Function) -> Function:
        check_function(function)
        if self.of(function) is not None:
            raise ValueError(f"{self}: @{function.name} is fused already; a transform is applied once")
        return _with_attributes(function, {_FUSED: True})

    @classmethod
    def of(cls, function: Function) -> Fused | None:
        """The fusion in the attributes of a function; None if it is not fused."""
        return cls() if dict(function.attributes).get(_FUSED) else None

    def __str__(self) -> str:
        return word("fused")


def _with_attributes(function: Function, said: Mapping[str, Any]) -> Function:
    """The function with more attributes, which say how devices run it."""
    attributes = *function.attributes, *said.items()
    if isinstance(function.source, Parts):  # not derived yet
        return replace(function.source, attributes=frozen_attributes(attributes)).joined()
    return replace(function, attributes=attributes)
