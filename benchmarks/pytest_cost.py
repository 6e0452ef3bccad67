"""What the pytest plugin costs: seconds of a test that does nothing, on 4 devices.

    python -m benchmarks.pytest_cost

`first` is with all that starts then, in a session of its own; the others are of 100 warm tests.  Each stands beside a
test without the plugin, run in the same session.
"""

from __future__ import annotations

import io
import statistics
import tempfile
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.spmd(tp=4)
@pytest.mark.parametrize("n", range(101))
def test_spmd(device, n):
    pass

@pytest.mark.mesh(tp=4)
@pytest.mark.parametrize("n", range(101))
def test_mesh(virtual_cluster, n):
    pass

@pytest.mark.parametrize("n", range(101))
def test_plain(n):
    pass
"""


class Durations:
    """Seconds of each test, all three phases, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[2]] += report.duration


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "test_cost.py")
        path.write_text(TESTS)
        durations = Durations()
        with redirect_stdout(io.StringIO()):
            pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", directory, str(path)], [durations])
    print("milliseconds          first   median   lowest")
    for name in ("test_spmd", "test_mesh", "test_plain"):
        first, *warm = (1e3 * s for test, s in durations.seconds.items() if test.startswith(name))
        print(f"{name:20} {first:6.1f} {statistics.median(warm):8.2f} {min(warm):8.2f}")


if __name__ == "__main__":
    main()
