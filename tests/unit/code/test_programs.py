"""How programs and exceptions travel; pickled and unpickled in one process."""

from __future__ import annotations

import enum
import functools
import importlib
import os
import pickle
import sys
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from parallelism.operation import is_installed, is_ours
from vcluster.code import Failure, apply_environment, describe_exception
from vcluster.code.call_sites import here
from vcluster.code.environment import ModuleWatcher, environment
from vcluster.code.exceptions import LONGEST_TRACEBACK
from vcluster.code.pickling import dump, load, travels_by_value

WEIGHTS = np.arange(35.0).reshape(5, 7)


class Colour(enum.Enum):
    RED = 1


class TestError(Exception):
    __test__ = False

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} in {where}")
        self.code = code


def uses_global(x):
    return x + WEIGHTS


@pytest.fixture
def module_directory(tmp_path, monkeypatch):
    """A directory on ``sys.path``; the modules imported from it are forgotten afterwards.

    A watcher removes all modules of users, so those of the other tests are put back.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]
    sys.modules.update(before)


def round_trip(value):
    buffers = []
    data = dump(value, "the value", buffers.append)
    return load(data, buffers), len(data), [buffer.raw().nbytes for buffer in buffers]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24.0).reshape(2, 3, 4), np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(24)[::-3],
        np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0), np.array(7.5), np.zeros((0, 3)), np.ones((5, 1)),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), np.broadcast_to(np.arange(3), (4, 3)),
    ],
)  # fmt: skip
def test_an_array_of_any_strides_leaves_out_of_band(array):
    back, size, buffers = round_trip({"x": array})
    assert_array_equal(back["x"], array)
    assert back["x"].dtype == array.dtype
    assert buffers == [array.nbytes]
    assert size < 400


def test_an_array_that_is_met_twice_stays_one_array():
    x = np.arange(12).reshape(3, 4).T[::2]
    (first, second), _, buffers = round_trip((x, x))
    assert first is second
    assert len(buffers) == 1


def test_a_mapped_file_arrives_as_the_array_it_shows(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.int64, "w+", shape=(3, 5))
    mapped[:] = 4
    back, _, buffers = round_trip(mapped)
    assert type(back) is np.ndarray
    assert_array_equal(back, np.full((3, 5), 4))
    assert buffers == [120]


def test_object_arrays_stay_in_the_stream():
    back, _, buffers = round_trip(np.array([{"a": 1}, None], dtype=object))
    assert back.tolist() == [{"a": 1}, None]
    assert buffers == []


def test_arrays_in_closures_and_globals_leave_out_of_band():
    bias = np.arange(7.0)
    back, _, buffers = round_trip(lambda x: uses_global(x) + bias)
    assert_array_equal(back(1), WEIGHTS + 1 + bias)
    assert sorted(buffers) == [bias.nbytes, WEIGHTS.nbytes]


def test_a_test_module_travels_by_value():
    data = dump((uses_global, Colour, TestError), "it")
    for kind in (Colour, TestError):
        assert f"{kind.__qualname__}".encode() in data and b"_make_skeleton" in data
    back = load(data)[0]
    assert back is not uses_global and back.__globals__ is not uses_global.__globals__
    assert back(1).shape == (5, 7)


def test_code_that_travels_by_value_keeps_its_file_and_lines():
    def outer():
        def inner():
            return None

        return inner

    back = load(dump(outer, "outer"))
    for ours, its in ((outer, back), (outer(), back())):
        assert its is not ours and its.__code__.co_filename == ours.__code__.co_filename == __file__
        assert list(its.__code__.co_lines()) == list(ours.__code__.co_lines())
        assert its.__code__ == ours.__code__


def test_an_importable_module_travels_by_reference(module_directory):
    (module_directory / "kernels_by_name.py").write_text("def f(): return 1\n")
    module = importlib.import_module("kernels_by_name")
    assert not travels_by_value("kernels_by_name")
    assert load(dump(module.f, "f")) is module.f
    assert not travels_by_value("numpy") and not travels_by_value("os.path") and not travels_by_value("builtins")


def test_a_module_whose_directory_left_the_path_travels_by_value(module_directory, monkeypatch):
    (module_directory / "kernels_gone.py").write_text("def f(): return 1\n")
    module = importlib.import_module("kernels_gone")
    assert not travels_by_value("kernels_gone")
    monkeypatch.setattr(sys, "path", sys.path[1:])
    assert travels_by_value("kernels_gone")
    assert load(dump(module.f, "f")) is not module.f


def test_a_module_made_by_hand_travels_by_value(monkeypatch):
    module = ModuleType("made_by_hand")
    exec("class C: pass\ndef f(): return C", module.__dict__)
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    assert travels_by_value("made_by_hand")
    assert load(dump(module.f, "f")) is not module.f


@pytest.mark.parametrize("name", ["test_kernels_x.py", "kernels_x_test.py", "conftest.py"])
def test_files_that_pytest_collects_travel_by_value(module_directory, name):
    (module_directory / name).write_text("def f(): return 1\n")
    stem = name.removesuffix(".py")
    spec = importlib.util.spec_from_file_location(f"{stem}_y", module_directory / name)
    module = sys.modules[f"{stem}_y"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert travels_by_value(module.__name__)


def _closure():
    lock = threading.Lock()
    return lambda: lock


def _holder():
    class Holder:
        def __init__(self):
            self.settings = {"locks": [1, threading.Lock()]}

    return Holder()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_closure, ["closure variable 'lock' of _closure.<locals>.<lambda> of the function"]),
        (_holder, ["item 1 of the value at 'locks' of attribute 'settings' of the function"]),
        (lambda: functools.partial(print, end=threading.Lock()), ["argument 'end' of the function"]),
        (threading.Lock, ["the function cannot be sent"]),
        (lambda: (i for i in ()), ["generator"]),
    ],
)
def test_what_cannot_be_pickled_is_named(make, words):
    with pytest.raises(TypeError) as caught:
        dump(make(), "the function")
    for word in [*words, "cannot be sent to another process", "lock" if "generator" not in words else "generator"]:
        assert word in str(caught.value)


def test_a_changed_module_and_its_importers_are_forgotten(module_directory, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    watcher = ModuleWatcher()
    watcher.install()
    try:
        inner, outer = module_directory / "watched_inner.py", module_directory / "watched_outer.py"
        inner.write_text("def f(): return 1\n")
        outer.write_text("from watched_inner import f\n")
        assert importlib.import_module("watched_outer").f() == 1
        assert watcher.refresh() == ()
        status = inner.stat()
        inner.write_text("def f(): return 2\n")  # of the same length, within the same second for a .pyc
        os.utime(inner, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        assert watcher.refresh() == ("watched_inner",)
        assert importlib.import_module("watched_outer").f() == 2
        assert watcher.refresh() == ()
        assert not {"numpy", "vcluster.code.pickling"} - set(sys.modules)
    finally:
        sys.meta_path.remove(watcher)


def test_a_changed_submodule_leaves_its_package(module_directory):
    watcher = ModuleWatcher()
    watcher.install()
    try:
        package = module_directory / "watched_package"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "part.py").write_text("x = 1\n")
        assert importlib.import_module("watched_package.part").x == 1
        (package / "part.py").write_text("x = 1234\n")
        assert watcher.refresh() == ("watched_package.part",)
        assert importlib.import_module("watched_package.part").x == 1234
    finally:
        sys.meta_path.remove(watcher)


def test_a_module_that_was_there_before_is_watched_too(module_directory):
    (module_directory / "watched_before.py").write_text("x = 1\n")
    importlib.import_module("watched_before")
    watcher = ModuleWatcher()
    watcher.install()
    try:
        (module_directory / "watched_before.py").write_text("x = 1234\n")
        assert watcher.refresh() == ("watched_before",)
    finally:
        sys.meta_path.remove(watcher)


def test_a_module_that_came_by_another_finder_is_watched_too(module_directory):
    watcher = ModuleWatcher()
    watcher.install()
    try:
        assert watcher.refresh() == ()
        path = module_directory / "watched_otherwise.py"
        path.write_text("x = 1\n")
        module = sys.modules["watched_otherwise"] = type(sys)("watched_otherwise")  # as pytest loads test modules
        module.__file__ = str(path)
        assert watcher.refresh() == ()
        path.write_text("x = 1234\n")
        assert watcher.refresh() == ("watched_otherwise",)
    finally:
        sys.meta_path.remove(watcher)


def test_a_module_whose_file_does_not_exist_is_left_alone(module_directory):
    """``torch.ops`` says that its file is ``_ops.py``; it went away with the first change of a user's module."""
    watcher = ModuleWatcher()
    path = module_directory / "watched_beside.py"
    for name, file in (("watched_beside", str(path)), ("watched_made", "_made.py")):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__file__ = file
    path.write_text("x = 1\n")
    assert watcher.refresh() == ()
    path.write_text("x = 1234\n")
    assert watcher.refresh() == ("watched_beside",)
    assert "watched_made" in sys.modules
    assert "watched_beside" not in sys.modules


