"""The data of the demo: the packaged digits, and what a file of the user's may and may not be."""

from __future__ import annotations

import os
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from vcluster.demo import data


def test_the_packaged_digits_are_the_1797_of_uci():
    images, labels = data.load_digits()
    assert images.shape == (1797, 8, 8)
    assert labels.shape == (1797,)
    assert images.dtype == labels.dtype == np.uint8
    assert images.min() == 0
    assert images.max() == 16
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert labels[:10].tolist() == list(range(10))
    assert images[0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]  # the first row of scikit-learn's first digit


def test_the_digits_file_is_small_and_says_where_it_comes_from():
    folder = Path(data.__file__).parent
    assert (folder / "digits.npz").stat().st_size < 100_000
    text = (folder / "digits.txt").read_text(encoding="utf-8")
    for word in ("UCI", "scikit-learn", "CC BY 4.0"):
        assert word in text


def test_training_and_test_rows_are_the_whole_set_without_overlap():
    digits = data.digits()
    assert digits.x.shape == (1438, 64)
    assert digits.x_test.shape == (359, 64)
    assert digits.classes
    assert (digits.features, digits.outputs) == (64, 10)
    counts = digits.targets.sum(axis=0) + digits.targets_test.sum(axis=0)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    np.testing.assert_allclose(digits.x.mean(axis=0), 0, atol=1e-12)


def test_the_split_follows_the_seed():
    assert np.array_equal(data.digits(3).x, data.digits(3).x)
    assert not np.array_equal(data.digits(3).x, data.digits(4).x)


def test_whole_numbers_are_classes_and_other_numbers_are_values(tmp_path):
    x = np.arange(30.0).reshape(10, 3)
    np.savez(tmp_path / "classes.npz", x=x, y=np.arange(10) % 4)
    classes = data.load_npz(tmp_path / "classes.npz")
    assert classes.classes
    assert classes.targets.shape == (8, 4)
    np.savez(tmp_path / "values.npz", x=x, y=np.linspace(-1, 1, 10))
    values = data.load_npz(tmp_path / "values.npz")
    assert not values.classes
    assert values.targets.shape == (8, 1)


def test_images_become_rows_and_a_constant_column_is_harmless(tmp_path):
    x = np.zeros((10, 2, 3), np.float32)
    x[:, 0, 0] = np.arange(10)
    np.savez(tmp_path / "images.npz", x=x, y=np.arange(10) % 2)
    loaded = data.load_npz(tmp_path / "images.npz")
    assert loaded.x.shape == (8, 6)
    assert np.isfinite(loaded.x).all()


def write(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


GOOD = {"x": np.arange(30.0).reshape(10, 3), "y": np.arange(10) % 4}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": np.where(np.arange(30).reshape(10, 3) == 7, np.nan, 1.0)}, r"x\[2\] holds nan, which is not finite"),
        ({"x": np.where(np.arange(30).reshape(10, 3) == 7, np.inf, 1.0)}, r"x\[2\] holds inf"),
        ({"y": np.array([0.5, np.nan] * 5)}, r"y\[1\] holds nan"),
        ({"x": np.full((10, 3), 1e300)}, "too large"),
        ({"x": np.arange(10.0)}, r"x must be \(rows, features\), got shape \(10,\)"),
        ({"x": np.zeros((10, 0))}, r"x must be \(rows, features\), got shape \(10, 0\)"),
        ({"x": np.zeros((0, 3)), "y": np.zeros(0)}, r"got shape \(0, 3\)"),
        ({"y": np.zeros((10, 2, 2))}, r"y must be \(rows,\) or \(rows, outputs\), got shape \(10, 2, 2\)"),
        ({"y": np.full((10, 2), 7.0)}, "y is the same in every row, so there is nothing to learn"),
        ({"y": np.arange(9)}, "x and y must have the same number of rows, got 10 and 9"),
        ({"x": GOOD["x"][:3], "y": GOOD["y"][:3]}, "training and testing need at least 5 rows, got 3"),
        ({"y": np.array(list("abcdefghij"))}, "y must hold real numbers, got <U1"),
        ({"x": GOOD["x"] * 1j}, "x must hold real numbers, got complex128"),
    ],
)
def test_wrong_arrays_are_one_line_that_says_what_is_wrong(tmp_path, change, text):
    with pytest.raises(data.DataError, match=text) as caught:
        data.load_npz(write(tmp_path / "wrong.npz", **{**GOOD, **change}))
    assert "\n" not in str(caught.value)
    assert "wrong.npz" in str(caught.value)


def test_missing_arrays_are_named_with_those_there_are(tmp_path):
    with pytest.raises(data.DataError, match="has no array x and no array y; it holds images, labels"):
        data.load_npz(write(tmp_path / "other.npz", images=np.zeros(3), labels=np.zeros(3)))


def test_pickled_objects_are_never_read(tmp_path):
    path = write(tmp_path / "objects.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    with pytest.raises(data.DataError, match="not a whole"):
        data.load_npz(path)


def test_files_that_are_not_archives(tmp_path):
    np.save(tmp_path / "single.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("x, y\n1, 2\n")
    (tmp_path / "empty.npz").write_bytes(b"")
    with pytest.raises(data.DataError, match="does not exist"):
        data.load_npz(tmp_path / "missing.npz")
    with pytest.raises(data.DataError, match="cannot be read: Is a directory"):
        data.load_npz(tmp_path)
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(data.DataError, match="not a file that can be read twice"):
        data.load_npz(tmp_path / "pipe.npz")
    with pytest.raises(data.DataError, match="single array"):
        data.load_npz(tmp_path / "single.npy")
    for name in ("text.npz", "empty.npz"):
        with pytest.raises(data.DataError, match="not a whole"):
            data.load_npz(tmp_path / name)


def test_an_archive_cut_or_damaged_anywhere_is_a_data_error(tmp_path):
    whole = write(tmp_path / "whole.npz", **GOOD).read_bytes()
    path = tmp_path / "damaged.npz"
    for end in range(0, len(whole), 37):
        path.write_bytes(whole[:end])
        with pytest.raises(data.DataError):
            data.load_npz(path)
    rng = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(whole)
        for place in rng.integers(len(whole), size=3):
            damaged[place] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        with suppress(data.DataError):  # anything else would be a traceback; damage in padding goes unnoticed
            data.load_npz(path)


def test_an_array_header_that_promises_too_much_is_a_data_error(tmp_path):
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 1000), }"
    body = b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n"
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w") as archive:
        archive.writestr("x.npy", body)
        archive.writestr("y.npy", body)
    with pytest.raises(data.DataError):
        data.load_npz(tmp_path / "bomb.npz")
