"""What holds for all tests."""

import gc
import os
import signal

import pytest
from drawn import BY_DAY
from hypothesis import settings

from vcluster.processes.blas_threads import THREAD_VARIABLES

# Read when NumPy is loaded.  As many BLAS threads as cores in every worker and script are a crowd of threads that spin.
os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))

os.environ["VCLUSTER_HOST_HARDWARE"] = ""       # no test depends on how the user's machine was calibrated

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background so, and children inherit it: the tests of Ctrl-C could never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A few examples by default, many for `pytest -m slow` (cluster/test_many_examples.py).  A crowded machine is slow, not
# wrong; and what CI finds, it finds again.
settings.register_profile("here", deadline=None, max_examples=BY_DAY)
settings.register_profile("ci", deadline=None, max_examples=BY_DAY, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_configure(config):
    if config.getoption("--vcluster-backend") == "mpi":
        config.pluginmanager.import_plugin("on_mpi")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the parameters of a test that is marked ``sampled(n)``, one in n is for every day; the others are slow."""
    counts: dict[object, int] = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and item.get_closest_marker("slow") is None:
            every, = mark.args
            test = (item.path, item.originalname)
            if counts.get(test, 0) % every:
                item.add_marker(pytest.mark.slow)
            counts[test] = counts.get(test, 0) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Thousands of tests are made and stay until the end: the garbage collector would look at them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
