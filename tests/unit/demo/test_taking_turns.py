"""Why wall time is long where there are more devices than cores."""

import os

import pytest

from vcluster.demo.training import taking_turns


@pytest.mark.parametrize(("devices", "cores", "backend", "reason"), [
    (8, 2, "process", "8 devices take turns on 2 cores"), (3, 1, "process", "3 devices take turns on 1 core"),
    (2, 2, "process", ""), (1, 4, "process", ""), (2, 4, "thread", "threads share one interpreter")])
def test_the_reason_is_told_where_devices_cannot_all_compute_at_once(devices, cores, backend, reason, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert taking_turns(devices, backend) == reason
