"""What the loggers `vcluster` and `parallelism` say: devices that start, are replaced and end; a search."""

import logging
import os
import signal

import pytest

from parallelism import models
from parallelism.planning import find_plan
from parallelism.transforms import SGD
from vcluster import DeviceFailedError, VirtualCluster


class Kept(logging.Handler):
    """The records of a logger. (`caplog` needs a plugin that costs every test a third of a millisecond.)"""

    def __init__(self, name, level):
        super().__init__(level)
        self.records = []
        self._logger = logging.getLogger(name)
        self._before = self._logger.level

    def __enter__(self):
        self._logger.addHandler(self)
        self._logger.setLevel(self.level)
        return self.records

    def __exit__(self, *_):
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before)

    def emit(self, record):
        self.records.append(record)


def test_devices_that_start_are_replaced_and_end():
    with Kept("vcluster", logging.INFO) as records:
        before, after = killed()
    assert {(record.name, record.levelname) for record in records} == {("vcluster", "INFO")}
    assert [record.getMessage() for record in records] == [
        f"<VirtualCluster of Mesh(devices=2), process backend, shared_memory> started; pids by rank: {before}",
        f"ranks [1] died in run 1; new devices with empty state take their places; pids by rank: {after}",
        "<VirtualCluster of Mesh(devices=2), closed> ended",
    ]
    assert not any(isinstance(each, VirtualCluster) for record in records for each in record.args)


def killed():
    """A cluster, of which a device dies: the ids of its processes before and after."""
    with VirtualCluster(2) as cluster:
        before = cluster.pids()
        with pytest.raises(DeviceFailedError):
            cluster.run(lambda device: os.kill(os.getpid(), signal.SIGKILL) if device.rank == 1 else None)
        after = cluster.pids()
    return before, after


@pytest.mark.slow
def test_a_search_says_what_it_timed_and_how_far_it_is():
    model = models.TransformerSpec(layers=1, width=4, heads=1, vocabulary=4, sequence=2)
    with Kept("parallelism", logging.DEBUG) as records:
        plans = find_plan(
            model, hardware="dgx-h100", devices=2, batch=2, tp=1, pp=1, recompute="none", zero=0, optimizer=SGD(0.1))
    said = [(record.levelname, record.getMessage()) for record in records]
    assert said[-1][0] == "INFO"
    full = sum(plan.is_simulated for plan in plans)
    assert said[-1][1].startswith(f"{plans.timed} plans timed, {full} simulated, in ")
    assert any(level == "DEBUG" and text.startswith("simulated: 0 of ") for level, text in said)


def test_nothing_is_said_unless_it_is_asked_for(capfd):
    with VirtualCluster(1, backend="thread") as cluster:
        cluster.run(lambda device: None)
    assert capfd.readouterr() == ("", "")
