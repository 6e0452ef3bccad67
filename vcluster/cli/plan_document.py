"""What `plan` found, as a document of plain values: it is printed, saved as JSON, and loaded again."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from parallelism.display.quantities import count
from parallelism.hardware import (
    Hardware,
    Validation,
    compared_in,
    mfu_remark,
    usual_error,
    validation_json,
)
from parallelism.ir import Function
from parallelism.models import TransformerSpec
from parallelism.planning import SETTINGS, Plan, Plans
from parallelism.planning.explanation import Account, why_not
from parallelism.planning.plan import Task
from parallelism.side_by_side import first_come
from parallelism.training import MegatronFlags, TrainingRun
from parallelism.training.megatron import update_flags
from parallelism.training.stage_layers import remark_of
from parallelism.training.training_run import ADAM_W, ROWS, precision_remark
from parallelism.transforms import SGD, Adam, Parts, Strategy
from parallelism.whole_files import written_whole
from vcluster.cli.command_line import WrongWords, accessing
from vcluster.cli.megatron_words import tokens_text

FORMAT, VERSION = "vcluster plans", 1
MOST_BYTES = 1 << 28
COUNTS = ("considered", "refused", "timed", "simulated", "elapsed_seconds", "gap")
"""The fields of `--json` besides the plans."""
MOST_INSIDE = "tp", "ep"
"""The axes that communicate in every layer, so that they are best inside of nodes."""
MOST_ROWS = 20_000
"""The most plans of which the settings are kept for the page."""


@dataclass(frozen=True)
class Asked:
    """The question that a document of plans answers."""

    program: str
    name: str
    model: TransformerSpec | Function
    flags: MegatronFlags
    hardware: str
    devices: int | None
    optimizer: SGD | Adam = ADAM_W
    rows: str = ROWS
    """The symbol for the rows of the batch, of a program in a file."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The numbers of its other symbols."""
    frozen: str = ""
    """The weights of a program in a file that are not trained, as words."""
    faults: Sequence[str] = ()
    """The words for slow links and devices."""

    @property
    def prefix(self) -> list[str]:
        """The beginning of every `simulate` line."""
        if isinstance(self.model, Function):
            optimizer = f"{type(self.optimizer).__name__.lower()}:{self.optimizer.lr:g}"
            sizes = [word for name, size in self.sizes.items() for word in ("--size", f"{name}={size}")]
            still = ["--frozen", self.frozen] if self.frozen else []
            return [*self.program.split(), "simulate", self.name, "--optimizer", optimizer, *still, *sizes]
        flags = MegatronFlags(**self.flags.given("model"))
        on = ["--hardware", self.hardware] + (
            ["--devices", str(self.devices)] if self.devices is not None else []
        )
        return [*self.program.split(), "simulate", self.name, *flags.words(), *on, *self.faults]

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        if isinstance(self.model, TransformerSpec):
            return self.model.parameters
        return sum(int(value.type.size) for value in Parts.of(self.model).weights)


