"""`launch_flags`: the flags of Megatron-LM in a launch script, checked against the table of all its arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from parallelism.display.quantities import short_errors, shortened
from parallelism.spelling import closest
from parallelism.training.launch_script import UNSET, LaunchWord, launch_words
from parallelism.training.megatron_options import ARGUMENTS, MODELLED

TOLD = 12
"""The most unknown flags that are named."""
NEAR = 0.8
"""How alike, of 1, a flag must be to one that is suggested."""
_FLAG = re.compile(r"-.*[A-Za-z_]", re.DOTALL)


class LaunchFlags(NamedTuple):
    """The flags of a launch script."""

    words: list[str]
    """The flags that are modelled, with their values, as words of a command line."""
    others: list[str]
    """The names of the others."""


class _Given(NamedTuple):
    name: str
    values: list[LaunchWord]
    line: int


@short_errors
def launch_flags(text: str, given: Mapping[str, str]) -> LaunchFlags:
    """The flags of a launch script (`launch_words`), with the values of names, and of flags, that are ``given``.

    A given name that the script does not read is a flag without its dashes.  ``ValueError``, with the line, for flags
    that Megatron-LM does not have, all at once; for values that are missing or too many; and for names without a value
    in flags that are modelled.
    """
    script = launch_words(text, given)
    flags = [*_flags(script.words), *_given_flags({k: v for k, v in given.items() if k not in script.names})]
    if unknown := [each for each in flags if each.name not in ARGUMENTS]:
        raise ValueError(unknown_flags({each.name: each.line for each in unknown}))
    for each in flags:
        _check_count(each)
    modelled = [each for each in flags if ARGUMENTS[each.name].kind == MODELLED]
    unset = {name for each in modelled for value in each.values for name in UNSET.findall(value.text)}
    if unset:
        raise ValueError(_without_value(sorted(unset)))
    last = {each.name: each for each in modelled}  # of a flag that is given twice
    words = []
    for each in last.values():
        words += [f"--{each.name}", *(value.text for value in each.values)]
    others = dict.fromkeys(each.name for each in flags if ARGUMENTS[each.name].kind != MODELLED)
    return LaunchFlags(words, [*others])


def _without_value(names: Sequence[str]) -> str:
    verb = "has" if len(names) == 1 else "have"
    return f"{', '.join(names)} {verb} no value in the script; give {' '.join(f'--set {name}=...' for name in names)}"


def unknown_flags(lines: Mapping[str, int | None]) -> str:
    """The sentence about flags that Megatron-LM does not have, by name, with their lines; some have a suggestion."""
    told = []
    for name, line in [*lines.items()][:TOLD]:
        near = closest(name, ARGUMENTS, cutoff=NEAR)
        remarks = [f"line {line}"] * bool(line) + [f"did you mean --{near}?"] * (near is not None)
        told.append(f"--{shortened(name)[1:-1]}" + (f" ({'; '.join(remarks)})" if remarks else ""))
    more = f" and {len(lines) - TOLD:,} more" if len(lines) > TOLD else ""
    return f"Megatron-LM has no {', '.join(told)}{more}"


def _flags(words: Sequence[LaunchWord]) -> Iterator[_Given]:
    """The flags, each with the values behind it."""
    last: _Given | None = None
    for text, line in words:
        if text.startswith("--") and text != "--":
            if last is not None:
                yield last
            name, equals, value = text[2:].partition("=")
            if unset := UNSET.search(name):
                raise ValueError(f"line {line}: {_without_value([unset[1]])}")
            last = _Given(name, [LaunchWord(value, line)] if equals else [], line)
        elif (unset := UNSET.fullmatch(text)) and (last is None or _is_full(last)):
            raise ValueError(f"line {line}: {_without_value([unset[1]])}")
        elif last is None or (_is_full(last) and _FLAG.fullmatch(text)):
            raise ValueError(f"line {line}: a flag begins with two dashes, got {shortened(text, 40)}")
        else:
            last.values.append(LaunchWord(text, line))
    if last is not None:
        yield last


def _is_full(flag: _Given) -> bool:
    """Whether a flag has all its values."""
    argument = ARGUMENTS.get(flag.name)
    return argument is not None and argument.values.isdecimal() and len(flag.values) >= int(argument.values)


def _given_flags(given: Mapping[str, str]) -> Iterator[_Given]:
    for name, value in given.items():
        plain = name.removeprefix("--")
        if plain not in ARGUMENTS:
            near = closest(plain, ARGUMENTS, cutoff=NEAR)
            raise ValueError(
                f"--set {shortened(name, 40)[1:-1]}: the script reads no such name, and Megatron-LM has no such flag"
                + (f"; did you mean {near}?" if near else "")
            )
        yield _Given(plain, [LaunchWord(word, 0) for word in value.split()], 0)


def _check_count(flag: _Given) -> None:
    count, values = ARGUMENTS[flag.name].values, len(flag.values)
    where = f"line {flag.line}: " if flag.line else ""
    if count.isdecimal() and values > int(count):
        extra = flag.values[int(count)]
        raise ValueError(
            f"{where}nothing is expected behind --{flag.name}{' VALUE' * int(count)}: {shortened(extra.text, 40)}"
        )
    if (count.isdecimal() and values < int(count)) or (count == "+" and not values):
        raise ValueError(f"{where}--{flag.name} needs a value")
