"""The Python of the documents has types: mypy --strict and pyright accept it, with the packages installed both ways."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest
from paths import ROOT
from test_documents import PAGES, code_blocks

INSTALLED = {"editable": ["--editable"], "wheel": []}
RESULTS = '''
import numpy as np
from vcluster import Device, VirtualCluster, VirtualDevice

def of_any_device(device: Device, x: np.ndarray) -> np.ndarray:
    sums = device.all_reduce(x, "tp", async_op=True)
    return sums.wait() + device.reduce_scatter(device.all_gather(x), "tp")

def of_ours(device: VirtualDevice, x: np.ndarray) -> np.ndarray:
    return device.broadcast(x if device.rank == 0 else None)

def shapes(cluster: VirtualCluster, x: np.ndarray) -> list[tuple[int, ...]]:
    run = cluster.run(of_any_device, x)
    first: np.ndarray = cluster.run(of_ours, x)[0]
    return [output.shape for output in run.outputs] + [first.shape]
'''
MISTAKES = '''
from vcluster import Device, VirtualCluster

def size(device: Device) -> int:
    return device.size

def wrong_option(device: Device, x: float) -> object:
    return device.all_reduce(x, group="tp")

def wrong_result(cluster: VirtualCluster) -> list[str]:
    return cluster.run(size).outputs

def wrong_program(cluster: VirtualCluster) -> object:
    return cluster.run(3)
'''


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """A folder with a module for each block of Python of the documents, one that is right, and one with mistakes."""
    folder = tmp_path_factory.mktemp("examples")
    missing = [library for library in ("jax", "onnx") if find_spec(library) is None]
    for block in code_blocks():
        code, _ = block.values
        if not any(re.search(rf"^(import|from) {library}\b", code, re.MULTILINE) for library in missing):
            (folder / f"{block.id.replace('-', '_')}.py").write_text(code, encoding="utf-8")
    assert len(list(folder.glob("*.py"))) > len(PAGES)
    (folder / "results.py").write_text(RESULTS, encoding="utf-8")
    (folder / "mistakes.py").write_text(MISTAKES, encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=INSTALLED)
def python(request, tmp_path_factory):
    """An environment into which the packages are installed from a copy of the sources.  It sees our requirements."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    source.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
        elif (path / "py.typed").exists():
            shutil.copytree(path, source / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    venv.create(folder / "venv")
    interpreter = folder / "venv" / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet", "--no-deps",
         *INSTALLED[request.param], source], check=True, env=outside())
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    # After the packages that are tested, for it may have others of the same names.
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return interpreter


def outside() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}


def checked(command: list[str | Path], folder: Path) -> tuple[int, str]:
    done = subprocess.run(command, cwd=folder, env=outside(), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def mypy(python: Path, folder: Path) -> tuple[int, str]:
    # Of what JAX offers, some has no types.
    command = [sys.executable, "-m", "mypy", "--strict", "--untyped-calls-exclude=jax", "--python-executable", python]
    return checked([*command, "--cache-dir", python.parents[2] / "cache", *folder.glob("*.py")], folder)


def pyright(python: Path, folder: Path) -> tuple[int, str]:
    command = shutil.which("pyright")
    if command is None:
        pytest.skip("there is no pyright here: its package fetches it from the registry of Node")
    return checked([command, "--pythonpath", python, *folder.glob("*.py")], folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_only_mistakes_are_refused(checker, python, examples):
    status, said = checker(python, examples)
    assert status == 1
    refused = set(re.findall(r"(\w+)\.py:(\d+):(?:\d+ -)? error:", said))
    assert refused == {("mistakes", "8"), ("mistakes", "11"), ("mistakes", "14")}, said