def document_of(
    asked: Asked,
    plans: Plans,
    top: int,
    questions: Mapping[str, Mapping[str, Any]],
    told: Callable[[str, int, int], object] = lambda *_: None,
) -> tuple[dict[str, Any], Plan | None]:
    """The document of a search, and the first plan.

    It has the ``top`` plans that are different programs, the answers to ``questions``, which are settings by their
    words, and the settings of all plans.  If no plan fits, ``needs`` has the memory of the smallest one, and of those
    that may need less.  ``told`` hears how many of the plans have their figures.
    """
    best = tuple(islice(plans.programs(), top))
    works: list[Callable[[], Any]] = [
        *(partial(_row, asked, plan) for plan in best),
        *(partial(_between_nodes, plans, best[0], axis) for axis in MOST_INSIDE if best),
        *(partial(_of_front, asked, plan) for plan in plans.front),
    ]
    described = first_come(works, told=partial(told, "parts of the best plans"))
    end_of_rows = len(best)
    begin_of_front = len(works) - len(plans.front)
    rows = described[:end_of_rows]
    front = described[begin_of_front:]
    outside = list(filter(None, described[end_of_rows:begin_of_front]))
    order = sorted(range(len(best)), key=lambda place: float(rows[place]["seconds"]))
    rows = [rows[place] for place in order]
    best = tuple(best[place] for place in order)
    asked_why_not = questions.items() if rows else ()
    document = {
        "format": FORMAT,
        "version": VERSION,
        "model": asked.name,
        "parameters": asked.parameters,
        "batch": plans.task.batch,
        "devices": plans.task.devices,
        "hardware": plans.task.hardware.name,
        "stack": plans.task.hardware.stack,
        "validation": validation_json(_compared(plans.task)),
        "memory_bytes": plans.memory,
        "reserve": plans.reserve.json(),
        "prefix": shlex.join(asked.prefix),
        "plans": rows,
        "front": front,
        "remarks": [*_remarks(plans, best), *(outside if order[:1] == [0] else [])],
        "considered": plans.considered,
        "refused": {reason: each.count for reason, each in plans.refused.items()},
        "one_by_one": dict(plans.one_by_one),
        "timed": plans.timed,
        "simulated": plans.simulated,
        "elapsed_seconds": plans.elapsed_seconds,
        "gap": plans.gap,
        "why_not": [_why_not(asked, plans, *each, best[0], rows[0]) for each in asked_why_not],
        **_of_transformer(asked, plans, best),
        "needs": [] if rows else _needs(plans),
        "all": _all(plans),
    }
    return document, best[0] if best else None


def _of_transformer(asked: Asked, plans: Plans, best: Sequence[Plan]) -> dict[str, Any]:
    """What a document says of a model by its name, and not of a program."""
    if not isinstance(asked.model, TransformerSpec):
        return {}
    stages = _stages(asked.model, best[0]) if best else ""
    tokens = tokens_text(asked.name, asked.flags)
    return {"tokens": tokens, "assumed": _assumed(asked.model, plans.task), "stages": stages}


def _needs(plans: Plans) -> list[dict[str, Any]]:
    """The memory of the smallest plan, and of those that may need less."""
    return [
        {
            "without": next(iter(need.setting), ""),
            "split": need.split,
            "stage": need.stage,
            "memory": need.memory,
            "setting": dict(need.setting),
        }
        for need in plans.needs()
    ]


def _compared(task: Task) -> Sequence[Validation]:
    """What the seconds of such steps were compared with."""
    model = task.model
    return compared_in(model.products, task.hardware.validation, experts=model.has_experts)


def _remarks(plans: Plans, best: Sequence[Plan]) -> list[str]:
    """What a reader should know of these plans: that they are equal within the error, and that none was so good yet."""
    if not best:
        return []
    task, first = plans.task, best[0]
    found = [mfu_remark(task.hardware.name, task.model.products, first.figures.mfu)]
    error = usual_error(_compared(task))
    equal = [place for place, plan in enumerate(best) if plan.seconds <= first.seconds * (1 + error)]
    if len(equal) > 1:
        simplest = min(equal, key=lambda place: (*_parts_of(best[place]), place))
        apart = max(best[place].seconds for place in equal) / first.seconds - 1
        found.append(
            f"Plans 1 to {equal[-1] + 1} differ by {apart:.1%}, less than the error of the seconds ({error:.0%}): the "
            f"model cannot tell which is faster. The simplest (fewest stages, axes and chunks) is {simplest + 1}: "
            f"{best[simplest].split}."
        )
    return [text for text in found if text]


def _parts_of(plan: Plan) -> tuple[int, int, int]:
    """The number of stages, of axes along which something is split, and of chunks of a stage's layers."""
    extents = plan.mesh.shape
    return (
        extents.get("pp", 1),
        sum(extent > 1 for extent in extents.values()),
        plan.settings.get("chunks", 1),
    )


def _stages(spec: TransformerSpec, plan: Plan) -> str:
    """How the layers lie on the stages of a plan, if not equally many; empty if they do."""
    return remark_of(spec, plan.run.pipeline.begin) if plan.run.pipeline is not None else ""


