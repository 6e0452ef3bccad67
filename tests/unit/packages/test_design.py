"""The pages of the design describe the rooms that there are."""

import configparser
import re

from paths import ROOT
from rooms import PAGE, WINGS, with_tables


def test_the_tables_of_the_design_are_those_of_the_code():
    document = PAGE.read_text()
    assert with_tables(document) == document, "run `python tests/support/rooms.py`"


def test_a_table_that_misses_a_room_is_noticed():
    document = PAGE.read_text()
    line = next(line for line in document.splitlines() if line.startswith("| `mesh` |"))
    assert with_tables(document.replace(line + "\n", "")) == document


def test_the_wings_are_those_that_the_contract_of_imports_holds():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    layers = config["importlinter:contract:wings"]["layers"].split("\n")[1:]
    held = [sorted(name.strip().removeprefix("parallelism.") for name in layer.split(":")) for layer in layers]
    assert held == [sorted(names) for _, names in WINGS.values()]


def test_every_room_and_module_stands_in_one_wing():
    package = ROOT / "parallelism"
    there = [path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    named = [name for _, names in WINGS.values() for name in names]
    assert sorted(named) == sorted(name for name in there if name != "__init__")


def test_the_walks_of_the_design_name_modules_that_exist():
    document = (ROOT / "docs" / "design.md").read_text()
    walks = document[document.index("## One walk"):]
    named = set(re.findall(r"(?:parallelism|vcluster|pipeline_parallelism)/[a-z_/]+", walks))
    assert len(named) > 30
    assert [path for path in sorted(named) if not (ROOT / path).is_dir() and not (ROOT / f"{path}.py").exists()] == []
