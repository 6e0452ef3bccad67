"""Steps of training by PyTorch.

Weights are in bfloat16, with main weights, gradients and AdamW in float32: what ``--bf16`` means to the simulator.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

from vcluster.calibration.gpu.measuring import reason_of
from vcluster.calibration.gpu.models import Model
from vcluster.calibration.gpu.through_torch.layers import backend_chosen, loss, made_weights, rotary_tables
from vcluster.calibration.gpu.through_torch.machine import clock_and_power
from vcluster.calibration.gpu.through_torch.profiled import profiled
from vcluster.calibration.gpu.through_torch.timing import Clock

_ON_END = 1.5
"""The seconds of steps on end without a wait."""
_WARM = 0.7
"""The seconds of steps before those whose kernels are recorded."""


def measured_step(clock: Clock, model: Model, steps: int, backend: str = "any") -> dict[str, Any]:
    """The seconds of a step of training: the median of the last half, by the clock of the host.

    On a GPU there are as many steps as take ``steps`` times 0.2 s, and at least ``steps``.

    ``device_seconds`` are those of its kernels alone, issued before they began, ``on_end_seconds`` those of a step among
    others that the host does not wait for.  Its kernels are recorded one by one (`profiled`).
    """
    if clock.on_gpu:
        clock.torch.cuda.reset_peak_memory_stats(clock.device)
    step = _step_of(clock, model)
    with backend_chosen(clock.torch, backend):
        for _ in range(3):
            first = float(step())
        clock.synchronize()
        found: list[float] = []
        while len(found) < steps or (clock.on_gpu and sum(found) < 0.2 * steps):
            began = perf_counter()
            last = step()
            clock.synchronize()
            found.append(perf_counter() - began)
        row: dict[str, Any] = {
            "seconds": median(found[len(found) // 2 :]),
            "steps": len(found),
            "first_loss": first,
            "last_loss": float(last),
        }
        if clock.on_gpu:
            timed = clock.time(step, cold=False, least=4, most=8)
            row |= {"device_seconds": timed.seconds, "issue_seconds": timed.issue_seconds}
            row |= _on_end(clock, step, row["seconds"])
            row["most_memory_bytes"] = clock.torch.cuda.max_memory_allocated(clock.device)
        row |= _kernels_of(clock, step)
    return row


def _kernels_of(clock: Clock, step: Any) -> dict[str, Any]:
    """The kernels of a step, or why they could not be recorded."""
    try:
        return profiled(clock, step, _WARM if clock.on_gpu else 0.0)
    except Exception as error:  # without a profiler the seconds are still told
        return {"kernels_not_recorded": reason_of(error)}


def _on_end(clock: Clock, step: Any, once: float) -> dict[str, Any]:
    """The seconds of a step among others that the host does not wait for, and the clock and power in between."""
    count = max(4, int(_ON_END / once))
    clock.synchronize()
    began = perf_counter()
    for number in range(count):
        step()
        if number == count // 2:
            told = clock_and_power(clock.torch, clock.device)
    clock.synchronize()
    return {"on_end_seconds": (perf_counter() - began) / count, **told}


def _step_of(clock: Clock, model: Model) -> Any:
    """A function that does a step of training and gives its loss, an array of one number."""
    torch, device, sizes = clock.torch, clock.device, model.sizes
    weights = made_weights(torch, model.shapes(), device, torch.bfloat16)
    main = [weight.detach().float() for weight in weights.values()]
    for weight in main:
        weight.grad = torch.zeros_like(weight)
    gradients = [weight.grad for weight in main]
    optimizer = torch.optim.AdamW(main, lr=1e-4, fused=True)
    shape = (model.microbatches, model.microbatch, model.tokens)
    tokens = torch.randint(model.vocabulary, shape, device=device)
    targets = tokens.roll(-1, dims=-1).contiguous()
    tables = (
        None if sizes.is_gpt else rotary_tables(torch, model.tokens, sizes.head_width, device, torch.bfloat16)
    )
    held = list(weights.values())

    def step() -> Any:
        for number in range(model.microbatches):
            value = loss(torch, model, weights, tokens[number], targets[number], tables)
            narrow = torch.autograd.grad(value / model.microbatches, held)
            (torch._foreach_add_ if number else torch._foreach_copy_)(gradients, narrow)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(held, main)
        return value.detach()

    return step
