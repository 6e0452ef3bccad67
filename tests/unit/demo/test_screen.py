"""What the demos print, and who reads it."""

import io

import pytest

from vcluster.demo.screen import Screen


class Gone(io.StringIO):
    """What nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_who_has_gone_ends_a_demo_as_any_command() -> None:
    with pytest.raises(BrokenPipeError):        # which `serve` takes for a good end; rich exits with status 1
        Screen(Gone()).line("text")
