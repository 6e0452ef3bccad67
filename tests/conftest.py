"""What holds for all tests."""

import os
import signal

from hypothesis import settings

from vcluster.forkserver import THREAD_VARIABLES

# Read when NumPy is loaded.  As many BLAS threads as cores in every worker and script are a crowd of threads that spin.
os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background so, and children inherit it: the tests of Ctrl-C could never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A few examples by default, many for `pytest -m slow` (cluster/test_many_examples.py).  A crowded machine is slow, not
# wrong; and what CI finds, it finds again.
EXAMPLES = int(os.environ.get("VCLUSTER_EXAMPLES", "25"))
settings.register_profile("here", deadline=None, max_examples=EXAMPLES)
settings.register_profile("ci", deadline=None, max_examples=EXAMPLES, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
