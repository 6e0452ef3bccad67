"""The doctor looks at this machine, on which the other tests run."""

from __future__ import annotations

import resource
import sys

import pytest

from vcluster.__main__ import PROGRAM, main
from vcluster.cli.command_line import serve


@pytest.mark.slow
def test_it_starts_devices_and_finds_what_there_is(capsys):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    try:
        status = serve(PROGRAM, main, ["doctor"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    out, err = capsys.readouterr()
    assert err == ""
    assert "4 devices and a first run in" in out
    assert max(map(len, out.splitlines())) <= 80
    marked = [line for line in out.splitlines() if line.startswith("!")]
    assert status == bool(marked)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not heed this limit")
def test_a_limit_that_keeps_devices_from_starting_is_named(capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        status = serve(PROGRAM, main, ["doctor"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    out, err = capsys.readouterr()
    assert (status, err) == (1, "")
    assert "! start          fails: " in out
    assert "ulimit -f unlimited" in out
