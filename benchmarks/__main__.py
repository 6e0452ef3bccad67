"""``python -m benchmarks``."""

from __future__ import annotations

import sys

from benchmarks.command import PROGRAM, main
from vcluster.cli.command_line import serve

if __name__ == "__main__":
    sys.exit(serve(PROGRAM, main))
