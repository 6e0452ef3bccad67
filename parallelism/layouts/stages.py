"""A program cut into stages, as a value: for each the functions of its forward and of its backward, and what crosses.

All functions of a stage speak of values by the names that they have in the whole program, so what one returns is found
by what takes it:

    received ─┐               ┌─ sent  ──────>  next stage
    data     ─┤ forward       │
    weights  ─┘               └─ saved ──┐
    weights  ────────────────────────────┤ backward   ┌─ gradients of `returned`  ──────>  stage before
    gradients of `answered`, from next  ─┘            └─ gradients of `trained`, added up over the microbatches

The backward in two halves, for schedules that split it: `backward_input` makes the gradients of `returned` and what is
`kept` of its work, `backward_weights` those of `trained` from that.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallelism.ir import Extent, Function, TensorType, Value

GRADIENT = "grad."
"""Before the name of a value: the input of a backward that is its gradient."""


@dataclass(frozen=True)
class StageFunctions:
    """One stage: its functions, for a single microbatch, and the names of what goes in and comes out.

    ``weights``
        inputs of the program that are the same for every microbatch, as far as this stage reads them.
    ``trained``
        those of them whose gradients the backward returns, after the gradients of ``returned``.
    ``data``
        inputs that have a row for each example, or are handed over with each microbatch: dealt to every stage that
        reads them, wherever it is.
    ``received``, ``sent``
        the values of the message from the stage before, and of that to the next one; of the last stage, the outputs of
        the program.  One that is used further on is received and sent on by every stage between.
    ``returned``, ``answered``
        those of ``received``, and of ``sent``, whose gradients go backward: ``answered`` of a stage is ``returned`` of
        the next one, and of the last stage the loss, whose gradient is 1.
    ``saved``
        what is kept from the forward to the backward, weights aside: inputs of the forward, and what it returns after
        ``sent``.
    ``forward``
        ``(received, data, weights) -> (sent, those of saved that it makes and does not send)``.
    ``recompute``
        None if ``saved`` has all that the backward reads.  Otherwise ``(saved, weights) -> what it reads besides``.
    ``backward``
        ``(what it reads of the forward, weights, grad.name for each of answered) -> gradients of (returned, trained)``.
        An output that no gradient reaches is a constant of zeros.
    ``backward_input``, ``backward_weights``
        its halves: ``(as backward) -> (gradients of returned, then what it makes of `between`)`` and
        ``(between, weights) -> gradients of trained``.
    ``between``
        what is kept from the one half to the other, weights aside: inputs and further outputs of the first.

    The inputs of each function are the values that it reads and no others, in no order to rely on: they are found by
    name.  Its outputs are in the order given here.
    """

    forward: Function
    backward: Function
    backward_input: Function
    backward_weights: Function
    recompute: Function | None
    weights: tuple[str, ...]
    trained: tuple[str, ...]
    data: tuple[str, ...]
    received: tuple[str, ...]
    sent: tuple[str, ...]
    returned: tuple[str, ...]
    answered: tuple[str, ...]
    saved: tuple[str, ...]
    between: tuple[str, ...]


@dataclass(frozen=True)
class Stages:
    """A program cut into stages, as `parallelism.layouts.partition` makes it."""

    function: Function
    """The program that was cut: of one microbatch."""
    functions: tuple[StageFunctions, ...]
    """Of each stage, in order."""
    batch: str | None
    """The symbol for the rows of a microbatch; None if the program is for one microbatch, whatever its size."""
