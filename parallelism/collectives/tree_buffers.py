"""A tree of arrays as one flat buffer for each dtype: the all_reduce of a tree reduces these one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from parallelism.collectives.arguments import checked_array
from parallelism.collectives.call import SCALAR
from parallelism.operation.trees import leaves, rebuild


class TreeBuffers:
    """The leaves of a tree by dtype, and the results that take their places."""

    def __init__(self, tree: Any) -> None:
        """``TypeError`` for a leaf that holds no numbers."""
        self._tree = tree
        self._leaves = [checked_array("all_reduce", leaf) for leaf in leaves(tree)]
        self._results: list[Any] = [None] * len(self._leaves)
        self.form = repr(rebuild(tree, [(array.dtype.str, array.shape) for array, _ in self._leaves])).encode()
        """The structure of the tree, which must be equal on all members."""
        self.by_dtype: dict[np.dtype[Any], list[int]] = {}
        """The numbers of the leaves of each dtype."""
        for i, (array, _) in enumerate(self._leaves):
            self.by_dtype.setdefault(array.dtype, []).append(i)

    def size(self, numbers: list[int]) -> int:
        """The elements of these leaves together."""
        return sum(self._leaves[i][0].size for i in numbers)

    def buffer(self, numbers: list[int]) -> npt.NDArray[Any]:
        """These leaves one after the other, flat."""
        return np.concatenate([self._leaves[i][0].reshape(-1) for i in numbers])

    def put(self, numbers: list[int], buffer: npt.NDArray[Any]) -> None:
        """Takes a reduced buffer as the results of these leaves."""
        place = 0
        for i in numbers:
            array, form = self._leaves[i]
            result = buffer[place : place + array.size].reshape(array.shape)
            self._results[i] = result[()] if form == SCALAR else result
            place += array.size

    def tree(self) -> Any:
        """A tree like the one that was given, of the results."""
        return rebuild(self._tree, list(self._results))
