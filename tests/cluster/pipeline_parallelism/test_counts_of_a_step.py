"""What the library itself does in a step of a pipeline, counted: Python functions, and operations in generators."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest

from parallelism.kernels import SGD
from parallelism.mesh import Mesh
from parallelism.pipelining import Pipeline
from pipeline_parallelism import MLP
from vcluster.messages import Mailbox
from vcluster.messages.tasks import Task

STAGES, MICROBATCHES, WIDTH = 3, 4, 6
MOST_AN_ACTION = 180
"""Functions that an action calls, with its messages, memory and event: 90 to 137, as messages come early or late."""
WAITING = "_block"
"""Called while a device waits; what this calls is up to the other devices."""


def count(device, model, x, targets):
    """The functions that a step calls when it is repeated, and the messages that were sent by a generator."""
    step = model.train_step(SGD(0.5), returns="loss")
    for time in range(4):
        functions: Counter[str] = Counter()
        waiting = 0

        def note(frame, event, arg, functions=functions):
            nonlocal waiting
            name = frame.f_code.co_name
            if event == "call" and (waiting or name == WAITING):
                waiting += 1
            elif event == "return" and waiting:
                waiting -= 1
            elif event == "call":
                functions[name] += 1
                if frame.f_code in (Mailbox.sending.__code__, Task.__init__.__code__):
                    functions["in a generator"] += 1

        inputs = step.inputs(device.mesh, x, targets)[device.rank]
        device.barrier()
        sys.setprofile(note if time == 3 else None)
        try:
            step(device, *inputs)
        finally:
            sys.setprofile(None)
    return functions.total(), functions["in a generator"]


@pytest.mark.not_on_mpi("counts what messages in shared memory cost")
def test_an_action_calls_few_functions_and_its_messages_need_no_generator(cluster_of):
    model = MLP((WIDTH,) * (STAGES + 1), Pipeline(STAGES, MICROBATCHES), dtype=np.float32)
    x = np.ones((MICROBATCHES * 2, WIDTH), np.float32)
    for functions, generators in cluster_of(Mesh(pp=STAGES)).run(count, model, x, x):
        assert functions <= MOST_AN_ACTION * 2 * MICROBATCHES
        assert generators == 0
