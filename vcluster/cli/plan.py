"""`plan`: the best split of a training step over described hardware, and why it is the best."""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from parallelism import ir
from parallelism.auto_sharding import dual
from parallelism.display import progress
from parallelism.hardware import sized_hardware
from parallelism.hardware.fields import shown
from parallelism.models import TransformerSpec
from parallelism.planning import SETTINGS, find_plan
from parallelism.planning.dealing import spelled_out
from parallelism.trace import Trace
from parallelism.training import OPTIONS, MegatronFlags
from parallelism.training.precision_flags import STATE, state_of
from parallelism.training.state_sharding import StateSharding
from parallelism.training.training_run import ADAM_W, ROWS
from parallelism.transforms import SGD, Adam
from parallelism.transforms.words import SHORTHANDS
from vcluster.cli.command_line import Arguments, Parser, WrongWords, accessing, whole, writable
from vcluster.cli.layouts_page import layouts_document, write_layouts
from vcluster.cli.megatron_words import (
    check_rate,
    flags_of,
    is_model,
    named_model,
    tell_remarks,
    tell_unchanging,
    training_parser,
)
from vcluster.cli.plan_document import Asked, document_of, loaded, printed_json, saved
from vcluster.cli.plan_text import needs_text, plan_text, write_page
from vcluster.cli.program_files import (
    loss_of_rows,
    optimizer_of,
    program_in,
    sizes_of,
    tell_whole,
    weights_told_once,
)
from vcluster.cli.serving.cache_words import CACHE, cache_of
from vcluster.cli.sliced import tell_slicings
from vcluster.runs.verified import verified

ORDER = "pp dp cp ep tp"
_FIXED = SETTINGS.with_flag()
"""The settings of a plan that flags of Megatron-LM fix, by field."""
_DTYPES = (
    "fp16",
    "bf16",
    "fp32",
    "accumulate_allreduce_grads_in_fp32",
    "grad_reduce_in_bf16",
    "main_grads_dtype",
    "use_precision_aware_optimizer",
    *STATE.values(),
)
"""The flags about dtypes."""
_OTHER = (
    *_DTYPES,
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    "outer_dp_sharding_strategy",
    "overlap_param_gather",
    "recompute_activations",
    "num_layers_per_virtual_pipeline_stage",
)
"""The flags about the strategy that have a meaning of their own here."""
_OPTIONS = {
    option.field: option
    for option in OPTIONS
    if option.field
    in (
        *_FIXED,
        "use_distributed_optimizer",
        "recompute_activations",
        "num_layers_per_virtual_pipeline_stage",
    )
}
"""The flags that a question may have, by field."""

HINTS = {f"--{name}": f"--fix {name}=" for name in (*SETTINGS, *SHORTHANDS)}
"""What a setting that is written as a flag may mean."""

OWN: Arguments = {
    "--batch": {"metavar": "B=512", "help": "the rows of a step, of a program in a file"},
    "--size": {
        "action": "append",
        "default": [],
        "metavar": "S=128",
        "help": "the value of another symbol of a program in a file; may be repeated",
    },
    "--memory": {"metavar": "72GB", "help": "the memory of a device that may be used (default: all)"},
    "--reserve": {
        "metavar": "4GB",
        "help": "what a process needs of it besides its tensors: contexts, buffers of NCCL, waste (default: that of "
        "the hardware; 0 with --memory)",
    },
    "--top": {"type": whole(), "default": 5, "metavar": "N", "help": "how many plans to tell (default: 5)"},
    "--again": {
        "action": "store_true",
        "help": "print the `simulate` lines of the plans of the front, too; with --json, the front",
    },
    "--fix": {
        "action": "append",
        "default": [],
        "metavar": "NAME=VALUES",
        "help": f"restrict a setting, as zero=0,1 or schedule=gpipe; settings: {', '.join((*SETTINGS, *SHORTHANDS))}",
    },
    "--why-not": {
        "action": "append",
        "default": [],
        "metavar": "NAME=VALUE",
        "help": "tell why the best plan with this setting is not the first, as tp=8, 'pp=2 chunks=4' or "
        "recompute-granularity=full",
    },
    "--simulations": {
        "type": whole(0),
        "default": 8,
        "metavar": "N",
        "help": "the most full simulations, to prove which plan is best (default: 8)",
    },
    "--auto": {
        "action": "store_true",
        "help": "of a program in a file: find the layout of each value, not a strategy",
    },
    "--slices": {
        "type": whole(),
        "metavar": "MICROBATCHES",
        "help": "find stages of different sizes, on meshes of their own, for 1F1B with so many microbatches",
    },
    **CACHE,
    "--verify": {
        "action": "store_true",
        "help": "run a small model under the first plan on processes, and compare with its simulation",
    },
    "--json": {"action": "store_true", "help": "print the figures as JSON"},
    "--html": {"type": Path, "metavar": "FILE.html", "help": "write a page that needs no other file"},
    "--save": {"type": Path, "metavar": "FILE.json", "help": "write what was found"},
    "--load": {"type": Path, "metavar": "FILE.json", "help": "tell what --save wrote, without a search"},
}


