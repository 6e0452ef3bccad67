"""A config.json, a folder with one, and the name of a repository as the model of plan, simulate and show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vcluster.__main__ import PROGRAM, main
from vcluster.cli.command_line import serve

SMALL = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128,
         "intermediate_size": 96, "max_position_embeddings": 64}
ON = ("--hardware", "dgx-h100", "--devices", "2")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = serve(PROGRAM, main, [*words])
    return status, *capsys.readouterr()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


@pytest.mark.slow
def test_a_file_and_a_folder_are_planned_and_simulated(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    for word in (f"{folder}", f"{folder / 'config.json'}"):
        status, out, _ = said(capsys, "plan", word, "--global-batch-size", "4", *ON, "--json")
        found = json.loads(out)
        assert status == 0 and found["plans"][0]["command"].split()[4] == word
        status, out, _ = said(capsys, "simulate", word, "--seq-length", "32", *ON, "--global-batch-size", "4")
        assert status == 0 and "86.3 k parameters; 2 layers, width 64" in out.replace("\n", " ")


def test_show_prints_the_loss_of_a_model(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    status, out, _ = said(capsys, "show", f"{folder}")
    assert status == 0 and out.startswith("func @transformer(") and "%tokens: tensor<Bx64xi64>" in out
    status, out, err = said(capsys, "show", "gpt")
    assert (status, out) == (2, "") and "gpt has all its figures as flags" in err


@pytest.mark.slow
def test_a_repository_names_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--hardware", "dgx-h100", "--devices", "8", "--tensor-model-parallel-size", "8", "--num-layers", "2", "--json")
    found = [said(capsys, "simulate", word, *words) for word in ("meta-llama/Llama-2-7b-hf", "llama2-7b")]
    assert [status for status, _, _ in found] == [0, 0]
    assert json.loads(found[0][1])["seconds"] == json.loads(found[1][1])["seconds"]


@pytest.mark.slow
def test_what_the_reader_has_to_say_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llava", "text_config": SMALL | {"num_nextn_predict_layers": 2}}))
    status, _, err = said(capsys, "simulate", f"{path}", *ON)
    assert status == 0 and "its text_config is read" in err and "num_nextn_predict_layers=2 is left out" in err


@pytest.mark.takes_seconds
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("content", "told"), [
    ('{"model_type": "mamba"}', "the architecture 'mamba' is not known"),
    ("[]", "must be an object of fields"), ("{", "is no JSON"), ('{"model_type": "llama", "hidden_size": []}', "hidden_size"),
    ('{"model_type": "gpt2", "add_cross_attention": true}', "add_cross_attention=True changes the arithmetic"),
])
def test_what_cannot_be_read_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, told: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    for command in (("plan", f"{path}", "--global-batch-size", "4", *ON), ("simulate", f"{path}", *ON), ("show", f"{path}")):
        status, out, err = said(capsys, *command)
        assert (status, out) == (2, "") and told in err and err.count("\n") == 1


def test_a_folder_without_a_config_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = said(capsys, "plan", f"{tmp_path}", "--global-batch-size", "4", *ON)
    assert (status, out) == (2, "") and "has no config.json of a model" in err
