"""What the ops of a program declare: equal ops the same, and others their own."""

import numpy as np
import pytest

from parallelism import ir
from parallelism.execution.chains import declared_cost
from parallelism.execution.device_program import DeviceProgram

SQUARE, WIDE = ir.TensorType("f64", (6, 6)), ir.TensorType("f64", (6, 9))


def of_equal_types(x, y, z):
    """Products and multiplications of values of one type, with the same operators."""
    product, elements = "ij,jk->ik", "ij,ij->ij"
    return (np.einsum(product, x, y), np.einsum(elements, x, y), np.einsum(product, y, x), np.einsum(product, x, z),
            x * y, x * x, np.sum(x, axis=0), np.sum(x, axis=1))


@pytest.mark.parametrize("seconds", [None, lambda op: 1.5])
def test_each_op_declares_what_it_declares_alone(seconds):
    function = ir.record(of_equal_types, SQUARE, SQUARE, WIDE)
    steps = DeviceProgram(function, {}, seconds=seconds).steps
    assert [step.cost for step in steps] == [declared_cost(op, seconds) for op in function.ops]
    if seconds is None:
        assert [step.cost.flops for step in steps][:5] == [432, 36, 432, 648, 36]
