"""What breaks silently when a file moves: paths that are written as strings, faces of rooms, old paths."""

from __future__ import annotations

import ast
import configparser
import importlib
import importlib.util
import re
import statistics
import sys
from fnmatch import fnmatch
from inspect import cleandoc
from pathlib import Path

import pytest
from density import long_functions, nested_expressions

import parallelism
import pipeline_parallelism
import tensor_parallelism
import vcluster
from parallelism.hardware import Hardware
from parallelism.ir import RecordError, TensorType, record
from parallelism.moved import MOVED
from vcluster import pytest_plugin
from vcluster.code import call_sites
from vcluster.demo.data import docstrings
from vcluster.processes import forkserver

PACKAGES = {package.__name__: Path(package.__path__[0])
            for package in (parallelism, tensor_parallelism, pipeline_parallelism, vcluster)}
ROOT = PACKAGES["vcluster"].parent
ROOMS = sorted(".".join(folder.parent.relative_to(ROOT).parts)
               for path in PACKAGES.values() for folder in path.rglob("__init__.py"))
STUBS = sorted(stub for path in PACKAGES.values() for stub in path.rglob("*.pyi"))


def modules(package):
    return list(PACKAGES[package].rglob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_every_name_of_a_face_is_there(room):
    face = importlib.import_module(room)
    assert face.__doc__
    for name in getattr(face, "__all__", ()):
        assert getattr(face, name) is not None


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: str(stub.relative_to(ROOT)))
def test_a_face_names_a_thing_where_it_is_defined_and_no_submodule(stub):
    folder = stub.parent
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            for alias in node.names:
                same = (folder / f"{alias.name}.py").exists() or (folder / alias.name).is_dir()
                assert not same or stub.name != "__init__.pyi", f"{alias.name} is a module of {folder} too"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_at_most_twenty_modules(room):
    folder = ROOT.joinpath(*room.split("."))
    assert len([file for file in folder.glob("*.py") if file.name != "__init__.py"]) <= 20


def test_modules_are_short():
    lengths = [len(file.read_text().splitlines()) for package in PACKAGES for file in modules(package)]
    assert max(lengths) <= 540
    assert statistics.median(lengths) <= 150


def test_functions_are_short():
    files = [file for package in PACKAGES for file in modules(package)]
    assert {file: found for file in files if (found := long_functions(file, 60))} == {}


def test_expressions_are_not_nested():
    files = [file for package in PACKAGES for file in modules(package)]
    assert {file: found for file in files if (found := nested_expressions(file))} == {}


@pytest.mark.parametrize(("text", "expected"), [
    ("x = [[f(i, j) for j in columns] for i in rows]", []),
    ("x = tuple(tuple(f(i, j) for j in columns) for i in rows)", []),
    ("x = [1 if n in axes else n for n in shape]", []),
    ("x = {n: 1 if n in axes else n for n in shape}", []),
    ("def f():\n  return [n for n in shape if n] if shape else []", []),
    ("x = a if b else c if d else e", ["1: a condition inside a condition"]),
    ("x = a if b else f(c if d else e)", ["1: a condition inside a condition"]),
    ("x = [[j for j in row if j] for row in rows]", ["1: a comprehension inside a comprehension"]),
    ("x = [sum(j for j in row) for row in rows]", ["1: a comprehension inside a comprehension"]),
    ("x = [row for row in rows if any(j for j in row)]", ["1: a comprehension inside a comprehension"]),
    ("x = [j for j in [i for i in rows]]", ["1: a comprehension inside a comprehension"]),
    ("x = [f(a if b else c) for a in rows]", ["1: a condition inside a comprehension"]),
    ("x = [a for a in (rows if rows else columns)]", ["1: a condition inside a comprehension"]),
    ("x = [\n  (a,\n   1 if a else 2)\n  for a in rows]", ["3: a condition inside a comprehension"]),
])
def test_what_is_nested_is_found(tmp_path, text, expected):
    file = tmp_path / "module.py"
    file.write_text(text)
    assert nested_expressions(file) == expected


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_a_path_that_documents_name_goes_on_working(old, new):
    module = importlib.import_module(new)
    spec = module.__spec__
    assert importlib.import_module(old) is module
    assert module.__spec__ is spec
    assert spec.name == new


