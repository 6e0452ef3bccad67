"""What `plan` found, as a document of plain values: it is printed, saved as JSON, and loaded again."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from parallelism.hardware import Hardware
from parallelism.ir import Function
from parallelism.models import TransformerSpec
from parallelism.planning import SETTINGS, Plan, Plans
from parallelism.trace import Trace
from parallelism.training import Figures, MegatronFlags, TrainingRun, figures
from parallelism.training.training_run import ADAM_W, ROWS
from parallelism.transforms.parts import first_argument
from parallelism.whole_files import written_whole
from vcluster.demo import WrongWords
from vcluster.demo.command_line import accessing

FORMAT, VERSION = "vcluster plans", 1
MOST_BYTES = 1 << 28
COUNTS = ("considered", "refused", "timed", "simulated", "elapsed_seconds", "gap")
"""The fields of `--json` besides the plans."""
SAVING = ("recompute", "zero")
"""The settings without which a search is made again where nothing fits."""
MOST_ROWS = 20_000
"""The most plans of which the settings are kept for the page."""


@dataclass(frozen=True)
class Asked:
    """What was asked for."""

    program: str
    name: str
    model: TransformerSpec | Function
    flags: MegatronFlags
    hardware: str
    devices: int | None

    @property
    def prefix(self) -> list[str]:
        """The beginning of every `simulate` line."""
        if isinstance(self.model, Function):
            optimizer = f"adamw:{ADAM_W.lr:g}"
            return [*self.program.split(), "simulate", self.name, "--optimizer", optimizer]
        flags = MegatronFlags(**self.flags.given("model"))
        on = ["--hardware", self.hardware] + (["--devices", str(self.devices)] if self.devices is not None else [])
        return [*self.program.split(), "simulate", self.name, *flags.words(), *on]

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        if isinstance(self.model, TransformerSpec):
            return self.model.parameters
        return sum(int(value.type.size) for value in first_argument(self.model))

    def run(self, plan: Plan) -> TrainingRun:
        """A plan as a run."""
        return TrainingRun(self.model, plan.task.batch, plan.strategy, plan.mesh, ADAM_W)


def document_of(
    asked: Asked, plans: Plans, top: int, questions: Sequence[Mapping[str, Any]], fixed: Mapping[str, Any],
    search: Callable[..., Plans],
) -> tuple[dict[str, Any], Trace | None]:
    """The document of a search, and the trace of the first plan.

    It has the ``top`` plans, the answers to ``questions``, and the settings of all plans.  If no plan fits, ``needs``
    has the memory of the smallest one, and for each of the ``fixed`` settings that save memory that of the smallest
    without it, which is searched anew.
    """
    told = sorted((_row(asked, plan) for plan in plans[:top]), key=lambda pair: float(pair[0]["seconds"]))
    rows = [row for row, _ in told]
    document = {
        "format": FORMAT, "version": VERSION, "model": asked.name, "parameters": asked.parameters,
        "batch": plans.task.batch, "devices": plans.task.devices, "hardware": plans.task.hardware.name,
        "memory_bytes": plans.memory, "prefix": shlex.join(asked.prefix),
        "plans": rows,
        "front": [{"seconds": plan.seconds, "peak_bytes": plan.peak_bytes, "split": short(plan.settings)}
                  for plan in plans.front],
        "considered": plans.considered, "refused": {reason: each.count for reason, each in plans.refused.items()},
        "timed": plans.timed, "simulated": plans.simulated, "elapsed_seconds": plans.elapsed_seconds, "gap": plans.gap,
        "why_not": [_why_not(asked, plans, question, rows) for question in questions] if rows else [],
        "needs": _needs(asked, plans, fixed, search) if not rows else [], "all": _all(plans),
    }
    return document, told[0][1].trace if told else None


def _all(plans: Plans) -> dict[str, Any]:
    """The settings, seconds and memory of all plans, in order, as columns; the first `MOST_ROWS` of very many."""
    chosen, most = plans.choices, min(len(plans), MOST_ROWS)
    names = [name for name in SETTINGS if name in chosen.columns]
    return {
        "names": names, "columns": {name: chosen[name][:most].tolist() for name in names},
        "words": {name: list(chosen.words[name]) for name in names if name in chosen.words},
        "seconds": plans.seconds[:most].tolist(), "peaks": plans.peaks[:most].tolist(),
        "full": [place in plans.full for place in range(most)]}


def _row(asked: Asked, plan: Plan) -> tuple[dict[str, Any], Figures]:
    """A plan with its figures, from its full simulation."""
    run = asked.run(plan)
    found = figures(run, plan.task.hardware)
    flags = words_of(run, plan.task.hardware)
    return {**found.json(), "microbatch": plan.microbatch, "command": shlex.join([*asked.prefix, *flags]),
            "split": short(plan.settings), "flags": shlex.join(flags), "links": _links(found)}, found


def words_of(run: TrainingRun, hardware: Hardware) -> list[str]:
    """The words of `simulate` that give a run of its model: flags of Megatron-LM, or else ``--strategy``."""
    if isinstance(run.model, Function):
        extents = "x".join(map(str, hardware.links[-1].extents))
        named = f"{hardware.name}:{extents}" if hardware.name in Hardware.presets() else hardware.name
        return ["--strategy", run.strategy.text_on(run.mesh), "--size", f"{ROWS}={run.batch}", "--hardware", named]
    flags = MegatronFlags.of(run)
    if flags is not None:
        given = {name: value for name, value in flags.given().items()
                 if not (name.endswith("_parallel_size") and value == 1) and name != "bf16"}
        return [*MegatronFlags(**given).words()]
    batch = ["--global-batch-size", str(run.batch)]
    text = run.strategy.text_on(run.mesh)
    strategy, mesh = type(run.strategy).parse_on_mesh(text)
    if [*mesh.shape.items()] == [*run.mesh.shape.items()]:
        return ["--strategy", text, *batch]
    axes = ",".join(f"{axis}={size}" for axis, size in run.mesh.shape.items())
    return ["--strategy", str(strategy), "--mesh", axes, *batch]


def short(settings: Mapping[str, Any]) -> str:
    """A plan in a few words."""
    words = [f"{axis}={settings[axis]}" for axis in ("pp", "dp", "cp", "tp") if settings[axis] > 1]
    words += ["sp"] * bool(settings["sp"]) + [f"zero={settings['zero']}"] * bool(settings["zero"])
    words += [f"{settings['schedule']}x{settings['chunks']}" if settings["chunks"] > 1 else settings["schedule"]
              ] * (settings["pp"] > 1 and settings["schedule"] != "1f1b")
    words += [f"recompute={settings['recompute']}"] * (settings["recompute"] != "none")
    if settings["order"].split()[0] != "pp" or settings["order"].split()[-1] != "tp":
        words.append(f"order={settings['order'].replace(' ', '-')}")
    return " ".join([*words, f"mb={settings['microbatch']}"])


def _links(found: Figures) -> dict[str, dict[str, Any]]:
    """By axis: the level of links that its collectives cross, and the bytes a second that a device receives there."""
    mesh, hardware, rank = found.run.mesh, found.hardware, found.step.slowest
    result: dict[str, dict[str, Any]] = {}
    for operation, total in found.step.by_operation[rank].items():
        axes = [axis for axis in operation.axes or () if mesh.shape[axis] > 1]
        if operation.kind == "collective" and axes and total.seconds:
            seen = result.setdefault(axes[0], {"seconds": 0.0, "bytes": 0})
            seen["seconds"] += total.seconds
            seen["bytes"] += total.bytes_received
            group = mesh.group(rank, tuple(axes))
            level = max(hardware.level(group[0], other) for other in group[1:])
            seen["level"] = hardware.links[level].name
    return result


# -- why not -----------------------------------------------------------------------------------------------------------


def _why_not(
    asked: Asked, plans: Plans, question: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The best plan with these settings, or why there is none."""
    words = " ".join(f"{name}={value}" for name, value in question.items())
    plan = next(plans.where(**question), None)
    if plan is None:
        return {"question": words, "answer": plans.why_not(plans.best, **question)}
    row, _ = _row(asked, plan)
    first = row["command"] == rows[0]["command"]
    return {"question": words, "answer": "the first plan is one with it" if first else "", "plan": row}


