"""The data that the perceptron learns: the packaged handwritten digits, or a file of the user's.

A user's file is untrusted: nothing in it is unpickled, and every problem with it is a `DataError` that names the file.
"""

import re
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import resources
from inspect import cleandoc
from pathlib import Path

import numpy as np

from parallelism.arrays import Ints

TEST_SHARE = 5
"""One of this many rows is used for testing."""

MOST_CLASSES = 1000
"""A target of integers below this is taken for classes, any other target for real values."""


class DataError(ValueError):
    """A data file cannot be used. The text is one line for the user."""


@dataclass(frozen=True)
class Dataset:
    """Rows for training and rows for testing, ready for a network.

    ``x`` and ``x_test`` are float64 (rows, features), each feature with mean 0 and spread 1 over the training rows.
    ``targets`` and ``targets_test`` are float64 (rows, outputs): one-hot if ``classes``, otherwise scaled like x.
    """

    name: str
    x: np.ndarray
    targets: np.ndarray
    x_test: np.ndarray
    targets_test: np.ndarray
    classes: bool

    @property
    def features(self) -> int:
        """The number of inputs of the network."""
        return int(self.x.shape[1])

    @property
    def outputs(self) -> int:
        """The number of outputs of the network: of classes, or of values per row."""
        return int(self.targets.shape[1])


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """The packaged digits: images uint8 (1797, 8, 8) of 0 to 16, labels uint8 (1797,). Source: digits.txt."""
    with (
        resources.files("vcluster.demo").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        return arrays["images"], arrays["labels"]


def digits(seed: int = 0) -> Dataset:
    """The handwritten digits as a `Dataset`: 64 features, 10 classes."""
    images, labels = load_digits()
    return _dataset("handwritten digits", images.reshape(len(images), -1), labels, seed)


def load_npz(path: str | Path, seed: int = 0) -> Dataset:
    """The arrays ``x`` and ``y`` of an .npz file as a `Dataset`.

    ``x`` is (rows, ...), real and finite. If ``y`` is one-dimensional with integers from 0 to 999, they are classes.
    Any other real ``y`` of shape (rows,) or (rows, outputs) holds real values. Raises `DataError` for everything else.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise DataError(f"{path} is not a file that can be read twice")
        # The file is opened here, because np.load does not close a file that it cannot read.
        with path.open("rb") as file, warnings.catch_warnings(action="ignore"):
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise DataError(f"{path} holds a single array, not an .npz archive with arrays x and y")
            with loaded as arrays:
                if missing := [name for name in ("x", "y") if name not in arrays.files]:
                    raise DataError(
                        f"{path} has no array {' and no array '.join(missing)}; "
                        f"it holds {', '.join(arrays.files) or 'nothing'}"
                    )
                x, y = arrays["x"], arrays["y"]
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except MemoryError:
        raise DataError(f"{path} needs more memory than this machine has") from None
    except Exception as error:
        # zipfile, zlib and NumPy's header parser raise a dozen types for bytes that are not an archive.
        reason = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))[:120]
        raise DataError(f"{path} is not a whole .npz file ({reason})") from None
    if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray)):
        raise DataError(f"{path} holds x or y as plain bytes, not as an array")
    return _dataset(path.name, *_checked(path, x, y), seed)


def _checked(path: Path, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    for name, array in (("x", x), ("y", y)):
        if not (np.issubdtype(array.dtype, np.number) or array.dtype == bool) or np.iscomplexobj(array):
            raise DataError(f"{path}: {name} must hold real numbers, got {array.dtype}")
    if x.ndim < 2 or x[:1].size == 0:
        raise DataError(f"{path}: x must be (rows, features), got shape {x.shape}")
    if y.ndim not in (1, 2) or y[:1].size == 0:
        raise DataError(f"{path}: y must be (rows,) or (rows, outputs), got shape {y.shape}")
    if len(x) != len(y):
        raise DataError(f"{path}: x and y must have the same number of rows, got {len(x)} and {len(y)}")
    if len(x) < TEST_SHARE:
        raise DataError(f"{path}: training and testing need at least {TEST_SHARE} rows, got {len(x)}")
    x = x.reshape(len(x), -1)
    for name, array in (("x", x), ("y", y.reshape(len(y), -1))):
        with np.errstate(over="ignore"):
            row, column = np.nonzero(~(np.abs(array.astype(np.float64)) < 1e150))
        if row.size:
            worst = array[row[0], column[0]]
            problem = "is not finite" if not np.isfinite(worst) else "is too large to be scaled"
            raise DataError(
                f"{path}: {name}[{row[0]}] holds {worst}, which {problem} ({row.size} such values)"
            )
    if not np.ptp(y.astype(np.float64), axis=0).any():
        raise DataError(f"{path}: y is the same in every row, so there is nothing to learn")
    return x, y


def _dataset(name: str, x: np.ndarray, y: np.ndarray, seed: int) -> Dataset:
    classes = y.ndim == 1 and bool(np.all((y >= 0) & (y < MOST_CLASSES) & (y == np.floor(y)))) and y.max() > 0
    targets = (
        np.eye(int(y.max()) + 1)[y.astype(np.int64)] if classes else y.reshape(len(y), -1).astype(np.float64)
    )
    order = np.random.default_rng(seed).permutation(len(x))
    test, train = np.split(order, [len(order) // TEST_SHARE])
    x = x.astype(np.float64)  # bools cannot be subtracted, and small integers overflow
    x = _scaled(x, x[train])
    if not classes:
        targets = _scaled(targets, targets[train])
    return Dataset(name, x[train], targets[train], x[test], targets[test], classes)


def _scaled(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """``values`` with mean 0 and spread 1 over the rows of ``by``, column by column.

    The spread of a column counts as at least a tenth of its range. Otherwise a column that is nearly constant (a pixel
    at the edge) would be amplified.
    """
    spread = np.maximum(by.std(axis=0), 0.1 * np.ptp(by, axis=0))
    return np.asarray((values - by.mean(axis=0)) / np.where(spread > 0, spread, 1.0))


VOCABULARY = 256
"""Tokens are bytes."""

LAST = "\u0250"
"""The first character after the Latin alphabets. All characters before it are one column wide."""

_DOCSTRING = re.compile(r'^ *"""(.*?)"""', re.DOTALL | re.MULTILINE)
"""Of a module, class, function or constant: a string that begins a line."""


@cache
def docstrings(package: str = "parallelism") -> str:
    """The docstrings of a package's modules, module by module, separated by empty lines.

    The sources are read and never run. Raises `DataError` if they are not installed.
    """
    files = sorted(Path(str(resources.files(package))).rglob("*.py"), key=lambda file: file.parts)
    found = (
        cleandoc(text) for file in files for text in _DOCSTRING.findall(file.read_text(encoding="utf-8"))
    )
    text = "\n\n".join(filter(None, found))
    if not text:
        raise DataError(f"the sources of {package} are not installed; the demo learns from their docstrings")
    return text


def tokens_of(text: str) -> Ints:
    """The bytes of the text as integers."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)


def pieces(tokens: Ints, rows: int, length: int, seed: tuple[int, ...]) -> Ints:
    """A batch of ``rows`` pieces of ``length`` tokens each, from positions drawn with the seed."""
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length + 1, rows)
    return tokens.take(starts[:, None] + np.arange(length))


def in_one_line(tokens: list[int]) -> str:
    """Tokens as one line of text: a line break becomes a space, and a character that cannot be shown becomes ``?``."""
    text = ""
    for c in bytes(tokens).decode("utf-8", "replace"):
        if c.isspace():
            text += " "
        else:
            text += c if c.isprintable() and c < LAST else "?"
    return text
