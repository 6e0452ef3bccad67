"""What the packages promise at their top."""

import subprocess
import sys

import pytest

import parallelism
import pipeline_parallelism
import tensor_parallelism
import vcluster

PACKAGES = [parallelism, tensor_parallelism, pipeline_parallelism, vcluster]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_there_once_and_is_what_it_says(package):
    assert len(set(package.__all__)) == len(package.__all__)
    for name in package.__all__:
        value = getattr(package, name)
        if isinstance(value, type) or callable(value):
            assert value.__name__ == name


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
