"""What holds for all tests."""

import os

from hypothesis import settings

# A crowded machine is slow, not wrong; and what CI finds, it finds again.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
