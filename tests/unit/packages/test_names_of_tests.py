"""Modules of tests have names of their own: pytest imports them by name, and refuses a second one of the same name."""

from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[2]


def test_no_two_modules_of_tests_have_one_name():
    places = defaultdict(list)
    for path in TESTS.rglob("test_*.py"):
        places[path.name].append(str(path.relative_to(TESTS)))
    assert len(places) > 100
    assert [paths for paths in places.values() if len(paths) > 1] == []
