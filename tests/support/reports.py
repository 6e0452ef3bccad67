"""What the tests report of themselves: less than pytest does, and no failure is left out."""

import pytest
from _pytest.runner import runtestprotocol

LISTED_BY_DURATIONS_SECONDS = 0.005
"""What pytest's ``--durations`` leaves out by default is shorter."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """What pytest does for a test, with a tenth less work for the tests of a millisecond, of which there are thousands.

    A worker sends all that it reports to the process that prints.  That a test begins and ends is not printed.  Of a
    set-up and a tear-down somebody reads a failure, a skip, and that it took long (`--durations`).
    """
    is_worker = hasattr(item.config, "workerinput")
    if not is_worker:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        if report.when == "call" or not report.passed or report.duration >= LISTED_BY_DURATIONS_SECONDS:
            item.ihook.pytest_runtest_logreport(report=report)
    if not is_worker:
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
