"""Worked strategies inside an operator: products and feed-forward blocks, spread over the devices of a mesh.

Names are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensor_parallelism.choice import Seconds
    from tensor_parallelism.contraction import Contraction
    from tensor_parallelism.feed_forward import FeedForward
    from tensor_parallelism.feed_forward_plan import FeedForwardPlan
    from tensor_parallelism.feed_forward_policies import FeedForwardSharding, FeedForwardShardingPolicy
    from tensor_parallelism.matmul import MatMul
    from tensor_parallelism.policies import MatMulSharding, MatMulShardingPolicy
    from tensor_parallelism.product import ProductPlan

_MODULES = {
    "choice": ("Seconds",),
    "contraction": ("Contraction",),
    "feed_forward": ("FeedForward",),
    "feed_forward_plan": ("FeedForwardPlan",),
    "feed_forward_policies": ("FeedForwardSharding", "FeedForwardShardingPolicy"),
    "matmul": ("MatMul",),
    "policies": ("MatMulSharding", "MatMulShardingPolicy"),
    "product": ("ProductPlan",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Contraction", "FeedForward", "FeedForwardPlan", "FeedForwardSharding", "FeedForwardShardingPolicy", "MatMul",
    "MatMulSharding", "MatMulShardingPolicy", "ProductPlan", "Seconds",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
