"""Checkpoints: the state of a training after a step, as a value and as one file.

A checkpoint holds layers, not stages or devices.  So a training can continue from it on a pipeline of any length, or
in one process.  A file is written completely or not at all, and it is read only if its checksum is right:

    vcluster checkpoint, version 1
    sha256 of what follows, in hexadecimal
    {"step": 12, "dtype": "<f8", "layer_sizes": [64, 128, 10], "optimizer": {"name": "SGD", ...}, ...}
    weights and bias of each layer; then, in the same order, each of the optimizer's moments: bytes of C order

A checksum is not a signature, and a file may come from anywhere.  So every field is checked, and nothing in it is ever
executed or unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from parallelism.arrays import Array
from parallelism.dtypes import NARROW_FLOATS, code_of, of_code
from parallelism.kernels import SGD, Adam, AdamState, Optimizer
from parallelism.whole_files import written_whole
from pipeline_parallelism.trained_stage import Layers

FORMAT = b"vcluster checkpoint, version "
VERSION = b"1"
LARGEST_INTEGER = 2**53 - 1

_OPTIMIZERS: dict[str, type[SGD | Adam]] = {"SGD": SGD, "Adam": Adam}
_DTYPES = {
    np.dtype(kind).newbyteorder("<").str for kind in (np.half, np.single, np.double, np.longdouble)
} | {*NARROW_FLOATS.values()}
_KEYS = {"step", "dtype", "layer_sizes", "optimizer", "moments", "updates"}


class CheckpointError(ValueError):
    """A file is not a checkpoint, or it is damaged.  The message is one line that begins with the file's name.

    >>> import tempfile
    >>> from pipeline_parallelism import Checkpoint, CheckpointError
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     try:
    ...         Checkpoint.load(file.name)
    ...     except CheckpointError as error:
    ...         print(str(error).replace(file.name, "weights.npz"))
    weights.npz: expected a file that begins with 'vcluster checkpoint, version ', got b''
    """


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A training after ``step`` steps.  ``mlp.checkpoint_step()`` returns it, ``mlp.restore_step()`` takes it.

    >>> import tempfile
    >>> import numpy as np
    >>> from parallelism import Pipeline
    >>> from pipeline_parallelism import MLP, Checkpoint
    >>> from vcluster import VirtualCluster
    >>> mlp = MLP((3, 4, 2), Pipeline(stages=2, microbatches=2))
    >>> with VirtualCluster(pp=2, backend="thread") as cluster, tempfile.NamedTemporaryFile() as file:
    ...     loss = cluster.run(mlp.train_step(), np.ones((4, 3)), np.ones((4, 2))).result.loss
    ...     cluster.run(mlp.checkpoint_step()).result.save(file.name)
    ...     Checkpoint.load(file.name).layer_sizes
    (3, 4, 2)

    ``parameters`` has a pair ``(weights, bias)`` for each layer.  ``optimizer`` is that of the last step, None before
    the first.  ``optimizer_state`` is its state for all arrays of the model in the order of the layers.
    """

    step: int
    parameters: Layers
    optimizer: Optimizer | None = None
    optimizer_state: Any = None

    @property
    def layer_sizes(self) -> tuple[int, ...]:
        """The inputs of the first layer and the outputs of each layer.  ``ValueError`` if layers do not fit."""
        if not self.parameters:
            raise ValueError("a checkpoint needs the parameters of one layer or more, got none")
        sizes = [self.parameters[0][0].shape[0]]
        for i, (weights, bias) in enumerate(self.parameters):
            if weights.ndim != 2 or weights.shape[0] != sizes[-1] or bias.shape != weights.shape[1:]:
                raise ValueError(
                    f"layer {i} should have weights ({sizes[-1]}, outputs) and bias (outputs,), "
                    f"got {weights.shape} and {bias.shape}"
                )
            sizes.append(weights.shape[1])
        return tuple(map(int, sizes))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the checkpoint to a file.  If writing fails, ``path`` is unchanged.

        ``ValueError`` for an optimizer other than SGD and Adam, and for arrays of several dtypes.
        """
        content = _encode(self)
        with written_whole(path, encoding=None, durable=True) as file:
            file.write(b"%s%s\n%s\n" % (FORMAT, VERSION, hashlib.sha256(content).hexdigest().encode()))
            file.write(content)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Checkpoint:
        """Read a checkpoint.  `CheckpointError` if the file is damaged or not a checkpoint; ``OSError`` as usual."""
        return _decode(path, Path(path).read_bytes())


# -- the parts of an optimizer's state ---------------------------------------------------------------------------------


def join_states(states: Sequence[Any]) -> Any:
    """Join the states of parts of the arrays to the state of all.  Lists are joined; other values must be equal."""
    first = states[0]
    if isinstance(first, list):
        return [array for state in states for array in state]
    if isinstance(first, tuple):
        return _like(first, [join_states(part) for part in zip(*states, strict=True)])
    if any(state != first for state in states):
        raise ValueError(
            "the parts of an optimizer's state must have equal values, except for arrays, got "
            f"{list(states)!r}"
        )
    return first


def split_state(state: Any, counts: Sequence[int]) -> list[Any]:
    """The inverse of `join_states`: the state of the first ``counts[0]`` arrays, of the next ``counts[1]``, ..."""
    if isinstance(state, list):
        ends = np.cumsum(counts)
        return [state[end - count : end] for end, count in zip(ends, counts, strict=True)]
    if isinstance(state, tuple):
        split = [split_state(part, counts) for part in state]
        return [_like(state, part) for part in zip(*split, strict=True)]
    return [state] * len(counts)


def _like(state: tuple[Any, ...], parts: Sequence[Any]) -> tuple[Any, ...]:
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


# -- the file ----------------------------------------------------------------------------------------------------------


def _encode(checkpoint: Checkpoint) -> bytes:
    optimizer, state = checkpoint.optimizer, checkpoint.optimizer_state
    if optimizer is not None and type(optimizer) not in _OPTIMIZERS.values():
        raise ValueError(
            f"a checkpoint file knows the optimizers {', '.join(_OPTIMIZERS)}, got {optimizer!r}"
        )
    moments, updates = _moments(state)
    if (len(moments), type(optimizer)) not in ((0, type(optimizer)), (1, SGD), (2, Adam)):
        raise ValueError(f"{optimizer!r} has no state of {len(moments)} moments")
    sizes = checkpoint.layer_sizes
    arrays = [array for layer in checkpoint.parameters for array in layer]
    dtype = arrays[0].dtype.newbyteorder("<")
    if code_of(dtype) not in _DTYPES:
        raise ValueError(f"a checkpoint holds arrays of one floating dtype, got {dtype}")
    shapes = list(map(np.shape, arrays))
    if any(list(map(np.shape, moment)) != shapes for moment in moments):
        raise ValueError("each moment of the optimizer's state must have the shapes of the parameters")
    everything = [*arrays, *(array for moment in moments for array in moment)]
    if other := next((array.dtype for array in everything if array.dtype.newbyteorder("<") != dtype), None):
        raise ValueError(f"a checkpoint holds arrays of one floating dtype, got {dtype} and {other}")
    header = {
        "step": int(checkpoint.step),
        "dtype": code_of(dtype),
        "layer_sizes": sizes,
        "optimizer": optimizer and {"name": type(optimizer).__name__, **asdict(optimizer)},  # type: ignore[call-overload]
        "moments": len(moments),
        "updates": updates,
    }
    return b"".join(
        [json.dumps(header).encode(), b"\n", *(array.astype(dtype).tobytes() for array in everything)]
    )


def _decode(path: str | PathLike[str], data: bytes) -> Checkpoint:
    first, _, rest = data.partition(b"\n")
    _check(
        path, first.startswith(FORMAT), f"expected a file that begins with {FORMAT.decode()!r}", first[:40]
    )
    version = first.removeprefix(FORMAT)
    _check(path, version == VERSION, f"expected version {VERSION.decode()}", version[:40])
    checksum, _, content = rest.partition(b"\n")
    actual = hashlib.sha256(content).hexdigest().encode()
    _check(path, checksum == actual, f"it is damaged: its checksum should be {checksum[:64]!r}", actual)
    text, _, body = content.partition(b"\n")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a line of JSON, got none: {error}") from None
    _check(
        path,
        type(header) is dict and header.keys() == _KEYS,
        f"expected an object of {', '.join(sorted(_KEYS))}",
        header,
    )
    for key in ("step", "moments", "updates"):
        _check(path, _is_whole(header[key], 0), f"expected {key} to be an integer of 0 or more", header[key])
    sizes, moments, dtype_name = header["layer_sizes"], header["moments"], header["dtype"]
    _check(
        path,
        type(sizes) is list and len(sizes) >= 2 and all(_is_whole(size, 1) for size in sizes),
        "expected layer_sizes to be two or more integers of at least 1",
        sizes,
    )
    _check(
        path,
        type(dtype_name) is str and dtype_name in _DTYPES,
        f"expected dtype to be one of {', '.join(sorted(_DTYPES))}",
        dtype_name,
    )
    optimizer = _optimizer(path, header["optimizer"])
    _check(
        path,
        (moments, type(optimizer)) in ((0, type(optimizer)), (1, SGD), (2, Adam)),
        f"expected as many moments as {optimizer!r} has",
        moments,
    )

    dtype = of_code(dtype_name)
    shapes = [shape for pair in pairwise(sizes) for shape in (pair, pair[1:])] * (1 + moments)
    expected = dtype.itemsize * sum(map(math.prod, shapes))
    _check(path, len(body) == expected, f"expected {expected} bytes of arrays", len(body))
    arrays, place = [], 0
    for shape in shapes:
        array = np.frombuffer(body, dtype, math.prod(shape), place).reshape(shape)
        arrays.append(array.astype(dtype.newbyteorder("=")))
        place += array.nbytes
    count = 2 * (len(sizes) - 1)
    parameters, *states = (arrays[start : start + count] for start in range(0, len(arrays), count))
    state: Any = AdamState(header["updates"], *states) if moments == 2 else next(iter(states), None)
    return Checkpoint(
        header["step"], list(zip(parameters[::2], parameters[1::2], strict=True)), optimizer, state
    )


def _optimizer(path: str | PathLike[str], description: Any) -> Optimizer | None:
    if description is None:
        return None
    known = (
        type(description) is dict
        and type(description.get("name")) is str
        and description["name"] in _OPTIMIZERS
    )
    _check(path, known, f"expected optimizer to name one of {', '.join(_OPTIMIZERS)}", description)
    kind = _OPTIMIZERS[description["name"]]
    names = {field.name for field in fields(kind)}
    numbers = {key: value for key, value in description.items() if key != "name"}
    _check(
        path,
        numbers.keys() == names,
        f"expected the optimizer {description['name']} with {', '.join(sorted(names))}",
        description,
    )
    for name, value in numbers.items():
        _check(
            path,
            type(value) in (int, float) and -LARGEST_INTEGER <= value <= LARGEST_INTEGER,
            f"expected the optimizer's {name} to be a number",
            value,
        )
    try:
        return kind(**numbers)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _check(path: str | PathLike[str], is_right: bool, expected: str, got: Any) -> None:
    if not is_right:
        raise CheckpointError(f"{path}: {expected}, got {reprlib.repr(got)}")


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= LARGEST_INTEGER


def _moments(state: Any) -> tuple[list[list[Array]], int]:
    """The lists of arrays in an optimizer's state, and its number of updates."""
    if state is None:
        return [], 0
    if isinstance(state, AdamState):
        return [state.means, state.squares], state.updates
    if isinstance(state, list):
        return [state], 0
    raise ValueError(
        f"a checkpoint file holds the states of {', '.join(_OPTIMIZERS)}, got a {type(state).__name__}"
    )
