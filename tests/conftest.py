"""What holds for all tests."""

import os
import signal

from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background so, and children inherit it: the tests of Ctrl-C could never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A crowded machine is slow, not wrong; and what CI finds, it finds again.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