def test_what_a_module_imports_first_is_a_requirement():
    """A package that is only installed here is not installed for others; imports inside a function may be extras."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    required = {re.split(r"[^\w-]", line)[0].lower().replace("-", "_")
                for line in config["options"]["install_requires"].split()}
    known = required | sys.stdlib_module_names | set(PACKAGES) | {"pytest"}  # pytest itself loads our plugin of it
    for file in (file for package in PACKAGES for file in modules(package)):
        found = re.findall(r"^import (\w+)|^from (\w+)[\w.]* import ", file.read_text(), re.MULTILINE)
        unknown = {name for pair in found for name in pair if name} - known
        assert not unknown, f"{file} imports {unknown}, which setup.cfg does not require"


def test_files_beside_the_modules_are_installed():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = {package: [p.strip() for p in value.split(",")]
                for package, value in config["options.package_data"].items()}
    for package, path in PACKAGES.items():
        for file in path.rglob("*"):
            if file.is_dir() or file.suffix in (".py", ".pyc") or "__pycache__" in file.parts:
                continue
            owner = file.parent
            while not (owner / "__init__.py").exists():
                owner = owner.parent
            name = ".".join(owner.relative_to(ROOT).parts)
            known = patterns.get(name, []) + patterns["*"]
            assert any(fnmatch(str(file.relative_to(owner)), p) for p in known), f"{file} of {package} is not installed"


@pytest.fixture
def index():
    """The module of setup.py, which is not run as a script."""
    spec = importlib.util.spec_from_file_location("vcluster_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_on_an_index_links_lead_to_the_release_and_pictures_to_their_bytes(index, monkeypatch):
    monkeypatch.setenv("VCLUSTER_REPOSITORY", "https://example.org/some/vcluster/")
    address, release = index.repository(), index.version()
    assert (address, release) == ("https://example.org/some/vcluster", vcluster.__version__)
    page = index.page((ROOT / "README.md").read_text(encoding="utf-8"), address, release)
    targets = re.findall(r"\]\(([^)]+)\)", page)
    assert len(targets) >= 8 and all(target.startswith(f"{address}/") for target in targets)
    assert f"]({address}/raw/v{release}/docs/ring.svg)" in page
    assert f"]({address}/blob/v{release}/docs/glossary.md#plans)" in page
    assert "pip install vcluster\n" in page and "in a clone" not in page
    for package in PACKAGES:
        assert f"`{package}`" in page.split("## In the wheel")[1]
    assert index.addresses(address, release)["Changelog"] == f"{address}/blob/v{release}/CHANGELOG.md"
    assert index.page("[a](b.md) [c](https://d.org)", address, "1").startswith(f"[a]({address}/blob/v1/b.md) [c](https://d.org)")


def test_without_an_address_nothing_is_made_up(index, monkeypatch):
    monkeypatch.delenv("VCLUSTER_REPOSITORY", raising=False)
    monkeypatch.setattr(index, "repository", lambda: "")
    assert index.addresses("", "1") == {}
    assert index.page("[a](b.md)", "", "1").startswith("[a](b.md)")


def test_the_version_is_one():
    assert f"\nversion: {vcluster.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {vcluster.__version__} (" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    recipe = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    assert f'version: "{vcluster.__version__}"' in recipe
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for line in config["options"]["install_requires"].split():
        assert f"- {line.replace('>=', ' >=')}\n" in recipe


def test_every_workflow_says_what_it_may_do():
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert len(workflows) == 2
    for workflow in workflows:
        assert "\npermissions:\n  contents: read\n" in workflow.read_text(encoding="utf-8")


def test_every_folder_with_modules_is_a_package():
    for path in PACKAGES.values():
        for file in path.rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), file


def test_the_entry_point_of_pytest_is_the_plugin():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["options.entry_points"]["pytest11"].strip() == f"vcluster = {pytest_plugin.__name__}"
    assert config["options.entry_points"]["console_scripts"].strip() == "vcluster = vcluster.__main__:command"
    assert callable(importlib.import_module("vcluster.__main__").command)


def test_modules_that_are_loaded_ahead_exist():
    for name in (*forkserver.PRELOAD, *forkserver.LOAD_WHEN_IDLE, *pytest_plugin.PRELOAD):
        assert importlib.util.find_spec(name) is not None, name


def test_a_line_of_every_package_is_known_as_ours_and_the_workers_as_such():
    for package in PACKAGES:
        assert all(call_sites.is_ours(str(file)) for file in modules(package))
    assert not call_sites.is_ours(__file__)
    assert Path(call_sites.WORKER).exists()


def test_a_program_that_cannot_be_recorded_is_refused_at_the_line_of_the_user():
    with pytest.raises(RecordError, match=rf"{Path(__file__).name}:\d+: return float\(x\)"):
        record(_converted, TensorType("f64", (3,)))


def _converted(x):
    return float(x)


def test_presets_are_found():
    assert "dgx-h100" in Hardware.presets()


def test_the_text_of_the_small_model_has_the_docstrings_of_every_room():
    text = docstrings("parallelism")
    for file in modules("parallelism"):
        first = file.read_text().partition('"""')[2].partition('"""')[0]
        assert first and cleandoc(first) in text, file
