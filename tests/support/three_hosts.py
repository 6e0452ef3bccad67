"""Hosts on one machine: network, UTS and mount namespaces with names of their own, joined by a bridge.

    with hosts("node0", "node1", "node2") as found:
        found.job(9, "-m", "vcluster.mpi", "script.py")     # mpiexec runs on the first, over the virtual interfaces
        found.traffic()                                     # bytes that each has sent and received

MPICH's launcher (hydra) starts its proxies by a script in place of ssh, which enters the namespaces of a host. All ends
with the processes that hold the namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
NETWORK = "10.77.0."

HOLD = """
set -e
mount --bind {hosts} /etc/hosts
hostname {name}
ip link set lo up
echo ready
read line
ip addr add {address}/24 dev eth0
ip link set eth0 up
echo up
exec sleep infinity
"""

INSTEAD_OF_SSH = """#!/bin/sh
# hydra calls: this -x HOST COMMAND ...
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec nsenter -t "$(cat {pids}/$host)" -n -u -m --wd={root} sh -c "$*"
"""


class Hosts:
    """Hosts that are up."""

    def __init__(self, names: tuple[str, ...], pids: dict[str, int], folder: Path) -> None:
        self.names, self.pids, self._folder = names, pids, folder

    def inside(self, name: str) -> list[str]:
        """What a command that runs on a host begins with."""
        return ["nsenter", "-t", str(self.pids[name]), "-n", "-u", "-m", f"--wd={ROOT}"]

    def job(self, ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
        """A job that runs ``python ...`` on ranks of all hosts in turn; what it printed."""
        mpiexec = Path(sys.executable).parent / "mpiexec.hydra"
        path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
        return subprocess.run(
            [*self.inside(self.names[0]), mpiexec, "-launcher", "ssh", "-launcher-exec", self._folder / "launch",
             "-iface", "eth0", "-hosts", ",".join(self.names), "-ppn", "1", "-n", str(ranks), sys.executable,
             *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path, "FI_PROVIDER": "tcp", "UCX_TLS": "tcp,self"}, cwd=ROOT,
            text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200,
            check=False)

    def traffic(self) -> dict[str, tuple[int, int]]:
        """By host, the bytes that its interface has received and sent."""
        found = {}
        for name in self.names:
            lines = Path(f"/proc/{self.pids[name]}/net/dev").read_text().splitlines()
            words = next(line.split() for line in lines if line.strip().startswith("eth0:"))
            found[name] = int(words[1]), int(words[9])
        return found


def refusal() -> str | None:
    """Why there can be no hosts here; None if there can."""
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-ec",
         "hostname tried; ip link add veth0 type veth peer name veth1; ip link add bridge0 type bridge"],
        capture_output=True, text=True, check=False) if sys.platform == "linux" else None
    if tried is None:
        return "namespaces are of Linux"
    return None if tried.returncode == 0 else f"unshare --net --uts --mount: {tried.stderr.strip()}"


@contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    """Hosts of these names, until the end of the context."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(
            f"{NETWORK}{place} {name}\n" for place, name in enumerate(names, 1)))
        launch = folder / "launch"
        launch.write_text(INSTEAD_OF_SSH.format(pids=folder, root=ROOT))
        launch.chmod(0o755)

        def hold(script: str) -> subprocess.Popen[str]:
            holder = stack.enter_context(subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "sh", "-c", script], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            stack.callback(holder.kill)
            assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
            return holder

        switch = hold("ip link add bridge0 type bridge && ip link set bridge0 up && echo ready && exec sleep infinity")
        pids = {}
        for place, name in enumerate(names, 1):
            holder = hold(HOLD.format(hosts=folder / "hosts", name=name, address=f"{NETWORK}{place}"))
            pids[name] = holder.pid
            (folder / name).write_text(str(holder.pid))
            on_switch = ["nsenter", "-t", str(switch.pid), "-n"]
            for words in (f"link add port{place} type veth peer name eth0 netns {holder.pid}",
                          f"link set port{place} master bridge0 up"):
                subprocess.run([*on_switch, "ip", *words.split()], check=True)
            assert holder.stdin is not None and holder.stdout is not None
            holder.stdin.write("go\n")
            holder.stdin.flush()
            assert holder.stdout.readline() == "up\n"
        yield Hosts(names, pids, folder)
