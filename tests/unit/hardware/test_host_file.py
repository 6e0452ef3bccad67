"""What ``hardware="host"`` stands for: this machine as it was calibrated, or what it was before."""

from __future__ import annotations

import pytest

from parallelism import Event, Hardware, HostLink, Link, Trace
from parallelism.hardware import VARIABLE, HardwareFileError, host_file, is_calibrated
from parallelism.hardware.host import host_summary
from vcluster import VirtualCluster
from vcluster.__main__ import PROGRAM, main
from vcluster.cli.command_line import serve

MACHINE = Hardware("mine", {"float64": 2.0**30}, 1e9, 1e9, (Link("m", 2, 2.0**-18, 2.0**30, "memory"),),
                   HostLink(1e-5, 1e9))


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "host.json"))
    return tmp_path / "host.json"


def test_it_is_among_the_users_settings_or_where_the_variable_says(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    assert host_file() == tmp_path / "settings" / "vcluster" / "host.json"
    monkeypatch.setenv("XDG_CONFIG_HOME", "not/absolute")
    assert host_file() == tmp_path / ".config" / "vcluster" / "host.json" and not is_calibrated()
    monkeypatch.setenv(VARIABLE, "elsewhere.json")
    assert str(host_file()) == "elsewhere.json"
    monkeypatch.setenv(VARIABLE, "")
    assert host_file() is None and Hardware.of_host() is None
    assert host_summary() == f"not calibrated, messages free: {VARIABLE} is empty"


def test_a_user_without_a_home_has_no_file(monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    for name in (VARIABLE, "HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert host_file() is None and not is_calibrated()


def test_the_tests_read_no_calibration_of_the_users():
    assert not is_calibrated()


def test_without_a_calibration_it_is_as_before_and_says_so(file, capsys):
    assert Hardware.of_host(4) is None
    assert host_summary() == "not calibrated, messages free: python -m vcluster calibrate"
    assert main(["hardware", "host"]) == 0 and main(["hardware"]) == 0
    assert capsys.readouterr().out.count("not calibrated, messages free") == 2
    trace = Trace([Event(0, "send", "send", peer=1, sequence=0, bytes_sent=8, messages=1),
                   Event(1, "recv", "recv", peer=0, sequence=0, bytes_received=8)]).on("host")
    assert trace.makespan_seconds == 0 and trace.hardware is None
    assert serve(PROGRAM + ".demo", lambda words: _demo(words), ["matmul", "--hardware", "host"]) == 2
    assert "--hardware host: not calibrated" in capsys.readouterr().err


def _demo(words):
    from vcluster.cli.command_line import hardware_of

    hardware_of(words[-1], 2)
    return 0


def test_a_calibration_is_what_it_stands_for_with_room_for_all_devices(file, capsys):
    MACHINE.save(file)
    assert Hardware.of_host() == Hardware.of_host(2) == MACHINE and Hardware.of_host(5).devices == 5
    trace = Trace([Event(0, "send", "send", peer=3, sequence=0, bytes_sent=2**20, messages=1),
                   Event(3, "recv", "recv", peer=0, sequence=0, bytes_received=2**20)]).on("host")
    assert trace.makespan_seconds == 2.0**-18 + 2.0**-10 and trace.hardware == "mine"
    assert main(["hardware", "host"]) == 0
    assert capsys.readouterr().out.startswith("mine\n  devices  2")


def test_a_broken_one_is_one_clear_error(file):
    file.write_text("{")
    with pytest.raises(HardwareFileError, match=rf"{file}: must be JSON; .*hardware='host'.* calibrate .*{VARIABLE}="):
        VirtualCluster(2)
    file.unlink()
    file.mkdir()
    with pytest.raises(HardwareFileError, match="cannot be read: Is a directory"):
        Hardware.of_host()
