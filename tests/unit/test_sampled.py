"""What is sampled by default, in tests/conftest.py, is there: a test of another name would be sampled no more."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_sampled_sweep_is_a_test_with_parameters():
    listed = re.findall(r'^    "(test_\w+)": \d', (TESTS / "conftest.py").read_text(encoding="utf-8"), re.MULTILINE)
    text = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.glob("*/test_*.py"))
    assert listed
    assert [name for name in listed if f"def {name}(" not in text] == []
