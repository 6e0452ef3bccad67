"""`python -m vcluster doctor` reports what would prevent a cluster on this machine from working well, and what to do.

`vcluster.cli.machine` collects the facts, `examine` judges them, and `report` formats the findings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from parallelism.display.quantities import fit, nbytes, plural
from parallelism.hardware.host import host_summary
from vcluster.cli.command_line import Parser
from vcluster.cli.machine import DEVICES, Container, Facts, Started, gather
from vcluster.mpi import current, is_host, node_lines

WANTED_DEVICES = 16
"""A limit that leaves room for fewer devices than this is a problem."""
DESCRIPTORS_PER_DEVICE = 3
WANTED_MEMORY = 512 << 20
LONGEST_START_SECONDS = 10.0
PRIVATE_MEMORY = {
    None: "unknown",
    True: "devices read large arrays there (ptrace allows it)",
    False: "is copied once more (ptrace_scope forbids more); device.empty is not",
}
"""Whether devices can read each other's private memory. This is never a problem: without it, arrays there are copied
once more."""


@dataclass(frozen=True)
class Finding:
    """One line of the report, and if it is a problem, one line on how to solve it."""

    subject: str
    found: str
    to_do: str | None = None


# -- judging -----------------------------------------------------------------------------------------------------------


def examine(facts: Facts) -> list[Finding]:
    """The findings about all facts."""
    return [
        _versions(facts.versions),
        _cores(facts),
        _memory(facts),
        _container(facts.container),
        _shared_memory(facts),
        *_start(facts.started),
        _files(facts),
        _processes(facts),
        _space(facts),
        Finding("private memory", PRIVATE_MEMORY[facts.started.private]),
        Finding("bytecode", "kept")
        if facts.keeps_bytecode
        else Finding(
            "bytecode", "not kept: every start compiles all modules again", "unset PYTHONDONTWRITEBYTECODE"
        ),
    ]


def _versions(versions: str) -> Finding:
    missing = [part.split()[0] for part in versions.split(", ") if part.endswith(" missing")]
    return Finding("versions", versions, f"pip install {' '.join(missing)}" if missing else None)


def _cores(facts: Facts) -> Finding:
    if facts.cores is None and facts.usable_cores is None:
        return Finding("cores", "unknown")
    usable, cores = facts.usable_cores or facts.cores, facts.cores or facts.usable_cores
    return Finding("cores", f"{usable}" if usable == cores else f"{usable} of {cores} may be used here")


def _memory(facts: Facts) -> Finding:
    box = facts.container
    left = None if box.memory is None else max(0, box.memory - box.memory_used)
    free = min((n for n in (facts.memory_available, left) if n is not None), default=None)
    if free is None:
        return Finding("memory", "unknown")
    found = f"{nbytes(free)} free" + (f" of {nbytes(facts.memory)}" if facts.memory is not None else "")
    if free >= WANTED_MEMORY:
        return Finding("memory", found)
    remedy = "raise the memory limit of the container" if free == left else "end other programs"
    return Finding(
        "memory", found, f"{remedy}: with less than {nbytes(WANTED_MEMORY)}, a device may be killed"
    )


def _container(box: Container) -> Finding:
    limits = (
        box.cores is not None and f"{box.cores:g} cores' time",
        box.memory is not None and f"{nbytes(box.memory)} memory",
        box.processes is not None and f"{box.processes} processes and threads",
    )
    told = ", ".join(limit for limit in limits if limit)
    return Finding("container", f"limits to {told}" if told else "no limits")


def _shared_memory(facts: Facts) -> Finding:
    if facts.shared_memory_error is None:
        return Finding("shared memory", f"{facts.shared_memory or 'unknown'}; /dev/shm is not used")
    return Finding(
        "shared memory", facts.shared_memory_error, 'allow memfd_create, or run with backend="thread"'
    )


def _start(started: Started) -> list[Finding]:
    if started.error is not None:
        return [Finding("start", f"fails: {started.error}", 'see the limits below, or use backend="thread"')]
    found = f"{DEVICES} devices and a first run in {started.seconds:.2f} s, by {started.method}"
    remedy = "wait, or look for the cause: other programs, a slow file system"
    start = Finding("start", found, remedy if started.seconds > LONGEST_START_SECONDS else None)
    if started.threads is None:
        return [start, Finding("BLAS", "unknown; pip install threadpoolctl to see its threads")]
    several = " and ".join(name for name, count in started.threads.items() if count > 1)
    threads = ", ".join(
        f"{name}: {plural(count, 'thread')} a device" for name, count in started.threads.items()
    )
    return [
        start,
        Finding(
            "BLAS",
            threads or "uses no threads of its own",
            f"limit {several} to 1 thread, or devices crowd the cores" if several else None,
        ),
    ]


def _files(facts: Facts) -> Finding:
    if facts.files_limit is None:
        return Finding("open files", "no limit")
    devices = max(0, facts.files_limit - facts.files_open) // DESCRIPTORS_PER_DEVICE
    found = f"limit {facts.files_limit}, {facts.files_open} open: room for about {plural(devices, 'device')}"
    return Finding("open files", found, "ulimit -n 4096" if devices < WANTED_DEVICES else None)


def _processes(facts: Facts) -> Finding:
    box = facts.container
    rooms = [
        (limit - used, to_do)
        for limit, used, to_do in (
            (facts.processes_limit, facts.processes_used, "ulimit -u 4096"),
            (box.processes, box.processes_used, "raise the container's limit of processes (pids)"),
        )
        if limit is not None
    ]
    if not rooms:
        return Finding("processes", "no limit")
    room, to_do = min(rooms)
    return Finding("processes", f"room for {max(0, room)} more", to_do if room < WANTED_DEVICES else None)


def _space(facts: Facts) -> Finding:
    """Limits of the address space. The mapping is sparse and uses little memory, but all of it counts against them."""
    needed = facts.shared_memory_needed
    for limit, what, to_do in (
        (facts.address_space_limit, "address space", "ulimit -v unlimited"),
        (facts.file_size_limit, "size of a file", "ulimit -f unlimited"),
    ):
        if limit is not None and limit < needed:
            found = f"{what} limited to {nbytes(limit)}; {nbytes(needed)} needed, sparse"
            return Finding("address space", found, to_do)
    return Finding("address space", f"enough for the {nbytes(needed)} that {DEVICES} devices map, sparse")


def _ranks() -> list[Finding]:
    """In an MPI job, its ranks by node."""
    if not is_host():
        return []
    job = current(1)
    return [
        Finding("MPI", f"{job.library}, {plural(job.size, 'rank')}"),
        *(Finding(name, ranks) for name, ranks in node_lines(job.places)),
    ]


# -- the report --------------------------------------------------------------------------------------------------------


def report(findings: Sequence[Finding]) -> str:
    """The findings as lines of at most 80 columns."""
    lines = []
    for finding in findings:
        lines.append(f"{' ' if finding.to_do is None else '!'} {finding.subject:<15}{finding.found}")
        if finding.to_do is not None:
            lines.append(f"{'':<17}to do: {finding.to_do}")
    wrong = sum(finding.to_do is not None for finding in findings)
    return "\n".join(
        [*map(fit, lines), "", f"{plural(wrong, 'problem')}, marked with !" if wrong else "No problems."]
    )


def run_checks() -> int:
    """Examine this machine and print the report. Returns the exit status: 1 if there is a problem."""
    findings = [*examine(gather()), Finding("host", host_summary()), *_ranks()]
    print(report(findings))
    return int(any(finding.to_do is not None for finding in findings))


def doctor(program: str, words: Sequence[str]) -> int:
    """Report what would cause problems on this machine. Returns 1 if there is a problem."""
    Parser(
        prog=f"{program} doctor",
        description="""\
Reports what this machine offers and what would cause problems. The exit status
is 1 if there is a problem.""",
    ).parse(words)
    return run_checks()
