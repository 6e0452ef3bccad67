"""What crosses to the host of an exception is short, however long its texts are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vcluster.code.exceptions import LONGEST_TEXT, LONGEST_WHOLE, MOST_MEMBERS, Failure, describe_exception

LONG = 3_000_000


class Own(Exception):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def __str__(self) -> str:
        return self.text


def with_a_note() -> Exception:
    error = ValueError("short")
    error.add_note("note " * (LONG // 5))
    return error


def with_many_notes() -> Exception:
    error = ValueError("short")
    for number in range(LONG // 10):
        error.add_note(f"note {number}")
    return error


def with_causes() -> Exception:
    error: Exception = ValueError("a" * LONG)
    for _ in range(3):
        try:
            raise KeyError("b" * LONG) from error
        except KeyError as raised:
            error = raised
    return error


def of_bad_syntax() -> Exception:
    try:
        compile("(" * LONG, "typed", "exec")
    except SyntaxError as error:
        return error
    raise AssertionError


RAISED: dict[str, Callable[[], Exception]] = {
    "a text": lambda: ValueError("x" * LONG), "lines": lambda: ValueError("x y\n" * (LONG // 4)),
    "a key": lambda: KeyError("é" * LONG), "of one's own": lambda: Own("x" * LONG), "a note": with_a_note,
    "many notes": with_many_notes, "causes": with_causes, "syntax": of_bad_syntax,
    "a group": lambda: ExceptionGroup("g" * LONG, [ValueError("m" * 100_000)] * 5000),
    "many of a group": lambda: ExceptionGroup("short", [ValueError(str(n)) for n in range(5000)]),
    "what cannot be pickled": lambda: ValueError(lambda: 0, "y" * LONG),
}


def sizes(failure: Failure) -> int:
    """The characters and bytes of a failure, with its causes and members."""
    inside = [*failure.members, *([failure.cause] if failure.cause else [])]
    own = len(failure.text) + len(failure.summary) + len(failure.values) + len(failure.pickled or b"")
    return own + sum(map(sizes, inside))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RAISED)
def test_a_long_exception_is_short_on_the_host(name: str) -> None:
    failure = describe_exception(RAISED[name]())
    assert len(failure.text) <= LONGEST_TEXT + 100 and len(failure.format()) < 30 * LONGEST_TEXT
    assert len(str(failure.exception())) <= 2 * LONGEST_TEXT
    assert sizes(failure) < 100 * LONGEST_TEXT


def test_both_ends_of_a_long_text_are_kept_and_its_type() -> None:
    failure = describe_exception(ValueError(f"begin {'x' * LONG} end"))
    for text in (failure.text, failure.format(), str(failure.exception())):
        assert "begin " in text and text.strip().endswith(" end") and " more characters] " in text
    assert type(failure.exception()) is ValueError


def test_a_short_exception_crosses_as_it_is() -> None:
    error = ExceptionGroup("group", [ValueError("x" * LONGEST_TEXT) for _ in range(MOST_MEMBERS)])
    error.add_note("a note")
    failure = describe_exception(error)
    assert failure.members_omitted == 0 and all(each.text == "x" * LONGEST_TEXT for each in failure.members)
    assert "more characters" not in failure.format() and "a note" in failure.format()


def test_the_rest_of_a_large_group_is_counted() -> None:
    failure = describe_exception(RAISED["many of a group"]())
    assert len(failure.members) == MOST_MEMBERS and "16 of 5000 ---" in failure.format()


class WithNumbers(Exception):
    """What cannot be cut: it has more in it than a text."""

    def __init__(self, text: str, numbers: tuple[int, ...]) -> None:
        super().__init__(text, numbers)


def test_an_exception_that_cannot_be_cut_crosses_whole_and_its_text_is_short() -> None:
    failure = describe_exception(WithNumbers("y" * (LONGEST_WHOLE - 100), (1, 2)))
    assert len(failure.text) < LONGEST_TEXT + 100 and " more characters] " in failure.format()
    assert type(failure.exception()) is WithNumbers and failure.exception().args[1] == (1, 2)
    assert type(describe_exception(WithNumbers("y" * LONGEST_WHOLE, (1, 2))).exception()) is RuntimeError