def test_the_environment_is_applied_and_picklable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/somewhere"])
    value = pickle.loads(pickle.dumps(environment()))  # noqa: S301
    assert value.path == (str(tmp_path), "/somewhere")
    monkeypatch.chdir("/")
    apply_environment(value)
    assert sys.path == [str(tmp_path), "/somewhere"]
    assert Path.cwd() == tmp_path


def test_here_is_the_nearest_line_outside_our_packages():
    line = sys._getframe().f_lineno + 1
    assert here() == f"{__file__}:{line}"
    code = compile("from vcluster.code.call_sites import here\ndef call(): return here()\n", str(_our_file()), "exec")
    inner: dict = {}
    exec(code, inner)
    line = sys._getframe().f_lineno + 1
    assert inner["call"]() == f"{__file__}:{line}"


def test_files_are_told_apart():
    assert is_ours(str(_our_file())) and is_installed(str(_our_file()))
    assert is_installed(np.__file__) and is_installed(enum.__file__)
    assert not is_ours(__file__) and not is_installed(__file__)


# -- exceptions --------------------------------------------------------------------------------------------------------


def _our_file() -> Path:
    import vcluster.code.call_sites

    return Path(vcluster.code.call_sites.__file__).parents[1] / "device" / "device.py"


def caught(function) -> Failure:
    try:
        function()
    except BaseException as error:
        return pickle.loads(pickle.dumps(describe_exception(error)))  # noqa: S301
    raise AssertionError("it did not raise")