def _assumed(spec: TransformerSpec, task: Task) -> str:
    """What is planned for that no figure of the model says: precision, optimizer, kernel of attention, and software."""
    load = task.model.load
    stack, slow = task.hardware.stack, precision_remark(task.model.dtype, task.hardware)
    kernel = (
        "flash attention, a kernel that writes no scores"
        if spec.fused_attention
        else "attention that writes its scores (--use-flash-attn: a kernel that does not)"
    )
    return (
        f"{task.model.dtypes}; {optimizer_text(task.model.optimizer)}; {kernel}{load and f'; {load}'}"
        f"{task.model.grouped and f'; {task.model.grouped}'}{'; '.join(['', *tuning_texts(spec)])}"
        f"{stack and f'; the stack {stack}'}{slow and f'. {slow}'}"
    )


def tuning_texts(spec: TransformerSpec) -> Iterator[str]:
    """The low-rank adapters and the packed documents of a model in words, if it has them."""
    if spec.lora is not None:
        products = dict.fromkeys(name.split(".")[1] for name in spec.adapters)
        yield (
            f"adapters of rank {spec.lora.rank} of {' and '.join(products)}, {count(spec.trained_parameters)} "
            "parameters, are trained, and all else is frozen"
        )
    if lengths := spec.document_lengths:
        told = f"{min(lengths)} tokens"
        if len({*lengths}) > 1:
            mean = sum(lengths) / len(lengths)
            told = f"{min(lengths)} to {max(lengths)} tokens, {mean:.0f} in the mean"
        yield f"sequences are packed documents of {told}"


def optimizer_text(optimizer: SGD | Adam) -> str:
    """An optimizer in words."""
    momentum = optimizer.momentum if isinstance(optimizer, SGD) else 0.0
    return f"{type(optimizer).__name__}{f' with momentum {momentum:g}' if momentum else ''}"


def _all(plans: Plans) -> dict[str, Any]:
    """The settings, seconds and memory of all plans, in order, as columns; the first `MOST_ROWS` of very many."""
    chosen, most = plans.choices, min(len(plans), MOST_ROWS)
    names = [name for name in SETTINGS if name in chosen.columns]
    return {
        "names": names,
        "columns": {name: chosen[name][:most].tolist() for name in names},
        "words": {name: list(chosen.words[name]) for name in names if name in chosen.words},
        "switches": [name for name in names if SETTINGS[name].is_switch],
        "seconds": plans.seconds[:most].tolist(),
        "peaks": plans.peaks[:most].tolist(),
        "full": [place in plans.full for place in range(most)],
    }


def _row(asked: Asked, plan: Plan) -> dict[str, Any]:
    """A plan with its figures, from its full simulation."""
    flags = words_of(plan.run, plan.task.hardware, asked.rows)
    return {
        **plan.figures.json(),
        "microbatch": plan.microbatch,
        "command": shlex.join([*asked.prefix, *flags]),
        "split": plan.split,
        "flags": shlex.join(flags),
        "links": plan.figures.links,
    }


def _between_nodes(plans: Plans, first: Plan, axis: str) -> str:
    """Why an axis of the first plan is not inside of a node; empty if it is."""
    why = plans.why_between_nodes(first, axis)
    return why and f"Why {axis}={first.settings[axis]} of the first is not inside of a node: {why}."


def _of_front(asked: Asked, plan: Plan) -> dict[str, Any]:
    """A plan of the front.  If it was not simulated fully, its seconds are a lower bound."""
    return {
        "seconds": plan.seconds,
        "peak_bytes": plan.peak_bytes,
        "split": plan.split,
        "simulated": plan.is_simulated,
        "flags": shlex.join(words_of(plan.run, plan.task.hardware, asked.rows)),
    }


