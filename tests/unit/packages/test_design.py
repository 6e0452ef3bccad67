"""The page of the design describes the rooms that there are."""

import re

from rooms import DESIGN, with_tables


def test_the_tables_of_the_design_are_those_of_the_code():
    document = DESIGN.read_text()
    assert with_tables(document) == document, "run `python tests/support/rooms.py`"


def test_a_table_that_misses_a_room_is_noticed():
    document = DESIGN.read_text()
    line = next(line for line in document.splitlines() if line.startswith("| `mesh` |"))
    assert with_tables(document.replace(line + "\n", "")) == document


def test_the_walks_of_the_design_name_modules_that_exist():
    root, document = DESIGN.parents[1], DESIGN.read_text()
    walks = document[document.index("## Five walks"):document.index("## How data moves")]
    named = set(re.findall(r"(?:parallelism|vcluster|pipeline_parallelism)/[a-z_/]+", walks))
    assert len(named) > 30
    assert [path for path in sorted(named) if not (root / path).is_dir() and not (root / f"{path}.py").exists()] == []
