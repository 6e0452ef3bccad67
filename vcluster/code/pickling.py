"""How a program travels to a device: by value if only the host knows it, by name if both can import it.

Functions and classes of ``__main__`` (scripts, ``python -c``, notebooks), of test modules, and of modules that cannot
be imported again travel by value. All others travel by reference: the device gets the host's ``sys.path``, imports the
module itself, and imports it again when the file has changed. Arrays never enter the pickle. They leave it through
``buffer_callback`` (PEP 574), wherever in the program they are referenced.
"""

from __future__ import annotations

import builtins
import collections
import fnmatch
import functools
import io
import os
import pickle
import signal
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeVar

import cloudpickle
import numpy as np
from cloudpickle import (
    cloudpickle as _reducers,
)  # the reducers that Pickler picks by itself have no public names

from parallelism.arrays import Array
from parallelism.operation import is_installed
from vcluster.code.arguments import PerDevice, Sharded
from vcluster.code.call_sites import code_of
from vcluster.code.decorated import reduce_decorated

TEST_FILES = ("test_*.py", "*_test.py", "conftest.py")
"""Names of files that pytest collects. They should not be imported twice, and often cannot be imported by name."""

BufferCallback = Callable[[pickle.PickleBuffer], Any]


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """As cloudpickle reduces code, with the name of its file, which cloudpickle 3.1.3 leaves out.

    Errors, debuggers, warnings and measures of coverage in a device all find the source by this name.
    """
    build, arguments = _reducers._code_reduce(code)
    place = 10  # of the name of the file among the arguments of types.CodeType
    return build, (*arguments[:place], code.co_filename, *arguments[place + 1 :])


