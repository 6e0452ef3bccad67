"""The words of `simulate gpt` and `plan gpt`: Megatron-LM's flags, the hardware, and the number of devices."""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from types import MappingProxyType
from typing import Any

from parallelism.display import WIDTH
from parallelism.hardware import Hardware, sized_hardware, with_usual_stack
from parallelism.hardware.fields import shown
from parallelism.models import TRANSFORMERS, TransformerSpec, from_config, transformer
from parallelism.models.published import published_name
from parallelism.spelling import closest, closest_few
from parallelism.training import ARGUMENTS, OPTIONS, UNCHANGING, MegatronFlags, Option, launch_flags
from parallelism.training.megatron_options import UNMODELLED, WITHOUT_EFFECT
from vcluster.cli.command_line import (
    Arguments,
    Parser,
    WrongWords,
    accessing,
    choice,
    hardware_of,
    whole,
)

PLAIN = "gpt"
"""The model whose figures are all given by flags."""

PRECISIONS = {"float32": "--fp32", "float16": "--fp16", "bfloat16": "--bf16"}
"""The flag for each dtype that a model by its name can have."""

DEVICES = dict.fromkeys(("--gpus", "--num-gpus", "--ngpus", "--world-size", "--num-devices"), "--devices")
"""Flags elsewhere for the number of devices."""

LONGEST_CHOICES = 40
"""Longer lists of choices stand behind an option's help, not behind its name, which is in one line."""

MOST_BYTES = 1 << 20
"""A file of flags is not larger."""

SCRIPT: Arguments = {
    "--args-file": {
        "type": Path,
        "metavar": "FILE",
        "help": "a launch script of Megatron-LM: its flags are read, and nothing is run; flags here win",
    },
    "--set": {
        "action": "append",
        "default": [],
        "metavar": "NAME=VALUE",
        "help": "the value of a name, or of a flag, in the launch script; may be repeated",
    },
    "--strict-flags": {
        "action": "store_true",
        "help": "refuse flags that change time or memory and are not modelled, rather than name them",
    },
}


class TrainingParser(Parser):
    """A parser whose words may name a launch script: its flags stand before those of the command line."""

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        found = super().parse(words)
        given: dict[str, str] = {}
        for text in found.set:
            name, equals, value = text.partition("=")
            if not name or not equals:
                raise WrongWords(f"--set needs a name and a value, as in --set NAME=8; got {shown(text)}")
            given[name] = value
        if found.args_file is None and not given:
            return found
        try:
            script = launch_flags("" if found.args_file is None else script_text(found.args_file), given)
        except ValueError as error:
            where = "" if found.args_file is None else f"{found.args_file}: "
            raise WrongWords(f"{where}{error}") from None
        before = [] if not words or words[0].startswith("-") else words[:1]
        found = super().parse([*before, *script.words, *words[len(before) :]])
        for name in script.others:
            setattr(found, f"unchanging {name}", True)
        return found


