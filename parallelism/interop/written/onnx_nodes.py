"""The nodes and tensors of a model of ONNX while it is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from parallelism.interop.onnx_models import files


class Nodes:
    """Nodes in their order, and the tensors that they read."""

    def __init__(self, weights: Mapping[str, Any], opset: int) -> None:
        self.nodes: list[Any] = []
        self.tensors: list[Any] = []
        self.opset = opset
        for name, array in weights.items():
            self.tensor(np.asarray(array), name)

    def tensor(self, array: Any, name: str | None = None) -> str:
        """The name of a constant."""
        name = name or f"const.{len(self.tensors)}"
        self.tensors.append(files.tensor_proto(np.ascontiguousarray(array) if array.ndim else array, name))
        return name

    def ints(self, *numbers: int) -> str:
        """The name of a constant of one dim."""
        return self.tensor(np.array(numbers, np.int64))

    def number(self, value: Any, dtype: np.dtype[Any]) -> str:
        """The name of a constant without dims."""
        return self.tensor(np.asarray(value, dtype))

    def node(self, kind: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """The name of the only result of a new node; a free one if no ``output`` is given."""
        name = output or f"part.{len(self.nodes)}"
        self.several(kind, inputs, [name], **attributes)
        return name

    def several(self, kind: str, inputs: Any, outputs: list[str], **attributes: Any) -> None:
        """A new node of several results."""
        self.nodes.append(files.node_proto(kind, inputs, outputs, f"{kind}_{len(self.nodes)}", attributes))

    def cast(self, x: str, dtype: np.dtype[Any], output: str | None = None) -> str:
        """``x`` in another dtype."""
        return self.node("Cast", x, output=output, to=files.code_of(dtype))

    def needs(self, opset: int) -> None:
        """The model has an operator that came with this opset."""
        self.opset = max(self.opset, opset)
