"""A cluster in a notebook: its picture, and the devices that a cell leaves when it is run again."""

import gc
import os
import subprocess
import sys
from functools import cache

import psutil
import pytest
from paths import ROOT

from vcluster import DeadlockError, VirtualCluster

SHELL = """
import gc, re, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.colors = "NoColor"
for cell in {mistakes!r}:
    print("=====")
    shell.run_cell(cell, store_history=True)
print("=====")
for _ in range(4):
    shell.run_cell({cell!r}, store_history=True)
gc.collect()
alive = [c for c in gc.get_objects() if type(c).__name__ == "VirtualCluster" and not c.closed]
last = shell.user_ns["_oh"].get(shell.execution_count - 1)
print(len(alive), sum(c.size for c in alive), repr(last), file=sys.__stdout__)
"""
MISTAKES = [
    "import numpy as np\nfrom vcluster import VirtualCluster\ncluster = VirtualCluster(2)",
    "def differ(device):\n    x = np.ones(2 + device.rank)\n    return device.all_reduce(x)  # here\n"
    "cluster.run(differ)",
    "def wait(device):\n    if device.rank == 0:\n        device.recv(1)  # for ever\ncluster.run(wait)",
    "def divide(device):\n    return 1 / (device.rank - 1)\ncluster.run(divide)",
    "def stop(device):\n    breakpoint()\ncluster.run(stop)",
    "import psutil\nfirst, scale = cluster.pids(), 3",
    "def kernel(device):\n    print('hello')\n    return int(scale * device.all_reduce(device.rank))",
    "cluster = VirtualCluster(2)\nprint('first gone:', not any(psutil.pid_exists(pid) for pid in first))",
    "print(cluster.run(kernel).outputs)",
    "cluster.restart()\nprint(cluster.run(kernel).outputs)\ncluster.close()\nprint(cluster.closed)",
    "cluster.run(kernel)",
]


@pytest.fixture(scope="module")
def in_a_shell(tmp_path_factory):
    """What the mistakes, and then four runs of a cell, show in a shell in a process of its own."""
    pytest.importorskip("IPython")
    folder = tmp_path_factory.mktemp("shell")

    @cache
    def run(cell):
        done = subprocess.run(
            [sys.executable, "-c", SHELL.format(mistakes=MISTAKES, cell=cell)],
            capture_output=True, text=True, check=False, cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder)})
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


SHOWN = "cluster = VirtualCluster(2, backend='thread')\ncluster"


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "left"), [
    (SHOWN, "1 2"), ("VirtualCluster(2, backend='thread')", "1 2"),    # IPython keeps its last result until the next
    ("cluster = VirtualCluster(4)\ncluster", "1 4"),
])
def test_a_cell_that_shows_a_cluster_leaves_one_however_often_it_is_run(in_a_shell, cell, left):
    shown = in_a_shell(cell)
    assert shown.splitlines()[-1].startswith(f"{left} <VirtualCluster of Mesh(devices={left[-1]})"), shown


def test_the_picture_names_the_mesh_the_devices_and_their_processes():
    with VirtualCluster(dp=2, tp=3, backend="thread", hardware="dgx-a100") as cluster:
        html = cluster._repr_html_()
        assert html.count("<tr>") == 7 and ">tp=2</div>" in html and "time of dgx-a100" in html and "pid" not in html
    assert "closed" in cluster._repr_html_()
    with VirtualCluster(2) as cluster:
        html = cluster._repr_html_()
        assert all(f"<td>{pid}</td>" in html for pid in cluster.pids())
        assert all(psutil.pid_exists(pid) for pid in cluster.pids())
        assert cluster._repr_mimebundle_() == {"text/plain": repr(cluster), "text/html": html}


def test_of_many_devices_the_first_have_rows():
    with VirtualCluster(20, backend="thread") as cluster:
        assert "… and 4 more" in cluster._repr_html_()
    gc.collect()


@pytest.mark.takes_seconds
def test_errors_name_the_cell_and_its_line_and_hide_the_library(in_a_shell):
    differ, wait, divide, stop = in_a_shell(SHOWN).split("=====\n")[2:6]
    line = "    return device.all_reduce(x)  # here"
    assert f"called all_reduce(float64[2], op='sum') at Cell In[2], line 3\n{line}" in differ
    line = "    device.recv(1)  # for ever"
    assert f"in recv(from rank 1, tag 0) at Cell In[3], line 3, waiting for rank 1\n{line}" in wait
    assert "  Cell In[4], line 2, in divide\n    return 1 / (device.rank - 1)" in divide
    assert "run again with backend='thread'" in stop
    for told in (differ, wait, divide, stop):
        assert "ipython-input" not in told and f"{ROOT}" not in told and "----> " in told, told


@pytest.mark.takes_seconds
def test_a_cluster_lives_across_cells(in_a_shell):
    cells = in_a_shell(SHOWN).split("=====\n")[1:]
    assert cells[0] == cells[5] == cells[6] == ""
    assert cells[7] == "first gone: True\n"
    assert sorted(cells[8].splitlines()) == ["[3, 3]", "[rank 0] hello", "[rank 1] hello"]
    assert cells[9].splitlines()[-2:] == ["[3, 3]", "True"]
    assert "ClusterError" in cells[10] and "cluster.restart()" in cells[10]
    divide = cells[3]
    assert "DeviceFailedError" in divide and "ZeroDivisionError" in divide


def test_outside_a_notebook_errors_name_files():
    with VirtualCluster(2, backend="thread") as cluster, pytest.raises(DeadlockError) as error:
        cluster.run(lambda device: device.rank or device.recv(1))
    assert f"at {__file__}:" in str(error.value) and "Cell" not in str(error.value)
