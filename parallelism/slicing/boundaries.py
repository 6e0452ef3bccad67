"""`Boundaries`: what goes from block to block, and how long it is on its way between two submeshes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from parallelism.cost import Costs
from parallelism.execution.stage_messages import Crossing
from parallelism.layouts.propagation.propagation import propagate
from parallelism.layouts.stages import Stages, gradient_layout
from parallelism.memoized import memoized
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding
from parallelism.transforms import Step


class Boundaries:
    """The messages of a step that is cut before every block, for microbatches of so many rows.

    As in a pipeline with ``meshes``, a value has one layout on both sides: one that all
    meshes of the stages can have.
    """

    def __init__(self, step: Step, blocks: int, rows: int, costs: Costs) -> None:
        self.step, self.blocks, self.rows, self.costs = step, blocks, rows, costs

    @cached_property
    def stages(self) -> Stages:
        """The blocks as stages."""
        return self.step.stages(self.blocks)

    def seconds(self, block: int, whole: Mesh, ends: Sequence[Mesh], starts: Sequence[int]) -> float:
        """The seconds of what goes to a block from the one before, or of the gradients back, whichever is longer.

        The two lie on the meshes ``ends``, which begin at these ranks, ``starts``.  ``whole`` has the least
        common multiples of the extents of all meshes of the pipeline.
        """
        return max(
            self._seconds(block, whole, (ends[0], ends[1]), (starts[0], starts[1]), back=False),
            self._seconds(block, whole, (ends[1], ends[0]), (starts[1], starts[0]), back=True),
        )

    @memoized
    def _seconds(
        self, block: int, whole: Mesh, ends: tuple[Mesh, Mesh], starts: tuple[int, int], *, back: bool
    ) -> float:
        """The seconds of the longest of the messages, which do not wait for each other."""
        functions = self.stages.functions[block]
        layouts = self._layouts(whole)
        names = functions.returned if back else functions.received
        types = {value.name: value.type for value in functions.forward.inputs}
        batch = self.stages.batch
        numbers = {batch: self.rows, f"{batch}_whole": self.rows, f"{batch}_first": 0}
        crossing = Crossing(
            tuple(types[name].specialize(numbers) for name in names),
            tuple(layouts[name] for name in names),
            *ends,
        )
        longest = 0.0
        for sender in range(ends[0].size):
            for receiver, pieces in crossing.sent(sender).items():
                nbytes = sum(int(piece.type.nbytes) for piece in pieces)
                longest = max(
                    longest, self.costs.message_seconds(nbytes, starts[0] + sender, starts[1] + receiver)
                )
        return longest

    @memoized
    def _layouts(self, whole: Mesh) -> dict[str, TensorSharding]:
        """The layouts of all values, by name."""
        return {
            value.name: gradient_layout(value.layout or TensorSharding.replicated(value.type.ndim))
            for value in propagate(self.stages.function, whole).values
        }
