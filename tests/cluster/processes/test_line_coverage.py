"""Line coverage of what devices run, by `pytest --cov` and by coverage.py alone."""

import os
import subprocess
import sys

import pytest

coverage = pytest.importorskip("coverage")
pytest_plugins = ["pytester"]

KERNEL = """
def kernel(device, x):
    if device.rank == 0:
        y = x + 1
    else:
        y = x + 2
    total = device.all_reduce(y)
    if device.rank == 5:
        never = 1
    return total
"""
TESTS = """
import pytest
from kernel_of_a_user import kernel
from vcluster import VirtualCluster

@pytest.mark.spmd(tp=2)
def test_body(device):
    if device.rank == 1:
        assert kernel(device, 1) == 5
    else:
        kernel(device, 1)

@pytest.mark.mesh(tp=2)
def test_host(virtual_cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def inner(device):
        return device.rank

    with VirtualCluster(1) as own:
        own.run(inner)
"""
SCRIPT = """
from kernel_of_a_user import kernel
from vcluster import VirtualCluster
with VirtualCluster(2) as cluster:
    cluster.run(kernel, 1)
"""
NEVER = [8]
"""The line of `KERNEL` that no rank comes to."""


@pytest.fixture
def folder(pytester):
    pytester.makepyfile(kernel_of_a_user=KERNEL, test_it=TESTS, script=SCRIPT)
    return pytester.path


def run(folder, *words, **variables):
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr
    return done


def missing(folder, name, config=False):
    """The lines of a file that nobody came to; the data file must be the only one there."""
    assert [path.name for path in folder.glob(".coverage*")] == [".coverage"]
    measured = coverage.Coverage(data_file=str(folder / ".coverage"), config_file=config)
    measured.load()
    return measured.analysis2(str(folder / name))[3]


@pytest.mark.slow
def test_under_pytest_cov_what_devices_ran_is_covered(folder):
    pytest.importorskip("pytest_cov")
    run(folder, "pytest", "-p", "no:cacheprovider", "-p", "vcluster", "-p", "pytest_cov", "--cov=.", "--cov-branch",
        "--cov-report=", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert missing(folder, "kernel_of_a_user.py") == NEVER
    assert missing(folder, "test_it.py") == []


@pytest.mark.slow
def test_under_coverage_run_too(folder):
    run(folder, "coverage", "run", "--source=.", "-m", "pytest", "-p", "no:cacheprovider")
    assert missing(folder, "kernel_of_a_user.py") == NEVER
    assert missing(folder, "test_it.py") == []


@pytest.mark.slow
def test_a_script_whose_subprocesses_are_measured_leaves_a_file_for_each_device(folder):
    config = folder / "config"
    config.write_text(f"[run]\nparallel = true\nsource = {folder}\n")
    run(folder, "coverage", "run", "--rcfile=config", "script.py", COVERAGE_PROCESS_START=str(config))
    assert len(list(folder.glob(".coverage.*"))) == 3
    run(folder, "coverage", "combine", "--rcfile=config", "-q")
    assert missing(folder, "kernel_of_a_user.py", str(config)) == NEVER
