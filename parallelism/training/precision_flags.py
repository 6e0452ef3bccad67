"""The dtypes of a training run, as Megatron-LM's flags say them: of weights, gradients, main copies and moments."""

from __future__ import annotations

from typing import Any

from parallelism.training.flag_values import FlagValues
from parallelism.transforms import MixedPrecision

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Words of Megatron-LM for dtypes."""
STATE = {"main": "main_params_dtype", "mean": "exp_avg_dtype", "square": "exp_avg_sq_dtype"}
"""The fields of the flags about state, by the fields of `MixedPrecision`."""


def gradients_of(flags: FlagValues) -> str:
    """The dtype in which gradients are added up, over microbatches and devices, and given to the optimizer.

    ``ValueError`` for flags that exclude each other, as in Megatron-LM.
    """
    in_main = flags.main_grads_dtype == "bf16"
    if not (flags.grad_reduce_in_bf16 or in_main):
        return "float32"
    narrow = "--grad-reduce-in-bf16" if flags.grad_reduce_in_bf16 else "--main-grads-dtype bf16"
    if flags.accumulate_allreduce_grads_in_fp32:
        raise ValueError(f"{narrow} and --accumulate-allreduce-grads-in-fp32 exclude each other")
    if flags.fp16 or flags.fp32:
        other = "--fp16" if flags.fp16 else "--fp32"
        raise ValueError(f"{narrow} needs weights in bfloat16; leave out {other}")
    if in_main and not flags.use_precision_aware_optimizer:
        raise ValueError("--main-grads-dtype bf16 needs --use-precision-aware-optimizer")
    return "bfloat16"


def state_of(flags: FlagValues) -> dict[str, str]:
    """The dtypes in which parts of the state are kept, by the fields of `MixedPrecision`; those in float32 are left out.

    ``ValueError`` for flags that need others, as in Megatron-LM.
    """
    found: dict[str, str] = {}
    for part, field in STATE.items():
        word = getattr(flags, field)
        dtype = DTYPES.get(word or "", "float32")  # a word that is not modelled says nothing here
        if dtype == "float32":
            continue
        flag = f"--{field.replace('_', '-')} {word}"
        if not flags.use_precision_aware_optimizer:
            raise ValueError(f"{flag} needs --use-precision-aware-optimizer")
        if flags.fp32:
            raise ValueError(f"{flag} needs weights of 16 bits; leave out --fp32")
        if flags.optimizer == "sgd":
            raise ValueError(f"{flag} needs --optimizer adam")
        found[part] = dtype
    return found


RECIPES = {"delayed": "tensor", "tensorwise": "tensor", "blockwise": "block", "mxfp8": "mx"}
"""The recipes of products in float8, by the words of ``--fp8-recipe``."""
DELAYED = "delayed"
"""The recipe whose scales are from the maxima of earlier steps."""
_FLOAT4 = {"products": "float4", "recipe": "nvfp4"}
"""What ``--fp4-format e2m1`` says, whose only recipe is ``nvfp4``."""


_OF_HISTORY = "fp8_amax_history_len", "fp8_amax_compute_algo"
"""The fields of the flags about a history of maxima."""


def products_of(flags: FlagValues) -> dict[str, Any]:
    """What the flags say about products in 8 or 4 bits, by the fields of `MixedPrecision`; empty if none is.

    ``ValueError`` for flags that need others, or exclude each other.
    """
    eight, four = _format_of(flags, "fp8"), _format_of(flags, "fp4")
    if eight is not None and four is not None:
        raise ValueError("--fp8-format and --fp4-format exclude each other")
    if eight is None and flags.fp8_param_gather:
        raise ValueError("--fp8-param-gather needs --fp8-format")
    if eight is None and four is None:
        if flags.first_last_layers_bf16:
            raise ValueError("--first-last-layers-bf16 needs --fp8-format or --fp4-format")
        return {}
    if flags.fp16 or flags.fp32:
        raise ValueError(
            f"--fp{8 if eight else 4}-format needs weights in bfloat16; leave out "
            f"{'--fp16' if flags.fp16 else '--fp32'}"
        )
    return {**(_FLOAT4 if eight is None else _of_float8(eight, flags)), **_at_ends(flags)}


def _format_of(flags: FlagValues, name: str) -> str | None:
    """The word of ``--fp8-format``, which ``--fp8`` may say, too; likewise of 4 bits."""
    plain = getattr(flags, name)
    full = getattr(flags, f"{name}_format")
    if None not in (plain, full) and plain != full:
        raise ValueError(f"--{name} {plain} and --{name}-format {full} exclude each other")
    found: str | None = full or plain
    return found


def _of_float8(format: str, flags: FlagValues) -> dict[str, Any]:
    word = flags.fp8_recipe or DELAYED
    found: dict[str, Any] = {"products": _FORMATS[format, RECIPES[word] == "tensor"], "recipe": RECIPES[word]}
    if flags.fp8_param_gather:
        found["gathers"] = "float8"
    if word == DELAYED:
        found["history"] = flags.fp8_amax_history_len or 1
        # Of one maximum the largest is the most recent one.
        found["amax"] = "max" if found["history"] == 1 else flags.fp8_amax_compute_algo or "most_recent"
    return found


def _at_ends(flags: FlagValues) -> dict[str, int]:
    """How many of the first and of the last blocks stay in 16 bits."""
    found: dict[str, int] = {}
    if not flags.first_last_layers_bf16:
        return found
    for field, given in (
        ("first_blocks", flags.num_layers_at_start_in_bf16),
        ("last_blocks", flags.num_layers_at_end_in_bf16),
    ):
        if given is not None and given != int(given):
            flag = "start" if field == "first_blocks" else "end"
            raise ValueError(f"--num-layers-at-{flag}-in-bf16 must be a whole number, got {given}")
        found[field] = 1 if given is None else int(given)
    return found


def idle_of_products(flags: FlagValues) -> list[str]:
    """The fields about products in few bits that were given and change nothing, because another flag is not."""
    idle = ["fp8_recipe"] * bool(flags.fp8_recipe and not (flags.fp8 or flags.fp8_format))
    is_delayed = bool(flags.fp8 or flags.fp8_format) and flags.fp8_recipe in (None, DELAYED)
    idle += [name for name in _OF_HISTORY if getattr(flags, name) is not None and not is_delayed]
    idle += ["fp4_recipe"] * bool(flags.fp4_recipe and not (flags.fp4 or flags.fp4_format))
    if not flags.first_last_layers_bf16:
        ends = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        idle += [name for name in ends if getattr(flags, name) is not None]
    return idle


_FORMATS = {
    ("hybrid", True): "float8",
    ("e4m3", True): "float8_e4m3fn",
    ("hybrid", False): "float8_hybrid",
    ("e4m3", False): "float8",
}
"""``products`` of `MixedPrecision`, by the word of ``--fp8-format`` and whether there is one scale for a tensor."""


def precision_of(flags: FlagValues) -> MixedPrecision | None:
    """The precision that the flags say; None for float32 throughout.  ``ValueError`` as of the functions above."""
    gradients, state = gradients_of(flags), state_of(flags)
    if flags.fp32:
        products_of(flags)
        return None
    fields: dict[str, Any] = {**state, **products_of(flags)}
    return MixedPrecision("float16" if flags.fp16 else "bfloat16", gradients, **fields)


def precision_flags(precision: MixedPrecision | None) -> dict[str, Any]:
    """The flags of a precision, by field.  Not every precision can be written as flags.

    If it cannot, these flags describe another precision: the caller reads them back and compares.
    """
    if precision is None:
        return {"fp32": True}
    words = {dtype: word for word, dtype in DTYPES.items()}
    state = {
        field: words.get(str(getattr(precision, part)))
        for part, field in STATE.items()
        if getattr(precision, part)
    }
    return {
        "fp16": precision.dtype == "float16",
        "bf16": precision.dtype == "bfloat16",
        "grad_reduce_in_bf16": precision.gradients == "bfloat16",
        "use_precision_aware_optimizer": True if state else None,
        **state,
        **_flags_of_products(precision),
    }


def _flags_of_products(precision: MixedPrecision) -> dict[str, Any]:
    """The flags of products in 8 or 4 bits, by field."""
    if precision.products is None:
        return {}
    at_ends = bool(precision.first_blocks or precision.last_blocks)
    return {
        **_flags_of_recipe(precision),
        "fp8_param_gather": precision.gathers == "float8" or None,
        "first_last_layers_bf16": at_ends or None,
        "num_layers_at_start_in_bf16": precision.first_blocks if at_ends else None,
        "num_layers_at_end_in_bf16": precision.last_blocks if at_ends else None,
    }


def _flags_of_recipe(precision: MixedPrecision) -> dict[str, Any]:
    products, recipe = str(precision.products), precision.recipe
    if products == "float4":
        return {"fp4_format": "e2m1", "fp4_recipe": recipe}
    is_tensor = recipe == "tensor"
    words = {each: word for (word, of_tensor), each in _FORMATS.items() if of_tensor == is_tensor}
    found = {
        "fp8_format": words.get(products, "e4m3"),
        "fp8_recipe": {each: word for word, each in RECIPES.items()}[recipe],
    }
    if not precision.history:
        return found
    algorithm = "most_recent" if precision.history == 1 else precision.amax
    of_history = dict(zip(_OF_HISTORY, (precision.history, algorithm), strict=True))
    return {**found, "fp8_recipe": DELAYED, **of_history}


def left_out(flags: FlagValues) -> list[str]:
    """What a precision-aware optimizer does that is not modelled, as words.

    With weights in bfloat16 and main copies in float32 it keeps only the 16 bits of these that the weights lack.
    """
    is_plain = flags.main_params_dtype in (None, "fp32") and not flags.fp16
    remainders = bool(flags.use_precision_aware_optimizer and is_plain)
    return ["--use-precision-aware-optimizer"] * remainders
