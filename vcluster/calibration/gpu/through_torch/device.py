"""`Device` measures items through PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

from vcluster.calibration.gpu import items
from vcluster.calibration.gpu.items import Given, Item
from vcluster.calibration.gpu.through_torch import group, kernels, programs
from vcluster.calibration.gpu.through_torch.timing import Clock

_DO: Mapping[str, Callable[[Clock, Given], dict[str, Any]]] = {
    items.PRODUCTS: kernels.product_row,
    items.ATTENTION: kernels.attention_row,
    items.ELEMENTWISE: kernels.elementwise_row,
    items.OPTIMIZER: programs.optimizer_row,
    items.COPIES: programs.copy_row,
    items.LAUNCHES: programs.launch_row,
    items.SUSTAINED: programs.sustained_row,
    items.DECODE: kernels.decode_row,
    items.LAYERS: programs.layer_row,
    items.COMPILED: programs.compiled_row,
    items.COMPILED_OPS: kernels.compiled_op_row,
    items.COLLECTIVES: group.collective_row,
}


class Device:
    """One device of PyTorch.  ``quick`` spends next to no time on an item."""

    def __init__(self, torch: Any, device: str, *, quick: bool = False) -> None:
        self.torch, self.name = torch, device
        self.clock = Clock(torch, device, 0.002 if quick else 0.06)
        torch.manual_seed(0)
        self.clock.settle(0.05 if quick else 2.0)

    def measure(self, item: Item) -> dict[str, Any]:
        """The figures of an item."""
        try:
            return _DO[item.table](self.clock, item.given)
        finally:
            self.tidy()

    def tidy(self) -> None:
        """Frees what the last item held, if little memory is left."""
        if self.clock.on_gpu and self.torch.cuda.memory_reserved() > 0.3 * self.torch.cuda.mem_get_info()[1]:
            gc.collect()
            self.torch.cuda.empty_cache()
