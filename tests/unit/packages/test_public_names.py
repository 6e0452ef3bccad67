"""What the packages promise at their top."""

import ast
import importlib
import subprocess
import sys

import public_names
import pytest
from paths import ROOT

import parallelism
import pipeline_parallelism
import tensor_parallelism
import vcluster
from parallelism import moved

PACKAGES = [parallelism, tensor_parallelism, pipeline_parallelism, vcluster]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_there_once_and_is_what_it_says(package):
    assert len(set(package.__all__)) == len(package.__all__)
    for name in package.__all__:
        value = getattr(package, name)
        if isinstance(value, type) or callable(value):
            assert value.__name__ == name


def test_no_recorded_name_was_removed():
    """If one has to go: docs/stability.md says how; then `python tests/support/public_names.py` records what is."""
    recorded, now = public_names.record(), public_names.public()
    assert public_names.removed(recorded, now) == []
    assert {"parallelism.Mesh.groups", "vcluster.VirtualCluster.run", "parallelism.planning.find_plan"} <= {*recorded}
    assert public_names.removed([*recorded, "vcluster.VirtualCluster.runs"], now) == ["vcluster.VirtualCluster.runs"]


def test_the_reference_of_the_site_has_only_rooms_that_are_recorded():
    reference = ast.parse((ROOT / "website" / "reference.py").read_text(encoding="utf-8"))
    (rooms,) = (ast.literal_eval(node.value) for node in reference.body
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROOMS")
    assert {*rooms} <= {*public_names.ROOMS}


@pytest.mark.parametrize(("package", "old", "new"), [
    ("vcluster", "Cluster", "VirtualCluster"), ("parallelism", "Grid", "Mesh"),
    ("parallelism.planning", "best_plan", "find_plan")])
def test_an_old_name_works_with_a_warning_that_names_the_new_one_at_the_line_of_the_caller(package, old, new, monkeypatch):
    monkeypatch.setitem(moved.RENAMED, f"{package}.{old}", (new, "0.3", "0.4"))
    module = importlib.import_module(package)
    with pytest.warns(DeprecationWarning, match=old) as told:
        assert getattr(module, old) is getattr(module, new)
    assert [str(each.message) for each in told] == [f"{package}.{old} is {package}.{new} since 0.3; the old name goes in 0.4"]
    assert told[0].filename == __file__
    assert old not in dir(module)


@pytest.mark.parametrize(("file", "told"), [
    ("parallelism/__init__.py", "at {folder}/parallelism: take that away (python -m pip uninstall parallelism)"),
    ("parallelism.py", "found {folder}/parallelism.py: give that file another name")])
def test_another_package_of_the_name_is_told_with_what_to_do(file, told, tmp_path):
    other = tmp_path / file
    other.parent.mkdir(exist_ok=True)
    other.write_text("", encoding="utf-8")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import vcluster"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert told.format(folder=tmp_path) in done.stderr.splitlines()[-1]


def test_the_runtime_passes_on_what_describes():
    assert set(parallelism.__all__) <= set(vcluster.__all__)
    assert all(getattr(vcluster, name) is getattr(parallelism, name) for name in parallelism.__all__)


@pytest.mark.parametrize("package", [parallelism, tensor_parallelism, vcluster], ids=lambda package: package.__name__)
def test_a_name_that_is_not_there_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="Mash"):
        _ = package.Mash


def test_a_module_of_a_room_is_imported_without_a_search_for_the_name_that_was_meant():
    program = ("import sys; from vcluster.memory import forks; from vcluster import VirtualCluster; "
               "assert not {'difflib', 'html'} & {*sys.modules}")
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_importing_loads_no_numpy_and_starts_nothing_and_numpy_waits_until_a_cluster_is_made():
    """So the fork server can begin before it is loaded."""
    program = ("import sys, threading, vcluster; assert 'numpy' not in sys.modules; "
               "assert threading.active_count() == 1; "
               "from vcluster import VirtualCluster; assert 'numpy' not in sys.modules")
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.slow
def test_the_command_plan_loads_no_search_of_another_kind():
    """Nor what draws pages, runs processes or reads the version of a package."""
    rooms = ("parallelism.auto_sharding.", "parallelism.slicing.", "parallelism.mixing.", "parallelism.budgets.search",
             "vcluster.report.", "vcluster.runs.cluster", "vcluster.cli.sliced", "vcluster.cli.sweeps.swept", "email")
    program = f"import sys, vcluster.__main__, vcluster.cli.plan; print(*[m for m in sys.modules if m.startswith({rooms})])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


@pytest.mark.slow
def test_a_start_loads_only_what_it_needs():
    """A device finds all its modules loaded, and its host loads none that only a device needs."""
    program = """
import subprocess, sys
from vcluster import VirtualCluster

def modules_after(statements):
    program = f"import sys; {statements}; print(*sys.modules)"
    return {*subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()}

with VirtualCluster(1) as cluster:
    of_device = {*cluster.run(lambda device: [*sys.modules]).outputs[0]}
of_server = modules_after("from vcluster.processes import forkserver as f; f._preload(f.PRELOAD); "
                          "from vcluster.code import refresh_modules; refresh_modules()")
libraries = modules_after("import numpy, cloudpickle, multiprocessing.util")
assert of_device <= of_server, of_device - of_server
dear = {"hashlib", "pathlib", "random", "shutil", "tempfile", "multiprocessing.connection"} - libraries
assert not dear & of_device, dear & of_device
rooms = "vcluster.collectives", "vcluster.device", "vcluster.processes.worker"
assert {name for name in of_device if name.startswith(rooms)}
assert not {name for name in sys.modules if name.startswith(rooms)}
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
