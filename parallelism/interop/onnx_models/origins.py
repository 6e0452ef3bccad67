"""Where a node comes from: the module of PyTorch, and the line of its code, as PyTorch's exporters write them."""

from __future__ import annotations

import re
from typing import Any

from parallelism.ir.core.lines import Line

SCOPES, STACK = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.stack_trace"
NODE, DETACHED = "pkg.torch.onnx.fx_node", "torch.ops.aten.detach."
MOST_CHARACTERS = 20_000
_PATH = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_FRAME = re.compile(r'File "([^"\n]*)", line (\d{1,9})')
BETWEEN = "torch_decisions.py"
"""The module of ours that stands between the lines of a model and PyTorch."""
_OF_TORCH = re.compile(rf"[/\\]torch[/\\]|[/\\]interop[/\\]{re.escape(BETWEEN)}$")


class Told(Line):
    """A line that a file names: it is told, and no file is opened for its text."""

    @property
    def text(self) -> str:
        return ""


def origin_of(node: Any) -> tuple[str | None, Told | None, bool]:
    """The region of a node, its line, and whether no gradient goes through it."""
    return region_of(node), line_of(node), is_detached(node)


def region_of(node: Any) -> str | None:
    """The path of the module that a node belongs to, as ``blocks.0.attention``; None if it is not told.

    The newer exporter writes the scopes of a node, the last of which is its own; the older one writes them into names,
    as ``/blocks.0/attention/MatMul``.
    """
    told = _told(node, SCOPES)
    if told:
        scopes = re.findall(r"'([^'\n]*)'", told)[:-1]
        path = scopes[-1] if scopes else ""
    else:
        path = ".".join(node.name.split("/")[1:-1]) if node.name.startswith("/") else ""
    return path if _PATH.fullmatch(path) else None


def line_of(node: Any) -> Told | None:
    """The innermost line outside of PyTorch from which a node was recorded; None if it is not told."""
    found = innermost(_told(node, STACK))
    return Told(*found) if found else None


def is_detached(node: Any) -> bool:
    """Whether a node is ``tensor.detach()`` in PyTorch, behind which no gradient goes."""
    return node.op_type == "Identity" and DETACHED in _told(node, NODE)


def innermost(stack: str) -> tuple[str, int] | None:
    """The file and the line of the innermost frame of a stack outside of PyTorch."""
    frames = [found for found in _FRAME.findall(stack) if not _OF_TORCH.search(found[0])]
    return (frames[-1][0], int(frames[-1][1])) if frames else None


def _told(node: Any, key: str) -> str:
    """What a node says under a key; empty if it says nothing, or too much."""
    values = [each.value for each in node.metadata_props if each.key == key]
    told = values[0] if values else ""
    return told if isinstance(told, str) and len(told) <= MOST_CHARACTERS else ""