# -- where nothing fits ------------------------------------------------------------------------------------------------


def _needs(
    asked: Asked, plans: Plans, fixed: Mapping[str, Any], search: Callable[..., Plans]
) -> list[dict[str, Any]]:
    """The least memory that is needed, with all settings and without one of those that save memory."""
    found = [_need(asked, plans, "")]
    for name in [name for name in SAVING if name in fixed and found[0]]:
        others = {key: value for key, value in fixed.items() if key != name}
        found.append(_need(asked, search(simulations=0, **others), name))
    return [each for each in found if each]


def _need(asked: Asked, plans: Plans, without: str) -> dict[str, Any]:
    if len(plans):
        least = min(plans, key=lambda plan: plan.peak_bytes)
    elif plans.tightest is not None:
        least = plans.tightest
    else:
        return {}
    memory = figures(asked.run(least), plans.task.hardware, link_sharing=False).memory
    stage = max(range(len(memory)), key=lambda i: sum(memory[i].values()))
    return {"without": without, "split": short(least.settings), "stage": stage, "memory": memory[stage],
            "setting": {without: least.settings[without]} if without else {}}


# -- files -------------------------------------------------------------------------------------------------------------


def printed_json(document: Mapping[str, Any]) -> str:
    """The fields of `--json`, as text."""
    own = ("split", "flags", "links")
    plans = [{name: value for name, value in plan.items() if name not in own} for plan in document["plans"]]
    return json.dumps({"plans": plans, **{name: document[name] for name in COUNTS}}, indent=1)


