"""How many members own the slices of a large all_reduce."""

from __future__ import annotations

import pytest

from vcluster.collectives.thresholds import OWNED_BYTES
from vcluster.collectives.zero_copy import owners_of


@pytest.mark.parametrize("members", [1, 2, 3, 32])
@pytest.mark.parametrize("cores", [1, 2, 8])
def test_no_core_idles_and_all_own_a_slice_of_what_is_large_for_all(members, cores):
    for nbytes in (1, OWNED_BYTES, 5 * OWNED_BYTES, 32 * OWNED_BYTES):
        owners = owners_of(nbytes, members, cores)
        assert min(members, cores) <= owners <= members
        assert owners <= cores or owners * OWNED_BYTES <= nbytes
    assert owners_of(members * OWNED_BYTES, members, cores) == members