def planned(program: str, words: Sequence[str]) -> int:
    """Find the best plans and tell them.  Returns 1 if none fits, or if a run differs from its simulation."""
    loads = any(word == "--load" or word.startswith("--load=") for word in words)
    began = perf_counter()
    parser = training_parser(
        program,
        "plan",
        "Finds the best split of a step of training over the devices of a described hardware.\n"
        "Flags that say how to split restrict the search.",
        (
            "gpt --num-layers 40 --hidden-size 5120 --num-attention-heads 40\n"
            "      --seq-length 2048 --vocab-size 51200 --global-batch-size 512\n"
            "      --hardware dgx-h100 --devices 64",
            "llama3-70b --global-batch-size 1024 --hardware dgx-h100 --devices 256\n"
            "      --memory 72GB --why-not tp=8 --save plans.json",
            "config.json --global-batch-size 512 --hardware dgx-h100 --devices 64",
            "loss.mlir --batch B=512 --hardware dgx-h100 --devices 16",
            "loss.mlir --batch B=512 --hardware dgx-h100 --devices 8 --auto",
            "gpt2-xl --global-batch-size 64 --hardware dgx-h100 --devices 8 --slices 8",
            "--load plans.json --json",
        ),
        OWN,
        optional=True,
        hints=HINTS,
    )
    arguments = parser.parse(words)
    if loads:
        _check_loads(parser, arguments)
    else:
        _check_given(arguments)
    for option in ("save", "html"):
        if (path := getattr(arguments, option)) is not None:
            writable(path, option)
    if arguments.auto or arguments.slices:
        return _without_strategies(program, arguments)
    document, trace = (loaded(arguments.load), None) if loads else _searched(program, arguments)
    if not loads:
        document["all_seconds"] = perf_counter() - began
    if arguments.save is not None:
        saved(document, arguments.save)
    if arguments.html is not None:
        with accessing(arguments.html, option="html"):
            write_page(document, trace, arguments.html)
    told = {**document, "plans": document["plans"][: arguments.top]}
    print(
        printed_json(told, again=arguments.again)
        if arguments.json
        else plan_text(told, again=arguments.again)
    )
    if arguments.html is not None and not arguments.json:
        print(f"\nThe page is {arguments.html}")
    if document["plans"]:
        return int(bool((document.get("verified") or {}).get("differences")))
    print(needs_text(document), file=sys.stderr)
    return 1


def _check_loads(parser: Parser, arguments: argparse.Namespace) -> None:
    """`WrongWords` for words that ask for a search, beside ``--load``, which makes none."""
    told = ("load", "top", "again", "json", "html", "save")
    given = vars(arguments)
    usual = {name: parser.get_default(name) for name in given}
    if asked := next(
        (name for name, value in given.items() if name not in told and value != usual[name]), None
    ):
        shown = (
            arguments.model
            if asked == "model"
            else f"--{asked.removeprefix('unchanging ').replace('_', '-')}"
        )
        raise WrongWords(f"--load tells what was found before, without a search; leave out {shown}")


