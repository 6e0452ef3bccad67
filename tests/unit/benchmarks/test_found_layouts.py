"""The table of found layouts is that of what was measured; what is found is never slower than what people write."""

import json

import pytest

from benchmarks.found_layouts import CASES, FOUND, PAGE, main, table
from vcluster.cli.command_line import WrongWords

ROWS = json.loads(FOUND.read_text())


def test_the_page_has_every_case() -> None:
    assert list(ROWS) == list(CASES)
    assert table(ROWS) in PAGE.read_text()


@pytest.mark.parametrize("name", CASES)
def test_nothing_that_people_write_is_faster(name: str) -> None:
    found = ROWS[name]["found"]
    assert found["gap"] == 0
    assert set(ROWS[name]) == {*CASES[name].baselines, "found"}
    for each in CASES[name].baselines:
        assert found["seconds"] < ROWS[name][each]["seconds"] * (1 - 1e-3), each


def is_of_today(row: dict[str, float], name: str, what: str) -> None:
    assert row["seconds"] == pytest.approx(ROWS[name][what]["seconds"], rel=1e-9), what
    assert row["peak_bytes"] == ROWS[name][what]["peak_bytes"], what


@pytest.mark.takes_seconds
@pytest.mark.sampled(6, 5)
@pytest.mark.parametrize("name", CASES)
def test_the_strategies_take_today_what_was_kept(name: str) -> None:
    for each in CASES[name].baselines:
        is_of_today(CASES[name].baseline(each), name, each)


@pytest.mark.slow
def test_what_is_found_today_is_what_was_kept() -> None:
    is_of_today(CASES["wide"].found(), "wide", "found")


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(WrongWords, match="there is no case 'gpt4'"):
        main(["gpt4"])
