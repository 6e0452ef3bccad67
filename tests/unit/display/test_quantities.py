"""Numbers with units: three digits in the unit that suits, wherever the units change; text in columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given as drawn, strategies as st

import parallelism
from parallelism.display import WIDTH, given_seconds, in_columns
from parallelism.display.quantities import bytes_in, count, fit, given, nbytes, plural, rate, seconds


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("written", "expected"), [
    (seconds(0), "0 s"), (seconds(0.9995), "1.00 s"), (seconds(0.9994), "999 ms"), (seconds(1.5e-3), "1.50 ms"),
    (seconds(2e-9), "2 ns"), (seconds(9.72e-10), "0.972 ns"), (seconds(9.996e-7), "1.00 us"), (seconds(4e-7), "400 ns"),
    (seconds(12345), "12345 s"), (seconds(float("inf")), "inf s"),
    (nbytes(0), "0 B"), (nbytes(1023), "1023 B"), (nbytes(1024), "1 KiB"), (nbytes(1536), "1.50 KiB"),
    (nbytes(1023.5 * 2 ** 20), "1.00 GiB"), (nbytes(2 ** 50), "1024 TiB"),
    (rate(None), "-"), (rate(999), "999 B/s"), (rate(12.5e9), "12.5 GB/s"), (rate(3e15), "3000 TB/s"),
    (count(9999), "9999"), (count(10_000), "10 k"), (count(4.2e9), "4.20 G"), (count(0.5), "0.500"),
    (given(3.35e12), "3.35 T"), (given(1), "1 "), (given(0.5), "0.5 "), (given_seconds(3e-6), "3 us"),
    (plural(1, "device"), "1 device"), (plural(0, "device"), "0 devices"),
    (fit("a\nb" + "c" * 100, 10), "a?bcccc..."), (fit("short"), "short"),
])
def test_as_written(written, expected):
    assert written == expected


FACTORS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1,
           "B": 1, **{f"{prefix}iB": 1024.0 ** power for power, prefix in enumerate("KMGT", 1)},
           **{f"{prefix}B/s": 1000.0 ** power for power, prefix in enumerate(["", "k", "M", "G", "T"])}}


@pytest.mark.parametrize("write", [seconds, nbytes, rate, count])
@drawn(value=st.floats(1e-6, 1e18))
def test_what_is_written_is_the_number_to_three_digits(write, value):
    number, _, unit = write(value).partition(" ")
    assert float(number) * FACTORS[unit] == pytest.approx(value, rel=5.1e-3)


def test_columns_are_as_wide_as_their_longest_cell():
    assert in_columns([["name", "n"], ["a", "100"]], 1) == ["name    n", "a     100"]
    assert in_columns([["name", "n"], ["a", "100"]], 2, gap="|") == ["name|n", "a   |100"]
    assert WIDTH == 80


def test_the_width_of_a_terminal_and_units_are_written_nowhere_else():
    root = Path(parallelism.__file__).parents[1]
    for package in ("parallelism", "tensor_parallelism", "pipeline_parallelism", "vcluster", "benchmarks"):
        for path in (root / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if path.stem != "quantities":
                assert not re.search(r"^ *(_PREFIXES|_UNITS)\b.* = ", text, re.MULTILINE), path
                assert not re.search(r"^_?WIDTH = 80$", text, re.MULTILINE), path
                assert '"KiB", "MiB"' not in text or package == "benchmarks", path


@pytest.mark.parametrize(("text", "nbytes"), [
    ("72GB", 72e9), ("64GiB", 64 * 2.0**30), ("1.5 KiB", 1536), ("512", 512), ("512B", 512), (" 3 mb ", 3e6),
    ("2TiB", 2.0**41),
])
def test_bytes_are_read_in_powers_of_ten_and_of_two(text, nbytes):
    assert bytes_in(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1PB", "1Gi", "72 Gbit", "1e3", "nan", "1 GB/s"])
def test_other_texts_of_bytes_are_refused(text):
    with pytest.raises(ValueError, match="bytes must be a number with a unit, such as 72GB or 64GiB"):
        bytes_in(text)
