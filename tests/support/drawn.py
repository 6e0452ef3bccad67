"""How many examples hypothesis draws: some by day, all that were asked for in the slow part."""

import os

from hypothesis import settings

BY_DAY = int(os.environ.get("VCLUSTER_EXAMPLES", "3"))
"""How many a test draws that says nothing else."""


def up_to(examples: int, by_day: int = BY_DAY) -> settings:
    """Settings for a test that draws ``examples`` in the slow part, where VCLUSTER_EXAMPLES is set, and else fewer."""
    return settings(max_examples=examples if "VCLUSTER_EXAMPLES" in os.environ else min(examples, by_day))


def counted(examples: int, by_day: int = 1) -> int:
    """How many examples a test that draws by itself takes: ``examples`` where VCLUSTER_EXAMPLES is set, else few."""
    return examples if "VCLUSTER_EXAMPLES" in os.environ else by_day
