"""``mpiexec -n 5 python -m vcluster.mpi script.py``: rank 0 runs the script, the others serve its devices.

mpiexec -n 5 python -m vcluster.mpi script.py argument ...
mpiexec -n 5 python -m vcluster.mpi -m vcluster.demo mlp --pp 4
"""

from __future__ import annotations

import sys

from vcluster.mpi.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
