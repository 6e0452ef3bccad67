"""Programs for any number of devices: localized once, with symbols for the numbers, and specialized for each mesh."""

from collections.abc import Collection
from dataclasses import dataclass, field

from parallelism.ir.core import Expression, Extent, Function, symbol
from parallelism.ir.core.extents import specialized
from parallelism.layouts.localization.local_program import layout_of, moves_of
from parallelism.layouts.localization.localized import Localized, localize
from parallelism.mesh import Mesh

Split = tuple[Extent, tuple[str, ...]]
"""The extent of a dim, and the axes that split it."""


@dataclass(frozen=True)
class SymbolicProgram:
    """A program laid out on axes whose numbers of devices are symbols: `localize_symbolically` makes it."""

    function: Function
    """The program of whole tensors, with layouts."""
    axes: tuple[str, ...]
    """The axes, outermost first.  The symbol of the number of devices along an axis has the name of the axis."""
    _variants: dict[frozenset[str], tuple[Function, tuple[Split, ...]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def localized(self, alone: Collection[str] = ()) -> Localized:
        """The program laid out on symbols; axes in ``alone`` have one device, so nothing is communicated over them."""
        devices: dict[str, Extent] = {axis: symbol(axis) for axis in self.axes}
        devices.update((axis, 1) for axis in self.axes if axis in alone)
        return localize(self.function, devices)

    def program(self, alone: Collection[str] = ()) -> Function:
        """The program of one device for any numbers of devices above 1, but 1 along the axes in ``alone``.

        Extents, and so flops, bytes and memory, are expressions of the symbols.  Parts are assumed to be even.
        """
        return self._variant(frozenset(alone))[0]

    def on(self, mesh: Mesh, **numbers: int) -> Function:
        """The program of a device of ``mesh``, equal to ``localize(function, mesh).program()``, op by op.

        ``numbers`` then replace other symbols, such as the rows of the batch.  (Where a layout is chosen by the sizes
        of tensors, a dim of symbolic extent does not count.)  Collectives over one device are left out, so for each set
        of axes of 1 there is a program of its own, made once.

        ``ValueError`` for a mesh with other axes, or with these in another order; and if a dim is not split evenly,
        because the program then differs from device to device and must be localized on the mesh.
        """
        if mesh.axes != self.axes:
            raise ValueError(
                f"@{self.function.name} is laid out on the axes {', '.join(self.axes)}, got {mesh!r}"
            )
        if unknown := ", ".join(sorted(numbers.keys() - self.function.symbols)):
            raise ValueError(
                f"@{self.function.name} has no symbol {unknown}; it has "
                f"{', '.join(sorted(self.function.symbols)) or 'none'}"
            )
        alone = frozenset(axis for axis, n in mesh.shape.items() if n == 1)
        program, splits = self._variant(alone)
        for extent, axes in splits:
            count, whole = 1, specialized(extent, numbers)
            for axis in axes:
                count *= mesh.shape[axis]
            if not isinstance(whole, Expression) and whole % count:
                raise ValueError(
                    f"a dim of {whole} of @{self.function.name} is not split evenly over the {count} devices "
                    f"along {', '.join(axes)} of {mesh!r}: localize the program on this mesh"
                )
        known = {**mesh.shape, **numbers}
        return program.specialize(**{name: known[name] for name in known.keys() & program.symbols})

    def _variant(self, alone: frozenset[str]) -> tuple[Function, tuple[Split, ...]]:
        """The program, and all dims that are split."""
        if alone not in self._variants:
            laid = self.localized(alone)
            layouts = [(value.type.shape, layout_of(value)) for value in laid.function.values]
            layouts += [
                (op.outputs[0].type.shape, move.after)
                for op in laid.function.ops
                for move in moves_of(op, laid.devices)
            ]
            self._variants[alone] = (
                laid.program(),
                tuple(
                    dict.fromkeys(
                        (extent, dim.axes)
                        for shape, layout in dict.fromkeys(layouts)
                        for extent, dim in zip(shape, layout.dims, strict=True)
                        if dim.axes
                    )
                ),
            )
        return self._variants[alone]


def localize_symbolically(function: Function, axes: Collection[str]) -> SymbolicProgram:
    """A program with layouts on ``axes``, outermost first, whose numbers of devices stay symbols.

    So a strategy is applied and laid out once, and its program is there for any numbers of workers: by
    ``program()`` with symbols, by ``on(mesh)`` for numbers.

    Not everything can be symbolic.  ``ValueError`` for a change of layout that no collective on one dim performs, and
    for an axis whose name is a symbol of the program already.  ``TypeError`` for a step that is cut into a pipeline,
    because the ops of a stage depend on the number of stages; the functions of its stages can be laid out one by one.
    """
    if not isinstance(function, Function):
        raise TypeError(
            f"a Function is laid out symbolically, got {type(function).__name__}; the ops of a pipeline's "
            "stage depend on the number of stages, so that number cannot be a symbol: lay out the "
            "functions of the stages one by one"
        )
    if taken := sorted({*axes} & function.symbols):
        raise ValueError(
            f"@{function.name} has a symbol {taken[0]}, so it cannot be the number of devices along the "
            f"axis {taken[0]!r}: rename one of them"
        )
    made = SymbolicProgram(function, tuple(axes))
    made.program()
    return made
