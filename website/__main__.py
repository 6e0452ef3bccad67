"""`python website` makes the site in build/site, to be read from a file, without a network.  A warning is an error."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "workshop"), str(HERE)]


def main() -> int:
    """Writes the sources into a folder of its own, and has Sphinx make pages of them."""
    from pages import write
    from sphinx.cmd.build import build_main

    parser = argparse.ArgumentParser(prog="python website", description=__doc__)
    parser.add_argument("folder", nargs="?", default=HERE.parent / "build" / "site", type=Path, help="default: build/site")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as made:
        write(Path(made))
        places = ["-c", str(HERE), "-d", f"{made}/_kept", made, str(folder)]
        return build_main(["-q", "-W", "--keep-going", "-b", "html", *places])


if __name__ == "__main__":
    sys.exit(main())
