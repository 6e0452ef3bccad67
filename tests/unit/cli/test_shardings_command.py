"""`python -m vcluster shardings` prints every sharding of an operator in 80 columns."""

from __future__ import annotations

import pytest

from vcluster.__main__ import main
from vcluster.cli.command_line import WrongWords


def printed(capsys, *words):
    assert main(["shardings", *words]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    return text


def test_a_product(capsys):
    lines = printed(capsys, "matmul", "--mesh", "x=2,y=4").splitlines()
    assert lines[0] == "matmul, mk,kn->mn: tensor<64x64xf32>, tensor<64x64xf32> on Mesh(x=2, y=4)"
    assert lines[2].split() == ["x", "y", "flops", "bytes", "takes", "leaves"]
    assert lines[8].split() == ["m", "m", "6.55e+04", "20", "KiB", "[(x,y),-]", "[-,-]", "[(x,y),-]"]
    assert "16 shardings" in lines[-1]


def test_shapes_and_attributes_of_its_own(capsys):
    text = printed(capsys, "einsum", "8,15", "15,32", "--attribute", "equation=ij,jk->ik", "--mesh", "x=2")
    assert "tensor<8x15xf32>" in text and "KiB *" in text and "*: some devices have less" in text
    text = printed(capsys, "where", "6,4", "6,4", "6,4", "--dtype", "bool", "--mesh", "x=2,y=2")
    assert "[x,y]" in text


@pytest.mark.parametrize(("words", "error"), [
    (["sofmax", "--mesh", "x=2"], "did you mean 'softmax'"),
    (["softmax", "--mesh", "x=2"], "give the shapes of its inputs"),
    (["softmax", "--mesh", "x=2", "--attribute", "axis"], "--attribute takes NAME=VALUE, got 'axis'"),
    (["matmul", "4,4", "--mesh", "x=2"], "matmul"),
    (["all_reduce", "4,4", "--mesh", "x=2", "--attribute", "axes=('x',)", "--attribute", "group=2", "--attribute",
      "op=sum"], "cannot be split"),
    (["matmul", "2,a", "4,5", "--mesh", "x=2"], "SHAPE: needs a whole number of at least 1, got 'a'"),
    (["matmul", "0,3", "3,4", "--mesh", "x=2"], "SHAPE: needs a whole number of at least 1, got 0"),
    (["matmul", "2,,3", "", "--mesh", "x=2"], "SHAPE: needs a whole number of at least 1, got ''"),
    ([], "the following arguments are required: operator, --mesh; see --help"),
])
def test_wrong_words(words, error):
    with pytest.raises(WrongWords) as told:
        main(["shardings", *words])
    assert error in str(told.value)
