"""What the loggers `vcluster` and `parallelism` say: devices that start, are replaced and end; a search."""

import logging
import os
import signal

import pytest

from parallelism import models
from parallelism.planning import find_plan
from parallelism.transforms import SGD
from vcluster import DeviceFailedError, VirtualCluster


def test_devices_that_start_are_replaced_and_end(caplog):
    caplog.set_level(logging.INFO, "vcluster")
    with VirtualCluster(2) as cluster:
        before = cluster.pids()
        with pytest.raises(DeviceFailedError):
            cluster.run(lambda device: os.kill(os.getpid(), signal.SIGKILL) if device.rank == 1 else None)
        after = cluster.pids()
    assert {(record.name, record.levelname) for record in caplog.records} == {("vcluster", "INFO")}
    assert [record.getMessage() for record in caplog.records] == [
        f"<VirtualCluster of Mesh(devices=2), process backend, shared_memory> started; pids by rank: {before}",
        f"ranks [1] died in run 1; new devices with empty state take their places; pids by rank: {after}",
        "<VirtualCluster of Mesh(devices=2), closed> ended",
    ]
    assert not any(isinstance(each, VirtualCluster) for record in caplog.records for each in record.args)



@pytest.mark.slow
def test_a_search_says_what_it_timed_and_how_far_it_is(caplog):
    caplog.set_level(logging.DEBUG, "parallelism")
    model = models.TransformerSpec(layers=1, width=4, heads=1, vocabulary=4, sequence=2)
    plans = find_plan(
        model, hardware="dgx-h100", devices=2, batch=2, tp=1, pp=1, recompute="none", zero=0, optimizer=SGD(0.1))
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "parallelism"]
    assert said[-1][0] == "INFO"
    full = sum(plan.is_simulated for plan in plans)
    assert said[-1][1].startswith(f"{plans.timed} plans timed, {full} simulated, in ")
    assert any(level == "DEBUG" and text.startswith("simulated: 0 of ") for level, text in said)


def test_nothing_is_said_unless_it_is_asked_for(capfd):
    with VirtualCluster(1, backend="thread") as cluster:
        cluster.run(lambda device: None)
    assert capfd.readouterr() == ("", "")
