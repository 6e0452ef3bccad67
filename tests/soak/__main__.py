"""Clusters under attack for hours: `python tests/soak --minutes 120`, by request and not in CI.

One host process after another does trials on clusters of one kind: random right programs and planted mistakes, kills,
stops, forks, threads, interrupts, failing runs. Each host ends by itself or is killed, and must leave no process. In
between, one cluster runs many programs and must hold afterwards what it held before. A host that says nothing for
long hangs: the stacks of all its processes are shown.

The status is 1 if anything was found. Each finding says how to repeat it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support"), str(HERE.parents[1])]

import stacks  # noqa: E402
from flat import WAYS  # noqa: E402
from host import KINDS, PATIENCE_SECONDS, Host, main as live, say  # noqa: E402
from trials import TRIALS  # noqa: E402

TOKEN = "VCLUSTER_SOAK"


class Supervisor:
    """Starts hosts, listens to them, and counts."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._rng = random.Random(arguments.seed)
        self.done: Counter[tuple[str, str]] = Counter()
        """Trials by kind and name."""
        self.findings: Counter[str] = Counter()
        self.killed = 0
        """Hosts that were killed and left nothing."""

    def slice(self, kind: str, seed: str, *options: str, kill_after: float | None = None) -> None:
        """One host, from its start to its end."""
        token = uuid.uuid4().hex
        command = [sys.executable, str(HERE), "--kind", kind, "--seed", seed, *options, "--as-host"]
        host = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={**os.environ, TOKEN: token},
            start_new_session=True)
        began, doing, closed = time.monotonic(), {"begin": "the start", "seed": seed}, False
        deadline = began + kill_after if kill_after is not None else float("inf")
        text = b""
        last = began
        while True:
            now = time.monotonic()
            if now > deadline:
                break
            if now > last + self._arguments.patience:
                self._hang(kind, doing, token)
                break
            if not select.select([host.stdout], [], [], max(0.0, min(1.0, deadline - now)))[0]:
                continue
            more = os.read(host.stdout.fileno(), 1 << 16)
            if not more:
                break
            last = time.monotonic()
            *lines, text = (text + more).split(b"\n")
            for line in map(json.loads, lines):
                if "begin" in line:
                    doing = line
                elif "end" in line:
                    self.done[kind, line["end"]] += 1
                elif "finding" in line:
                    self._found(kind, **line)
                elif "note" in line:
                    print(f"  {line['note']}", flush=True)
                closed = closed or "closed" in line
        by_us = time.monotonic() > deadline
        host.kill() if by_us else None
        with suppress(subprocess.TimeoutExpired):
            host.wait(PATIENCE_SECONDS)
        if host.poll() is None:
            host.kill()
            host.wait()
        elif not by_us and not closed and not self.findings["hang"]:
            self._found(kind, "host ended", doing["begin"], doing["seed"], f"with {host.returncode}")
        host.stdout.close()
        self._nothing_left(kind, doing, token)
        self.killed += by_us

    def _found(self, kind: str, finding: str, trial: str, seed: str, text: str) -> None:
        self.findings[finding] += 1
        print(f"FOUND on {kind} in {trial or 'between trials'}: {finding}\n{text}", flush=True)
        if trial in TRIALS:
            print(f"repeat: python tests/soak --kind {kind} --trial {trial} --trial-seed {seed}", flush=True)
        elif trial in WAYS:
            print(f"repeat: python tests/soak --kind {kind} --trial {trial}", flush=True)

    def _hang(self, kind: str, doing: dict[str, str], token: str) -> None:
        self._found(kind, "hang", doing["begin"], doing["seed"],
                    f"nothing happened for {self._arguments.patience:.0f} s; the stacks of all processes follow")
        end = time.monotonic() + 1
        while not processes_of(token) and time.monotonic() < end:
            time.sleep(0.01)  # the host may have just been started, and have no environment yet
        for pid in processes_of(token):
            stacks.show(pid)
            time.sleep(0.2)  # so that they do not write all at once
        for pid in processes_of(token):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _nothing_left(self, kind: str, doing: dict[str, str], token: str) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while left := processes_of(token):
            if time.monotonic() > end:
                self._found(kind, "left behind", doing["begin"], doing["seed"], f"processes {left}")
                for pid in left:
                    stacks.show(pid)
                    time.sleep(0.2)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.1)

    def run(self) -> None:
        """Hosts of all kinds by turns until the time is over."""
        arguments = self._arguments
        end = time.monotonic() + 60 * arguments.minutes
        only = [option for name in arguments.trial for option in ("--trial", name)]
        ways = [way for way in WAYS if not arguments.trial or way in arguments.trial]
        trials = not arguments.trial or set(arguments.trial) & set(TRIALS)
        number = 0
        while time.monotonic() < end:
            for kind in arguments.kind if trials else ():
                seconds = min(arguments.slice, end - time.monotonic())
                if seconds <= 0:
                    break
                number += 1
                kill_after = self._rng.uniform(0.3, seconds) if self._rng.random() < 0.4 else None
                if arguments.trial_seed:
                    kill_after, only = None, [*only, "--trial-seed", arguments.trial_seed]
                self.slice(kind, f"{arguments.seed}-{number}", "--seconds", str(seconds), "--times",
                           str(arguments.times), *only, kill_after=kill_after)
                self._progress(kind, end)
            for way in ways:
                if time.monotonic() < end:
                    kind = arguments.kind[number // max(1, len(arguments.kind)) % len(arguments.kind)]
                    number += not trials
                    self.slice(kind, "0", "--trial", way, "--runs", str(arguments.runs), "--warm-up",
                               str(arguments.warm_up))
                    self._progress(f"{kind} {way}", end)
            if arguments.times < float("inf"):
                break

    def _progress(self, kind: str, end: float) -> None:
        left = max(0.0, end - time.monotonic()) / 60
        print(f"{kind:40} {self.done.total():8} trials, {self.findings.total()} findings, {left:.1f} minutes left",
              flush=True)

    def table(self) -> str:
        """Trials by name and kind."""
        kinds = [kind for kind in KINDS if any(kind == each for each, _ in self.done)]
        names = [name for name in (*TRIALS, *WAYS) if any(name == each for _, each in self.done)]
        rows = [["trial", *(kind.replace("process-", "").replace("shared_memory", "shm") for kind in kinds)]]
        rows += [[name, *(str(self.done[kind, name] or "") for kind in kinds)] for name in names]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)) for row in rows]
        found = ", ".join(f"{count} x {what}" for what, count in self.findings.items()) or "nothing found"
        return "\n".join([*lines, f"{self.killed} hosts were killed and left nothing", found])


