"""The work object of an asynchronous call is no array: whoever computes with it hears what to write."""

from __future__ import annotations

import operator

import numpy as np
import pytest

from parallelism.operation import Unfinished
from parallelism.recorder.device import _Pending
from vcluster.messages import Pending


class Work(Unfinished):
    def __repr__(self) -> str:
        return "<all_reduce, pending>"


@pytest.mark.parametrize("use", [
    lambda work: work + 1.0, lambda work: 2 * work, lambda work: np.ones(3) - work, lambda work: work @ np.ones(3),
    lambda work: np.exp(work), lambda work: np.sum(work), lambda work: -work, lambda work: work[0], float,
    lambda work: operator.iadd(work, 1), lambda work: operator.iadd(np.ones(3), work), lambda work: work < 1,
])
def test_computing_with_work_says_wait(use):
    with pytest.raises(TypeError, match=r"<all_reduce, pending> is an asynchronous operation and not its result, so no"
                                        r"thing can be computed with it: write .wait\(\)"):
        use(Work())


def test_work_can_still_be_kept_and_asked():
    work = Work()
    assert work == work and work in [work] and {work: 1}[work] == 1 and bool(work)


@pytest.mark.parametrize("kind", [Pending, _Pending])
def test_all_work_objects_are_such(kind):
    assert issubclass(kind, Unfinished)
