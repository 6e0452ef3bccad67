"""Every process of the soak writes the stacks of all its threads to stderr when it gets SIGUSR2.

The fork server loads this module, so that devices have it from their start.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

SIGNAL = signal.SIGUSR2


def show_on_signal() -> None:
    faulthandler.register(SIGNAL, file=2, all_threads=True)


def show(pid: int) -> None:
    """Ask a process for its stacks. Of one that would die of it, print what the system knows."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in status if ":\t" in line)
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        waits = Path(f"/proc/{pid}/wchan").read_text()
        print(f"-- pid {pid} ({fields['State']}, waits in {waits}): {words[:100]}", file=sys.stderr, flush=True)
        if int(fields["SigCgt"], 16) >> (SIGNAL - 1) & 1:
            os.kill(pid, SIGNAL)


show_on_signal()
