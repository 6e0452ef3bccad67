"""Derivatives of PyTorch that its export loses: those at corners and of parts without gradients are kept, others told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Lost(NamedTuple):
    """What has derivatives that are not in an export, by its names."""

    functions: list[str]
    """Classes of ``torch.autograd.Function``."""
    hooks: list[str]
    """Modules, parameters and lines with hooks that may change gradients."""


@contextmanager
def lost_derivatives(torch: Any, module: Any) -> Iterator[Lost]:
    """The functions with a backward of their own that are called meanwhile, but for those of PyTorch; and hooks.

    The exporter records what functions compute.  A checkpoint computes its part with gradients meanwhile: by itself it
    would do so under ``torch.no_grad()``.
    """
    from torch.utils.checkpoint import CheckpointFunction

    base = torch.autograd.Function.__mro__[1]  # a name for ``apply`` may be older than this call
    lost = Lost([], [*_hooks(module)])

    def apply(cls: Any, *given: Any, **named: Any) -> Any:
        if cls is CheckpointFunction:
            part, _, *arguments = given
            return part(*arguments)
        if not cls.__module__.startswith("torch."):
            lost.functions.append(cls.__name__)
        return super(base, cls).apply(*given, **named)

    register_hook = torch.Tensor.register_hook

    def register(tensor: Any, hook: Any) -> Any:
        lost.hooks.append(getattr(hook, "__qualname__", type(hook).__name__))
        return register_hook(tensor, hook)

    base.apply = classmethod(apply)
    torch.Tensor.register_hook = register
    try:
        yield lost
    finally:
        del base.apply
        torch.Tensor.register_hook = register_hook


def _hooks(module: Any) -> Iterator[str]:
    """The modules and parameters that have hooks on their gradients, by their names."""
    for name, each in module.named_modules():
        if each._backward_hooks or each._backward_pre_hooks:
            yield name or type(each).__name__
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks:
            yield name


def detach_ungraded(torch: Any, module: Any) -> None:
    """Detach the results of each part under ``torch.no_grad()``: the export inlines the part and forgets the ``no_grad``."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or node.args[0]:
            continue
        for result in [user for user in node.users if "getitem" in str(user.target)]:
            with graph.inserting_after(result):
                detached = graph.call_function(torch.ops.aten.detach.default, (result,))
            detached.meta.update(result.meta)
            result.replace_all_uses_with(detached, delete_user_cb=lambda user, own=detached: user is not own)
    module.recompile()


def corners(torch: Any) -> dict[Any, Callable[..., Any]]:
    """Functions with corners, by their operators, in plain operators that have the derivatives of PyTorch there.

    A bound of ``clamp`` has a gradient, one of ``hardtanh`` has none, and a deviation of zero has none.  ONNX knows no
    derivatives: its largest and smallest would share them, and a root has none at zero.
    """
    aten, where = torch.ops.aten, torch.where

    def clamp(x: Any, low: Any = None, high: Any = None) -> Any:
        if not x.is_floating_point():
            return NotImplemented
        x = x if low is None else where(x < low, low, x)
        return x if high is None else where(x > high, high, x)

    def hardtanh(x: Any, low: float = -1, high: float = 1) -> Any:
        return where(x <= low, low, where(x >= high, high, x))

    def deviation(x: Any, *how: Any, **named: Any) -> Any:
        variance = torch.var(x, *how, **named)
        return where(variance == 0, variance, where(variance == 0, 1, variance).sqrt())

    return {
        aten.clamp.default: clamp,
        aten.clamp.Tensor: clamp,
        aten.clamp_min.default: clamp,
        aten.clamp_min.Tensor: clamp,
        aten.clamp_max.default: lambda x, high: clamp(x, None, high),
        aten.clamp_max.Tensor: lambda x, high: clamp(x, None, high),
        aten.hardtanh.default: hardtanh,
        aten.relu6.default: lambda x: hardtanh(x, 0, 6),
        aten.std.dim: deviation,
        aten.std.correction: deviation,
    }
