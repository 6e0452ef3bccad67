"""What the doctor says of a machine, from facts that are made up; it looks at the real one in tests/cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vcluster import __main__ as top
from vcluster.cli import doctor, machine
from vcluster.cli.machine import Container, Facts, Started

GIB = 1 << 30
HEALTHY = Facts(
    versions="Python 3.11.0, numpy 2.0.0", cores=8, usable_cores=8, memory=16 * GIB, memory_available=8 * GIB,
    shared_memory="anonymous (memfd)", shared_memory_needed=160 * GIB,
    started=Started(0.25, "forkserver", {"openblas": 1}, private=True), files_limit=1024, files_open=24,
    processes_limit=5000, processes_used=100,
)


def wrong(facts):
    return {finding.subject: finding.to_do for finding in doctor.examine(facts) if finding.to_do is not None}


def found(facts, subject):
    return next(finding.found for finding in doctor.examine(facts) if finding.subject == subject)


def test_a_healthy_machine_has_nothing_in_the_way():
    assert doctor.report(doctor.examine(HEALTHY)) == """\
  versions       Python 3.11.0, numpy 2.0.0
  cores          8
  memory         8 GiB free of 16 GiB
  container      no limits
  shared memory  anonymous (memfd); /dev/shm is not used
  start          4 devices and a first run in 0.25 s, by forkserver
  BLAS           openblas: 1 thread a device
  open files     limit 1024, 24 open: room for about 333 devices
  processes      room for 4900 more
  address space  enough for the 160 GiB that 4 devices map, sparse
  private memory devices read large arrays there (ptrace allows it)
  bytecode       kept

