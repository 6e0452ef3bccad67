"""A GPU that need not exist: it takes the seconds that a described hardware would, and trains as long as it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from parallelism.cost import Costs
from parallelism.hardware import Hardware
from vcluster.calibration.gpu import items
from vcluster.calibration.gpu.fits import moved, product_seconds
from vcluster.calibration.gpu.items import Item
from vcluster.calibration.gpu.kernel_fits import BACKWARD, FORWARD, LOSS, SOURCES
from vcluster.calibration.gpu.models import Model

H100 = {"gpu": "NVIDIA H100 80GB HBM3", "date": "2026-11-27", "torch": "2.11.0", "multiprocessors": 132,
        "nvidia_smi.driver_version": "580.1", "memory_bytes": 85_000_000_000, "cuda": None}


class FakeGpu:
    """Measures by the model of costs.  ``step_seconds`` is what a step of any model takes.

    Work for seconds on end is slower by a factor.  ``before`` is called with each item, and may raise what a
    library would.
    """

    def __init__(
        self, hardware: Hardware, *, machine: Mapping[str, Any] = H100, step_seconds: float = 0.05,
        slower: float = 1.0, before: Callable[[Item], None] = lambda item: None,
    ) -> None:
        self.hardware, self.told, self.step_seconds, self.before = hardware, dict(machine), step_seconds, before
        self.slower = slower
        self.trained: list[str] = []

    def machine(self) -> dict[str, Any]:
        return self.told

    def step(self, model: Model, steps: int) -> Mapping[str, float]:
        self.trained.append(model.name)
        return {"seconds": self.step_seconds}

    def measure(self, item: Item) -> Mapping[str, Any]:
        self.before(item)
        given, hardware = dict(item.given), self.hardware
        if item.table == items.PRODUCTS:
            seconds = product_seconds(hardware, given)
            return {"seconds": seconds, "flops_per_second": 2 * given["m"] * given["n"] * given["k"] / seconds}
        if item.table == items.COPIES:
            return self._copied(given)
        if item.table == items.ELEMENTWISE:
            return {way: self._elementwise(given, way) for way in (FORWARD, BACKWARD)}
        if item.table == items.ATTENTION:
            return self._attention(given)
        if item.table == items.OPTIMIZER:
            count = 12 * given["layers"] * given["width"] ** 2
            seconds = 30 * count / (hardware.memory_bytes_per_second * hardware.memory_efficiency)
            return {"seconds": seconds, "parameters": count, "seconds_per_parameter": seconds / count}
        if item.table == items.SUSTAINED:
            return {"alone_seconds": 1e-3, "seconds": 1e-3 * self.slower}
        if item.table == items.COLLECTIVES:
            cost = Costs(hardware).collective(given["name"], given["nbytes"], range(given["devices"]))
            return {"seconds": cost.seconds}
        return {"seconds": hardware.kernel_launch_seconds, "forward_seconds": 1e-3, "backward_seconds": 2e-3,
                "both_seconds": 1e-3}

    def _elementwise(self, given: dict[str, Any], way: str) -> float:
        """By the constants of the kernel that a measurement of this op tells."""
        costs, elements = Costs(self.hardware), given["rows"] * given.get("width", 0)
        for name, sources in SOURCES.items():
            for source in sources:
                if (source.op, source.way) == (given["op"], way):
                    return costs.compute_seconds(nbytes=source.nbytes * elements, kernel=name)
        if given["op"] == "cross_entropy_float32":      # a cast, and then the ops of the loss, which are launched with it
            behind = sum(costs.compute_seconds(nbytes=4 * elements, kernel=name) - self.hardware.kernel_launch_seconds
                         for name in LOSS)
            return costs.compute_seconds(nbytes=6 * elements, kernel="convert") + behind
        return self._moving(given)

    def _attention(self, given: dict[str, Any]) -> dict[str, float]:
        flops = 4.0 * given["batch"] * given["heads"] * given["tokens"] ** 2 * given["head_width"]
        shape = (given["batch"] * given["heads"], given["tokens"], given["tokens"], given["head_width"], given["causal"])
        tokens, costs, found = given["tokens"], Costs(self.hardware), {"flops": flops}
        computed = flops * (tokens + 1) / (2 * tokens) if given["causal"] else flops
        for name, way, times in (("attention", FORWARD, 1.0), ("attention_gradient", BACKWARD, 2.5)):
            found[way] = costs.compute_seconds(times * computed, dtype=given["dtype"], shape=shape, kernel=name)
        return found

    def _moving(self, given: dict[str, Any]) -> float:
        try:
            return Costs(self.hardware).compute_seconds(nbytes=moved(given))
        except KeyError:        # an op that nothing is fitted to
            return 1e-4

    def _copied(self, given: dict[str, Any]) -> dict[str, float]:
        host = self.hardware.host
        if given["way"] == "device":
            seconds = Costs(self.hardware).compute_seconds(nbytes=moved(given))
        else:
            seconds = host.latency_seconds + given["nbytes"] / host.bytes_per_second
        return {"seconds": seconds, "bytes_per_second": given["nbytes"] / seconds}