_REDUCERS_BY_TYPE = collections.ChainMap({types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


_DEALT = frozenset({PerDevice, Sharded})
"""Arguments in whose place each device gets its own part."""


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle with arrays out of band, whatever their strides, and with test modules by value.

    With ``buffer_callback``, every array without object fields leaves the pickle as a `pickle.PickleBuffer`. An array
    that is contiguous in neither order is copied first. One that is read-only here is not where it arrives, which has it
    for itself. As in protocol 5, the buffer stays in the stream if the
    callback returns a true value.
    """

    dispatch_table: MutableMapping[Any, Any] = _REDUCERS_BY_TYPE

    def __init__(self, file: Any, buffer_callback: BufferCallback | None = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is np.ndarray:
            usual = (obj.flags.forc and obj.flags.writeable) or obj.dtype.hasobject
            return NotImplemented if usual else as_writable(obj).__reduce_ex__(5)
        if kind in _DEALT:
            raise TypeError(
                f"run() deals out what lies in dicts, lists and tuples; a {kind.__name__} inside of anything else "
                f"would arrive as it is"
            )
        if kind is np.memmap:  # the mapping cannot travel, but its content can
            return as_writable(obj.view(np.ndarray)).__reduce_ex__(5)
        if isinstance(obj, BaseException) and _skips_init(kind):
            return _rebuild_exception, (kind, obj.args), obj.__dict__ or None
        if kind is type and obj.__module__ == "builtins" and not hasattr(builtins, name := obj.__name__):
            outcomes = sys.modules.get("_pytest.outcomes")  # pytest.skip and pytest.fail claim to be built in
            if outcomes is not None and vars(outcomes).get(name) is obj:
                return getattr, (outcomes, name)
        decorated = reduce_decorated(obj)
        if decorated is not None and (kind is functools.cached_property or travels_by_value(obj.__module__)):
            return decorated
        if isinstance(obj, (type, types.FunctionType, TypeVar)) and travels_by_value(
            getattr(obj, "__module__", None)
        ):
            if isinstance(obj, TypeVar):
                return _reducers._make_typevar, _reducers._decompose_typevar(obj)
            return _reduce_class(obj) if isinstance(obj, type) else self._dynamic_function_reduce(obj)
        reduced = super().reducer_override(obj)
        by_value = isinstance(reduced, tuple) and reduced[-1] is _reducers._class_setstate
        return _reduce_class(obj) if by_value else reduced


def as_writable(array: Array) -> Array:
    """The array in one piece, as a view that is not said to be read-only: a pickle would say so of what arrives.

    Nobody writes into it here.
    """
    if not array.flags.forc:
        return np.ascontiguousarray(array).reshape(array.shape)
    if array.flags.writeable:
        return array
    order: Literal["C", "F"] = "C" if array.flags.c_contiguous else "F"
    if not array.nbytes:
        return np.empty(array.shape, array.dtype, order)
    return np.asarray(_Memory(array)).view(array.dtype).reshape(array.shape, order=order)


class _Memory:
    """The bytes of an array, as NumPy asks any object for them."""

    def __init__(self, array: Array) -> None:
        self._array = array  # it lives as long as its bytes are read
        place = array.__array_interface__["data"][0]
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (array.nbytes,),
            "data": (place, False),
        }


def dump(value: object, subject: str, buffer_callback: BufferCallback | None = None) -> bytes:
    """Pickle ``value``. Its arrays go to ``buffer_callback``, in the order in which `load` needs them.

    ``subject`` names the value in an error, for example "argument 'x'" or "the function". Raises ``TypeError`` that
    names the part that cannot be pickled and its type. What the handler of a signal raises meanwhile arrives as itself.
    """
    stream = io.BytesIO()
    try:
        Pickler(stream, buffer_callback).dump(value)
    except Exception as error:
        if is_from_handler(error) or _failure(value) is None:  # the value is not to blame
            raise
        trail, culprit, reason = _culprit(value, error)
        where = "".join(f"{step} of " for step in reversed(trail))
        raise TypeError(
            f"{where}{subject} cannot be sent to another process: {type_name(type(culprit))} "
            f"cannot be pickled ({reason})"
        ) from error
    return stream.getvalue()


def load(data: bytes | memoryview, buffers: Iterable[Any] = ()) -> Any:
    """The value that was given to `dump`. Its arrays lie in ``buffers`` without a copy and are writable if those are."""
    return pickle.loads(data, buffers=buffers)  # noqa: S301  (between processes of one program)


def _reduce_class(kind: type) -> tuple[Any, ...]:
    """As cloudpickle reduces a class, except that a class that comes back to its own process stays as it is."""
    if kind not in _arrived:
        _own_classes[kind] = os.getpid()
    make, arguments, state, *others = _reducers._dynamic_class_reduce(kind)[:5]
    is_made_of_slots = "__slots__" in vars(kind) and NamedTuple not in getattr(kind, "__orig_bases__", ())
    if is_made_of_slots and make is _reducers._make_skeleton_class:
        arguments, state = _with_slots(kind, arguments, state)
    return make, arguments, state, *others, _fill_class


def _with_slots(
    kind: type,
    arguments: tuple[Any, ...],
    state: tuple[Any, ...],
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What makes a class, with its slots, which cloudpickle 3.1.3 leaves out: its objects would have a ``__dict__``,
    which those of this process do not have, and could not come back.
    """
    mine, place = vars(kind), 3  # of what the new class begins with
    slots = {name for name, value in mine.items() if isinstance(value, types.MemberDescriptorType)}
    kept = {name: value for name, value in state[0].items() if name not in slots}
    slots |= {"__dict__", "__weakref__"} & {*mine}
    begins = {**arguments[place], "__slots__": tuple(sorted(slots))}
    return (*arguments[:place], begins, *arguments[place + 1 :]), (kept, *state[1:])


def _fill_class(kind: type, state: Any) -> type:
    """Give a class that has arrived its attributes.

    A class of this process has them already. Those that arrive have methods with copies of the globals, which would not
    change with the module any more.
    """
    if _own_classes.get(kind) != os.getpid():
        _arrived.add(kind)
        _reducers._class_setstate(kind, state)
    return kind


_own_classes: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
"""The classes that were made in this process, with its id: a forked copy gets them anew."""
_arrived: weakref.WeakSet[type] = weakref.WeakSet()


# -- what travels by value ---------------------------------------------------------------------------------------------


def has_parts_by_value(pickled: bytes) -> bool:
    """Whether a class or a function may travel by value in a pickle: what arrives is made by functions of cloudpickle,
    which the pickle names."""
    return _reducers.__name__.encode() in pickled


def travels_by_value(module_name: object) -> bool:
    """Whether the functions and classes of this module must travel by value, because a device could not import it."""
    if module_name in ("__main__", "__mp_main__"):
        return True
    module = sys.modules.get(module_name) if isinstance(module_name, str) else None
    if module is None or not isinstance(module_name, str):
        return False  # cloudpickle decides
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None) or getattr(module, "__file__", None)
    return _unimportable(module_name, spec is not None, origin, tuple(sys.path))


@functools.lru_cache(maxsize=4096)
def _unimportable(name: str, has_spec: bool, origin: str | None, path: tuple[str, ...]) -> bool:
    """The arguments are everything that the answer depends on: ``sys.path`` may have changed since the import."""
    package, _, _ = name.rpartition(".")
    if origin is None or not os.path.isfile(origin):
        # The module was created by hand. Parts that an importable package creates (six.moves) come with that package.
        # Built-in and frozen modules, and namespace packages, have a spec.
        top = sys.modules.get(name.partition(".")[0])
        return not has_spec and getattr(top, "__spec__", None) is None
    if is_installed(origin):
        return False
    if any(fnmatch.fnmatch(os.path.basename(origin), pattern) for pattern in TEST_FILES):
        return True
    where = getattr(sys.modules.get(package), "__path__", None) if package else None
    if package and where is None:
        return True
    for finder in sys.meta_path:
        if type(finder).__module__.startswith("_pytest."):
            if getattr(sys.modules.get(name), "__loader__", None) is finder:
                return True  # pytest rewrote its asserts, which the import in a device would not do
        elif (spec := finder.find_spec(name, where)) is not None:
            return spec.origin is None or not os.path.samefile(spec.origin, origin)
    return True


# -- why something cannot be pickled -----------------------------------------------------------------------------------


def _culprit(
    value: object, error: Exception, above: frozenset[int] = frozenset()
) -> tuple[list[str], object, str]:
    """The smallest part that cannot be pickled: the steps that lead to it, outermost first, the part, and the reason."""
    above |= {id(value)}
    for step, part in _parts(value) if len(above) <= 32 else ():
        if id(part) not in above and (failure := _failure(part)) is not None:
            trail, culprit, reason = _culprit(part, failure, above)
            return [step, *trail], culprit, reason
    return [], value, next(iter(str(error).splitlines()), type(error).__name__)


def is_from_handler(error: Exception) -> bool:
    """Whether the handler of a signal has raised an exception that was caught in the calling function."""
    caught = error.__traceback__
    if caught is None or caught.tb_next is None:  # no function of Python was called
        return False
    handlers = {code_of(handler) for handler in map(signal.getsignal, signal.valid_signals())} - {None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(caught))


def _failure(value: object) -> Exception | None:
    try:
        Pickler(io.BytesIO(), lambda buffer: None).dump(value)
    except Exception as error:
        return error
    return None


Parts = Iterator[tuple[str, object]]
"""The parts of a value, each with the words that name it."""


def _parts(value: object) -> Parts:
    if isinstance(value, np.ndarray) and value.dtype == object:
        return _items(value.flat)
    for kinds, parts_of in _PARTS:
        if isinstance(value, kinds):
            return parts_of(value)
    selects_parts = isinstance(type(value).__reduce__, types.FunctionType)
    return iter(()) if selects_parts else _attributes(value)


def _of_function(function: types.FunctionType) -> Parts:
    name, code = function.__qualname__, function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            yield f"closure variable {variable!r} of {name}", cell.cell_contents
    for variable in _reducers._extract_code_globals(code):
        if variable in function.__globals__:
            yield f"global {variable!r} of {name}", function.__globals__[variable]
    for variable, default in _defaults(function):
        yield f"the default of {variable!r} of {name}", default


def _of_method(method: types.MethodType) -> Parts:
    yield "the object", method.__self__
    yield f"the method {method.__name__!r}", method.__func__


def _of_partial(value: functools.partial[object]) -> Parts:
    yield "the function", value.func
    for i, part in enumerate(value.args):
        yield f"argument {i}", part
    for name, part in value.keywords.items():
        yield f"argument {name!r}", part


def _of_dict(value: dict[object, object]) -> Parts:
    for key, part in value.items():
        yield f"the key {key!r}", key
        yield f"the value at {key!r}", part


def _items(values: Iterable[object]) -> Parts:
    for i, part in enumerate(values):
        yield f"item {i}", part


def _of_class(kind: type) -> Parts:
    for name, part in vars(kind).items():
        yield f"class attribute {name!r}", part


def _attributes(value: object) -> Parts:
    state: dict[str, object] = dict(getattr(value, "__dict__", None) or {})
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, slot):
                state.setdefault(slot, getattr(value, slot))
    if isinstance(value, BaseException):
        state.setdefault("args", value.args)
    for name, part in state.items():
        yield f"attribute {name!r}", part
    yield f"the class {type_name(type(value))}", type(value)