def _check_given(arguments: argparse.Namespace) -> None:
    """`WrongWords` where the model or the hardware is left out; of what is none, the name comes first."""
    if arguments.model is not None and not is_model(arguments.model):
        with accessing(Path(arguments.model), "read"):
            Path(arguments.model).open("rb").close()
    given = {"model": arguments.model, "--hardware": arguments.hardware}
    if missing := [name for name, value in given.items() if value is None]:
        raise WrongWords(f"the following arguments are required: {', '.join(missing)}; see --help")


def _without_strategies(program: str, arguments: argparse.Namespace) -> int:
    """Find and tell the layouts of a program, or stages of different sizes.  Returns 1 if none fit."""
    asked = "--auto" if arguments.auto else "--slices"
    _check_without_strategies(arguments, asked)
    optimizer, flags = optimizer_and_flags(arguments)
    try:
        model, batch = _model_and_batch(arguments, flags)
        if given := [f"--{name.replace('_', '-')}" for name in flags.given("strategy")]:
            raise ValueError(
                f"{asked} finds {'the layouts' if arguments.auto else 'stages and their meshes'} itself; "
                f"leave out {given[0]}"
            )
        if arguments.slices:
            if isinstance(model, TransformerSpec):
                model = _in_precision(model, flags, arguments)
            return tell_slicings(model, batch, optimizer, arguments)
        if not isinstance(model, ir.Function):
            raise ValueError(f"--auto is for a program in a file; {arguments.model} is planned by strategies")
        with progress("finding layouts") as told:
            plans = find_plan(
                model,
                hardware=arguments.hardware,
                devices=arguments.devices,
                batch=batch,
                memory=arguments.memory,
                optimizer=optimizer,
                strategies="auto",
                progress=told,
            )
            bought = dual(plans.best) if plans and not arguments.json else None
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        raise WrongWords(str(error)) from None
    _tell_layouts(plans, bought, arguments, flags)
    return int(not plans)


def _check_without_strategies(arguments: argparse.Namespace, asked: str) -> None:
    """`WrongWords` for options that are for plans of strategies, or for the other search."""
    refused = ["fix", "why_not", "save", "load", "verify", "again"]
    if arguments.slices:
        refused.append("html")
    for name in refused:
        if getattr(arguments, name):
            raise WrongWords(
                f"--{name.replace('_', '-')} is for plans of strategies; leave it out with {asked}"
            )
    if arguments.slices and arguments.auto:
        raise WrongWords("--auto and --slices are two searches; leave one out")


def _tell_layouts(plans: Any, bought: Any, arguments: argparse.Namespace, flags: MegatronFlags) -> None:
    """Prints the layouts that were found, with what more memory would bring, and writes the page."""
    if arguments.html is not None:
        with accessing(arguments.html, option="html"):
            write_layouts(plans, arguments.html)
    if plans:
        tell_unchanging(arguments, flags)
    print(json.dumps(layouts_document(plans), indent=1) if arguments.json else plans)
    if bought is not None:
        print(f"\n{bought}")
    if arguments.html is not None and not arguments.json:
        print(f"\nThe page is {arguments.html}")
    if not plans:
        print(f"nothing fits: {plans.refused[0].reason}", file=sys.stderr)


