"""What a package index shows of us: the README with links that lead to the repository, and the project's addresses.

All else about the package is in `setup.cfg`.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
IN_A_CLONE = re.compile(r"^pip install -e \. .*$", re.MULTILINE)
INSTALLED = """
## In the wheel

One wheel installs four top-level packages: `vcluster`, which runs, `parallelism`, which describes, simulates and plans, and
two of worked strategies, `tensor_parallelism` and `pipeline_parallelism`. Another distribution with a package `parallelism`
cannot stand in the same environment. Python 3.11 or later, Linux or macOS; on Windows descriptions, plans and threads.
"""
LINK = re.compile(r"(!?)(\[[^\]]*\]\()([^)#\s]+)")


def repository() -> str:
    """The address of the repository, without a slash at the end; empty if nobody has said it."""
    settings = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["vcluster"]
    return (os.environ.get("VCLUSTER_REPOSITORY") or settings["repository"]).rstrip("/")


def version() -> str:
    """The version that `vcluster/__init__.py` names."""
    return re.findall(
        r'^__version__ = "(.+)"$', (HERE / "vcluster/__init__.py").read_text(encoding="utf-8"), re.MULTILINE
    )[0]


def page(readme: str, address: str, release: str) -> str:
    """The README for an index: one installs from there, and relative links lead to the files of the release.

    Without an ``address`` links stay as they are.
    """
    readme = IN_A_CLONE.sub("pip install vcluster", readme) + INSTALLED

    def absolute(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if "://" in target:
            return found[0]
        return f"{picture}{words}{address}/{'raw' if picture else 'blob'}/v{release}/{target}"

    return LINK.sub(absolute, readme) if address else readme


def addresses(address: str, release: str) -> dict[str, str]:
    """The links beside the page, by their labels."""
    if not address:
        return {}
    files = {"Documentation": "docs/start.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
    return {"Source": address, "Issues": f"{address}/issues"} | {
        label: f"{address}/blob/v{release}/{path}" for label, path in files.items()
    }


if __name__ == "__main__":
    setup(
        long_description=page((HERE / "README.md").read_text(encoding="utf-8"), repository(), version()),
        long_description_content_type="text/markdown",
        project_urls=addresses(repository(), version()),
    )
