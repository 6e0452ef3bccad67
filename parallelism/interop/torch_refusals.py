"""Why PyTorch cannot export a module: the operator and the line of the model, out of what its exporters raise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from traceback import walk_tb

from parallelism.interop.errors import UnsupportedError
from parallelism.interop.onnx_models.origins import innermost
from parallelism.interop.torch_sizes import suggested

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NODE = re.compile(r"Error when translating node %(\w+)")
_OPERATOR = re.compile(r"op='([\w.]+)'")
_STACKS = "The following call raised this error:", "Original traceback:"
"""What stands before the stack of the line of the model."""
_OTHER_WAYS = {
    "transformers.grouped_mm_fallback": "; plan takes the config.json of a model with experts, and "
    "model.set_experts_implementation('batched_mm') gathers the weights of each token instead"
}
"""What a model can do where an operator cannot be exported."""


def refusal(error: Exception, module: str, fixing: Sequence[str] = ()) -> UnsupportedError:
    """The error for what an exporter raised about a module; ``fixing`` are the lines at which symbols became numbers."""
    told = [_COLOUR.sub("", str(each)) for each in _chain(error)]
    if fixes := suggested(told[0]):
        return UnsupportedError(
            f"the module is a program of its own for each size {' and '.join(fixes)}: it loops over it, makes a number of "
            f"it, or sizes depend on each other; dynamic= says which dims are symbols, one mapping an argument, and an "
            f"argument with {{}} keeps the sizes of its example; len(x) is a number, x.shape[0] a symbol",
            module,
            fixing[0] if fixing else "",
        )
    for text in told:
        if found := _NODE.search(text):
            operator = next((each[1] for text in told if (each := _OPERATOR.search(text))), found[1])
            place = _place(_stack_of(error, found[1]))
            instead = _OTHER_WAYS.get(operator, "")
            return UnsupportedError(
                f"PyTorch's exporter to ONNX does not know this operator{instead}", operator, place
            )
    for text in reversed(told):  # from the first error on
        if stack := next((words for words in _STACKS if words in text), ""):
            first = text.strip().split("\n\n")[0]
            return UnsupportedError(
                f"PyTorch cannot export it: {' '.join(first.split())}",
                module,
                _place(text[text.index(stack) :]),
            )
    return UnsupportedError(f"PyTorch cannot export it: {' '.join(told[0].split())}", module)


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
