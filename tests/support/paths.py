"""Where the files of the repository lie."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
"""Figures from papers and standards, each with its source."""
