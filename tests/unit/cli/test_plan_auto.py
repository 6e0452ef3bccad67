"""`python -m vcluster plan FILE --auto` finds the layout of each value of a program."""

from __future__ import annotations

import json

import pytest

from parallelism import ir, models
from vcluster.__main__ import main
from vcluster.cli.command_line import WrongWords

WORDS = ["--batch", "B=32", "--hardware", "dgx-h100", "--devices", "2", "--auto"]


@pytest.fixture
def loss(tmp_path):
    path = tmp_path / "loss.ir"
    path.write_text(str(models.mlp((64, 32), ir.symbol("B"), "f4")))
    return str(path)


@pytest.mark.takes_seconds
def test_as_text_and_as_a_page(loss, tmp_path, capsys):
    page = tmp_path / "found.html"
    assert main(["plan", loss, *WORDS, "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("@mlp.step on 2 devices of dgx-h100, 80 GB each\n")
    assert all(len(line) <= 80 for line in text.splitlines() if str(tmp_path) not in line)
    assert "On x=2:" in text and text.rstrip().endswith("found.html")
    assert "\n1 GB more memory a device saves nothing: memory does not limit.\n" in text
    written = page.read_text()
    assert "@mlp.step: " in written and "gradient" in written and "http" not in written


@pytest.mark.takes_seconds
def test_as_json(loss, capsys):
    assert main(["plan", loss, *WORDS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    mesh, = found["meshes"]
    assert found["devices"] == 2 and mesh["mesh"] == {"x": 2} and mesh["seconds"] > 0 and mesh["gap"] == 0
    assert found["layouts"]["p.w0"].startswith("[") and found["layouts"]["next.p.w0"] == found["layouts"]["p.w0"]
    assert all({"kind", "axes", "calls", "bytes"} == each.keys() for each in found["collectives"])


@pytest.mark.takes_seconds
def test_nothing_fits(loss, capsys):
    assert main(["plan", loss, *WORDS, "--memory", "4kB", "--json"]) == 1
    out, err = capsys.readouterr()
    assert "at least" in err
    found = json.loads(out)
    assert found["meshes"][0]["least_bytes"] > 4_000 and "layouts" not in found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("words", "error"), [
    (["--fix", "tp=2"], "--fix is for plans of strategies; leave it out with --auto"),
    (["--why-not", "tp=2"], "--why-not is for plans of strategies"),
    (["--verify"], "--verify is for plans of strategies"),
    (["--tensor-model-parallel-size", "2"], "--auto finds the layouts itself; leave out --tensor-model-parallel-size"),
    (["--memory", "much"], "memory must be"),
])
def test_mistakes(loss, words, error):
    with pytest.raises(WrongWords, match=error):
        main(["plan", loss, *WORDS, *words])


def test_a_model_by_its_name():
    with pytest.raises(WrongWords, match="--auto is for a program in a file; gpt2-xl is planned by strategies"):
        main(["plan", "gpt2-xl", "--global-batch-size", "8", *WORDS[2:]])
