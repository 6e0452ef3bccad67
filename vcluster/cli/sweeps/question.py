"""What a search is asked for: the model, the batch and the settings of plans, from the words of `plan`."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallelism import ir
from parallelism.hardware import Hardware, sized_hardware
from parallelism.hardware.fields import shown
from parallelism.models import TransformerSpec
from parallelism.planning import SETTINGS
from parallelism.planning.dealing import spelled_out
from parallelism.planning.settings import check_names
from parallelism.training import OPTIONS, MegatronFlags
from parallelism.training.precision_flags import STATE, precision_of, products_of, state_of
from parallelism.training.state_sharding import StateSharding
from parallelism.training.training_run import ADAM_W, ROWS
from parallelism.transforms import SGD, Adam
from vcluster.cli.command_line import WrongWords
from vcluster.cli.megatron_words import check_few_bits, check_rate, flags_of, is_model, named_model
from vcluster.cli.plan_document import Asked
from vcluster.cli.program_files import held, loss_of_rows, optimizer_of, program_in, sizes_of
from vcluster.cli.sweeps.imperfect_words import imperfections_of, words_of_faults

ORDER = "pp dp ep cp tp"
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
    "fp8",
    "fp8_format",
    "fp8_recipe",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_param_gather",
    "fp4",
    "fp4_format",
    "fp4_recipe",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
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


@dataclass(frozen=True)
class Search:
    """What is searched for, on whatever hardware."""

    asked: Asked
    model: TransformerSpec | ir.Function
    batch: int
    options: Mapping[str, Any]
    """Further arguments of `find_plan`: those that the words fix among them."""
    fixed: Mapping[str, Any]
    """The settings that the words fix."""

    @classmethod
    def of(cls, program: str, arguments: argparse.Namespace) -> "Search":
        """The search of the words.  ``ValueError``, ``TypeError``, ``OSError`` or `WrongWords` for wrong ones."""
        optimizer, flags = optimizer_and_flags(arguments)
        model, batch = model_and_batch(arguments, flags)
        asked = Asked(
            program, arguments.model, model, flags, arguments.hardware, arguments.devices, optimizer
        )
        asked = replace(asked, faults=words_of_faults(imperfections_of(arguments)))
        if not isinstance(model, TransformerSpec):
            asked = replace(
                asked,
                rows=rows_of(arguments)[0],
                sizes=sizes_of(arguments.size),
                frozen=arguments.frozen or "",
            )
        fixed = fixed_settings(flags, model, arguments.fix)
        if isinstance(model, TransformerSpec):
            model = replace(model, dtype=dtype_of(flags))
        else:
            fixed.setdefault("order", ORDER)  # as in the mesh of a strategy's text
        options = {
            "memory": arguments.memory,
            "reserve": arguments.reserve,
            "optimizer": optimizer,
            **dtypes_of(flags),
            "simulations": arguments.simulations,
            **fixed,
        }
        return cls(asked, model, batch, options, fixed)

    def check_rate(self, hardware: Hardware) -> None:
        """``ValueError`` if the hardware has no rate for the dtype of the model."""
        if isinstance(self.model, TransformerSpec):
            check_rate(hardware, str(self.model.dtype))
            precision = self.options.get("precision")
            check_few_bits(hardware, precision.products_dtype if precision is not None else "")


def dtypes_of(flags: MegatronFlags) -> dict[str, Any]:
    """What the flags say about dtypes, as arguments of `find_plan`."""
    if products_of(flags):
        return {"precision": precision_of(flags)}
    return {"gradients": flags.gradients, "state": state_of(flags)}


def optimizer_and_flags(arguments: argparse.Namespace) -> tuple[SGD | Adam, MegatronFlags]:
    """What updates the weights, and the flags.  A program in a file has an optimizer in the form of `simulate`."""
    if is_model(arguments.model):
        flags = flags_of(arguments)
        return flags.trained_by, flags
    text, arguments.optimizer = arguments.optimizer, None
    if arguments.sgd_momentum is not None:
        raise WrongWords("--sgd-momentum is for a model by its name; leave it out")
    return ADAM_W if text is None else optimizer_of(text), flags_of(arguments)


def model_and_batch(
    arguments: argparse.Namespace, flags: MegatronFlags
) -> tuple[TransformerSpec | ir.Function, int]:
    """The model of the first word, a name or a file, and the rows of a step."""
    if is_model(arguments.model):
        if arguments.size:
            raise ValueError("--size is for a program in a file; a model by its name has flags")
        if arguments.frozen:
            raise ValueError("--frozen is for a program in a file; a model by its name has --lora-rank")
        if arguments.batch is not None:
            raise ValueError(
                "--batch is for a program in a file; a model by its name has --global-batch-size"
            )
        if flags.global_batch_size is None:
            raise ValueError(
                "--global-batch-size must say how many sequences a step has, as --global-batch-size 512"
            )
        return flags.spec(named_model(arguments.model, flags.seq_length)), flags.global_batch_size
    if given := [
        f"--{name.replace('_', '-')}"
        for name in (*flags.given("model"), *flags.given())
        if name in (*flags.given("model"), *_DTYPES, "global_batch_size")
    ]:
        raise ValueError(f"a program in a file has its own figures, dtypes and batch; leave out {given[0]}")
    name, rows = rows_of(arguments)
    program, sizes = program_in(Path(arguments.model), sizes_of(arguments.size))
    if not isinstance(program, ir.Function):
        raise ValueError(
            f"{arguments.model} is cut into a pipeline already; a plan is for the program of a loss"
        )
    return held(arguments, loss_of_rows(program, name, sizes)), rows


def dtype_of(flags: MegatronFlags) -> str:
    """The dtype of products that flags give a model by its name."""
    if flags.fp32:
        return "float32"
    return "float16" if flags.fp16 else "bfloat16"


def in_precision(
    model: TransformerSpec, flags: MegatronFlags, arguments: argparse.Namespace
) -> TransformerSpec:
    """The model in the dtype of the flags.  ``ValueError`` if the hardware has no rate for it."""
    check_rate(sized_hardware(arguments.hardware, arguments.devices), dtype_of(flags))
    return replace(model, dtype=dtype_of(flags))


def rows_of(arguments: argparse.Namespace) -> tuple[str, int]:
    """The symbol for the rows of a program in a file, and their number."""
    name, _, rows = (arguments.batch or "").partition("=")
    if not name or not rows.isdecimal() or not 0 < int(rows) < 10**9:
        raise ValueError(
            "--batch must give the rows of a step, as the symbol that the program has for them and a "
            f"number: {ROWS}=512{f', got {arguments.batch!r}' if arguments.batch else ''}"
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
            flags[option.field] = int(value) if value.isdecimal() and not option.choices else value
        elif value in ("", "1"):
            flags[option.field] = True
        elif value == "0" and option.field in (*_FIXED, "use_distributed_optimizer"):
            found |= {_FIXED.get(option.field, "zero"): False if option.field in _FIXED else 0}
        else:
            raise ValueError(f"--why-not {name} takes no value but 0 and 1, got {value!r}")
    if "num_layers_per_virtual_pipeline_stage" in flags and isinstance(fixed.get("pp"), int):
        flags.setdefault("pipeline_model_parallel_size", fixed["pp"])
    check_names(spelled_out(found))
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
