"""`plan`: the best split of a training step over described hardware, and why it is the best."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from parallelism import ir
from parallelism.display import Told, progress
from parallelism.hardware import sized_hardware
from parallelism.models import TransformerSpec
from parallelism.planning import SETTINGS, Plan, Plans, find_plan
from parallelism.planning.search import AUTO_SECONDS, Stopped, machine_of
from parallelism.rarely_collected import rarely_collected
from parallelism.training import MegatronFlags
from parallelism.transforms.words import SHORTHANDS
from vcluster.cli.command_line import Arguments, Parser, WrongWords, accessing, required, whole, writable
from vcluster.cli.megatron_words import (
    is_model,
    searched_hardware,
    tell_remarks,
    tell_unchanging,
    training_parser,
)
from vcluster.cli.plan_document import document_of, loaded, printed_json, saved
from vcluster.cli.plan_text import needs_text, plan_text, write_page
from vcluster.cli.program_files import tell_whole, weights_told_once
from vcluster.cli.serving.cache_words import CACHE, cache_of
from vcluster.cli.sweeps.imperfect_words import IMPERFECT, imperfections_of
from vcluster.cli.sweeps.mixed_clusters import MIXED, check_mixed, tell_mixed
from vcluster.cli.sweeps.question import Search, in_precision, model_and_batch, optimizer_and_flags, question
from vcluster.cli.sweeps.words import ARGUMENTS as SWEEP, batches_in, take_apart

if TYPE_CHECKING:
    from parallelism.budgets.degraded import Degraded

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
    "--frozen": {
        "metavar": "NAMES",
        "help": "of a program in a file: weights that are not trained, or what their names begin with, as p.table,p.encoder",
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
    **SWEEP,
    **IMPERFECT,
    **MIXED,
    "--load": {"type": Path, "metavar": "FILE.json", "help": "tell what --save wrote, without a search"},
}


@rarely_collected()
def planned(program: str, words: Sequence[str]) -> int:
    """Find the best plans and tell them.  Returns 1 if none fits, or if a run differs from its simulation."""
    began = perf_counter()
    loads = any(word == "--load" or word.startswith("--load=") for word in words)
    arguments = _arguments(program, words, loads=loads)
    if arguments.other is not None:
        return tell_mixed(program, arguments)
    if arguments.tokens is not None:
        from vcluster.cli.sweeps.swept import swept  # what only some searches need is loaded by them

        return swept(program, arguments)
    if arguments.auto or arguments.slices:
        return _without_strategies(program, arguments)
    document, first = (loaded(arguments.load), None) if loads else _searched(program, arguments)
    if not loads:
        document["all_seconds"] = perf_counter() - began
    if arguments.save is not None:
        saved(document, arguments.save)
    if arguments.html is not None:
        with accessing(arguments.html, option="html"):
            write_page(document, None if first is None else first.figures.trace, arguments.html)
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


def _arguments(program: str, words: Sequence[str], *, loads: bool) -> argparse.Namespace:
    """The words, checked as far as no search is needed.  `WrongWords`."""
    parser = _parser(program)
    words, batches = batches_in(words)
    arguments = parser.parse(words)
    if loads:
        _check_loads(parser, arguments)
    else:
        _check_given(arguments)
    check_mixed(arguments)
    arguments.batches = batches
    take_apart(arguments)
    for option in ("save", "html"):
        if (path := getattr(arguments, option)) is not None:
            writable(path, option)
    return arguments


@cache  # of some hundred words, and a process may serve many commands
def _parser(program: str) -> Parser:
    """The parser of all words of `plan`."""
    return training_parser(
        program,
        "plan",
        "Finds the best split of a step of training over the devices of a described\nhardware."
        " Flags that say how to split restrict the search.",
        (
            "gpt --num-layers 40 --hidden-size 5120 \\\n"
            "      --num-attention-heads 40 --seq-length 2048 --vocab-size 51200 \\\n"
            "      --global-batch-size 512 --hardware dgx-h100 --devices 64",
            "llama3-70b --global-batch-size 1024 \\\n"
            "      --hardware dgx-h100 --devices 256 --memory 72GB --why-not tp=8 \\\n"
            "      --save plans.json",
            "config.json --global-batch-size 512 \\\n      --hardware dgx-h100 --devices 64",
            "loss.mlir --batch B=512 \\\n      --hardware dgx-h100 --devices 16",
            "loss.mlir --batch B=512 \\\n      --hardware dgx-h100 --devices 8 --auto",
            "gpt2-xl --global-batch-size 64 \\\n      --hardware dgx-h100 --devices 8 --slices 8",
            "--load plans.json --json",
            "llama2-13b --tokens 1T --days 30 \\\n"
            "      --global-batch-size 1024 --price 2.50 \\\n"
            "      --hardware dgx-h100,h200-node --devices 64,128,256",
        ),
        OWN,
        optional=True,
        hints=HINTS,
    )


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
        raise WrongWords(required(", ".join(missing)))


def _without_strategies(program: str, arguments: argparse.Namespace) -> int:
    """Find and tell the layouts of a program, or stages of different sizes.  Returns 1 if none fit."""
    asked = "--auto" if arguments.auto else "--slices"
    _check_without_strategies(arguments, asked)
    optimizer, flags = optimizer_and_flags(arguments)
    try:
        model, batch = model_and_batch(arguments, flags)
        if given := [f"--{name.replace('_', '-')}" for name in flags.given("strategy")]:
            raise ValueError(
                f"{asked} finds {'the layouts' if arguments.auto else 'stages and their meshes'} itself; "
                f"leave out {given[0]}"
            )
        if arguments.slices:
            if isinstance(model, TransformerSpec):
                model = in_precision(model, flags, arguments)
            from vcluster.cli.sliced import tell_slicings

            return tell_slicings(model, batch, optimizer, arguments)
        if not isinstance(model, ir.Function):
            raise ValueError(f"--auto is for a program in a file; {arguments.model} is planned by strategies")
        from parallelism.auto_sharding import dual

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
            bought = dual(plans.best, time_limit=AUTO_SECONDS) if plans and not arguments.json else None
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        raise WrongWords(str(error)) from None
    _tell_layouts(plans, bought, arguments, flags)
    return int(not plans)


def _check_without_strategies(arguments: argparse.Namespace, asked: str) -> None:
    """`WrongWords` for options that are for plans of strategies, or for the other search."""
    refused = ["fix", "why_not", "save", "load", "verify", "again"]
    refused += ["slow_links", "slow_devices", "lost_devices", "jitter"]
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
    from vcluster.cli.layouts_page import layouts_document, write_layouts

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


def _plans(search: Search, arguments: argparse.Namespace, told: Told) -> "tuple[Plans, Degraded | None]":
    """The plans on the hardware as it is, and, where it is imperfect, those on the perfect one beside them."""

    def on(hardware: Any, devices: int | None, figures: int = 1) -> Plans:
        return find_plan(
            search.model,
            hardware=hardware,
            devices=devices,
            batch=search.batch,
            figures=figures,
            progress=told,
            **search.options,
        )

    wrong = imperfections_of(arguments)
    hardware = searched_hardware(arguments.hardware, search.model)
    if not wrong:
        try:
            return on(hardware, arguments.devices, arguments.top), None
        except Stopped as stopped:
            print(f"{stopped}: these are the plans so far; Ctrl-C again ends all", file=sys.stderr)
            return stopped.plans, None
    from parallelism.budgets.degraded import Degraded, search_degraded

    machine_of(hardware, arguments.devices)  # says how many devices there are, or refuses
    found = search_degraded(on, hardware, arguments.devices, search.batch, wrong)
    return (found.plans, found) if isinstance(found, Degraded) else (found, None)


def _searched(program: str, arguments: argparse.Namespace) -> tuple[dict[str, Any], Plan | None]:
    try:
        search = Search.of(program, arguments)
        search.check_rate(sized_hardware(arguments.hardware, arguments.devices))
        asked, flags, model = search.asked, search.asked.flags, search.model
        cache = cache_of(model, str(getattr(model, "dtype", ""))) if arguments.cache else None
        questions = {text: question(text, model, search.fixed) for text in arguments.why_not}
        with progress("listing the splits") as told, weights_told_once():
            plans, degraded = _plans(search, arguments, told)
            if not len(plans) and plans.tightest is None:
                raise ValueError(plans.refusals)
            if degraded is not None:
                asked = replace(asked, devices=plans.task.devices)
            document, first = document_of(asked, plans, arguments.top, questions, told)
            document |= {} if degraded is None else {"imperfect": {**degraded.json(), "text": degraded.text}}
        document |= {} if cache is None else {"cache": cache}
        if arguments.verify and len(plans):
            from vcluster.runs.verified import verified

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
    return document, first
