"""What tests of the checks share."""

import pytest

from vcluster.check import collective


@pytest.fixture
def four_ranks_alone(monkeypatch):
    """`check_collective` runs functions on 4 ranks, whose messages it explains, and with two lengths of arrays."""
    monkeypatch.setattr("vcluster.check.collective._SIZES", (4,))
    monkeypatch.setattr("vcluster.check.collective._WAITING_SIZES", (4,))
    monkeypatch.setattr("vcluster.check.collective._SORTS", collective._SORTS[:2])
