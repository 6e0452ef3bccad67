"""The page of the design describes the rooms that there are."""

from rooms import DESIGN, with_tables


def test_the_tables_of_the_design_are_those_of_the_code():
    document = DESIGN.read_text()
    assert with_tables(document) == document, "run `python tests/support/rooms.py`"


def test_a_table_that_misses_a_room_is_noticed():
    document = DESIGN.read_text()
    line = next(line for line in document.splitlines() if line.startswith("| `mesh` |"))
    assert with_tables(document.replace(line + "\n", "")) == document
