"""What tests of the checks share."""

import pytest


@pytest.fixture
def four_ranks_alone(monkeypatch):
    """`check_collective` runs functions on 4 ranks, whose messages it explains, and on no other number of them."""
    monkeypatch.setattr("vcluster.check.collective._SIZES", (4,))
