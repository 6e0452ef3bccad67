"""Larger work through PyTorch: optimizers, copies, launches, products for seconds, whole layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from time import perf_counter
from typing import Any

from vcluster.calibration.gpu.items import Given
from vcluster.calibration.gpu.models import Sizes
from vcluster.calibration.gpu.through_torch.kernels import Row, attention_work, drawn, elementwise_work
from vcluster.calibration.gpu.through_torch.layers import backend_chosen, layer, made_weights, rotary_tables
from vcluster.calibration.gpu.through_torch.machine import load_now
from vcluster.calibration.gpu.through_torch.timing import Clock

_SMALL = {"gpt": Sizes("gpt", 64, 4, 4, 128), "llama": Sizes("llama", 64, 4, 4, 128)}
"""Layers so small that only issuing them takes time."""


def optimizer_row(clock: Clock, given: Given) -> Row:
    """An update of all weights of a model without its tables, or another work on all of them."""
    torch, width = clock.torch, given["width"]
    shapes = Sizes("gpt", width, 1, 1, 4 * width).shapes()
    weights = [
        drawn(clock, *shape, dtype="float32").requires_grad_()
        for _ in range(given["layers"])
        for shape in shapes.values()
    ]
    count = sum(weight.numel() for weight in weights)
    timed = clock.time(_on_weights(torch, given["how"], weights), cold=False)
    return {
        **timed.row(),
        "parameters": count,
        "tensors": len(weights),
        "seconds_per_parameter": timed.seconds / count,
    }


def _on_weights(torch: Any, how: str, weights: list[Any]) -> Callable[[], object]:
    """Work on all weights: what is measured of an optimizer."""
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    gradients = [weight.grad for weight in weights]
    if how == "accumulate_foreach":
        narrow = [gradient.bfloat16() for gradient in gradients]
        return lambda: torch._foreach_add_(gradients, narrow)
    if how == "copy_foreach":
        narrow = [gradient.bfloat16() for gradient in gradients]
        return lambda: torch._foreach_copy_(gradients, narrow)
    if how == "zero_foreach":
        return lambda: torch._foreach_zero_(gradients)
    if how == "clip":
        return lambda: torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
    kinds = {"adamw_foreach": {"foreach": True}, "adamw_plain": {"foreach": False}}
    optimizer = torch.optim.AdamW(weights, lr=1e-4, **kinds.get(how, {"fused": True}))
    if how != "adamw_main_weights":
        return optimizer.step  # type: ignore[no-any-return]
    copies = [weight.detach().bfloat16() for weight in weights]

    def with_copies() -> None:
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, weights)

    return with_copies


def copy_row(clock: Clock, given: Given) -> Row:
    """A copy of so many bytes on the device, or between it and the memory of the host."""
    torch = clock.torch
    nbytes = given["nbytes"]
    way = given["way"]
    pinned = way.endswith("pinned") and clock.on_gpu
    there = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=clock.device)
    if way == "device":
        here = torch.empty_like(there)
    else:
        here = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, pin_memory=pinned)
    source, target = (here, there) if way.startswith("to_device") else (there, here)
    if way == "device" or pinned:
        timed = clock.time(lambda: target.copy_(source, non_blocking=True))
        return {**timed.row(), "bytes_per_second": nbytes / timed.seconds}
    seconds = clock.wall(lambda: target.copy_(source))
    return {"seconds": seconds, "bytes_per_second": nbytes / seconds}


def sustained_row(clock: Clock, given: Given) -> Row:
    """Work without a pause: what it takes alone, and once power and heat have settled; the clocks then."""
    with backend_chosen(clock.torch, given.get("backend", "any")):
        work = _LASTING[given["what"]](clock, given)
        alone = clock.time(work, cold=False, most=10)
        pieces, state = _without_pause(clock, work, alone.seconds, given["for_seconds"])
    return {"alone_seconds": alone.seconds, "seconds": pieces[-1], "pieces": pieces, "state": state}


def _without_pause(
    clock: Clock, work: Callable[[], object], once: float, spend: float
) -> tuple[list[float], str]:
    """The seconds of each call in pieces of a fifth of the time, and clocks and power in the second half."""
    pieces: list[float] = []
    state, count = "", max(1, int(0.2 * spend / max(once, 1e-6)))
    began = perf_counter()
    while not pieces or perf_counter() - began < spend:
        start = perf_counter()
        for _ in range(count):
            work()
        if perf_counter() - began > 0.5 * spend and not state:
            state = load_now() if clock.on_gpu else "none"
        clock.synchronize()
        pieces.append((perf_counter() - start) / count)
    return pieces, state


def _square(clock: Clock, given: Given) -> Callable[[], object]:
    torch, size = clock.torch, given["size"]
    left, right = (drawn(clock, size, size, dtype=given["dtype"]) for _ in range(2))
    right, scale = right.t(), torch.ones((), device=clock.device)
    if given["dtype"] == "float8":
        return lambda: torch._scaled_mm(left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    return lambda: left @ right


def _attention_both_ways(clock: Clock, given: Given) -> Callable[[], object]:
    return _both_ways(clock, *attention_work(clock, given))


def _elementwise_both_ways(clock: Clock, given: Given) -> Callable[[], object]:
    return _both_ways(clock, *elementwise_work(clock, given))


def _layer_both_ways(clock: Clock, given: Given) -> Callable[[], object]:
    return _both_ways(clock, *layer_work(clock, sizes_of(given), given["tokens"], given["batch"]))


def _both_ways(clock: Clock, forward: Callable[[], Any], inputs: Sequence[Any]) -> Callable[[], object]:
    gradient = clock.torch.randn_like(forward())
    return lambda: clock.torch.autograd.grad(forward(), inputs, gradient)


_LASTING: Mapping[str, Callable[[Clock, Given], Callable[[], object]]] = {
    "product": _square,
    "attention": _attention_both_ways,
    "elementwise": _elementwise_both_ways,
    "layer": _layer_both_ways,
}


# -- launches ----------------------------------------------------------------------------------------------------------


def launch_row(clock: Clock, given: Given) -> Row:
    """What starting work takes: on the device, and on the host that issues it."""
    return _LAUNCHES[given["what"]](clock, given)


def _kernels(clock: Clock, given: Given) -> Row:
    """Kernels on one number after each other, all issued before the first begins."""
    count = given["count"]
    work = _additions(clock, count)
    timed = clock.time(work, cold=False, most=10)
    return {"seconds": timed.seconds / count, "issue_seconds": timed.issue_seconds / count}


def _issue(clock: Clock, given: Given) -> Row:
    """The time of the host for one op on few numbers, with what a gradient needs noted."""
    work = _few_numbers(clock, given["op"])
    if given["op"] == "mul_inplace":
        with clock.torch.no_grad():
            return {"issue_seconds": clock.issue(work, given["count"])}
    return {"issue_seconds": clock.issue(work, given["count"])}


def _few_numbers(clock: Clock, op: str) -> Callable[[], Any]:
    torch, functions = clock.torch, clock.torch.nn.functional
    x = drawn(clock, 16, 16).requires_grad_()
    weight = drawn(clock, 16, 16).requires_grad_()
    bias = drawn(clock, 16).requires_grad_()
    query = drawn(clock, 1, 2, 16, 16).requires_grad_()
    plain = drawn(clock, 16, 16)
    works: Mapping[str, Callable[[], Any]] = {
        "add": lambda: x + weight,
        "mul_inplace": lambda: plain.mul_(0.5),
        "linear": lambda: functions.linear(x, weight, bias),
        "layer_norm": lambda: functions.layer_norm(x, (16,), bias, bias),
        "gelu": lambda: functions.gelu(x),
        "sdpa": lambda: functions.scaled_dot_product_attention(query, query, query, is_causal=True),
        "view": lambda: torch.transpose(x, 0, 1),
    }
    return works[op]


def _issue_backward(clock: Clock, given: Given) -> Row:
    """The time of the host for the gradient of one op, in a chain of them."""
    torch, functions, count = clock.torch, clock.torch.nn.functional, given["count"]
    x = drawn(clock, 16, 16).requires_grad_()
    weight = drawn(clock, 16, 16).requires_grad_()
    bias = drawn(clock, 16).requires_grad_()
    step: Callable[[Any], Any] = {
        "gelu": lambda y: functions.gelu(y),
        "linear": lambda y: functions.linear(y, weight, bias),
        "layer_norm": lambda y: functions.layer_norm(y, (16,), bias, bias),
    }[given["op"]]
    y = x
    for _ in range(count):
        y = step(y)
    total = y.sum()
    seconds = clock.wall(
        lambda: torch.autograd.grad(total, (x, weight, bias), retain_graph=True, allow_unused=True)
    )
    return {"issue_seconds": seconds / count}


def _additions(clock: Clock, count: int) -> Callable[[], None]:
    """So many kernels on one number."""
    one = clock.torch.zeros(1, device=clock.device)

    def work() -> None:
        for _ in range(count):
            one.add_(1.0)

    return work


def _graph(clock: Clock, given: Given) -> Row:
    """A captured graph of kernels on one number: the time of each, and that of the host for a replay."""
    count = given["count"]
    work = _additions(clock, count)
    graph = _captured(clock, work)
    timed = clock.time(graph.replay, cold=False, most=10)
    return {"seconds": timed.seconds / count, "replay_issue_seconds": timed.issue_seconds}


def _captured(clock: Clock, work: Callable[[], object]) -> Any:
    if not clock.on_gpu:
        raise ValueError("graphs are captured on a GPU only")
    torch = clock.torch
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    clock.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def _small_layer(clock: Clock, given: Given) -> Row:
    """A layer so small that only issuing it takes time, forward and backward."""
    torch, sizes = clock.torch, _SMALL[given["style"]]
    forward, inputs = layer_work(clock, sizes, 32, 1)
    if given["how"] == "graph":
        with torch.no_grad():
            graph = _captured(clock, forward)
        return {"forward_seconds": clock.wall(graph.replay, 20)}
    result = forward()
    gradient = torch.randn_like(result)

    def backward() -> object:
        return torch.autograd.grad(result, inputs, gradient, retain_graph=True)

    return {"forward_seconds": clock.wall(forward, 20), "backward_seconds": clock.wall(backward, 20)}


def _optimizer_issue(clock: Clock, given: Given) -> Row:
    """The time of an update of many weights of few numbers."""
    weights = [drawn(clock, 16, dtype="float32").requires_grad_() for _ in range(given["tensors"])]
    return {"issue_seconds": clock.wall(_on_weights(clock.torch, given["how"], weights), 20)}


def _synchronize(clock: Clock, given: Given) -> Row:
    """A kernel on one number and waiting for it."""
    one = clock.torch.zeros(1, device=clock.device)
    return {"seconds": clock.wall(lambda: one.add_(1.0), given["count"])}


_LAUNCHES: Mapping[str, Callable[[Clock, Given], Row]] = {
    "kernel": _kernels,
    "issue": _issue,
    "issue_backward": _issue_backward,
    "graph": _graph,
    "small_layer": _small_layer,
    "optimizer_issue": _optimizer_issue,
    "synchronize": _synchronize,
}


# -- layers ------------------------------------------------------------------------------------------------------------


def layer_work(clock: Clock, sizes: Sizes, tokens: int, batch: int) -> tuple[Callable[[], Any], list[Any]]:
    """The forward of a layer, and what it has gradients of."""
    weights = made_weights(clock.torch, sizes.shapes(), clock.device, clock.torch.bfloat16)
    x = drawn(clock, batch, tokens, sizes.width).requires_grad_()
    tables = (
        None
        if sizes.is_gpt
        else rotary_tables(clock.torch, tokens, sizes.head_width, clock.device, clock.torch.bfloat16)
    )
    return lambda: layer(clock.torch, sizes, x, weights, tables), [x, *weights.values()]


def sizes_of(given: Given) -> Sizes:
    """The figures of a layer of an item."""
    return Sizes(
        given["style"], given["width"], given["heads"], given["key_value_heads"], given["feed_forward"]
    )


def layer_row(clock: Clock, given: Given, *, compiled: bool = False) -> Row:
    """A whole layer in bfloat16, forward as in training and backward; with ``recompute=full`` again in the backward."""
    torch = clock.torch
    plain, inputs = layer_work(clock, sizes_of(given), given["tokens"], given["batch"])
    forward = plain
    if compiled:
        forward = torch.compile(plain)
    elif given["recompute"] == "full":

        def forward() -> Any:
            return import_module("torch.utils.checkpoint").checkpoint(plain, use_reentrant=False)

    def again() -> object:
        return torch.autograd.grad(forward(), inputs, gradient)

    with backend_chosen(torch, given["backend"]):
        began = perf_counter()
        gradient = torch.randn_like(forward())
        first = perf_counter() - began
        one_way = clock.time(forward, cold=False, least=4, most=10)
        both = clock.time(again, cold=False, least=4, most=10)
    tokens = given["tokens"] * given["batch"]
    return {
        **one_way.row("forward_"),
        **both.row("both_"),
        "first_seconds": first,
        "backward_seconds": both.seconds - one_way.seconds,
        "tokens_per_second": tokens / both.seconds,
    }


def compiled_row(clock: Clock, given: Given) -> Row:
    """A whole layer by the compiler; ``first_seconds`` is how long it compiled the forward."""
    return layer_row(clock, given, compiled=True)
