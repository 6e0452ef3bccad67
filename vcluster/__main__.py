"""``python -m vcluster``: what there is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from vcluster.demo.command_line import WrongWords, nearest, serve

PROGRAM = "python -m vcluster"

LIST = f"""vcluster: a cluster of real processes on this machine

  {PROGRAM}.demo              the demos, one line each
  {PROGRAM}.demo mlp --pp 4   a perceptron trained as a pipeline
  {PROGRAM} doctor            what this machine lacks, and what to do
  {PROGRAM} hardware [NAME]   hardware that is described, or yours
  {PROGRAM} --version         which one this is

In Python:

  from vcluster import VirtualCluster
  with VirtualCluster(4) as cluster:
      run = cluster.run(lambda device: device.all_reduce(device.rank))
  print(run.outputs)
"""


def main(words: Sequence[str]) -> int:
    """Prints what there is, or the version; the exit status."""
    if not words or words[0] in ("-h", "--help"):
        print(LIST, end="")
        return 0
    if words[0] == "--version":
        try:
            print("vcluster", version("vcluster"))
        except PackageNotFoundError:
            print("vcluster, from sources that are not installed")
        return 0
    if words[0] == "doctor":
        if len(words) > 1:
            raise WrongWords(f"doctor takes no more words, got {words[1]!r}")
        from vcluster import doctor

        return doctor.show()
    if words[0] == "hardware":
        if len(words) > 2:
            raise WrongWords(f"hardware takes the name of a preset or of a file, got {words[2]!r} too")
        from vcluster import hardware_shown

        try:
            print(hardware_shown.one(words[1]) if len(words) > 1 else hardware_shown.every())
        except ValueError as error:
            raise WrongWords(str(error)) from None
        return 0
    if words[0] == "demo":
        raise WrongWords(f"the demos are {PROGRAM}.demo, with a dot")
    there = ("--version", "--help", "demo", "doctor", "hardware")
    raise WrongWords(f"there is no {words[0]!r}{nearest(words[0], there)}")


if __name__ == "__main__":
    sys.exit(serve(PROGRAM, main))
