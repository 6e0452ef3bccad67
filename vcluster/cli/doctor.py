"""What would get in the way of a cluster on this machine, and what to do: `python -m vcluster doctor`.

`vcluster.cli.machine` looks, `examine` judges, `report` tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallelism.display.quantities import fit, nbytes, plural
from parallelism.hardware.host import told as told_of_host
from vcluster.cli.machine import DEVICES, Container, Facts, Started, gather

WANTED_DEVICES = 16
"""Limits that leave room for fewer are in the way."""
DESCRIPTORS_PER_DEVICE = 3
WANTED_MEMORY = 512 << 20
LONGEST_START_SECONDS = 10.0


@dataclass(frozen=True)
class Finding:
    """One line of the report; and one on what to do, if this gets in the way."""

    subject: str
    found: str
    to_do: str | None = None


# -- judging -----------------------------------------------------------------------------------------------------------


def examine(facts: Facts) -> list[Finding]:
    """What there is to say about each fact."""
    return [
        _versions_found(facts.versions), _cores(facts), _memory(facts), _container(facts.container),
        _shared_memory(facts), *_start(facts.started), _files(facts), _processes(facts),
        _space(facts), _private_memory(facts.started), _bytecode(facts),
    ]


def _versions_found(versions: str) -> Finding:
    missing = [part.split()[0] for part in versions.split(", ") if part.endswith(" missing")]
    return Finding("versions", versions, f"pip install {' '.join(missing)}" if missing else None)


def _cores(facts: Facts) -> Finding:
    if facts.cores is None and facts.usable_cores is None:
        return Finding("cores", "cannot be told")
    usable, there = facts.usable_cores or facts.cores, facts.cores or facts.usable_cores
    return Finding("cores", f"{usable}" if usable == there else f"{usable} of {there} may be used here")


def _memory(facts: Facts) -> Finding:
    box = facts.container
    left = None if box.memory is None else max(0, box.memory - box.memory_used)
    free = min((n for n in (facts.memory_available, left) if n is not None), default=None)
    if free is None:
        return Finding("memory", "cannot be told")
    found = f"{nbytes(free)} free" + (f" of {nbytes(facts.memory)}" if facts.memory is not None else "")
    if free >= WANTED_MEMORY:
        return Finding("memory", found)
    limited = left is not None and free == left
    who = "raise the memory limit of the container" if limited else "end other programs"
    return Finding("memory", found, f"{who}: a device may be killed with less than {nbytes(WANTED_MEMORY)}")


def _container(box: Container) -> Finding:
    told = []
    if box.cores is not None:
        told.append(f"{box.cores:g} cores' time")
    if box.memory is not None:
        told.append(f"{nbytes(box.memory)} memory")
    if box.processes is not None:
        told.append(f"{box.processes} processes and threads")
    return Finding("container", f"limits to {', '.join(told)}" if told else "no limits")


def _shared_memory(facts: Facts) -> Finding:
    if facts.shared_memory_error is not None:
        return Finding(
            "shared memory", facts.shared_memory_error, 'allow memfd_create, or run with backend="thread"'
        )
    return Finding("shared memory", f"{facts.shared_memory or 'cannot be told'}; /dev/shm is not used")


def _start(started: Started) -> list[Finding]:
    if started.error is not None:
        return [Finding("start", f"fails: {started.error}", 'see the limits below, or use backend="thread"')]
    found = f"{DEVICES} devices and a first run in {started.seconds:.2f} s, by {started.method}"
    slow = started.seconds > LONGEST_START_SECONDS
    start = Finding("start", found, "wait, or find what is slow: other programs, a file system?" if slow else None)
    if started.threads is None:
        return [start, Finding("BLAS", "cannot be told; pip install threadpoolctl shows it")]
    several = {name: count for name, count in started.threads.items() if count > 1}
    told = ", ".join(f"{name}: {plural(count, 'thread')} a device" for name, count in started.threads.items())
    if not several:
        return [start, Finding("BLAS", told or "none with threads of its own")]
    return [start, Finding("BLAS", told, f"limit {' and '.join(several)} to 1 thread, or devices crowd the cores")]


def _files(facts: Facts) -> Finding:
    if facts.files_limit is None:
        return Finding("open files", "no limit")
    devices = max(0, facts.files_limit - facts.files_open) // DESCRIPTORS_PER_DEVICE
    found = f"limit {facts.files_limit}, {facts.files_open} open: room for about {plural(devices, 'device')}"
    return Finding("open files", found, "ulimit -n 4096" if devices < WANTED_DEVICES else None)


def _processes(facts: Facts) -> Finding:
    box = facts.container
    rooms = []
    if facts.processes_limit is not None:
        rooms.append((facts.processes_limit - facts.processes_used, "ulimit -u 4096"))
    if box.processes is not None:
        rooms.append((box.processes - box.processes_used, "raise the container's limit of processes (pids)"))
    if not rooms:
        return Finding("processes", "no limit")
    room, to_do = min(rooms)
    found = f"room for {max(0, room)} more"
    return Finding("processes", found, to_do if room < WANTED_DEVICES else None)


def _space(facts: Facts) -> Finding:
    """Sparse: only what is touched costs memory, but all of it counts against these limits."""
    needed = facts.shared_memory_needed
    for limit, what, to_do in (
        (facts.address_space_limit, "address space", "ulimit -v unlimited"),
        (facts.file_size_limit, "size of a file", "ulimit -f unlimited"),
    ):
        if limit is not None and limit < needed:
            found = f"{what} limited to {nbytes(limit)}; {nbytes(needed)} needed, sparse"
            return Finding("address space", found, to_do)
    return Finding("address space", f"enough for the {nbytes(needed)} that {DEVICES} devices map, sparse")


def _private_memory(started: Started) -> Finding:
    """Never in the way: without it, what lies in private memory is copied once more."""
    told = {
        None: "cannot be told", True: "devices read large arrays there (ptrace allows it)",
        False: "is copied once more (ptrace_scope forbids more); device.empty is not",
    }
    return Finding("private memory", told[started.private])


def _bytecode(facts: Facts) -> Finding:
    if facts.keeps_bytecode:
        return Finding("bytecode", "kept")
    return Finding("bytecode", "not kept: modules are compiled anew at every start", "unset PYTHONDONTWRITEBYTECODE")


# -- telling -----------------------------------------------------------------------------------------------------------


def report(findings: Sequence[Finding]) -> str:
    """The findings as lines of at most 80 columns."""
    lines = []
    for finding in findings:
        mark = " " if finding.to_do is None else "!"
        lines.append(f"{mark} {finding.subject:<15}{finding.found}")
        if finding.to_do is not None:
            lines.append(f"{'':<17}to do: {finding.to_do}")
    wrong = sum(finding.to_do is not None for finding in findings)
    verdict = "Nothing gets in the way." if not wrong else f"{plural(wrong, 'thing')} in the way, marked with !"
    return "\n".join([*map(fit, lines), "", verdict])


def show() -> int:
    """Looks, prints the report; the exit status: 1 if something gets in the way."""
    findings = [*examine(gather()), Finding("host", told_of_host())]
    print(report(findings))
    return int(any(finding.to_do is not None for finding in findings))