def processes_of(token: str) -> list[int]:
    """All processes that have the token in their environment."""
    mine = f"{TOKEN}={token}".encode()
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            pid = int(path.name)
            if mine in (path / "environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python tests/soak", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=120, help="how long (120); a cluster in many runs may end later")
    made.add_argument("--seed", default="0", help="what is drawn; the same seed draws the same trials")
    made.add_argument("--kind", action="append", choices=KINDS, help="clusters of this kind only; may be repeated")
    made.add_argument("--trial", action="append", choices=[*TRIALS, *WAYS], help="this trial only; may be repeated")
    made.add_argument("--trial-seed", help="every trial draws from this seed: repeats a finding")
    made.add_argument("--times", type=float, default=float("inf"), help="one round of hosts, with so many trials each")
    made.add_argument("--slice", type=float, default=60, help="seconds of one host (60)")
    made.add_argument("--runs", type=int, default=20_000, help="runs of one cluster, which must hold no more (20000)")
    made.add_argument("--warm-up", type=int, default=2000, help="runs before that (2000)")
    made.add_argument("--patience", type=float, default=120, help="seconds of silence that are a hang (120)")
    made.add_argument("--seconds", type=float, default=0, help=argparse.SUPPRESS)
    made.add_argument("--as-host", action="store_true", help=argparse.SUPPRESS)
    return made


def main() -> int:
    arguments = parser().parse_args()
    arguments.kind = arguments.kind or list(KINDS)
    arguments.trial = arguments.trial or []
    if not arguments.as_host:
        supervisor = Supervisor(arguments)
        with suppress(KeyboardInterrupt):
            supervisor.run()
        print(supervisor.table())
        return 1 if supervisor.findings else 0
    kind, = arguments.kind
    if arguments.trial and arguments.trial[0] in WAYS:
        host = Host(kind, arguments.seed)
        WAYS[arguments.trial[0]](host, arguments.runs, arguments.warm_up)
        host.close()
        say(closed=True)
    else:
        live(kind, arguments.seed, arguments.seconds, arguments.times, tuple(arguments.trial), arguments.trial_seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
