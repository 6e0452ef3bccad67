"""A host of the soak: one process with clusters of one kind, on which it does one trial after another.

It tells its supervisor of each step by a line of JSON on stdout: `begin` and `end` of a trial, or a `finding`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from typing import Any

import kernels
import psutil
import stacks
from hand import Hand
from random_programs import MESHES
from trials import FORK_SERVER, PROCESSES, TRIALS, WEIGHTS, Finding, run_right

from vcluster import VirtualCluster
from vcluster.processes import start_fork_server

KINDS = (
    *(f"process-{method}-{transport}" for transport in ("shared_memory", "queue")
      for method in ("forkserver", "spawn", "fork")),
    "thread-shared_memory", "thread-queue",
)
LOOK_EVERY = 40
"""Trials between two counts of what this process and the devices hold."""
PATIENCE_SECONDS = 10.0
"""Seconds in which what a trial has left behind must be gone."""


class Host:
    """The clusters of one kind. Those of two meshes live long."""

    def __init__(self, kind: str, seed: str, only: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.backend, *method, self.transport = kind.split("-")
        self._method, = method or [None]
        self._seed = seed
        self._only = only
        self.rng = random.Random(seed)
        self.hand = Hand()
        if self._method == "forkserver":
            start_fork_server(preload=("stacks", "kernels"))
        self._long: dict[Any, VirtualCluster] = {}
        self._meshes = self.rng.sample(MESHES, 2)
        self._number = 0
        self._fresh: Any = None
        self.held: dict[str, Any] | None = None
        """What this process and the devices held at the last look."""
        sys.unraisablehook = self._unraisable

    def new_cluster(self, mesh: Any, **options: Any) -> VirtualCluster:
        made = VirtualCluster(
            mesh, backend=self.backend, transport=self.transport, start_method=self._method, **options)
        made.show_output = lambda rank, stream, text: None  # kernels that fork are told so
        return made

    @property
    def cluster(self) -> VirtualCluster:
        """The cluster of this trial."""
        if self._fresh is not None:
            return self._fresh
        mesh = self._meshes[self._number % 2]
        if mesh not in self._long:
            self._long[mesh] = self.new_cluster(mesh)
        return self._long[mesh]

    @cluster.setter
    def cluster(self, cluster: VirtualCluster) -> None:
        self._fresh = None if cluster in self._long.values() else cluster

    def others(self) -> list[VirtualCluster]:
        return [cluster for cluster in self._long.values() if cluster is not self.cluster]

    def allowed(self) -> list[str]:
        """The trials that apply to this kind."""
        return [
            name for name in self._only or TRIALS
            if (self.backend == "process" or name not in PROCESSES)
            and (self._method == "forkserver" or name not in FORK_SERVER)
        ]

    def live(self, seconds: float, most: float, trial_seed: str | None = None) -> None:
        """Do trials for some time. With ``trial_seed``, each draws the same."""
        end = time.monotonic() + seconds
        names = self.allowed()
        weights = [WEIGHTS.get(name, 1) for name in names]
        while time.monotonic() < end and self._number < most:
            self._number += 1
            name = random.Random(f"{self._seed}-{self._number}").choices(names, weights)[0]
            seed = trial_seed or f"{self._seed}-{self._number}"
            say(begin=name, seed=seed)
            self.rng = random.Random(seed)
            try:
                TRIALS[name](self)
                self.hand.wait()
                run_right(self.cluster, self.rng)
                if self._number % LOOK_EVERY == 0:
                    self._look()
                say(end=name)
            except (Exception, KeyboardInterrupt) as error:
                self._tell(name, seed, error)

    def _tell(self, name: str, seed: str, error: BaseException) -> None:
        """A finding. The clusters are made anew, so that it is not found twice."""
        what = "finding" if isinstance(error, Finding) else f"unexpected {type(error).__name__}"
        say(finding=what, trial=name, seed=seed, text="".join(traceback.format_exception(error)))
        self.hand.wait()
        self._fresh = self.held = None
        for cluster in self._long.values():
            with contextlib.suppress(Exception):
                cluster.close()
        self._long.clear()

    def _unraisable(self, error: Any) -> None:
        """What Python prints and drops is lost: an interrupt, or an error of ours."""
        text = "".join(traceback.format_exception(error.exc_value))
        text = f"in {error.object!r}\n{text}"
        say(finding="lost exception", trial="", seed=f"{self._seed}-{self._number}", text=text)

    def _look(self) -> None:
        """What this process and the devices hold is what they held at the last look, or less."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            now = self._holds()
            if self.held is None or len(now) != len(self.held):
                self.held = now
                return
            more = {what: (self.held[what], now[what]) for what in now if now[what] > self.held.get(what, now[what])}
            if not more:
                return
            if time.monotonic() > end:
                names = [thread.name for thread in threading.enumerate()]
                self.held = now
                raise Finding("more than before:", more, names, psutil.Process().children())
            time.sleep(0.05)

    def _holds(self) -> dict[str, int]:
        gc.collect()
        me = psutil.Process()
        held = {
            "descriptors of the host": me.num_fds(),
            "children": len(me.children(recursive=True)),
        }
        if self.transport != "queue":  # each queue that is used for the first time has a thread
            held["threads of the host"] = me.num_threads()
        if self._method in ("forkserver", "spawn"):  # a fork of the host has what the host has then
            for mesh, cluster in self._long.items():
                cluster.run(kernels.collect)
                for rank, pid in enumerate(cluster.pids()):
                    device = psutil.Process(pid)
                    held[f"descriptors of rank {rank} of {mesh}"] = device.num_fds()
                    if self.transport != "queue":
                        held[f"threads of rank {rank} of {mesh}"] = device.num_threads()
        return held

    def close(self) -> None:
        for cluster in self._long.values():
            cluster.close()
        self.hand.close()


def say(**words: Any) -> None:
    """Tell the supervisor."""
    os.write(1, (json.dumps(words) + "\n").encode())


def main(kind: str, seed: str, seconds: float, most: float, only: tuple[str, ...], trial_seed: str | None) -> None:
    """The whole life of a host."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in its background without it
    stacks.show_on_signal()
    warnings.simplefilter("ignore")
    host = Host(kind, seed, only)
    host.live(seconds, most, trial_seed)
    host.close()
    say(closed=True)
