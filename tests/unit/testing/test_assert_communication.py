"""`assert_communication` passes what is so, and tells what is not."""

from __future__ import annotations

import textwrap

import pytest

from parallelism.trace import Event, Trace
from vcluster.testing import assert_communication


def collective(name, group, sequence, received, location, **more):
    return [
        Event(rank, "collective", name, group=group, sequence=sequence, bytes_received=nbytes, location=location,
              messages=1, **more)
        for rank, nbytes in zip(group, received, strict=True)
    ]


@pytest.fixture
def trace():
    """Two all_reduce in each of two groups, an all_gather over everybody, a message, and what is between the lines."""
    return Trace(
        [
            *(event for group in ((0, 1), (2, 3)) for n in (0, 1)
              for event in collective("all_reduce", group, n, (8, 8), "/far/model.py:12", axes=("tp",))),
            *collective("all_gather", (0, 1, 2, 3), 0, (24, 24, 24, 21), "/far/model.py:20"),
            Event(0, "send", "send", peer=3, bytes_sent=5, messages=1, tag=0, sequence=0, location="/far/model.py:30"),
            Event(3, "recv", "recv", peer=0, bytes_received=5, tag=0, sequence=0, location="/far/model.py:31"),
            Event(0, "send", "message", peer=1, bytes_sent=99, parent=0),
            Event(0, "h2d", "arguments", peer=-1, bytes_received=1000),
            Event(1, "compute", "matmul", flops=10.0),
        ],
        size=4,
    )


def test_it_passes_what_took_place(trace):
    assert_communication(trace, all_reduce=4, all_gather=1, send=1, recv=1, reduce_scatter=0, matmul=1, others=0)
    assert_communication(trace, bytes_received=8 * 8 + 3 * 24 + 21 + 5, bytes_sent=5)
    assert_communication(trace, bytes_received=(40, 40, 40, 42), all_reduce={0: 2, 3: 2}, others=3)
    assert_communication(trace.filter(axes="tp"), all_reduce=4, others=0)
    assert_communication(trace)


def test_the_table_tells_what_was_expected_what_came_and_where(trace):
    with pytest.raises(AssertionError) as caught:
        assert_communication(trace, all_reduce=2, all_gather=1, bytes_received=100, others=0)
    assert str(caught.value) == textwrap.dedent(
        """\
        the communication differs from what was expected
                          expected  got
        > all_reduce             2  4
          all_gather             1  1
        > bytes_received       100  162: 40 on rank 0, 40 on rank 1, 40 on rank 2, 42 on rank 3
        > others                 0  2: 1 recv, 1 send

        what took place:
          ranks 0-3  2 x all_reduce over tp          received 8 B each   /far/model.py:12
          ranks 0-2  1 x all_gather in [0, 1, 2, 3]  received 24 B each  /far/model.py:20
          rank 3     1 x all_gather in [0, 1, 2, 3]  received 21 B each  /far/model.py:20
          rank 0     1 x send to rank 3              sent 5 B each       /far/model.py:30
          rank 3     1 x recv from rank 0            received 5 B each   /far/model.py:31"""
    )


def test_numbers_by_rank_fail_by_rank(trace):
    with pytest.raises(AssertionError, match=r"(?m)^> bytes_received, rank 3 +40  42$"):
        assert_communication(trace, bytes_received=[40] * 4)
    with pytest.raises(AssertionError, match=r"(?m)^> all_reduce, rank 2 +1  2$"):
        assert_communication(trace, all_reduce={2: 1})


def test_nothing_took_place():
    with pytest.raises(AssertionError, match="what took place:\n  nothing"):
        assert_communication(Trace([], size=2), barrier=1)


def test_a_name_that_is_none_is_refused(trace):
    with pytest.raises(ValueError, match="no operation and no total 'shift'; it is recorded as 'permute'"):
        assert_communication(trace, shift=1)
    with pytest.raises(ValueError, match=r"a trace has no operation and no total 'all_reduces'; did you mean 'all_re"):
        assert_communication(trace, all_reduces=0)
    with pytest.raises(ValueError, match="total 'xyz'; the names are bytes_received"):
        assert_communication(trace, xyz=0)


def test_there_is_a_number_for_every_rank(trace):
    with pytest.raises(ValueError, match="bytes_sent must have one number for each of the 4 ranks, got 3 numbers"):
        assert_communication(trace, bytes_sent=(1, 2, 3))


def test_what_is_no_trace_is_told_where_a_trace_is():
    told = "assert_communication takes a trace, such as run.trace; got a dict"
    with pytest.raises(TypeError, match=told):
        assert_communication({}, all_reduce=1)