def raising(error):
    def function():
        raise error

    return function


class BrokenSignature(ValueError):
    def __init__(self, a, b, *, c):
        super().__init__(f"{a} and {b}")
        self.c = c


class Unprintable(Exception):
    def __str__(self):
        raise ZeroDivisionError


class Unloadable(Exception):
    def __reduce__(self):
        return _explode, ()


def _explode():
    raise LookupError


def test_the_original_comes_back_with_its_attributes_and_notes():
    error = BrokenSignature(1, 2, c=3)
    error.add_note("in layer 4")
    failure = caught(raising(error))
    back = failure.exception()
    assert (failure.type_name, failure.text) == (f"{__name__}.BrokenSignature", "1 and 2")
    assert type(back).__name__ == "BrokenSignature" and isinstance(back, ValueError)
    assert (back.args, back.c, back.__notes__) == (("1 and 2",), 3, ["in layer 4"])
    assert "in layer 4" in failure.format()


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3), KeyboardInterrupt(), OSError(2, "no such file", "x.npy"), KeyError("k"), StopIteration(5),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), np.linalg.LinAlgError("singular"), AssertionError(),
    ],
)  # fmt: skip
def test_every_usual_exception_comes_back(error):
    back = caught(raising(error)).exception()
    assert type(back) is type(error)
    assert back.args == error.args
    assert str(back) == str(error)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("held by", threading.Lock()), "ValueError: ('held by', <unlocked _thread.lock"),
        (Unloadable("gone"), "Unloadable: gone"),
    ],
)
def test_what_cannot_come_back_is_a_runtime_error_that_names_it(error, text):
    back = caught(raising(error)).exception()
    assert type(back) is RuntimeError
    assert text in str(back)