def script_text(path: Path) -> str:
    """The text of a launch script.  `WrongWords` for what is no text of a moderate size."""
    with accessing(path, "read", "args-file"):
        if path.exists() and not path.is_file():
            raise WrongWords(f"--args-file: {path} cannot be read: it is no file")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise WrongWords(f"--args-file: {path} has more than {MOST_BYTES:,} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WrongWords(f"--args-file: {path} is not text in UTF-8 at byte {error.start}") from None
    if "\0" in text:
        raise WrongWords(
            f"--args-file: {path} has a zero byte in line {text.count(chr(10), 0, text.index(chr(0))) + 1}"
        )
    return text


_FILE = re.compile(r".*\.[a-z]\w*", re.IGNORECASE | re.DOTALL)
"""A word that ends as the name of a file does.  The last part of ``llama3.1-8b`` is none, nor is that of ``a/b``."""


def is_model(word: str) -> bool:
    """Whether a word names a model: a published one, or a config.json or a folder with one; and no other file.

    Raises `WrongWords` with the nearest models if it is neither, unless it ends as a file does: then it is a file that
    is missing.
    """
    if word.startswith("-"):
        return False
    if config_path(word) is not None:
        return True
    if os.path.exists(word):  # noqa: PTH110 - False for what cannot be a name; a Path raises OSError
        return False
    known = word.lower().replace("_", "-")
    if known == PLAIN or published_name(word) is not None:
        return True
    if not _FILE.fullmatch(word):
        models = (PLAIN, *TRANSFORMERS)
        nearest = closest(known, models, cutoff=0.9)
        near = closest_few(known, models) if nearest is None else [nearest]
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; the models are {', '.join(models)}"
        raise WrongWords(f"there is neither a model nor a file {shown(word)}{hint}")
    return False


def config_path(word: str) -> Path | None:
    """The config.json that a word says, as a file or a folder with one; None if there is neither."""
    if os.path.isdir(word):  # noqa: PTH112 - as above
        path = Path(word, "config.json")
        if not path.is_file():
            raise WrongWords(f"the folder {shown(word)} has no config.json of a model")
        return path
    return Path(word) if word.endswith(".json") and os.path.isfile(word) else None  # noqa: PTH113 - as above


def training_parser(
    program: str,
    command: str,
    description: str,
    examples: Sequence[str],
    own: Arguments,
    *,
    optional: bool = False,
    hints: Mapping[str, str] = MappingProxyType({}),
) -> Parser:
    """A parser with all flags of Megatron-LM that are known, and those of the command's ``own``.

    ``optional``: model and hardware may be left out.  ``hints``, as of `Parser`, are beside those for the devices.
    """
    parser = TrainingParser(
        {
            "model": {
                "metavar": "MODEL",
                **({"nargs": "?"} if optional else {}),
                "help": f"{PLAIN}, with all its figures as flags; or a published model, as llama3-70b or Qwen/Qwen3-8B; or "
                "the config.json of a Hugging Face model, or a folder with one.  Flags change figures",
            },
            "--hardware": {
                "required": not optional,
                "metavar": "NAME",
                "help": "a preset (see `hardware`), or a file. A Transformer gets the stack of its training there, as "
                "dgx-h100+megatron-core-h100; dgx-h100+plain has none",
            },
            "--devices": {
                "type": whole(),
                "metavar": "N",
                "help": "number of devices (default: all of the hardware)",
            },
            **SCRIPT,
            **own,
        },
        {**DEVICES, **hints},
        prog=f"{program} {command}",
        usage=f"{program} {command} MODEL --hardware NAME [--devices N] [flags]",
        description="\n".join(
            [description, "", "examples:", *(f"  {program} {command} {example}" for example in examples)]
        ),
        epilog="\n".join(_behind_the_words()),
    )
    _add_megatron(parser, own)
    return parser


def _behind_the_words() -> list[str]:
    """The lines at the end of the help."""
    unchanging = wrap(
        f"The other {len(UNCHANGING)} arguments of Megatron-LM are accepted and change nothing here; the output names "
        "those that are given, and says which of them would change the time or the memory.",
        WIDTH,
    )
    utilization = wrap(
        "MFU counts the products of the model with all scores of attention, HFU what the devices compute: also what "
        "runs again, and not the scores that a mask hides from a fused kernel. At long context HFU may be the smaller.",
        WIDTH,
    )
    names = wrap(", ".join(TRANSFORMERS), WIDTH - 8)
    models = f"models: {PLAIN}" + "\n        ".join(["", *names])
    return [models, "", *utilization, "", *unchanging]


def _add_megatron(parser: Parser, own: Arguments) -> None:
    """The flags of Megatron-LM: those that have a meaning here, and those that change nothing."""
    group = parser.add_argument_group("flags of Megatron-LM")
    for option in OPTIONS:
        group.add_argument(f"--{option.name}", **_keywords(option))
    for name, count in UNCHANGING.items():
        if f"--{name}" in own:  # `--save` of a plan writes the plans
            continue
        values: dict[str, Any] = {"action": "store_true"}
        if count != "0":
            values = {"nargs": int(count) if count.isdecimal() else count}
        group.add_argument(
            f"--{name}",
            dest=f"unchanging {name}",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
            **values,
        )


def _keywords(option: Option) -> dict[str, Any]:
    shown: dict[str, Any] = {"help": option.help}
    if option.switch:
        return shown | {"action": "store_true", "default": None}
    if option.name == "optimizer":  # a program in a file takes others, with a rate
        return shown | {"metavar": "|".join(option.choices)}
    if option.choices:
        known = option.choices + option.unmodelled
        named = "|".join(option.choices)
        if len(named) > LONGEST_CHOICES:
            shown["help"] += f"; NAME is {', '.join(option.choices)}"
            named = "NAME"
        return shown | {"type": choice(known), "metavar": named}
    if option.many:
        return shown | {"metavar": "TEXT", "nargs": "+"}
    if option.text:
        return shown | {"metavar": "TEXT"}
    if option.rate or option.amount:
        return shown | {"type": float, "metavar": "RATE" if option.rate else "X"}
    return shown | {"type": whole(), "metavar": "N"}


def flags_of(arguments: argparse.Namespace) -> MegatronFlags:
    """The flags of Megatron-LM that were given.

    `WrongWords` for wrong ones, and with ``--strict-flags`` for those that are known and not modelled.
    """
    try:
        given = {option.field: getattr(arguments, option.field) for option in OPTIONS}
        texts = {name: " ".join(value) for name, value in given.items() if isinstance(value, list)}
        flags = MegatronFlags(**given | texts)
    except ValueError as error:
        raise WrongWords(str(error)) from None
    if arguments.strict_flags and (left_out := [*_given(arguments, UNMODELLED), *flags.unmodelled]):
        raise WrongWords(f"--strict-flags: known and not modelled: {', '.join(left_out)}")
    return flags


def _given(arguments: argparse.Namespace, kind: str) -> list[str]:
    """The given flags that change nothing here, of a kind of `Argument`."""
    return [
        f"--{name}"
        for name in UNCHANGING
        if ARGUMENTS[name].kind == kind and hasattr(arguments, f"unchanging {name}")
    ]


def tell_unchanging(arguments: argparse.Namespace, flags: MegatronFlags, idle: Sequence[str] = ()) -> None:
    """Names on stderr the given flags of Megatron-LM that change nothing: once all words are known to be right.

    ``idle`` are the fields of others that change nothing on the mesh.
    """
    without = [*_given(arguments, WITHOUT_EFFECT), *(f"--{name.replace('_', '-')}" for name in idle)]
    if without:
        print(f"without effect on a simulated step: {', '.join(without)}", file=sys.stderr)
    if left_out := [*_given(arguments, UNMODELLED), *flags.unmodelled]:
        print(f"known, and not modelled: {', '.join(left_out)}", file=sys.stderr)


def named_model(word: str, sequence: int | None = None) -> TransformerSpec | None:
    """The model of this name, or of this config.json, whose sequences may have another length; None for `gpt`.

    ``ValueError`` for a file that cannot be read.
    """
    path = config_path(word)
    if path is not None:
        try:
            return from_config(path, sequence=sequence)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    return None if word.lower() == PLAIN else transformer(word)


def tell_remarks(model: object) -> None:
    """Print the remarks that were made while a model's config.json was read, to stderr."""
    if isinstance(model, TransformerSpec):
        for remark in model.remarks:
            print(remark, file=sys.stderr)


def tokens_text(word: str, flags: MegatronFlags) -> str:
    """How large the vocabulary of a model is, and what it was padded from."""
    named = named_model(word, flags.seq_length)
    given = flags.padded_vocab_size or flags.vocabulary(named) or (named.vocabulary if named else 0)
    padded = flags.spec(named).vocabulary
    return f"vocabulary {padded}" + (f" (padded from {given})" if padded != given else "")


def hardware_and_devices(arguments: argparse.Namespace) -> tuple[Hardware, int]:
    """The hardware of ``--hardware`` with room for ``--devices``, and their number."""
    name, devices = arguments.hardware, arguments.devices
    try:
        hardware: Hardware | None = hardware_of(name) if name == "host" else sized_hardware(name, devices)
    except (ValueError, OSError) as error:
        raise WrongWords(f"--hardware: {error}") from None
    assert hardware is not None  # `hardware_of` refuses an uncalibrated host
    return hardware, hardware.ranks if devices is None else devices


def searched_hardware(name: str, model: object) -> str:
    """The hardware of a model; for a Transformer with the stack of its training there (`with_usual_stack`)."""
    if not isinstance(model, TransformerSpec):
        return name
    return with_usual_stack(name, experts=model.experts is not None)


def tell_all_devices(arguments: argparse.Namespace, devices: int) -> None:
    """Says on stderr how many devices a preset has, where no word says it."""
    if arguments.devices is None and arguments.hardware in Hardware.presets():
        print(f"without --devices all {devices} devices of {arguments.hardware} are used", file=sys.stderr)


def check_few_bits(hardware: Hardware, products: str) -> None:
    """``ValueError`` if products are in float8 or float4 and the hardware has no rate for it."""
    if products in ("float8", "float4") and products not in hardware.flops_per_second:
        raise ValueError(f"{hardware.name} has no rate for {products}; leave out --fp{products[-1]}-format")


def check_rate(hardware: Hardware, dtype: str) -> None:
    """``ValueError`` if the hardware has no rate for the dtype that the flags give a model."""
    rated = [flag for name, flag in PRECISIONS.items() if name in hardware.flops_per_second]
    if rated and PRECISIONS[dtype] not in rated:
        raise ValueError(f"{hardware.name} has no rate for {dtype}; give {' or '.join(rated)}")