def words_of(run: TrainingRun, hardware: Hardware, rows: str = ROWS) -> list[str]:
    """The words of `simulate` that give a run of its model: flags of Megatron-LM, or else ``--strategy``.

    ``rows`` is the symbol for the rows of the batch in the file of a program.
    """
    if isinstance(run.model, Function):
        extents = "x".join(map(str, hardware.links[-1].extents))
        named = f"{hardware.name}:{extents}" if hardware.name in Hardware.presets() else hardware.name
        text = run.strategy.with_pipeline(batch=rows).text_on(run.mesh)
        return ["--strategy", text, "--size", f"{rows}={run.batch}", "--hardware", named]
    flags = MegatronFlags.of(run)
    if flags is not None:
        given = {name: value for name, value in flags.given().items() if not _is_usual(name, value)}
        return [*MegatronFlags(**given).words()]
    batch = ["--global-batch-size", str(run.batch), *MegatronFlags(**update_flags(run.optimizer)).words()]
    text = run.strategy.text_on(run.mesh)
    strategy, mesh = Strategy.parse_on_mesh(text)
    if [*mesh.shape.items()] == [*run.mesh.shape.items()]:
        return ["--strategy", text, *batch]
    axes = ",".join(f"{axis}={size}" for axis, size in run.mesh.shape.items())
    return ["--strategy", str(strategy), "--mesh", axes, *batch]


def _is_usual(flag: str, value: Any) -> bool:
    """Whether a run is the same without a flag: sizes are 1, but that of the experts' tensor parallelism is that of the
    rest of the model."""
    if flag == "expert_tensor_parallel_size":
        return False
    return flag == "bf16" or (flag.endswith("_parallel_size") and value == 1)


def _why_not(
    asked: Asked,
    plans: Plans,
    words: str,
    settings: Mapping[str, Any],
    first: Plan,
    first_row: Mapping[str, Any],
) -> dict[str, Any]:
    """The best plan with these settings, or why there is none."""
    plan, reason = plans.with_settings(**settings)
    if plan is None:
        return {"question": words, "answer": reason}
    row = _row(asked, plan)
    same = ""
    if row["command"] == first_row["command"]:
        same = f"the first plan has {words}"
    elif plan.program == first.program:
        same = f"with {words} the program is that of the first plan"
    return {"question": words, "answer": same, "plan": row}


# -- files -------------------------------------------------------------------------------------------------------------


def printed_json(document: Mapping[str, Any], *, again: bool = False) -> str:
    """The fields of `--json`, as text: what was asked for beside the plans is there, too."""
    more: dict[str, Any] = {}
    if document["why_not"]:
        more["why_not"] = [_answered(each, document["plans"][0]) for each in document["why_not"]]
    more |= {"front": document["front"]} if again else {}
    more |= {
        name: document[name]
        for name in ("one_by_one", "verified", "assumed", "stages", "needs", "cache", "imperfect")
        if document.get(name)
    }
    reserve = document.get("reserve", {})
    more |= {"reserve": reserve} if any(reserve.values()) else {}
    plans = list(map(_printed, document["plans"]))
    return json.dumps({"plans": plans, **{name: document[name] for name in COUNTS}, **more}, indent=1)


