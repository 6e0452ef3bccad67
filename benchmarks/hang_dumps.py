"""What it costs to explain the dumps of a large job: CPU seconds, and memory at the most.

    python -m benchmarks.hang_dumps [RANKS]

Of 1,000 ranks with 200 and 2,000 calls of 12 frames each; one rank lacks the last calls.  All other ranks read one file by
links, so that the disk needs no gigabytes; each is read and parsed.  Seconds are of the CPU: a machine may be busy.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CALLS = (200, 2000)
FRAMES, GROUPS, OPEN = 12, 3, 6


def entry(number: int, *, is_open: bool) -> dict[str, object]:
    """One call, as PyTorch writes it."""
    group, now = number % GROUPS, 1_700_000_000_000_000_000 + 1000 * number
    return {
        "record_id": number, "pg_id": group, "process_group": [str(group), f"axis {group}"], "p2p_seq_id": 0,
        "collective_seq_id": number // GROUPS + 1, "op_id": number, "profiling_name": "nccl:all_reduce",
        "time_created_ns": now, "input_sizes": [[1024, 1024]], "input_dtypes": ["BFloat16"],
        "output_sizes": [[1024, 1024]], "output_dtypes": ["BFloat16"], "state": "scheduled" if is_open else "completed",
        "time_discovered_started_ns": None if is_open else now, "retired": not is_open, "timeout_ms": 600000,
        "time_discovered_completed_ns": None if is_open else now + 500, "is_p2p": False,
        "frames": [{"name": f"forward_{depth}", "line": 100 + depth + number % 7,
                    "filename": f"/home/me/training/repository/package/modules/module_{depth}.py"}
                   for depth in range(FRAMES)],
    }


def write(folder: Path, ranks: int, calls: int) -> int:
    """The dumps of a job. Returns the bytes that are read."""
    config = {str(group): {"name": str(group), "desc": f"axis {group}", "ranks": str([*range(ranks)])}
              for group in range(GROUPS)}
    entries = [entry(number, is_open=number >= calls - OPEN) for number in range(calls)]
    texts = {name: json.dumps({"version": "2.10", "pg_config": config, "entries": part})
             for name, part in (("usual", entries), ("odd", entries[:-OPEN]))}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="ascii")
    (folder / "dumps").mkdir()
    for rank in range(ranks):
        (folder / "dumps" / f"trace_{rank}.json").symlink_to(folder / ("odd" if rank == ranks // 2 else "usual"))
    return len(texts["usual"]) * (ranks - 1) + len(texts["odd"])


def measure(ranks: int, calls: int) -> str:
    """One line of figures."""
    with tempfile.TemporaryDirectory() as folder:
        nbytes = write(Path(folder), ranks, calls)
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "vcluster", "hang", str(Path(folder, "dumps"))],
                              capture_output=True, text=True, check=True)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (f"{ranks:,} ranks with {calls:,} calls, {nbytes / 1e9:.1f} GB: {seconds:.1f} s of CPU ({wall:.0f} s), "
            f"{after.ru_maxrss / 1024:.0f} MiB; {done.stdout.splitlines()[0]}")


if __name__ == "__main__":
    for calls in CALLS:
        print(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, calls), flush=True)
