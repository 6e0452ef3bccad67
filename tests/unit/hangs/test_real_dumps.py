"""Dumps that `torch.distributed` itself has written, of three planted hangs of four ranks on gloo.

`tests/support/gloo_hangs.py` made them; it is run again where PyTorch is there.
"""

import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path

import gloo_hangs
import pytest

from vcluster.hangs import explain

RECORDED = Path(__file__).parents[2] / "data" / "hangs"
SCRIPT = "/home/me/gloo_hangs.py"


def line(function, text):
    """The place of the first line of a function of the script that has a text, as a dump names it."""
    lines, first = inspect.getsourcelines(function)
    return f"{SCRIPT}:{first + next(i for i, each in enumerate(lines) if text in each)}"


def check(folder):
    """What is said of the three hangs."""
    found = explain(folder / "skips")
    assert found.cause == "deadlock: rank 2 did not come to calling all_reduce, for which rank 0 waits"
    assert found.ranks == (0, 1, 3)
    where = line(gloo_hangs.skips, "dist.all_reduce")
    assert found.locations == (where,) * 3
    assert found.decision.last_alike.startswith(f"barrier() at {line(gloo_hangs.start, 'barrier(column)')}")
    assert found.decision.calls[2] == "called nothing more"
    assert found.decision.calls[0] == f"called all_reduce(float32[3]) at {where}"

    found = explain(folder / "calls_another")
    assert found.cause == "the members of group [0, 1, 2, 3] differ in what they call"
    assert found.ranks == (1,)
    usual, odd = (line(gloo_hangs.calls_another, f"dist.{what}") for what in ("all_reduce", "broadcast"))
    assert found.details == (f"  ranks 0, 2 and 3 called all_reduce(float32[3]) at {usual}\n"
                             f"  rank 1 called broadcast(float32[3]) at {odd}")

    found = explain(folder / "other_order")
    assert found.cause == ("deadlock: rank 0 waits for rank 1; rank 1 waits for rank 3; rank 3 waits for rank 2; "
                           "rank 2 waits for rank 0")
    where = line(gloo_hangs.other_order, "group=first")
    assert found.ranks == (0, 1, 2, 3)
    assert found.locations == (where,) * 4
    assert found.decision.calls == {
        0: f"called all_reduce(float32[3]) of ranks 0 and 1 at {where}",
        1: f"called all_reduce(float32[3]) of ranks 1 and 3 at {where}"}


def test_recorded_dumps_of_pytorch_are_explained():
    assert json.loads((RECORDED / "version.json").read_text())["torch"] == "2.13.0+cpu"
    check(RECORDED)


def test_the_page_shows_what_is_said_of_them():
    page = (RECORDED.parents[2] / "docs" / "hangs.md").read_text(encoding="utf-8")
    assert f"```text\n{explain(RECORDED / 'skips')}\n```" in page


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="there is no PyTorch")
def test_dumps_that_pytorch_writes_now_are_explained(tmp_path):
    subprocess.run([sys.executable, gloo_hangs.__file__, str(tmp_path)], check=True, capture_output=True, timeout=250)
    check(tmp_path)
