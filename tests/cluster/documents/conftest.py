"""What examples leave behind is taken away."""

import pytest

from parallelism.algorithms.registry import TABLES, install, registered


@pytest.fixture
def registrations():
    """What an example registers is gone after it."""
    before = registered()       # a table that an example loads has nothing of ours
    yield
    install([*before, *[()] * (len(TABLES) - len(before))])