def saved(document: Mapping[str, Any], path: Path) -> None:
    """Writes the document.  `WrongWords` if it cannot be written."""
    with accessing(path, option="save"), written_whole(path) as stream:
        stream.write(json.dumps(document))


def loaded(path: Path) -> dict[str, Any]:
    """A document that `saved` wrote.  `WrongWords` for any other file."""
    with accessing(path, "read", "load"), path.open("rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    try:
        if len(content) > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES} bytes")
        document = json.loads(content)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError("it was not written by plan --save")
        if document.get("version") != VERSION:
            raise ValueError(f"it has version {document.get('version')!r}, and versions up to {VERSION} are read")
        _check(document)
    except (ValueError, RecursionError, UnicodeDecodeError) as error:
        raise WrongWords(f"--load: {path} cannot be read: {error}") from None
    return document


_TEXTS = ("model", "hardware", "prefix")
_NUMBERS = ("parameters", "batch", "devices", "memory_bytes", "considered", "timed", "simulated", "elapsed_seconds",
            "gap")
_PLAN_TEXTS = ("strategy", "hardware", "command", "split", "flags")
_PLAN_NUMBERS = ("seconds", "tflops_per_device", "mfu", "hfu", "bubble", "peak_bytes", "microbatch")


def _check(document: Mapping[str, Any]) -> None:
    """``ValueError`` unless the document has what is printed of it."""
    _fields(document, _TEXTS, _NUMBERS, "the document")
    _mapping(document.get("refused"), "refused")
    for name in ("plans", "front", "why_not", "needs"):
        if not isinstance(document.get(name), list) or not all(isinstance(each, dict) for each in document[name]):
            raise ValueError(f"{name} must be a list of objects")
    for plan in [*document["plans"], *(each["plan"] for each in document["why_not"] if each.get("plan") is not None)]:
        if not isinstance(plan, dict):
            raise ValueError("a plan must be an object")
        _fields(plan, _PLAN_TEXTS, _PLAN_NUMBERS, "a plan")
        _mapping(plan.get("parts"), "parts")
        _mapping(plan.get("mesh"), "mesh")
        if not isinstance(plan.get("memory"), list):
            raise ValueError("memory must be a list")
        for stage in plan["memory"]:
            _mapping(stage, "memory")
        if not isinstance(plan.get("links"), dict):
            raise ValueError("links must be an object")
    if (run := document.get("verified")) is not None:
        if not isinstance(run, dict) or not isinstance(run.get("differences"), list):
            raise ValueError("verified must be an object with differences")
        _fields(run, ("strategy",), ("apart", "seconds", "received_bytes"), "verified")
        _mapping(run.get("mesh"), "mesh")
    for each in document["front"]:
        _fields(each, ("split",), ("seconds", "peak_bytes"), "the front")
    _check_columns(document.get("all"))
    for each in document["why_not"]:
        _fields(each, ("question", "answer"), (), "why_not")
    for each in document["needs"]:
        _fields(each, ("without", "split"), ("stage",), "needs")
        _mapping(each.get("memory"), "memory")
        if not isinstance(each.get("setting"), dict):
            raise ValueError("setting must be an object")


def _check_columns(found: Any) -> None:
    """``ValueError`` unless these are columns of one length, with a word for each number of a word."""
    columns = found.get("columns") if isinstance(found, dict) else None
    if not isinstance(columns, dict) or found.get("names") != [name for name in SETTINGS if name in columns]:
        raise ValueError("all must be an object with the names of settings")
    words = found.get("words")
    if not isinstance(words, dict) or {*columns} != {*found["names"]} or not {*words} <= {*columns}:
        raise ValueError("all must have a column for each setting")
    numbers = [found.get("seconds"), found.get("peaks"), found.get("full"), *columns.values()]
    if not all(isinstance(each, list) and all(isinstance(x, int | float) and abs(x) < inf for x in each)
               for each in numbers) or len({len(each) for each in numbers}) != 1:
        raise ValueError("the columns of all must be lists of numbers, as many in each")
    for name, texts in words.items():
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts) or any(
            not isinstance(x, int) or not 0 <= x < len(texts) for x in columns[name]
        ):
            raise ValueError(f"{name} must be numbers of words")


def _fields(found: Mapping[str, Any], texts: Sequence[str], numbers: Sequence[str], what: str) -> None:
    for name in texts:
        if not isinstance(found.get(name), str):
            raise ValueError(f"{name} of {what} must be a text")
    for name in numbers:
        value = found.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -inf < value < inf:
            raise ValueError(f"{name} of {what} must be a number")


def _mapping(found: Any, what: str) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{what} must be an object of numbers")
    _fields(found, (), [*found], what)
