"""Messages between two devices: a round trip by size, and a stream of 4 MiB ones, beside ``multiprocessing.Queue``."""

from __future__ import annotations

from contextlib import ExitStack, closing

from benchmarks.cases import Case
from benchmarks.installed import start_queue_pair
from benchmarks.plan import KIB, MIB, Plan
from benchmarks.results import Measurement, Results
from benchmarks.systems import OURS, OurCluster, Say, System, SystemFailedError, take_turns
from benchmarks.tables import nbytes_text, rate_text, ratio_text, seconds_text, table
from benchmarks.targets import STREAM_FACTOR, STREAM_RATE, against

NAME = "messages"
QUEUE = "queue"
SIZES = (8, 4 * KIB, 64 * KIB, MIB, 16 * MIB)
QUICK_SIZES = (8, 64 * KIB, MIB)
STREAM_BYTES = 4 * MIB


def measure(plan: Plan, results: Results, say: Say) -> None:
    """Both systems stand ready and take turns."""
    todo = [Case("round_trip", nbytes) for nbytes in plan.sizes_or(SIZES, QUICK_SIZES)]
    todo.append(Case("stream", max(plan.sizes) if plan.sizes else STREAM_BYTES))
    with ExitStack() as stack:
        systems: list[System] = [stack.enter_context(closing(OurCluster(2)))]
        try:
            queue = start_queue_pair()
            stack.callback(queue.close)
            queue.connect()
            systems.append(queue)
            results.versions[QUEUE] = queue.version
        except SystemFailedError as error:
            results.skipped[QUEUE] = str(error)
        take_turns(NAME, systems, todo, plan, results, say)


def report(results: Results) -> str:
    """A line for each size: ours, the queue's, and how many times faster ours is."""
    by_case: dict[tuple[str, int], dict[str, Measurement]] = {}
    for m in results.of(NAME):
        by_case.setdefault((m.operation, m.nbytes), {})[m.system] = m
    rows = []
    for (operation, nbytes), systems in by_case.items():
        ours, queue = systems.get(OURS), systems.get(QUEUE)
        cells = [_figure(operation, nbytes, found) for found in (ours, queue)]
        factor = ratio_text(queue.seconds.median / ours.seconds.median) + " x" if ours and queue else "-"
        met = "-"
        if operation == "stream" and nbytes == STREAM_BYTES and ours is not None:
            seconds = [STREAM_BYTES / STREAM_RATE] + ([queue.seconds.median / STREAM_FACTOR] if queue else [])
            met = against(min(seconds), ours.seconds.median, f"{rate_text(STREAM_RATE)}, {STREAM_FACTOR:.0f} x")
        rows.append([operation.replace("_", " "), nbytes_text(nbytes), *cells, factor, met])
    return table(("2 devices", "bytes", "vcluster", "Queue", "faster", "at least"), rows)


def _figure(operation: str, nbytes: int, found: Measurement | None) -> str:
    if found is None:
        return "-"
    return rate_text(nbytes / found.seconds.median) if operation == "stream" else seconds_text(found.seconds.median)