def test_an_exception_that_cannot_be_printed_is_described():
    failure = caught(raising(Unprintable()))
    assert failure.text == "<str() of the exception raised ZeroDivisionError>"
    assert "Unprintable" in failure.format()


def test_groups_tell_their_members():
    failure = caught(raising(ExceptionGroup("two", [ValueError("one"), ExceptionGroup("in", [TypeError("deep")])])))
    back = failure.exception()
    assert isinstance(back, ExceptionGroup)
    assert [type(e) for e in back.exceptions] == [ValueError, ExceptionGroup]
    for words in ("two (2 sub-exceptions)", "ValueError: one", "TypeError: deep"):
        assert words in failure.format()


def test_causes_are_told_and_attached():
    def explicit():
        try:
            {}["k"]
        except KeyError as error:
            raise ValueError("bad") from error

    def implicit():
        try:
            {}["k"]
        except KeyError:
            raise ValueError("bad")  # noqa: B904

    def hidden():
        try:
            {}["k"]
        except KeyError:
            raise ValueError("bad") from None

    assert type(caught(explicit).exception().__cause__) is KeyError
    assert type(caught(implicit).exception().__context__) is KeyError
    assert caught(hidden).cause is None
    text = caught(explicit).format()
    assert text.index("KeyError: 'k'") < text.index("direct cause") < text.index("ValueError: bad")


def test_a_circle_of_causes_ends():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert "second" in caught(raising(first)).format()


def test_an_endless_recursion_is_cut_in_the_middle():
    def ping(n):
        return pong(n + 1)

    def pong(n):
        return ping(n + 1)

    failure = caught(lambda: ping(0))
    assert isinstance(failure.exception(), RecursionError)
    assert len(failure.frames) == LONGEST_TRACEBACK and failure.omitted > 0
    assert f"[{failure.omitted} more calls]" in failure.format()


def test_the_traceback_shows_the_users_lines_and_leaves_ours_out():
    ours: dict = {}
    source = "def call(f):\n    return f()\ndef fail():\n    raise ValueError('ours')\n"
    exec(compile(source, str(_our_file()), "exec"), ours)

    def kernel():
        ours["fail"]()  # the user's line

    failure = caught(lambda: ours["call"](kernel))
    assert [frame.function for frame in failure.frames][-1] == "kernel"
    assert failure.location == f"{__file__}:{kernel.__code__.co_firstlineno + 1}"
    assert "# the user's line" in failure.format()
    assert "device.py" not in failure.format()


def test_the_location_is_the_users_line_not_the_librarys():
    def kernel():
        np.concatenate([])
        return np.stack([np.zeros(2), np.zeros(3)])

    failure = caught(lambda: np.stack([np.zeros(2), np.zeros(3)]))
    assert failure.location.startswith(__file__)
    assert "numpy" in failure.frames[-1].filename
    assert caught(kernel).location == f"{__file__}:{kernel.__code__.co_firstlineno + 1}"


def test_the_frames_of_our_own_stay_where_there_are_no_others():
    inner: dict = {}
    exec(compile("def fail():\n    raise ValueError\n", str(_our_file()), "exec"), inner)
    try:
        inner["fail"]()
    except ValueError as error:
        failure = describe_exception(error.with_traceback(error.__traceback__.tb_next))
    assert [frame.function for frame in failure.frames] == ["fail"]


def test_a_syntax_error_shows_the_line_it_is_about():
    failure = caught(lambda: compile("x = = 1", "cell.py", "exec"))
    assert "x = = 1" in failure.format()
    assert isinstance(failure.exception(), SyntaxError)
