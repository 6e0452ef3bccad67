"""A cluster in a notebook: its picture, and the devices that a cell leaves when it is run again."""

import gc
import os
import subprocess
import sys

import psutil
import pytest
from paths import ROOT

from vcluster import VirtualCluster

SHELL = """
import gc, sys
import psutil
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_cell("from vcluster import VirtualCluster", store_history=True)
for _ in range(10):
    shell.run_cell({cell!r}, store_history=True)
gc.collect()
alive = [c for c in gc.get_objects() if type(c).__name__ == "VirtualCluster" and not c.closed]
print(len(alive), sum(c.size for c in alive), repr(shell.user_ns["_oh"].get(11)), file=sys.__stdout__)
"""


@pytest.mark.parametrize(("cell", "left"), [
    ("cluster = VirtualCluster(2, backend='thread')\ncluster", "1 2"),
    ("VirtualCluster(2, backend='thread')", "1 2"),    # IPython keeps its last result until the next
    ("cluster = VirtualCluster(2)\ncluster", "1 2"),
])
def test_a_cell_that_shows_a_cluster_leaves_one_however_often_it_is_run(cell, left, tmp_path):
    pytest.importorskip("IPython")
    done = subprocess.run(
        [sys.executable, "-c", SHELL.format(cell=cell)], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"{left} <VirtualCluster of Mesh(devices=2)"), done.stdout + done.stderr


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
