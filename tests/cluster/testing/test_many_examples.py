"""What the tests of `tests/unit` draw examples for, on many more of them than a developer's run can afford."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import ROOT

MANY = os.environ.get("VCLUSTER_MANY_EXAMPLES", "300")
MODULES = [
    path for path in sorted((ROOT / "tests" / "unit").rglob("test_*.py"))
    if "from hypothesis import" in path.read_text(encoding="utf-8")
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_it_holds_for_many_examples(module):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "hypothesis and not slow", str(module)], cwd=ROOT,
        env={**os.environ, "VCLUSTER_EXAMPLES": MANY}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )
    none = 5        # where all of them are slow they run in the slow part, with the examples that they say
    assert done.returncode in (0, none), done.stdout