_PARTS: Sequence[tuple[Any, Callable[[Any], Parts]]] = (
    (types.FunctionType, _of_function),
    (types.MethodType, _of_method),
    (functools.partial, _of_partial),
    (dict, _of_dict),
    ((list, tuple, set, frozenset), _items),
    (type, _of_class),
)
"""What gives the parts of a value of these types; other values have attributes."""


def _defaults(function: types.FunctionType) -> Parts:
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def type_name(kind: type) -> str:
    """The name of a type as tracebacks print it."""
    return ("" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.") + kind.__qualname__


# -- exceptions --------------------------------------------------------------------------------------------------------


def _skips_init(kind: type[BaseException]) -> bool:
    """Whether this exception has an ``__init__`` of its own, which the default pickle would call with ``args``.

    ``args`` are often not the arguments of that ``__init__`` but those it passed to ``super().__init__``. The call then
    fails at the receiving end.
    """
    return isinstance(kind.__init__, types.FunctionType) and all(
        getattr(kind, name) is getattr(BaseException, name) for name in ("__reduce__", "__reduce_ex__")
    )


def _rebuild_exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    exception = kind.__new__(kind, *args)
    initialisers = (base.__init__ for base in kind.__mro__)  # type: ignore[misc]  # mypy takes base for an instance
    next(init for init in initialisers if not isinstance(init, types.FunctionType))(exception, *args)
    return exception
