"""A failing ``assert a == b`` in a device shows the values, as it does on the host.

pytest rewrites the asserts of a test module when the host imports it, and the rewritten code travels to the devices.
The plugins and the configuration of pytest are missing there. `Settings` holds the part of the configuration that
explanations need; it is collected on the host.

This uses private parts of pytest. If they have changed, the message of an assert contains a little less.
"""

import importlib
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

INI_NAMES = ("truncation_limit_lines", "truncation_limit_chars", "assertion_text_diff_style")


@dataclass(frozen=True)
class Settings:
    """The configuration of assertion messages in this session."""

    verbosity: int
    ini: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, config: Any) -> Self:
        """The settings of a pytest configuration."""
        verbosity = (
            config.get_verbosity("assertions") if hasattr(config, "get_verbosity") else config.option.verbose
        )
        ini = []
        for name in INI_NAMES:
            with suppress(ValueError, KeyError):  # this version of pytest does not have it
                ini.append((name, config.getini(name)))
        return cls(verbosity, tuple(ini))


class _Config:
    """A replacement for pytest's configuration."""

    VERBOSITY_ASSERTIONS = "assertions"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.option = SimpleNamespace(verbose=settings.verbosity)
        self.pluginmanager = SimpleNamespace(has_plugin=lambda name: False)

    def get_verbosity(self, kind: str | None = None) -> int:
        return self._settings.verbosity

    def getini(self, name: str) -> Any:
        return dict(self._settings.ini).get(name)

    def getoption(self, name: str, default: Any = None) -> Any:
        return self._settings.verbosity if name == "verbose" else default

    def get_terminal_writer(self) -> Any:
        return SimpleNamespace(_highlight=lambda source, lexer="python": source)


def explain_assertions(device: object, settings: Settings) -> None:
    """In a device's process: explain failing asserts from now on."""
    assertion = importlib.import_module("_pytest.assertion")
    config = _Config(settings)

    def compare(op: str, left: object, right: object) -> str | None:
        with suppress(Exception):  # this pytest may need more; the assert still fails, and shows both sides
            lines = assertion.pytest_assertrepr_compare(config, op, left, right)
            if lines and not hasattr(
                assertion.truncate, "materialize_with_truncation"
            ):  # this one truncates elsewhere
                lines = assertion.truncate.truncate_if_required(lines, SimpleNamespace(config=config))
            if lines:
                return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        return None

    assertion.util._reprcompare, assertion.util._config = compare, config
