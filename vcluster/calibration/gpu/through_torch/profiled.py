"""The kernels of steps one by one, by PyTorch's profiler: which op issued them, what they took, what lay between."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from time import perf_counter
from typing import Any

from vcluster.calibration.gpu.through_torch.timing import Clock

STEPS = 2
"""The steps that are recorded, one after the other."""
_LONGEST_NAME = 120
_LEAST = 2e-4
"""The part of all seconds from which on a row is kept."""
_PAUSE = 5e-6
"""A pause between kernels from which on it is counted: a launch behind another one takes less."""


def profiled(clock: Clock, step: Callable[[], object], warm_seconds: float) -> dict[str, Any]:
    """What the kernels of a step take, after steps for ``warm_seconds``, so that clocks are those of training.

    ``kernels`` has a row for each op and its shapes, and one for each kernel: how many of them a step has, and their
    seconds together.  ``kernel_seconds`` is the sum of all kernels, ``span_seconds`` the time from the first to the
    last, ``pauses`` how often none ran for more than some microseconds, and ``pause_seconds`` for how long.
    """
    profiler = import_module("torch.profiler")
    kinds = [profiler.ProfilerActivity.CPU]
    if clock.on_gpu:
        kinds.append(profiler.ProfilerActivity.CUDA)
    with profiler.profile(activities=kinds):  # the first one takes long to begin
        step()
        clock.synchronize()
    until = perf_counter() + warm_seconds
    while perf_counter() < until:
        step()
    clock.synchronize()
    with profiler.profile(activities=kinds, record_shapes=True) as found:
        for _ in range(STEPS):
            step()
        clock.synchronize()
    return {"kernels": _rows(found, clock.on_gpu), **_between(found)}


def _rows(found: Any, on_gpu: bool) -> list[dict[str, Any]]:
    rows = []
    for each in found.key_averages(group_by_input_shape=True):
        is_kernel = _is_on_gpu(each)
        spent = each.self_device_time_total if on_gpu else each.self_cpu_time_total
        if spent <= 0:
            continue
        row = {
            "what": "kernel" if is_kernel else "op",
            "name": str(each.key)[:_LONGEST_NAME],
            "count": each.count / STEPS,
            "seconds": spent / 1e6 / STEPS,
        }
        if not is_kernel:
            row["shapes"] = str([shape for shape in each.input_shapes or () if shape])[:_LONGEST_NAME]
        rows.append(row)
    least = _LEAST * sum(row["seconds"] for row in rows)
    kept = [row for row in rows if row["seconds"] >= least]
    return sorted(kept, key=lambda row: (row["what"], -row["seconds"]))


def _between(found: Any) -> dict[str, float]:
    """The kernels together, and the pauses between them, of a step."""
    kernels = sorted(_spans(found.events()))
    if not kernels:
        return {}
    busy, pauses, paused, until = 0.0, 0, 0.0, kernels[0][0]
    for begin, end in kernels:
        if begin - until > _PAUSE:
            pauses += 1
            paused += begin - until
        busy += end - begin
        until = max(until, end)
    return {
        "kernel_count": len(kernels) / STEPS,
        "kernel_seconds": busy / STEPS,
        "span_seconds": (until - kernels[0][0]) / STEPS,
        "pauses": pauses / STEPS,
        "pause_seconds": paused / STEPS,
    }


def _spans(events: Iterable[Any]) -> list[tuple[float, float]]:
    """When each kernel began and ended, in seconds."""
    return [(each.time_range.start / 1e6, each.time_range.end / 1e6) for each in events if _is_on_gpu(each)]


def _is_on_gpu(event: Any) -> bool:
    return str(event.device_type).endswith("CUDA")
