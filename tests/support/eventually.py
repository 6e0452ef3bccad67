"""Conditions that other processes or threads make true."""

import time


def eventually(condition, seconds=10.0):
    """What ``condition()`` returns once that is true; False if it is not in time."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return found
