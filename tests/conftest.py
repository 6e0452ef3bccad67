"""What holds for all tests."""

import gc
import os
import signal
import sys
from math import inf
from zlib import crc32

import pytest
from drawn import BY_DAY
from hypothesis import settings
from reports import pytest_runtest_protocol  # noqa: F401  (a hook)

from parallelism.display import progress_line
from vcluster.processes.blas_threads import THREAD_VARIABLES

# Read when NumPy is loaded.  As many BLAS threads as cores in every worker and script are a crowd of threads that spin.
os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))

# Some hundred scripts and devices would each compile all modules again (`vcluster doctor` says so, too).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

os.environ["VCLUSTER_HOST_HARDWARE"] = ""       # no test depends on how the user's machine was calibrated

progress_line.LONG_SECONDS = inf        # on a crowded machine a search is long; what it writes is tested by itself

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background so, and children inherit it: the tests of Ctrl-C could never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A few examples by default, many for `pytest -m slow` (cluster/test_many_examples.py).  A crowded machine is slow, not
# wrong; and what CI finds, it finds again.
settings.register_profile("here", deadline=None, max_examples=BY_DAY)
settings.register_profile("ci", deadline=None, max_examples=BY_DAY, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

SLOW_PART = os.environ.get("VCLUSTER_SLOW_PART")
"""``2/8``: of the slow tests those of part 2 of 8.  The id of a test says in which part it is."""


def pytest_configure(config):
    if config.getoption("--vcluster-backend") == "mpi":
        config.pluginmanager.import_plugin("on_mpi")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Which parameters of a test are for every day; the others are slow.

    ``sampled(n, first=0)`` keeps one in n of them, from the first on; ``slow_for(word, ...)`` keeps those without such
    a word in their id.
    """
    counts: dict[object, int] = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and item.get_closest_marker("slow") is None:
            every, first = (*mark.args, 0)[:2]
            test = (item.path, item.originalname)
            if counts.get(test, 0) % every != first:
                item.add_marker(pytest.mark.slow)
            counts[test] = counts.get(test, 0) + 1
        words = item.get_closest_marker("slow_for")
        if words is not None and any(word in item.callspec.id for word in words.args):
            item.add_marker(pytest.mark.slow)
    if SLOW_PART:
        number, parts = map(int, SLOW_PART.split("/"))
        left = [item for item in items
                if item.get_closest_marker("slow") and crc32(item.nodeid.encode()) % parts != number % parts]
        config.hook.pytest_deselected(items=left)
        left_out = set(left)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="module", autouse=True)
def objects_that_stay_are_not_looked_at_again():
    """What a module leaves (JAX alone has 500,000 objects) would be looked at by each collection after it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Thousands of tests are made and stay until the end: the garbage collector would look at them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)    # each module begins with a collection of its own
        gc.enable()
