"""The event of a `recv` begins when the kernel calls it, so that it holds the time in which no message had come."""

from __future__ import annotations

import numpy as np
import pytest

from parallelism.mesh import Mesh

TIMES = 4


@pytest.mark.parametrize("elements", [1, 1 << 15])     # in a block that is used again, and in one that is not
def test_a_recv_is_one_event_from_its_call_on(cluster_of, elements):
    def kernel(device):
        if device.rank == 0:
            for number in range(TIMES):
                device.barrier()
                device.send(np.full(elements, number), 1)
            return None
        begun, enter = [], device.recorder.enter
        for number in range(TIMES):
            device.barrier()
            device.recorder.enter = lambda *given: begun.append(enter(*given)) or begun[-1]
            assert (device.recv(0) == number).all()
            del device.recorder.enter
        return [start - device.recorder._wall_zero for start in begun]

    run = cluster_of(Mesh(devices=2)).run(kernel)
    found = [event.wall_start_seconds for event in run.trace.filter(name="recv", rank=1)]
    assert found == [start / 1e9 for start in run.outputs[1]]
    assert len(found) == TIMES
