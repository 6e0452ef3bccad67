"""An error about a text is short, however long the text is, and is a ``ValueError`` or ``TypeError``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from parallelism import Hardware, Mesh, Pipeline, TensorSharding, ir
from parallelism.display.quantities import bytes_in
from parallelism.hardware import sized_hardware
from parallelism.ir import TensorType
from parallelism.models import TransformerSpec, transformer
from parallelism.pipelining.actions import Action, Overlapped, parse_step
from parallelism.pipelining.schedule import Schedule
from parallelism.planning.search import memory_of
from parallelism.planning.settings import checked_settings
from parallelism.planning.trained import TrainedModel
from parallelism.training import MegatronFlags
from parallelism.training.training_run import ADAM_W
from parallelism.transforms import Overlap, Step, Strategy
from vcluster.__main__ import PROGRAM, main
from vcluster.calibration.published import Table
from vcluster.cli import program_files as placed
from vcluster.cli.command_line import WrongWords, serve
from vcluster.cli.sweeps import question

MOST = 2000
PROGRAM_TEXT = """func @f(%x: tensor<8x16xf64> [dp, None]) -> (tensor<f64>) {
  %3 = "sum"(%x) {axes = [0, 1], keepdims = false} : (tensor<8x16xf64>) -> tensor<f64>
  return %3
}
"""
WORDS = "dp=2 tp=4 sp zero=1 pp 1f1b:8 precision=bf16 recompute=block.* overlap"
SPEC = {"layers": 4, "width": 8, "heads": 2, "vocabulary": 4, "sequence": 4}
MODEL = TrainedModel.of(TransformerSpec(**SPEC), ADAM_W)
H100 = Hardware.preset("dgx-h100")

READERS: dict[str, tuple[Callable[[str], object], str]] = {
    "a strategy": (Strategy.parse, WORDS), "a strategy on a mesh": (Strategy.parse_on_mesh, WORDS),
    "a step": (Step.parse, f"pp 1f1b:2\n{PROGRAM_TEXT}"), "a program": (ir.parse, PROGRAM_TEXT),
    "a layout": (TensorSharding.parse, "[dp, tp:None]"),
    "a layout on a mesh": (lambda text: TensorSharding.parse(text, Mesh(dp=2, tp=2)), "[dp, tp]"),
    "a schedule": (Schedule.from_csv, "0F0,0B0\n1F0,1B0\n"), "an action": (Action.parse, "2F0"),
    "a pair": (Overlapped.parse, "(0F7;7B3)OVERLAP_F_B"), "a step of a rank": (parse_step, "2F0"),
    "overlap": (Overlap.parse, "25MB,ahead:2"), "a model": (transformer, "llama2-7b"),
    "a preset": (Hardware.preset, "dgx-h100:4"), "a slice": (lambda text: Hardware.preset(f"tpu-v4:{text}"), "4x4x8"),
    "a stack": (lambda text: Hardware.preset(f"dgx-h100+{text}"), "megatron-h100"), "hardware": (Hardware.of, "x.toml"),
    "sized hardware": (lambda text: sized_hardware(text, 3), "dgx-h100"), "bytes": (bytes_in, "72GB"),
    "memory": (lambda text: memory_of(text, H100), "72GB"), "a dtype": (lambda text: TensorType(text, (2,)), "bf16"),
    "symbols": (ir.symbols, "B D"), "a schedule's name": (lambda text: Pipeline(2, 2, text), "1f1b"),
    "a table": (Table.of, "megatron"), "an optimizer": (placed.optimizer_of, "adam:0.1"),
    "a rate": (lambda text: placed.optimizer_of(f"adam:{text}"), "0.1"),
    "a size": (lambda text: placed.sizes_of([text]), "B=8"),
    "settings": (lambda text: question.settings([text]), "zero=0,1"),
    "a question": (lambda text: question.question(text, TransformerSpec(**SPEC), {}), "pp=2 chunks=4"),
    "a setting": (lambda text: checked_settings({"schedule": text}, MODEL), "1f1b"),
    "a name of a setting": (lambda text: checked_settings({text: 1}, MODEL), "tp"),
    "an axis": (Mesh(dp=2).axes_of, "dp"), "a norm": (lambda text: TransformerSpec(**SPEC, norm=text), "rms"),
    "a flag": (lambda text: MegatronFlags(optimizer=text), "adam"),
}


def long_texts(right: str, length: int, samples: int) -> Iterator[str]:
    """Long texts that are nothing, and right ones with something long in them."""
    for part in ("(", "[", '"', "\\", "x", "9", "=", ",", ":", "@", "\n", "dp=2 ", "a,b ", "0F0,", "%x "):
        yield part * (length // len(part))
    rng = random.Random(length)
    for _ in range(samples):
        place = rng.randrange(len(right) + 1)
        part = rng.choice(["x", "9", "(", "é", "[", '"', "a.", "= ", ", ", "\\"])
        yield right[:place] + part * (length // len(part)) + right[place:]


def check(name: str, length: int, samples: int) -> None:
    read, right = READERS[name]
    for text in long_texts(right, length, samples):
        said = ""
        try:
            read(text)
        except (ValueError, TypeError, WrongWords) as error:
            said = str(error)
        assert len(said) < MOST, (text[:40], said[:200])


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", READERS)
def test_an_error_about_a_long_text_is_short(name: str) -> None:
    check(name, 20_000, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_an_error_about_a_megabyte_is_short(name: str) -> None:
    check(name, 1_000_000, 10)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("words", [
    "{}", "show {}", "show m.mlir --strategy {}", "show m.mlir --mesh {}", "run m.mlir --size {}", "plan {}",
    "plan gpt2 --fix {}", "plan gpt2 --hardware {} --devices 2", "simulate {} --hardware dgx-h100", "hardware {}",
    "simulate gpt2 --hardware {}", "simulate gpt2 --hardware dgx-h100 --normalization {}", "shardings {}",
    "shardings matmul {}", "shardings matmul --mesh {}", "calibrate --published {}", "convert {} b.mlir", "report {}",
    "completion {}", "demo {}", "plan gpt2 --optimizer {}", "run m.mlir --optimizer {}", "run m.mlir --donate {}",
    "plan gpt2 --memory {}", "plan m.mlir --batch {}", "run m.mlir --backend {}",
])
def test_a_command_line_is_refused_in_a_short_line(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    monkeypatch.chdir(str(tmp_path))
    with open("m.mlir", "w", encoding="utf-8") as file:     # noqa: PTH123 - in the current folder
        file.write(PROGRAM_TEXT)
    more = ["--global-batch-size", "2"] if "plan gpt2" in words else []
    more += ["--hardware", "dgx-h100:1"] if "plan gpt2" in words and "--hardware" not in words else []
    for long in ("x" * 30_000, "=" * 30_000, "9" * 30_000, "a=1," * 7_000, "-" * 30_000):
        status = serve(PROGRAM, main, [*(word.format(long) for word in words.split()), *more])
        out, err = capsys.readouterr()
        assert (status, out) == (2, "") and err.count("\n") == 1 and len(err) < MOST