def _answered(each: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """A ``--why-not`` with its answer as a text, whether there is a plan or not."""
    plan = {"plan": _printed(each["plan"])} if each.get("plan") else {}
    return {"question": each["question"], "answer": why_not_text(each, first), **plan}


def _printed(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in plan.items() if name not in ("split", "flags", "links")}


def why_not_text(each: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """The answer to a ``--why-not``, beside the first plan: a sentence without its stop."""
    plan = each.get("plan")
    if plan is None or each["answer"]:
        return str(each["answer"])
    return why_not(each["question"], account(plan), account(first))


def account(plan: Mapping[str, Any]) -> Account:
    """One plan in a document."""
    return Account(*(plan[name] for name in Account._fields))


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
            raise ValueError(
                f"it has version {document.get('version')!r}, and versions up to {VERSION} are read"
            )
        _check(document)
    except (ValueError, RecursionError, UnicodeDecodeError) as error:
        raise WrongWords(f"--load: {path} cannot be read: {error}") from None
    return document


_TEXTS = ("model", "hardware", "prefix")
_NUMBERS = (
    "parameters",
    "batch",
    "devices",
    "memory_bytes",
    "considered",
    "timed",
    "simulated",
    "elapsed_seconds",
    "gap",
)
_PLAN_TEXTS = ("strategy", "hardware", "command", "split", "flags")
_PLAN_NUMBERS = ("seconds", "tflops_per_device", "mfu", "hfu", "bubble", "peak_bytes", "microbatch")


def _check(document: Mapping[str, Any]) -> None:
    """``ValueError`` unless the document has what is printed of it."""
    _fields(
        document,
        (*_TEXTS, *(name for name in ("tokens", "assumed", "stages") if name in document)),
        (*_NUMBERS, *(name for name in ("all_seconds",) if name in document)),
        "the document",
    )
    _mapping(document.get("refused"), "refused")
    _mapping(document.get("reserve", {}), "reserve")
    _mapping(document.get("one_by_one", {}), "one_by_one")
    for name in ("plans", "front", "why_not", "needs"):
        _check_that(_is_list_of(dict, document.get(name)), f"{name} must be a list of objects")
    answered = [each["plan"] for each in document["why_not"] if each.get("plan") is not None]
    for plan in [*document["plans"], *answered]:
        _check_plan(plan)
    if document.get("imperfect") is not None:
        _check_that(isinstance(document["imperfect"], dict), "imperfect must be an object")
        _fields(document["imperfect"], ("text",), ("slowdown",), "imperfect")
    run = document.get("verified")
    if run is not None:
        _check_run(run)
    for each in document["front"]:
        _fields(each, ("split", *({"flags"} & each.keys())), ("seconds", "peak_bytes"), "the front")
    _check_columns(document.get("all"))
    for each in document["why_not"]:
        _fields(each, ("question", "answer"), (), "why_not")
    for each in document["needs"]:
        _fields(each, ("without", "split"), ("stage",), "needs")
        _mapping(each.get("memory"), "memory")
        _check_that(isinstance(each.get("setting"), dict), "setting must be an object")


def _check_that(is_right: bool, wanted: str) -> None:
    if not is_right:
        raise ValueError(wanted)


def _is_list_of(kind: type, found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(each, kind) for each in found)


def _check_plan(plan: Any) -> None:
    _check_that(isinstance(plan, dict), "a plan must be an object")
    _fields(plan, _PLAN_TEXTS, _PLAN_NUMBERS, "a plan")
    if plan.get("tokens_per_second") is not None:
        _fields(plan, (), ("tokens_per_second",), "a plan")
    _mapping(plan.get("parts"), "parts")
    _mapping(plan.get("mesh"), "mesh")
    _check_that(isinstance(plan.get("memory"), list), "memory must be a list")
    for stage in plan["memory"]:
        _mapping(stage, "memory")
    _check_that(isinstance(plan.get("links"), dict), "links must be an object")


def _check_run(run: Any) -> None:
    is_right = isinstance(run, dict) and isinstance(run.get("differences"), list)
    _check_that(is_right, "verified must be an object with differences")
    numbers = ("apart", "seconds", "received_bytes", *({"limit"} & run.keys()))
    _fields(run, ("strategy",), numbers, "verified")
    _mapping(run.get("mesh"), "mesh")


def _check_columns(found: Any) -> None:
    """``ValueError`` unless these are columns of one length, with a word for each number of a word."""
    found = found if isinstance(found, dict) else {}
    columns, names, words = (found.get(name) for name in ("columns", "names", "words"))
    _check_that(
        isinstance(columns, dict) and _is_list_of(str, names),
        "all must be an object with the names of settings",
    )
    _check_that(_is_list_of(str, found.get("switches", [])), "switches must be names of settings")
    each_has_one = isinstance(words, dict) and {*columns} == {*names} and {*words} <= {*columns}
    _check_that(each_has_one, "all must have a column for each setting")
    numbers = [found.get("seconds"), found.get("peaks"), found.get("full"), *columns.values()]
    _check_that(
        all(map(_is_list_of_numbers, numbers)) and len({len(each) for each in numbers}) == 1,
        "the columns of all must be lists of numbers, as many in each",
    )
    for name, texts in words.items():
        are_words = _is_list_of(str, texts) and _is_list_of(int, columns[name])
        _check_that(
            are_words and all(0 <= x < len(texts) for x in columns[name]), f"{name} must be numbers of words"
        )


def _is_list_of_numbers(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(x, int | float) and abs(x) < inf for x in found)


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
