"""A lesson in a folder of its own, as a student has it: its notebook, solved, and lesson.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from paths import ROOT

WORKSHOP = ROOT / "workshop"
WITHOUT = """
import os, sys
sys.modules["fcntl"] = None
if hasattr(os, "memfd_create"):
    del os.memfd_create
"""
"""Makes a Python that has neither, as on native Windows."""
_ALONE = """
import json, sys
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]))
print("passes" if lesson.last else "does not pass")
print("on", lesson.backend)
lesson.reset()
"""


def solved_notebook(number, folder):
    """Writes the notebook of a student, with the cells of the solved one, and lesson.py: its path, and what it holds."""
    (solved,) = (WORKSHOP / "solved").glob(f"{number}-*.ipynb")
    mine = json.loads((WORKSHOP / solved.name).read_text(encoding="utf-8"))
    mine["cells"] = json.loads(solved.read_text(encoding="utf-8"))["cells"]
    notebook = folder / solved.name
    notebook.write_text(json.dumps(mine), encoding="utf-8")
    (folder / "lesson.py").write_text((WORKSHOP / "lesson.py").read_text(encoding="utf-8"), encoding="utf-8")
    return notebook, mine


def run_alone(notebook, first=""):
    """Runs the cells of a notebook in its folder, behind the code ``first``: the process, which has ended."""
    environment = {name: value for name, value in os.environ.items() if name != "VCLUSTER_WORKSHOP_SCORES"}
    return subprocess.run([sys.executable, "-c", first + _ALONE, notebook.name], cwd=notebook.parent, capture_output=True,
                          text=True, check=False, env=environment)
