"""``python -m benchmarks.found_layouts``: the layouts that the integer program finds, beside those that people write.

Each case is a training step with plain gradient descent: the loss of a model of one layer, its backward and the update.
Tokens and targets lie split by rows over ``dp``; weights lie as each strategy wants them, and in the next step as in
this one.  All seconds are those of the simulator, without sharing of links.  What was found is kept in
``found_layouts.json``, case by case; the table in ``docs/found-layouts.md`` is made of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

from parallelism.auto_sharding import auto_shard
from parallelism.display.quantities import decimal_bytes, seconds
from parallelism.ir import Function
from parallelism.layouts import annotate
from parallelism.mesh import Mesh
from parallelism.models import TRANSFORMERS, mixture, mlp
from parallelism.simulation import simulate
from parallelism.transforms import (
    SGD,
    DataParallel,
    ExpertParallel,
    SequenceParallel,
    Strategy,
    TensorParallel,
    Zero,
    train_step,
)
from vcluster.cli.command_line import Parser, WrongWords, nearest, serve

HERE = Path(__file__).parent
FOUND, PAGE = HERE / "found_layouts.json", Path("docs/found-layouts.md")
BEGIN, END = "<!-- found layouts -->", "<!-- end of found layouts -->"
PROGRAM = "python -m benchmarks.found_layouts"
GPT3, LLAMA = (replace(TRANSFORMERS[name], layers=1, vocabulary=1024, sequence=2048, dtype="bfloat16")
               for name in ("gpt3-175b", "llama3-70b"))
DATA, TENSOR, SEQUENCE = DataParallel("dp"), TensorParallel("tp"), SequenceParallel("tp")
BASELINES = {
    "data": (DATA,), "ZeRO-3 (FSDP)": (DATA, Zero(3, "dp")), "Megatron": (TENSOR, DATA),
    "sequence": (TENSOR, SEQUENCE, DATA), "2-D": (TENSOR, SEQUENCE, DATA, Zero(3, "dp")),
    "experts": (ExpertParallel("tp"), DATA),
}
OVER_ALL = ("data", "ZeRO-3 (FSDP)")
"""These have the rows over all devices, not over ``dp`` alone."""
OF_BLOCKS = ("data", "ZeRO-3 (FSDP)", "Megatron", "sequence", "2-D")


@dataclass(frozen=True)
class Case:
    """A program on a mesh, and the strategies that people write for it."""

    title: str
    loss: Callable[[], Function]
    mesh: Mesh
    hardware: str
    baselines: tuple[str, ...] = OF_BLOCKS

    def step(self) -> Function:
        """The training step."""
        return train_step(self.loss(), SGD(0.1))

    def baseline(self, name: str) -> dict[str, float]:
        """The seconds and bytes of a strategy."""
        mesh = Mesh(dp=self.mesh.size) if name in OVER_ALL else self.mesh
        step = Strategy(*BASELINES[name])(self.step())
        trace = simulate(step, self.hardware, mesh=mesh, link_sharing=False, fold=True)
        return {"seconds": trace.makespan_seconds, "peak_bytes": max(trace.peaks().values())}

    def found(self) -> dict[str, float]:
        """The seconds and bytes of what the integer program finds, its gap, and the CPU seconds that it took."""
        start = process_time()
        step = self.step()
        given = annotate(step, {
            value.name: f"[{', '.join(['dp', *['None'] * (value.type.ndim - 1)])}]" for value in step.inputs
            if value.name in ("tokens", "x", "targets")})
        solution = auto_shard(given, self.mesh, self.hardware)
        trace = solution.simulate(link_sharing=False, fold=True)
        return {"seconds": trace.makespan_seconds, "peak_bytes": max(trace.peaks().values()),
                "gap": solution.choice.gap, "cpu_seconds": process_time() - start}


CASES = {
    "gpt3": Case("GPT-3's block, 8 sequences, a node", lambda: GPT3.function(batch=8), Mesh(dp=2, tp=4), "dgx-h100"),
    "gpt3-nodes": Case("GPT-3's block, 16 sequences, two nodes", lambda: GPT3.function(batch=16), Mesh(dp=2, tp=8),
                       "dgx-h100:2"),
    "gpt3-square": Case("GPT-3's block, 64 sequences, eight nodes", lambda: GPT3.function(batch=64), Mesh(dp=8, tp=8),
                        "dgx-h100:8"),
    "grouped": Case("Llama-3-70B's block, grouped queries, 8 sequences", lambda: LLAMA.function(batch=8),
                    Mesh(dp=2, tp=4), "dgx-h100"),
    "mixture": Case(
        "8 experts, 2 of them for each token", lambda: mixture(4096, 14336, 8, 2, 1024, 16, 2048, dtype="bfloat16"),
        Mesh(dp=2, tp=4), "dgx-h100", ("data", "ZeRO-3 (FSDP)", "experts")),
    "wide": Case("a perceptron of 8192, 65536, 8192; 4096 rows", lambda: mlp((8192, 65536, 8192), 4096, "bfloat16"),
                 Mesh(dp=2, tp=4), "dgx-h100", ("data", "ZeRO-3 (FSDP)", "Megatron")),
}


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of the page."""
    def cell(row: Mapping[str, float] | None) -> str:
        return "" if row is None else f"{seconds(row['seconds'])}, {decimal_bytes(row['peak_bytes'])}"

    lines = ["| " + " | ".join(["program", "mesh", *BASELINES, "found"]) + " |", "|---" * (len(BASELINES) + 3) + "|"]
    for name, row in found.items():
        cells = [CASES[name].title, repr(CASES[name].mesh), *(cell(row.get(each)) for each in BASELINES)]
        lines.append(f"| {' | '.join(cells)} | **{cell(row['found'])}** |")
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    """Measure cases, keep them, and write the table."""
    arguments = Parser({
        "names": {"nargs": "*", "metavar": "NAME", "help": f"of {', '.join(CASES)} (default: all)"},
    }, prog=PROGRAM, description=str(__doc__).split("\n\n")[0]).parse(words)
    for name in arguments.names:
        if name not in CASES:
            raise WrongWords(f"there is no case {name!r}{nearest(name, tuple(CASES))}")
    for name in arguments.names or CASES:
        case = CASES[name]
        row = {each: case.baseline(each) for each in case.baselines} | {"found": case.found()}
        for what, each in row.items():
            print(f"{name}: {what}: {seconds(each['seconds'])}, {decimal_bytes(each['peak_bytes'])}", flush=True)
        print(f"{name}: the search took {row['found']['cpu_seconds']:.0f} s of CPU", flush=True)
        _keep(name, row)
    return 0


def _keep(name: str, row: Mapping[str, Any]) -> None:
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    found[name] = row
    FOUND.write_text(json.dumps({each: found[each] for each in CASES if each in found}, indent=1) + "\n")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(json.loads(FOUND.read_text()))}\n\n{END}{rest.split(END)[1]}",
                    encoding="utf-8")


if __name__ == "__main__":
    sys.exit(serve(PROGRAM, main))
