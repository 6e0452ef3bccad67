"""Hardware as files, in TOML or JSON: read, checked, never evaluated.

The fields of a file are those of `Hardware`, `Link` and so on; every unit is in a name.  What is wrong with a file is
one `HardwareFileError` that says where, what was expected and what came.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from parallelism.hardware import fields as checked
from parallelism.spelling import did_you_mean
from parallelism.whole_files import written_whole

MOST_BYTES = 1 << 20

Described = TypeVar("Described")
Part = type[Any] | list[type[Any]] | dict[str, type[Any]]
Parts = Mapping[str, Part]


class HardwareFileError(ValueError):
    """A hardware file that cannot be read; the text names the file, the field, what was expected and what came.

    >>> from parallelism import Hardware, HardwareFileError
    >>> try:
    ...     Hardware.of("nowhere.json")
    ... except HardwareFileError as error:
    ...     print(error)
    nowhere.json: cannot be read: No such file or directory
    """


def presets() -> tuple[str, ...]:
    """The names of the presets."""
    found = (entry.name for entry in (files("parallelism.hardware") / "presets").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml")))


def meant_preset(name: str) -> str:
    """``; did you mean ...?`` of a name that no preset has: those of the same device, else one that is spelt like it.

    >>> meant_preset("dgx-h200")
    "; did you mean 'h200-node'?"
    """
    words = {word for word in name.lower().replace("_", "-").split("-") if any(map(str.isdigit, word))}
    same = [repr(preset) for preset in presets() if words and words <= {*preset.split("-")}]
    return f"; did you mean {' or '.join(same)}?" if same else did_you_mean(name, presets())


def read_preset(name: str) -> dict[str, Any]:
    """The fields of a preset."""
    return tomllib.loads(
        (files("parallelism.hardware") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    )


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """The fields of a file, unchecked but for its syntax."""
    file = Path(path)
    if file.suffix.lower() not in (".toml", ".json"):
        raise HardwareFileError(f"{_printable(file)}: a hardware file ends in .toml or .json")
    try:
        with file.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise HardwareFileError(f"{_printable(file)}: cannot be read: {reason}") from None
    if len(content) > MOST_BYTES:
        raise HardwareFileError(f"{_printable(file)}: must be at most {MOST_BYTES} bytes; got more")
    language = file.suffix[1:].upper()
    try:
        text = content.decode("utf-8")
        document: Any = (
            tomllib.loads(text)
            if language == "TOML"
            else json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
        )
    except (ValueError, RecursionError) as error:
        reason = "it is too deep" if isinstance(error, RecursionError) else str(error)[:200]
        raise HardwareFileError(f"{_printable(file)}: must be {language}; got {reason}") from None
    if not isinstance(document, dict):
        raise HardwareFileError(
            f"{_printable(file)}: must be an object with fields; got {checked.shown(document)}"
        )
    return document


def write(value: Any, path: str | PathLike[str]) -> None:
    """Writes a description as JSON."""
    text = json.dumps(_plain(value), indent=2, allow_nan=False)
    with written_whole(path, encoding="utf-8") as file:
        file.write(text + "\n")


def _plain(value: Any) -> Any:
    """Fields, as JSON has them; those with nothing in them are left out."""
    if is_dataclass(value):
        named = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {name: entry for name, entry in named.items() if entry not in (None, [], {}, "")}
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def build(
    kind: type[Described], table: Any, path: str | PathLike[str], where: str = "", *, parts: Parts
) -> Described:
    """A description of ``kind`` from a table of its fields; ``where`` it stands in the file, with a dot behind.

    ``parts`` says by the name of a field what is described there by a table, or by each of a list of tables, or by each
    table of a table with any names.
    """
    known = {}
    for field in fields(kind):  # type: ignore[arg-type]
        known[field.name] = field.default is MISSING and field.default_factory is MISSING
    origin = f"{_printable(path)}: {where}"
    if not isinstance(table, dict):
        raise HardwareFileError(
            f"{origin.removesuffix('.')} must be a table with {', '.join(known)}; got {checked.shown(table)}"
        )
    built = {
        name: _part(entry, path, f"{where}{name}", parts.get(name), parts) for name, entry in table.items()
    }
    for name in table:
        if name not in known:
            close = did_you_mean(name, known) or f"; the fields are {', '.join(known)}"
            raise HardwareFileError(f"{origin}{_printable(name)} is no field{close}")
    for name, required in known.items():
        if required and name not in table:
            raise HardwareFileError(f"{origin}{name} is missing; the fields are {', '.join(known)}")
    try:
        return kind(**built)
    except (ValueError, TypeError) as error:
        raise HardwareFileError(f"{origin}{error}") from None


def _part(entry: Any, path: str | PathLike[str], where: str, kind: Part | None, parts: Parts) -> Any:
    """What an entry of a table describes; the entry itself if ``kind`` is None."""
    if isinstance(kind, dict):
        return by_name(kind[""], entry, path, where, parts=parts)
    if isinstance(kind, list):
        return list_of(kind[0], entry, path, where, parts=parts)
    return entry if kind is None else build(kind, entry, path, f"{where}.", parts=parts)


def list_of(
    kind: type[Described], entry: Any, path: str | PathLike[str], where: str, *, parts: Parts
) -> tuple[Described, ...]:
    """Descriptions of one ``kind`` from a list of tables."""
    if not isinstance(entry, list):
        raise HardwareFileError(
            f"{_printable(path)}: {where} must be a list of tables; got {checked.shown(entry)}"
        )
    return tuple(build(kind, table, path, f"{where}[{i}].", parts=parts) for i, table in enumerate(entry))


def by_name(
    kind: type[Described], table: Any, path: str | PathLike[str], where: str, *, parts: Parts
) -> dict[str, Described]:
    """Descriptions of one ``kind`` by their names, from a table of tables."""
    if not isinstance(table, dict):
        raise HardwareFileError(
            f"{_printable(path)}: {where} must be a table of tables; got {checked.shown(table)}"
        )
    return {
        name: build(kind, entry, path, f"{where}.{_printable(name)}.", parts=parts)
        for name, entry in table.items()
    }


def _printable(path: object) -> str:
    """A name from outside, on one line and not too long."""
    text = str(path)
    return text if text.isprintable() and len(text) <= 200 else checked.shown(text)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {checked.shown(twice)} twice")
    return table


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is no number")
