"""``python -m benchmarks.published_plans``: what `plan` picks beside the settings that teams published for their runs.

``published_strategies.json`` has the settings, with their sources.  Each is simulated on its hardware; beside it stand
the pick of a search, plain data parallelism, ZeRO-3 over all devices, and the pick of the same search under GPipe.  All
seconds are those of full simulations.  A search is restricted to the neighbourhood of the published setting, because a
free one takes minutes for these models: its words are those of ``plan --fix``.  What was found is kept in
``published_plans.json``, row by row; the table in ``docs/planning.md`` is made of it.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

from parallelism.display.quantities import decimal_bytes
from parallelism.hardware import Hardware
from parallelism.models import TransformerSpec
from parallelism.planning import find_plan
from parallelism.planning.assembled_steps import figures_of_run
from parallelism.planning.explanation import settings_text
from parallelism.training import MegatronFlags, TrainingRun
from parallelism.training.training_run import ADAM_W
from vcluster.cli.command_line import Parser, WrongWords, nearest, serve
from vcluster.cli.plan_document import words_of

HERE = Path(__file__).parent
SETTINGS, FOUND, PAGE = HERE / "published_strategies.json", HERE / "published_plans.json", Path("docs/planning.md")
BEGIN, END = "<!-- published plans -->", "<!-- end of published plans -->"
PROGRAM = "python -m benchmarks.published_plans"
SEARCHES = ("pick", "dp", "zero3", "gpipe")


@dataclass(frozen=True)
class Setting:
    """A training run as it was published."""

    name: str
    source: str
    hardware: str
    devices: int
    flags: MegatronFlags
    measured_seconds: float | None = None
    """The seconds of a step that the source gives for this setting; None if they are not compared."""

    @property
    def spec(self) -> TransformerSpec:
        """The model, in the dtype of its products."""
        return replace(self.flags.spec(), dtype="float16" if self.flags.fp16 else "bfloat16")

    @property
    def batch(self) -> int:
        """The sequences of a step."""
        assert self.flags.global_batch_size is not None
        return self.flags.global_batch_size

    def command(self, run: TrainingRun | None = None) -> str:
        """The `simulate` line of a run of this model; of the published one if none is given."""
        model = MegatronFlags(**self.flags.given("model"))
        words = self.flags.words() if run is None else (*model.words(), *words_of(run, Hardware.preset(self.hardware)))
        on = ["--hardware", f"{self.hardware}+plain", "--devices", str(self.devices)]
        return shlex.join([*["python", "-m", "vcluster", "simulate", "gpt"], *words, *on])

    @property
    def space(self) -> dict[str, Any]:
        """The settings of the search: half, equal and twice the published tp and pp, and usual microbatches.

        Stages that do not divide the layers are simulated one by one, so there only the rest is searched.
        """
        flags = self.flags
        tp, pp, cp = (getattr(flags, f"{name}_parallel_size") or 1
                      for name in ("tensor_model", "pipeline_model", "context"))
        layers, micro = flags.num_layers or 1, flags.micro_batch_size or 1
        if layers % pp:
            return {"tp": tp, "pp": pp, "cp": cp, "zero": 1, "microbatch": [1, 2], "recompute": ["none", "selective"],
                    "schedule": "1f1b"}
        near = {"tp": [each for each in (tp // 2, tp, 2 * tp) if 0 < each <= 8 and self.devices % each == 0],
                "pp": [each for each in (pp // 2, pp, 2 * pp) if each and layers % each == self.devices % each == 0],
                "cp": cp, "zero": [0, 1], "microbatch": sorted({1, 2, 4, micro})}
        if chunks := flags.num_layers_per_virtual_pipeline_stage:
            near["chunks"] = sorted({1, layers // pp // chunks, 2})
        return near

    def searched(self, name: str) -> dict[str, Any]:
        """The settings of a search of `SEARCHES`."""
        return {"pick": self.space, "gpipe": self.space | {"schedule": "gpipe", "chunks": 1},
                "dp": {"tp": 1, "pp": 1, "zero": 0},
                "zero3": {"tp": 1, "pp": 1, "zero": 3, "microbatch": [1, 2, 4, 8, 16]}}[name]


def settings() -> Iterator[Setting]:
    """All published settings."""
    found = json.loads(SETTINGS.read_text())
    gpt = {"seq_length": 2048, "vocab_size": 51200, "fp16": True}
    for row in (one := found["megatron_sc21"])["rows"]:
        yield _of(f"Megatron-LM {row['params_B']:g}B", one, "dgx-a100", row, **gpt, micro_batch_size=row["MBS"],
                  recompute_granularity="full",
                  num_layers_per_virtual_pipeline_stage=row["layers_per_virtual_stage"])
    for row in (one := found["korthikanti"])["rows"]:
        each = row["layers"] // (row["PP"] * row["interleave_m"])
        yield _of(f"selective {row['name']}", one, "dgx-a100", row, **gpt, micro_batch_size=row["MBS"],
                  sequence_parallel=True, recompute_granularity="selective",
                  num_layers_per_virtual_pipeline_stage=each if row["interleave_m"] > 1 else None)
    for row in (one := found["mt_nlg"])["rows"]:
        row = one["common"] | row
        yield _of(f"MT-NLG 530B, {row['GPUs']}", one, "dgx-a100", row, **gpt, micro_batch_size=1,
                  recompute_granularity="full")
    for row in (one := found["megascale"])["models"]:
        replicas = 4
        row = row | {"GPUs": row["TP"] * row["PP"] * replicas, "GBS": row["TP"] * row["PP"] * replicas}
        each = row["layers"] // (row["PP"] * row["interleave"])
        yield _of(f"MegaScale {row['name']}", one, "dgx-a100", row, seq_length=2048, vocab_size=64000, bf16=True,
                  micro_batch_size=1, sequence_parallel=True, use_distributed_optimizer=True, use_flash_attn=True,
                  recompute_granularity=None if row["name"] == "175B" else "selective",
                  num_layers_per_virtual_pipeline_stage=each)
    for row in (one := found["llama3_405b"])["rows"]:
        row = one["model"] | row | {"GBS": row["DP"] * row["batch_per_DP"]}
        yield _of(f"Llama 3 405B, {row['GPUs']}, {row['seq'] // 1024}k", one, "dgx-h100", row, bf16=True,
                  seq_length=row["seq"], vocab_size=row["vocab"], micro_batch_size=1, context_parallel_size=row["CP"],
                  ffn_hidden_size=row["ffn"], group_query_attention=True, num_query_groups=row["kv_heads"], swiglu=True,
                  normalization="RMSNorm", position_embedding_type="rope", untie_embeddings_and_output_weights=True,
                  disable_bias_linear=True, attention_dropout=0.0, hidden_dropout=0.0, use_flash_attn=True,
                  sequence_parallel=True, use_distributed_optimizer=True)


def _of(name: str, one: Mapping[str, Any], hardware: str, row: Mapping[str, Any], **flags: Any) -> Setting:
    return Setting(name, one["source"], hardware, row["GPUs"], MegatronFlags(
        num_layers=row["layers"], hidden_size=row["hidden"], num_attention_heads=row["heads"],
        tensor_model_parallel_size=row["TP"], pipeline_model_parallel_size=row["PP"], global_batch_size=row["GBS"],
        **flags), row.get("measured_s"))


# -- what is found -----------------------------------------------------------------------------------------------------


def published(setting: Setting) -> dict[str, Any]:
    """The published setting, simulated."""
    start = process_time()
    found = figures_of_run(setting.flags.run(setting.devices), setting.hardware)
    return {"seconds": found.seconds, "peak_bytes": found.peak_bytes, "mfu": found.mfu, "command": setting.command(),
            "cpu_seconds": process_time() - start}


def searched(setting: Setting, name: str) -> dict[str, Any]:
    """The pick of a search; or why there is none."""
    fixed, start = setting.searched(name), process_time()
    try:
        plans = find_plan(setting.spec, hardware=setting.hardware, devices=setting.devices, batch=setting.batch,
                          reserve=0, optimizer=ADAM_W, **fixed)
    except ValueError as error:
        return {"why": str(error), "space": settings_text(fixed)}
    told = {"space": settings_text(fixed), "timed": plans.timed, "gap": plans.gap,
            "cpu_seconds": process_time() - start}
    if len(plans):
        best = plans.best
        return told | {"seconds": best.seconds, "peak_bytes": best.peak_bytes, "mfu": best.figures.mfu,
                       "split": best.split, "command": setting.command(best.run)}
    if plans.tightest is not None:
        return told | {"why": f"needs {decimal_bytes(plans.tightest.peak_bytes)}"}
    return told | {"why": "the batch cannot be dealt"}


# -- the page ----------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of the page, of the rows that were measured."""
    lines = [
        "| run | devices | batch | published, simulated | measured | the pick | plain DP | ZeRO-3 | the pick under GPipe |",
        "|---|---|---|---|---|---|---|---|---|"]
    for setting in settings():
        if (row := found.get(setting.name)) is not None:
            measured = "not compared" if setting.measured_seconds is None else f"{setting.measured_seconds:.2f} s"
            cells = [_cell(row.get("published")), measured, *(_cell(row.get(name)) for name in SEARCHES)]
            lines.append(f"| {setting.name} | {setting.devices} | {setting.batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    if "seconds" not in row:
        return str(row["why"])
    size = row["peak_bytes"] / 1e9
    text = f"{row['seconds']:.2f} s, {size:.0f} GB"
    if size > 80:
        text += ", does not fit"
    return text + (f": `{row['split']}`" if "split" in row else "")


def main(words: Sequence[str]) -> int:
    """Measure rows, keep them, and write the table."""
    arguments = Parser({
        "names": {"nargs": "*", "metavar": "NAME", "help": "rows to measure, by their names (default: all)"},
        "--only": {"metavar": "SEARCH", "help": f"measure published, {', '.join(SEARCHES)} alone"},
        "--list": {"action": "store_true", "help": "list the rows, with their simulate lines"},
    }, prog=PROGRAM, description=str(__doc__).split("\n\n")[0]).parse(words)
    known = {setting.name: setting for setting in settings()}
    for name in arguments.names:
        if name not in known:
            raise WrongWords(f"there is no row {name!r}{nearest(name, tuple(known))}")
    if arguments.list:
        print("\n\n".join(f"{setting.name}\n{setting.command()}" for setting in known.values()))
        return 0
    for name in arguments.names or known:
        for what in ("published", *SEARCHES):
            if arguments.only in (None, what):
                row = published(known[name]) if what == "published" else searched(known[name], what)
                _keep(name, what, row)
                print(f"{name}: {what}: {_cell(row)} ({row.get('cpu_seconds', 0):.0f} s)", flush=True)
    return 0


def _keep(name: str, what: str, row: Mapping[str, Any]) -> None:
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    found.setdefault(name, {})[what] = row
    FOUND.write_text(json.dumps(found, indent=1) + "\n")
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(serve(PROGRAM, main))
