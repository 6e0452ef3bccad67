"""A file is written whole or not at all."""

import os
import stat

import pytest

from parallelism.whole_files import written_whole


def fill(path):
    with written_whole(path) as file:
        file.write("after")
        file.flush()
        raise OSError(28, "No space left on device")


def test_a_file_is_as_before_if_writing_fails(tmp_path):
    path = tmp_path / "old.txt"
    path.write_text("before")
    path.chmod(0o640)
    with pytest.raises(OSError, match="No space"):
        fill(path)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["old.txt"]  # noqa: PTH208
    with written_whole(path) as file:
        file.write("after")
    assert path.read_text() == "after"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(ZeroDivisionError), written_whole(tmp_path / "new.txt") as file:
        file.write(str(1 // 0))
    assert os.listdir(tmp_path) == ["old.txt"]  # noqa: PTH208


def test_a_link_and_a_device_stay_what_they_are(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    with written_whole(link) as file:
        file.write("after")
    assert (link.is_symlink(), target.read_text()) == (True, "after")
    with written_whole(os.devnull) as file:
        file.write("nothing")
    with pytest.raises(OSError, match="No space"):
        fill("/dev/full")


def test_an_error_names_the_path_that_was_given(tmp_path):
    path = tmp_path / "nowhere" / "trace.json"
    with pytest.raises(FileNotFoundError) as error, written_whole(path):
        pass
    assert error.value.filename == str(path) and "trace.json'" in str(error.value)
