"""ONNX's own tests of its nodes: all that are read pass, and the others are refused; none is wrong."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("onnx")

import onnx_backend


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_node_is_wrong_and_most_are_right():
    found = onnx_backend.outcomes()
    counts = Counter(each.result for each in found)
    assert [each for each in found if each.result == "wrong"] == []
    assert all(each.reason for each in found if each.result != "passed")
    assert counts["passed"] / (len(found) - counts["other"]) >= 0.93
    assert counts["passed"] / len(found) >= 0.89
