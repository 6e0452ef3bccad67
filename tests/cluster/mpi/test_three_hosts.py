"""Jobs over three hosts of one machine, which only their network joins."""

import json
import shutil
import sys
from pathlib import Path

import interface_traffic
import pytest
from mpi_jobs import needs_mpi
from three_hosts import hosts, refusal

HYDRA = shutil.which("mpiexec.hydra", path=str(Path(sys.executable).parent))
pytestmark = [
    needs_mpi, pytest.mark.slow, pytest.mark.timeout(400),
    pytest.mark.skipif(HYDRA is None, reason="there is no MPICH beside Python, whose launcher takes a command"),
]
NAMES = "node0", "node1", "node2"
MESSAGE_BYTES = 1000
"""The most that a message costs beside its array: its head and description, and headers and acknowledgements of TCP."""


@pytest.fixture(scope="module")
def three():
    refused = refusal()
    if refused is not None:
        pytest.skip(refused)
    with hosts(*NAMES) as found:
        yield found


def test_what_the_interfaces_send_is_what_the_trace_says(three):
    done = three.job(17, "-m", "vcluster.mpi", interface_traffic.__file__, 16, 1 << 16, 1 << 20)
    assert done.returncode == 0, done.stdout
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 4
    for row in found:
        print(row)
        assert row["hosts"] == len(NAMES)
        assert row["traced"] <= row["sent"] <= 1.05 * row["traced"] + MESSAGE_BYTES * row["messages"], row


@pytest.mark.parametrize(("ranks", "demo"), [
    (5, ["mlp", "--pp", 4, "--steps", 3]), (9, ["gpt", "--dp", 2, "--pp", 2, "--tp", 2, "--steps", 1])])
def test_demos_run_over_hosts(three, ranks, demo):
    before = three.traffic()
    done = three.job(ranks, "-m", "vcluster.mpi", "-m", "vcluster.demo", *demo)
    assert done.returncode == 0, done.stdout
    assert " ok " in done.stdout
    for name, (received, sent) in three.traffic().items():
        assert received > before[name][0] + 100_000 and sent > before[name][1] + 100_000
