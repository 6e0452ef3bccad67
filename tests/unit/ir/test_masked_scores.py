"""A fused kernel computes the scores that a mask allows, and no others: counted on the mask itself."""

from math import ceil

import numpy as np
import pytest

from parallelism import Mesh, ir
from parallelism.ir.core.extents import rounded_up, specialized
from parallelism.ir.operators.attention import attention_shape, hidden_flops
from parallelism.ir.operators.masked_scores import allowed_scores, equal_keys, scores_of_part
from parallelism.kernels import Mask
from parallelism.layouts import annotate, localize, localize_symbolically
from parallelism.models.layers import attention
from parallelism.simulation import simulate

PACKED = Mask(documents=(3,)), Mask(True, documents=(2, 1, 4)), Mask(True, 2, (5, 3)), Mask(True, documents=(20,))
MASKS = (Mask(), Mask(causal=True), *(Mask(True, window) for window in (1, 2, 5, 7, 30)))


def counted(mask: Mask, rows: int, columns: int) -> int:
    allowed = mask.allowed(range(rows), range(columns))
    return rows * columns if allowed is None else int(allowed.sum())


@pytest.mark.parametrize("mask", [*MASKS, *PACKED], ids=str)
def test_the_scores_are_those_of_the_mask(mask):
    for rows, columns in ((7, 7), (1, 1), (1, 9), (9, 1), (4, 11), (11, 4), (0, 3), (3, 0)):
        assert allowed_scores(mask, rows, columns) == counted(mask, rows, columns), (rows, columns)
        assert scores_of_part(mask, rows, rows, columns) == counted(mask, rows, columns)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_with_symbols_they_are_those_of_the_numbers(mask):
    rows, devices = ir.symbols("S C")
    whole = 1 * allowed_scores(mask, rows, rows)
    part = scores_of_part(mask, rows // devices, rows, rows)
    for number in (1, 6, 12, 60):
        assert specialized(whole, {"S": number}) == counted(mask, number, number)
        if number % 3 == 0:
            assert specialized(3 * part, {"S": number, "C": 3}) == counted(mask, number, number)


def op_of(mask: Mask, *, fused: bool = True, gradient: bool = False) -> ir.Function:
    types = [ir.TensorType("f4", (2, 9, 6, 4)), ir.TensorType("f4", (2, 9, 3, 4)), ir.TensorType("f4", (2, 9, 3, 5))]
    program = ir.record(lambda q, k, v: np.sum(attention(q, k, v, mask=mask, fused=fused)), *types)
    return ir.gradient(program, ["q", "k", "v"]) if gradient else program


def flops(program: ir.Function, *kinds: str) -> int:
    return sum(op.flops for op in program.ops if op.kind in kinds)


@pytest.mark.parametrize("mask", [*MASKS, *PACKED], ids=str)
def test_flops_are_two_for_each_term_of_the_products_of_these_scores(mask):
    scores = 2 * 6 * counted(mask, 9, 9)
    assert flops(op_of(mask), "attention") == 2 * scores * (4 + 5)
    both = op_of(mask, gradient=True)
    assert flops(both, "attention_gradient") == 2 * scores * (3 * 4 + 2 * 5)
    of_all = 2 * 2 * 6 * 81 * (4 + 5 + 3 * 4 + 2 * 5)
    assert sum(map(hidden_flops, both.ops)) == of_all - flops(both, "attention", "attention_gradient")


def test_a_part_of_packed_rows_has_the_mean_of_all_and_needs_their_number():
    mask = Mask(True, documents=(2, 1, 4))
    assert 3 * scores_of_part(mask, 7, 21, 21) == counted(mask, 21, 21) == 3 * (3 + 1 + 10)
    with pytest.raises(ValueError, match="documents are counted in a sequence whose length is a number, got S"):
        allowed_scores(mask, ir.symbol("S"), ir.symbol("S"))


def test_keys_of_documents_have_as_many_scores_without_them():
    assert equal_keys(Mask(documents=(3,)), 9, 9) == 3
    assert equal_keys(Mask(True, documents=(3,)), 9, 9) == 3
    assert equal_keys(Mask(True, documents=(8,)), 8, 8) == 8
    assert equal_keys(Mask(True, documents=(2, 1, 4)), 7, 7) == 3    # (3 + 1 + 10) / 7 scores in a row


def test_attention_that_writes_its_scores_computes_all_of_them():
    assert len({op_of(mask, fused=False, gradient=True).flops for mask in MASKS}) == 1


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_rows_may_be_a_sum(mask):
    """By which no extent is divided: a part of 4 of ``S - 3`` rows had no count where a mask hides columns."""
    S, = ir.symbols("S")
    of_part = lambda rows: rounded_up(8 * scores_of_part(mask, 4, rows, 5))
    part, keys = of_part(S - 3), equal_keys(mask, S - 3, S - 3)
    for number in (4, 7, 12):
        assert specialized(part, {"S": number}) == of_part(number - 3)
        assert specialized(keys, {"S": number}) == equal_keys(mask, number - 3, number - 3)


def test_keys_of_a_window_have_as_many_scores_without_it():
    for rows in (1, 8, 20):
        for window in range(1, 24):
            keys = equal_keys(Mask(True, window), rows, rows)
            assert keys == max(1, ceil(2 * counted(Mask(True, window), rows, rows) / rows) - 1) <= rows
            assert window < rows or keys == rows
    assert attention_shape(op_of(Mask(True, 1)).ops[0]) == (12, 9, 1, 4, 1)
    assert attention_shape(op_of(Mask(True)).ops[0]) == (12, 9, 9, 4, 1)
    assert attention_shape(op_of(Mask()).ops[0]) == (12, 9, 9, 4, 0)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_each_device_has_its_share_of_the_rows(mask, devices):
    """Of 12 rows 6, 4 or 3 are on a device; each counts the mean of all, rounded up, wherever its rows begin.

    Of a window of 2 these are 23 scores of 4 flops: on 3 devices 31 each.
    """
    kind = ir.TensorType("f4", (1, 12, 1, 1))
    program = ir.record(lambda q, k, v: attention(q, k, v, mask=mask), kind, kind, kind)
    laid = annotate(program, {"q": "[None, cp, None, None]"})
    localized = localize(laid, Mesh(cp=devices))
    shares = [flops(localized.program(rank), "attention") for rank in range(devices)]
    whole = flops(program, "attention")
    assert shares == [ceil(whole / devices)] * devices
    assert localize_symbolically(laid, ["cp"]).on(Mesh(cp=devices)).flops == localized.program().flops
    trace = simulate(laid, "dgx-h100", mesh=Mesh(cp=devices), fold=False)
    told = trace.columns.isin("name", {"attention"})
    assert trace.columns.numbers("flops")[told].tolist() == shares


def test_uneven_parts_add_up_to_the_whole():
    kind = ir.TensorType("f4", (2, 10, 3, 4))
    program = ir.record(lambda q, k, v: attention(q, k, v), kind, kind, kind)
    localized = localize(annotate(program, {"q": "[None, cp, None, None]"}), Mesh(cp=4))
    shares = [flops(localized.program(rank), "attention") for rank in range(4)]
    assert sum(shares) == flops(program, "attention")
    assert [share * 10 for share in shares] == [sum(shares) * rows for rows in (3, 3, 2, 2)]
