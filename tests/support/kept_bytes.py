"""What a program with its gradient keeps in memory from one to the other."""

from parallelism.ir.core.regions import inside
from parallelism.ir.passes import MARK


def kept_bytes(program):
    """The bytes that a device keeps from the forward for the backward, other than inputs."""
    owner = {value.name: value for value in program.inputs}
    forward, kept, back = set(), {}, False
    for op in program.ops:
        back = back or inside(op, MARK)
        for value in op.inputs:
            mine = owner[value.name]
            if back and mine.name in forward:
                kept[mine.name] = mine.type.nbytes
        for value in op.outputs:
            owner[value.name] = owner[op.inputs[0].name] if op.operator.view else value
            if not back and owner[value.name] is value:
                forward.add(value.name)
    return sum(kept.values())
