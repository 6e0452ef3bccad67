"""A stage of a pipeline that computes nothing, and says what it would cost."""

from __future__ import annotations

import numpy as np

from parallelism.pipelining import Stage


class PricedStage(Stage):
    """Its ``costs`` by kind of action are flops: seconds, where a device makes one a second."""

    def __init__(self, costs):
        self.costs = costs

    def forward(self, microbatch, x):
        return np.zeros(0)

    def backward(self, microbatch, grad):
        return np.zeros(0)

    def backward_input(self, microbatch, grad):
        return np.zeros(0)

    def backward_weights(self, microbatch):
        return None

    def cost(self, kind, microbatch):
        return self.costs[kind], 0.0