def _searched(program: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], Trace | None]:
    optimizer, flags = optimizer_and_flags(arguments)
    try:
        model, batch = _model_and_batch(arguments, flags)
        asked = Asked(
            program, arguments.model, model, flags, arguments.hardware, arguments.devices, optimizer
        )
        if not isinstance(model, TransformerSpec):
            asked = replace(asked, rows=_rows(arguments)[0], sizes=sizes_of(arguments.size))
        fixed = fixed_settings(flags, model, arguments.fix)
        if isinstance(model, TransformerSpec):
            model = _in_precision(model, flags, arguments)
        else:
            fixed.setdefault("order", ORDER)  # as in the mesh of a strategy's text
        cache = cache_of(model, str(getattr(model, "dtype", ""))) if arguments.cache else None
        questions = {text: question(text, model, fixed) for text in arguments.why_not}
        with progress("listing the splits") as told, weights_told_once():
            plans = find_plan(
                model,
                hardware=arguments.hardware,
                devices=arguments.devices,
                batch=batch,
                memory=arguments.memory,
                reserve=arguments.reserve,
                optimizer=optimizer,
                gradients=flags.gradients,
                state=state_of(flags),
                simulations=arguments.simulations,
                progress=told,
                **fixed,
            )
            if not len(plans) and plans.tightest is None:
                raise ValueError(plans.refusals)
            document, trace = document_of(asked, plans, arguments.top, questions, told)
        document |= {} if cache is None else {"cache": cache}
        if arguments.verify and len(plans):
            document["verified"] = verified(plans.best.scaled_down(), plans.task.hardware).json()
    except (ValueError, TypeError, OSError) as error:
        raise WrongWords(str(error)) from None
    tell_remarks(asked.model)
    if len(plans):
        tell_unchanging(arguments, flags)
        if isinstance(model, ir.Function):
            tell_whole(plans.best.strategy, plans.best.step)
        idle = [
            name
            for name in flags.given("update")
            if name != "optimizer" and (name != "sgd_momentum" or flags.optimizer != "sgd")
        ]
        if update := [f"--{name.replace('_', '-')}" for name in idle]:
            print(f"without effect on a search: {', '.join(update)}", file=sys.stderr)
    return document, trace


def optimizer_and_flags(arguments: argparse.Namespace) -> tuple[SGD | Adam, MegatronFlags]:
    """What updates the weights, and the flags.  A program in a file has an optimizer in the form of `simulate`."""
    if is_model(arguments.model):
        flags = flags_of(arguments)
        return flags.trained_by, flags
    text, arguments.optimizer = arguments.optimizer, None
    if arguments.sgd_momentum is not None:
        raise WrongWords("--sgd-momentum is for a model by its name; leave it out")
    return ADAM_W if text is None else optimizer_of(text), flags_of(arguments)


def _model_and_batch(
    arguments: argparse.Namespace, flags: MegatronFlags
) -> tuple[TransformerSpec | ir.Function, int]:
    """The model of the first word, a name or a file, and the rows of a step."""
    if is_model(arguments.model):
        if arguments.size:
            raise ValueError("--size is for a program in a file; a model by its name has flags")
        if arguments.batch is not None:
            raise ValueError(
                "--batch is for a program in a file; a model by its name has --global-batch-size"
            )
        if flags.global_batch_size is None:
            raise ValueError("--global-batch-size must say how many sequences a step has")
        return flags.spec(named_model(arguments.model, flags.seq_length)), flags.global_batch_size
    if given := [
        f"--{name.replace('_', '-')}"
        for name in (*flags.given("model"), *flags.given())
        if name in (*flags.given("model"), *_DTYPES, "global_batch_size")
    ]:
        raise ValueError(f"a program in a file has its own figures, dtypes and batch; leave out {given[0]}")
    name, rows = _rows(arguments)
    program, sizes = program_in(Path(arguments.model), sizes_of(arguments.size))
    if not isinstance(program, ir.Function):
        raise ValueError(
            f"{arguments.model} is cut into a pipeline already; a plan is for the program of a loss"
        )
    return loss_of_rows(program, name, sizes), rows


def _in_precision(
    model: TransformerSpec, flags: MegatronFlags, arguments: argparse.Namespace
) -> TransformerSpec:
    dtype = "float32" if flags.fp32 else "float16" if flags.fp16 else "bfloat16"
    check_rate(sized_hardware(arguments.hardware, arguments.devices), dtype)
    return replace(model, dtype=dtype)


def _rows(arguments: argparse.Namespace) -> tuple[str, int]:
    """The symbol for the rows of a program in a file, and their number."""
    name, _, rows = (arguments.batch or "").partition("=")
    if not name or not rows.isdecimal() or not 0 < int(rows) < 10**9:
        raise ValueError(
            "--batch must give the rows of a step, as the symbol that the program has for them and a "
            f"number: {ROWS}=512"
        )
    return name, int(rows)


