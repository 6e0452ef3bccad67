"""Sums over microbatches: a function adds each of its results into a buffer as soon as the result is there.

So a device holds the sums of all gradients of a stage, and of a microbatch one gradient at a time.
"""

from collections.abc import Sequence

from parallelism.ir import Function, Op, Value
from parallelism.layouts.localization.local_program import free_name


def added_into_buffers(function: Function, first: int, names: Sequence[str]) -> Function:
    """The function that adds its outputs from number ``first`` on into buffers.

    The buffers are its last inputs: one for each of these outputs, of the same type, called by its name in ``names``.
    The sums lie in the memory of the buffers, and are returned in place of the outputs.
    """
    taken = {value.name for value in function.values}
    buffers, sums = ([Value(free_name(f"{name}{end}", taken), term.type)
                      for name, term in zip(names, function.outputs[first:], strict=True)] for end in ("", ".sum"))
    of_term: dict[str, list[tuple[Value, Value]]] = {}
    for term, buffer, total in zip(function.outputs[first:], buffers, sums, strict=True):
        of_term.setdefault(term.name, []).append((buffer, total))

    def adding(terms: Sequence[Value], region: str | None) -> list[Op]:
        return [Op("accumulate", (buffer, term), (), (total,), region)
                for term in terms for buffer, total in of_term.get(term.name, ())]

    ops = adding(function.inputs, None)
    for op in function.ops:
        ops += [op, *adding(op.outputs, op.region)]
    return Function(function.name, (*function.inputs, *buffers), tuple(ops), (*function.outputs[:first], *sums))
