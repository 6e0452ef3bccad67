"""Why PyTorch cannot export a module: the operator and the line of the model, out of what its exporters raise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import unwrap
from pathlib import Path
from traceback import extract_tb, format_list, walk_tb
from typing import Any

from parallelism.interop.errors import UnsupportedError
from parallelism.interop.onnx_models.origins import BETWEEN, innermost
from parallelism.interop.torch_sizes import suggested, violated

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NODE = re.compile(r"Error when translating node %(\w+)")
_OPERATOR = re.compile(r"op='([\w.]+)'")
_STACKS = "The following call raised this error:", "Original traceback:"
"""What stands before the stack of the line of the model."""
_HERE = str(Path(__file__).parent)
_OF_NUMBERS = (
    "the module decides by the numbers of a tensor, as `if x.sum() > 0` and `range(int(x.max()))` do: leave out what "
    "only checks them, and write torch.where, which computes both and chooses"
)
_OF_DERIVATIVES = (
    "PyTorch cannot export a derivative inside of a module, as by torch.autograd.grad and torch.func.grad: write it in "
    "operators"
)
_OWN_REASONS = {
    "data-dependent expression": _OF_NUMBERS,
    "functorch tensor": _OF_DERIVATIVES,
    "fake tensor in the exported program constant": _OF_DERIVATIVES,
    "Couldn't swap": "the module casts or moves a part of it while it runs, as by self.linear.to(dtype): do so before",
    "tuple of ints,but got FakeTensor": "a size is a number in a tensor, as those that pack_padded_sequence makes: run the "
    "padded rows, and mask what is behind the end of each",
    "'NoneType' object": "something is None there that is not when the module runs by itself: modules of transformers make "
    "no masks while they are exported, so give them attention_mask, and decoder_attention_mask",
}
"""Words of PyTorch's errors, and why a module cannot be a program then."""
_OTHER_WAYS = {
    "transformers.grouped_mm_fallback": "; plan takes the config.json of a model with experts, and "
    "model.set_experts_implementation('batched_mm') gathers the weights of each token instead"
}
"""What a model can do where an operator cannot be exported."""


def refusal(error: Exception, module: str, fixing: Sequence[str] = ()) -> UnsupportedError:
    """The error for what an exporter raised about a module; ``fixing`` are the lines at which symbols became numbers."""
    told = [_COLOUR.sub("", str(each)) for each in _chain(error)]
    if fixes := suggested(told[0]) or violated(told[0]):
        return UnsupportedError(
            f"the module is a program of its own for each size {' and '.join(fixes)}: it loops over it, makes a number of "
            f"it, or sizes depend on each other; dynamic= says which dims are symbols, one mapping an argument, and an "
            f"argument with {{}} keeps the sizes of its example; int(x.shape[0]) is a number, x.shape[0] a symbol",
            module,
            fixing[0] if fixing else "",
        )
    if reason := _own_reason(told):
        return UnsupportedError(reason, module, _line_in(told) or _place(_user_frames(error)))
    for text in told:
        if found := _NODE.search(text):
            operator = next((each[1] for text in told if (each := _OPERATOR.search(text))), found[1])
            place = _place(_stack_of(error, found[1]))
            instead = _OTHER_WAYS.get(operator, "")
            return UnsupportedError(
                f"PyTorch's exporter to ONNX does not know this operator{instead}", operator, place
            )
    for text in reversed(told):  # from the first error on
        if place := _line_in([text]):
            first = text.strip().split("\n\n")[0]
            return UnsupportedError(f"PyTorch cannot export it: {' '.join(first.split())}", module, place)
    words = " ".join(told[0].split())
    return UnsupportedError(f"PyTorch cannot export it: {words}", module, _place(_user_frames(error)))


def _own_reason(told: Sequence[str]) -> str:
    """Why a module cannot be a program, where PyTorch says it in its own words; empty for what it says otherwise."""
    for words, reason in _OWN_REASONS.items():
        if any(words in text for text in told):
            return reason
    return ""


def _line_in(told: Sequence[str]) -> str:
    """File and line of the stack that an error tells; empty if it tells none."""
    for text in told:
        if stack := next((words for words in _STACKS if words in text), ""):
            return _place(text[text.index(stack) :])
    return ""


def _user_frames(error: BaseException) -> str:
    """The stack of an error behind the last call from here: the lines of the model, if it was raised while these ran."""
    frames = extract_tb(error.__traceback__)
    own = [number for number, frame in enumerate(frames) if _is_caller(frame.filename)]
    return "".join(format_list(frames[own[-1] + 1 if own else 0 :]))


def _is_caller(file: str) -> bool:
    return file.startswith(_HERE) and not file.endswith(BETWEEN)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _stack_of(error: Exception, name: str) -> str:
    """The stack from which a node was recorded: the exporter had it in hand, under its name; empty if it had not."""
    for each in _chain(error):
        for frame, _ in walk_tb(each.__traceback__):
            node = frame.f_locals.get("node")
            if getattr(node, "name", "") == name:
                return str(getattr(node, "meta", {}).get("stack_trace", ""))
    return ""


def _place(stack: str) -> str:
    """File and line of the innermost line outside of PyTorch; empty if there is none."""
    found = innermost(stack)
    return f"{found[0]}:{found[1]}" if found else ""


@contextmanager
def lines_of_the_loss(loss: Any) -> Iterator[None]:
    """A context in which ops know their line of the function ``loss``; PyTorch keeps those of methods ``forward`` alone.

    It keeps others where it has a list of them, as 2.13 does.
    """
    import torch.fx.proxy as proxy

    anchors = getattr(proxy, "_STACK_TRACE_ANCHORS", None)
    code = getattr(unwrap(loss), "__code__", None) if loss is not None else None
    anchor = (code.co_filename, code.co_name) if code is not None else None
    if anchors is None or anchor is None or anchor in anchors:
        yield
        return
    anchors.add(anchor)
    try:
        yield
    finally:
        anchors.discard(anchor)
