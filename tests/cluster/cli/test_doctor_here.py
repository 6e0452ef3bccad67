"""The doctor looks at this machine, on which the other tests run."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest


def consult(*limits):
    def limit():
        for name, value in limits:
            resource.setrlimit(name, (value, resource.getrlimit(name)[1]))

    return subprocess.run(
        [sys.executable, "-m", "vcluster", "doctor"], preexec_fn=limit, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=50, check=False,
    )


def test_it_starts_devices_and_finds_what_there_is():
    done = consult((resource.RLIMIT_NOFILE, min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
    assert done.stderr == ""
    assert "4 devices and a first run in" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    marked = [line for line in done.stdout.splitlines() if line.startswith("!")]
    assert done.returncode == bool(marked)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not heed this limit")
def test_a_limit_that_keeps_devices_from_starting_is_named():
    done = consult((resource.RLIMIT_FSIZE, 1 << 20))
    assert done.returncode == 1
    assert done.stderr == ""
    assert "! start          fails: " in done.stdout
    assert "ulimit -f unlimited" in done.stdout
