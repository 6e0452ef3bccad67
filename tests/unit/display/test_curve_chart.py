"""Curves: the table has every number, the marks of the picture stand where the logarithms say."""

import re
from math import log

import pytest

from parallelism.display import curves

PLACES = (2, 8, 128)
SERIES = {"ring <1>": (2.0, 14.0, 254.0), "tree": (2.0, 6.0, 14.0)}


def drawn(**more):
    return curves("Steps & more", PLACES, SERIES, across="ranks", up="steps", **more)


def test_the_text_is_a_table_of_all_numbers():
    assert str(drawn(place_text="{:g}r".format)).splitlines() == [
        "Steps & more", "ranks  ring <1>  tree",
        "   2r         2     2", "   8r        14     6", " 128r       254    14"]


def test_marks_stand_at_the_logarithms_and_tell_their_numbers():
    html = drawn()._repr_html_()
    assert "Steps &amp; more" in html
    assert "ring <1>" not in html
    lines = [[tuple(map(float, point.split(","))) for point in found.split()]
             for found in re.findall(r'<polyline points="([^"]+)"', html)]
    assert len(lines) == 2
    (x0, y0), (x1, y1), (x2, y2) = lines[0]
    assert (x1 - x0) / (x2 - x0) == pytest.approx(log(8 / 2) / log(128 / 2), abs=2e-3)
    assert (y0 - y1) / (y0 - y2) == pytest.approx(log(14 / 2) / log(254 / 2), abs=2e-3)
    assert lines[1][0] == lines[0][0]                       # the same number at the same place
    assert "ring &lt;1&gt;: 254 steps at 128 ranks" in html
    assert html.count("steps at") == 6


@pytest.mark.parametrize(("ratio", "values", "levels"), [
    (10, (3.0, 50.0), ["1", "10", "100"]), (4, (4.0, 64.0), ["4", "16", "64"]), (10, (5.0, 5.0), ["1", "10"]),
    (2, (1.0, 2.0**30), ["1", "32", "1024", "32768", "1.04858e+06", "3.35544e+07", "1.07374e+09"]),
    (10, (0.02, 0.5), ["0.01", "0.1", "1"])])
def test_lines_are_at_powers_of_the_ratio_around_all_values(ratio, values, levels):
    html = curves("t", (1, 2), {"a": values}, across="x", up="y", ratio=ratio)._repr_html_()
    assert re.findall(r'text-anchor="end" fill="var\(--quiet\)">([^<]+)<', html)[:-1] == levels
    heights = [float(y) for y in re.findall(r'<path d="M[\d.]+ ([\d.]+)h[\d.]+" stroke="var\(--line\)"', html)]
    for _, y in (map(float, point.split(",")) for point in re.search(r'points="([^"]+)"', html)[1].split()):
        assert min(heights) - 0.1 <= y <= max(heights) + 0.1


@pytest.mark.parametrize(("places", "series", "words"), [
    ((1,), {"a": (1,)}, "two places or more"), ((2, 2), {"a": (1, 1)}, "above 0 and grow"),
    ((0, 2), {"a": (1, 1)}, "above 0 and grow"), ((1, float("inf")), {"a": (1, 1)}, "above 0 and grow"),
    ((1, 2), {}, "one curve at least"), ((1, 2), {"a": (1,)}, "curve 'a' needs 2 values"),
    ((1, 2), {"a": (0, 1)}, "values above 0"), ((1, 2), {"a": (1, float("nan"))}, "values above 0")])
def test_bad_numbers_are_an_error(places, series, words):
    with pytest.raises(ValueError, match=words):
        curves("t", places, series, across="x", up="y")
