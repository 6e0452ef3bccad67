"""Seconds of work on a device of PyTorch: warmed up, repeated, the median.

On a GPU events before and after the work are timed by the GPU itself.  Before each repetition the caches are filled
with other data, and a kernel that only waits holds the GPU until the host has issued the work: so the seconds are those
of the kernels, and not those of Python.  How long the host takes to issue them is told beside.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

Work = Callable[[], object]

_WAIT_SECONDS = 5e-5
"""The least that the GPU is held before a repetition."""
_LONGEST_WAIT = 0.05


class Timed(NamedTuple):
    """The times of the repetitions of a piece of work."""

    seconds: float
    """The median, by the clock of the device."""
    issue_seconds: float
    """The least of what the host took to issue it."""
    apart: float
    """How far the upper and the lower quarter are apart, as a part of the median."""
    repeats: int

    def row(self, prefix: str = "") -> dict[str, float]:
        """The figures by name."""
        return {f"{prefix}{name}": value for name, value in self._asdict().items()}


def _timed(seconds: list[float], issued: list[float]) -> Timed:
    middle, ranked = median(seconds), sorted(seconds)
    quarter = len(ranked) // 4
    apart = (ranked[-1 - quarter] - ranked[quarter]) / middle if middle else 0.0
    return Timed(middle, min(issued), apart, len(seconds))


class Clock:
    """Times work on one device.  ``spend`` are the seconds that the repetitions of one item should take in all."""

    def __init__(self, torch: Any, device: str, spend: float) -> None:
        self.torch, self.device, self.spend = torch, device, spend
        self.on_gpu = device.startswith("cuda")
        self._other: Any = None
        self._cycles_per_second = 1e9
        self.empty_seconds = 0.0
        """What two events take with nothing between them; it is taken off."""
        if self.on_gpu:
            properties = torch.cuda.get_device_properties(device)
            cache = int(getattr(properties, "L2_cache_size", 0)) or 64 << 20
            self._other = torch.empty(max(2 * cache, 128 << 20), dtype=torch.uint8, device=device)
            self._cycles_per_second = self._counted_cycles()
            self.empty_seconds = self.time(lambda: None, least=20, most=20).seconds

    def settle(self, seconds: float) -> None:
        """Computes for some time, so that clocks are as high as under load."""
        ones = self.torch.randn(2048 if self.on_gpu else 64, 2048 if self.on_gpu else 64, device=self.device)
        until = perf_counter() + seconds
        while perf_counter() < until:
            for _ in range(8):
                ones @ ones
            self.synchronize()

    def synchronize(self) -> None:
        """Waits until the device has done all that was issued."""
        if self.on_gpu:
            self.torch.cuda.synchronize(self.device)

    def time(self, work: Work, *, cold: bool = True, least: int = 5, most: int = 40) -> Timed:
        """What the work takes.  ``cold``: the caches hold other data when it begins."""
        for _ in range(2):
            work()
        self.synchronize()
        began = perf_counter()
        work()
        issue = perf_counter() - began
        self.synchronize()
        once = max(perf_counter() - began, 1e-7)
        repeats = max(least, min(most, int(self.spend / once)))
        return self._on_gpu(work, issue, repeats, cold) if self.on_gpu else self._on_host(work, repeats)

    def _on_host(self, work: Work, repeats: int) -> Timed:
        seconds = []
        for _ in range(repeats):
            began = perf_counter()
            work()
            seconds.append(perf_counter() - began)
        return _timed(seconds, seconds)

    def _on_gpu(self, work: Work, issue: float, repeats: int, cold: bool) -> Timed:
        cuda, issued = self.torch.cuda, []
        held = min(_LONGEST_WAIT, max(_WAIT_SECONDS, 2 * issue))
        events = []
        for _ in range(repeats):
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            if cold:
                self._other.zero_()
            cuda._sleep(int(held * self._cycles_per_second))
            begin.record()
            began = perf_counter()
            work()
            issued.append(perf_counter() - began)
            end.record()
            events.append((begin, end))
            if held > 1e-3:  # so that not more than some thousand kernels wait
                self.synchronize()
        self.synchronize()
        return _timed(
            [max(0.0, begin.elapsed_time(end) / 1e3 - self.empty_seconds) for begin, end in events], issued
        )

    def issue(self, work: Work, count: int) -> float:
        """The seconds of the host for each of ``count`` calls, while the device has nothing else to do."""
        found = []
        work()
        for _ in range(5):
            self.synchronize()
            began = perf_counter()
            for _ in range(count):
                work()
            found.append((perf_counter() - began) / count)
        self.synchronize()
        return median(found)

    def wall(self, work: Work, repeats: int = 5) -> float:
        """The seconds from the call to the end of its work on the device: the median."""
        found = []
        work()
        for _ in range(repeats):
            self.synchronize()
            began = perf_counter()
            work()
            self.synchronize()
            found.append(perf_counter() - began)
        return median(found)

    def _counted_cycles(self) -> float:
        """The cycles a second of the kernel that waits."""
        cuda = self.torch.cuda
        with suppress(RuntimeError):
            cuda._sleep(1000)
            self.synchronize()
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            begin.record()
            cuda._sleep(10_000_000)
            end.record()
            self.synchronize()
            return float(1e7 / (begin.elapsed_time(end) / 1e3))
        return 1e9