No problems."""


@pytest.mark.parametrize(("change", "subject", "told", "to_do"), [
    ({"versions": "Python 3.11.0, numpy 2.0.0, psutil missing"}, "versions", "psutil missing", "pip install psutil"),
    ({"memory_available": GIB // 4}, "memory", "256 MiB free of 16 GiB", "end other programs"),
    ({"container": Container(memory=GIB, memory_used=GIB - (100 << 20))}, "memory", "100 MiB free",
     "raise the memory limit of the container"),
    ({"container": Container(memory=GIB, memory_used=2 * GIB)}, "memory", "0 B free", "raise the memory limit"),
    ({"shared_memory_error": "OSError: no"}, "shared memory", "OSError: no", 'backend="thread"'),
    ({"started": Started(error="killed")}, "start", "fails: killed", 'backend="thread"'),
    ({"started": Started(11.0, "spawn", {})}, "start", "11.00 s, by spawn", "look for the cause"),
    ({"started": Started(0.1, "fork", {"mkl": 8, "openmp": 1})}, "BLAS", "mkl: 8 threads a device", "limit mkl to 1"),
    ({"files_limit": 64}, "open files", "limit 64, 24 open: room for about 13 devices", "ulimit -n 4096"),
    ({"files_limit": 20}, "open files", "room for about 0 devices", "ulimit -n"),
    ({"processes_limit": 101}, "processes", "room for 1 more", "ulimit -u"),
    ({"container": Container(processes=110, processes_used=111)}, "processes", "room for 0 more", "the container's"),
    ({"address_space_limit": GIB}, "address space", "limited to 1 GiB; 160 GiB needed", "ulimit -v unlimited"),
    ({"keeps_bytecode": False}, "bytecode", "compiles all modules again", "unset PYTHONDONTWRITEBYTECODE"),
    ({"file_size_limit": GIB}, "address space", "size of a file limited to 1 GiB", "ulimit -f unlimited"),
])
def test_what_gets_in_the_way_is_marked_with_what_to_do(change, subject, told, to_do):
    facts = replace(HEALTHY, **change)
    assert to_do in wrong(facts)[subject]
    assert len(wrong(facts)) == 1
    assert told in found(facts, subject)
    text = doctor.report(doctor.examine(facts))
    assert "\n! " in "\n" + text
    assert text.endswith("1 problem, marked with !")


def test_what_is_less_than_usual_but_enough_is_only_told():
    box = Container(cores=1.5, memory=2 * GIB, memory_used=GIB, processes=200, processes_used=50)
    facts = replace(HEALTHY, usable_cores=2, container=box)
    assert wrong(facts) == {}
    assert found(facts, "cores") == "2 of 8 may be used here"
    assert found(facts, "memory") == "1 GiB free of 16 GiB"
    assert found(facts, "container") == "limits to 1.5 cores' time, 2 GiB memory, 200 processes and threads"
    assert found(facts, "processes") == "room for 150 more"


def test_private_memory_that_nobody_may_read_is_only_told():
    facts = replace(HEALTHY, started=replace(HEALTHY.started, private=False))
    assert wrong(facts) == {}
    assert found(facts, "private memory") == "is copied once more (ptrace_scope forbids more); device.empty is not"


def test_where_nothing_can_be_seen_it_says_so_and_goes_on():
    facts = Facts(versions="Python 3.11.0", started=Started(0.1, "spawn"))
    assert wrong(facts) == {}
    for subject in ("cores", "memory", "BLAS"):
        assert "unknown" in found(facts, subject)
    assert found(facts, "open files") == found(facts, "processes") == "no limit"


def test_lines_fit_80_columns_whatever_an_error_says():
    facts = replace(HEALTHY, started=Started(error="a\nb\x1b[31m " + "very " * 40), shared_memory_error="é" * 200)
    text = doctor.report(doctor.examine(facts))
    assert max(map(len, text.splitlines())) == 80
    assert len(text.splitlines()) == len(doctor.examine(facts)) + 2 + 2
    assert "\x1b" not in text


@pytest.mark.parametrize(("facts", "status"), [(HEALTHY, 0), (replace(HEALTHY, files_limit=30), 1)])
def test_the_exit_status_tells(monkeypatch, capsys, facts, status):
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    assert top.main(["doctor"]) == status
    assert "open files" in capsys.readouterr().out


def write(root, files):
    for path, text in files.items():
        place = root / path.replace("/", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def test_a_container_of_version_2_is_read_up_to_the_root(tmp_path):
    group = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n"}
    write(tmp_path, {
        **group,
        "sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/memory.max": "4096\n",
        "sys/fs/cgroup/a/memory.current": "1000\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/a/cpu.max": "max 100000\n", "sys/fs/cgroup/pids.max": "64\n",
        "sys/fs/cgroup/pids.current": "7\n",
    })
    assert machine.container_limits(tmp_path) == Container(1.5, 4096, 1000, 64, 7)


def test_a_container_of_version_1_whose_path_is_the_one_outside(tmp_path):
    write(tmp_path, {
        "proc/self/cgroup": "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n2:pids:/docker/x\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/pids/pids.max": "max\n",
    })
    assert machine.container_limits(tmp_path) == Container(None, GIB, 5, None, 0)


@pytest.mark.parametrize("text", ["", "nonsense", "\x00", "1:\n"])
def test_a_container_that_tells_nothing_is_none(tmp_path, monkeypatch, text):
    write(tmp_path, {"proc/self/cgroup": text})
    assert machine.attempt(lambda: machine.container_limits(tmp_path)) in (None, Container())
    assert machine.attempt(lambda: machine.container_limits(tmp_path / "missing")) is None


def test_what_cannot_be_looked_at_hides_nothing_else(monkeypatch):
    def missing(*_, **options):
        raise OSError("not here")

    for name in ("container_limits", "_own_processes", "os.sched_getaffinity"):
        monkeypatch.setattr(f"vcluster.cli.machine.{name}", missing)
    monkeypatch.setattr("psutil.virtual_memory", missing)
    monkeypatch.setattr(machine, "Arena", missing)
    monkeypatch.setattr(machine.subprocess, "run", missing)
    facts = machine.gather()
    assert facts.memory is None
    assert set(wrong(facts)) >= {"shared memory", "start"}
    assert "OSError: not here" in found(facts, "start")


def test_doctor_takes_no_more_words():
    with pytest.raises(top.WrongWords, match="nothing is expected here: 'now'"):
        top.main(["doctor", "now"])