def fixed_settings(
    flags: MegatronFlags, model: TransformerSpec | ir.Function, fix: Sequence[str]
) -> dict[str, Any]:
    """The settings of plans that the flags and ``--fix`` restrict.  ``ValueError`` where they contradict each other."""
    given = flags.given("strategy") | {
        name: value for name, value in flags.given("batch").items() if name != "global_batch_size"
    }
    if unknown := [f"--{name.replace('_', '-')}" for name in given if name not in (*_FIXED, *_OTHER)]:
        raise ValueError(f"a search cannot be restricted by {', '.join(unknown)}; --fix restricts settings")
    fixed = {setting: given[name] for name, setting in _FIXED.items() if name in given}
    sharding = StateSharding.of(flags)
    if sharding.stage:
        fixed["zero"] = sharding.stage
    if sharding.outer_stage:
        raise ValueError("a search cannot be restricted by --outer-dp-sharding-strategy optim")
    if flags.recompute_activations:
        fixed.setdefault("recompute", "selective")
    if (each := flags.num_layers_per_virtual_pipeline_stage) is not None:
        stages = each * fixed.get("pp", 0)
        layers = model.layers if isinstance(model, TransformerSpec) else 0
        if not stages or layers % stages or not layers:
            raise ValueError(
                "--num-layers-per-virtual-pipeline-stage restricts a search with a "
                f"--pipeline-model-parallel-size such that both divide the {layers} layers"
            )
        fixed |= {"chunks": layers // stages, "schedule": "interleaved_1f1b"}
    more = spelled_out(settings(fix))
    if both := sorted({*fixed} & {*more}):
        raise ValueError(f"--fix {both[0]} and a flag both restrict {both[0]}")
    return fixed | more


def question(text: str, model: TransformerSpec | ir.Function, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a ``--why-not``: settings of plans, or flags of Megatron-LM without dashes in front.

    A flag without a value is on; with 0 it is off.  ``ValueError`` for what is neither.
    """
    flags, found = dict[str, Any](), dict[str, Any]()
    for each in re.split(r"\s+(?=[a-z-]+=|-*[a-z]+-[a-z-]+(?:\s|$))", text.strip()):
        name, _, value = each.removeprefix("--").partition("=")
        option = _OPTIONS.get(name.replace("-", "_"))
        if option is None:
            more = settings([each])
            if twice := next((name for name in more if name in found), None):
                raise ValueError(
                    f"--why-not gives {twice} twice: it asks for one value; several questions are several "
                    "--why-not"
                )
            found |= more
        elif not option.switch:
            flags[option.field] = value if option.choices else int(value) if value.isdecimal() else value
        elif value in ("", "1"):
            flags[option.field] = True
        elif value == "0" and option.field in (*_FIXED, "use_distributed_optimizer"):
            found |= {_FIXED.get(option.field, "zero"): False if option.field in _FIXED else 0}
        else:
            raise ValueError(f"--why-not {name} takes no value but 0 and 1, got {value!r}")
    if "num_layers_per_virtual_pipeline_stage" in flags and isinstance(fixed.get("pp"), int):
        flags.setdefault("pipeline_model_parallel_size", fixed["pp"])
    return {**fixed_settings(MegatronFlags(**flags), model, []), **found}


def settings(texts: Sequence[str]) -> dict[str, Any]:
    """Settings by name, from texts such as ``tp=8`` and ``zero=0,1``; several values are a list."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ValueError(f"a setting is a name and a value, as tp=8; got {shown(text)}")
        if name in found:
            raise ValueError(
                f"{name} is given twice; several values of a setting are one list, as {name}=1,2: got "
                f"{shown(text)}"
            )
        several = [_value(name, each) for each in values.split(",")]
        found[name] = several if len(several) > 1 else several[0]
    return found


def _value(name: str, text: str) -> Any:
    if name in SETTINGS and SETTINGS[name].is_switch and text in ("0", "1"):
        return text == "1"
    return int(text) if text.isdecimal() and len(text) < 10 else text
