"""`Executable`: a program, laid out on a mesh, as an operation of the cluster.

    run = cluster.run(Executable(function, mesh), inputs)       # on processes, threads, or under `record`
    run.result                                                  # the outputs, whole
    trace = simulate(Executable(function, mesh), "dgx-h100")    # the trace it would leave, without running it

Each device runs its own part of the program (`parallelism.layouts.localize`), op by op, and records what every op
declares and holds (`parallelism.execution.device_program`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from parallelism.arrays import Array
from parallelism.execution.device_program import GRADIENTS, DeviceProgram
from parallelism.execution.overlapping import arranged, order_on_all
from parallelism.ir import OPERATORS, Function, Op, Operator
from parallelism.ir.passes import Kinds, checked_arrays, donations, inputs_named
from parallelism.ir.passes.given_arrays import one_of
from parallelism.layouts.localization.localized import Localized, localize
from parallelism.mesh import Mesh
from parallelism.operation import Device, Operation
from parallelism.transforms import Fused, Overlap


class Executable(Operation):
    """A program for all devices of a mesh.

    >>> import numpy as np
    >>> from parallelism import Executable, Mesh, models
    >>> from parallelism.layouts import annotate
    >>> from vcluster import VirtualCluster
    >>> program = annotate(models.mlp((6, 4), 8, "f8"), {"x": "[dp, None]"})
    >>> inputs = [np.ones(value.type.shape) for value in program.inputs]
    >>> with VirtualCluster(dp=2, backend="thread") as cluster:
    ...     run = cluster.run(Executable(program, Mesh(dp=2)), inputs)
    >>> float(run.result[0]), run.trace.count("all_reduce")
    (36.0, 1)

    ``program`` is what `parallelism.layouts.localize` makes, or a function with layouts that is to be localized on
    ``mesh`` (what has none is laid out by propagation).  ``categories`` says in which category of memory values are
    counted, by their names, or by the beginnings of names of inputs before a dot.  Other inputs are ``inputs``, outputs
    ``outputs``, all between ``activations``.  ``seconds(op)``, as a `parallelism.execution.op_profile.Profile`, says
    what an op takes in place of its flops and bytes.

    ``fused``, or a program under `parallelism.transforms.Fused`: chains of elementwise ops run as one
    (`parallelism.ir.passes.fusion`).  ``overlapping``: collectives of a backward run beside products
    (`parallelism.execution.overlapping.beside_products`).

    ``donate`` has names of inputs, or the beginnings of names before a dot, as ``"p"`` for ``p.0.weights``.  An output
    of the same type and layout, that is made when the input is not read any more, lies in its memory and is counted in
    its category.  So a step never holds new state beside the old one.  The caller's arrays are not changed.

    ``ValueError``, before anything runs, for a name of ``donate`` that fits no input, and for a donated input whose
    memory no output can take.

    ``cluster.run(executable, inputs)``: the arrays of the whole, in order or by name; ``run.result``: the outputs, in
    order, whole.  **Communication**: that of the collectives in each device's program.
    """

    declares_all = True
    kept_by_devices = True

    def __init__(
        self,
        program: Function | Localized,
        mesh: Mesh | None = None,
        *,
        categories: Mapping[str, str] | None = None,
        seconds: Callable[[Op], float] | None = None,
        donate: str | Iterable[str] = (),
        fused: bool | str = False,
        overlapping: bool = False,
    ) -> None:
        if isinstance(program, Function):
            if mesh is None:
                raise TypeError(f"@{program.name} needs a mesh to be laid out on: Executable(function, mesh)")
            program = localize(program, mesh)
        elif mesh not in (None, program.mesh):
            raise ValueError(f"@{program.function.name} is laid out on {program.mesh!r}, not on {mesh!r}")
        self.programs, self.seconds = program, seconds
        self.fused = fused or Fused.of(program.function) is not None
        known = {value.name for value in self.programs.function.values}
        self.categories: dict[str, str] = {}
        for name, category in (categories or {}).items():
            named = [name] if name in known else [v.name for v in inputs_named(self.programs.function, name)]
            if not named:
                raise ValueError(f"categories has %{name}, which is no value of {self.name}")
            self.categories.update(dict.fromkeys(named, category))
        self.order = order_on_all(program, Overlap.of(program.function), beside=overlapping)
        """The order in which devices run the ops; None: that of the program."""
        self._by_class: dict[int, DeviceProgram] = {}
        self._own_operators: tuple[Operator, ...] = ()
        self.donate = (donate,) if isinstance(donate, str) else tuple(donate)
        if self.donate:
            for number in range(len(self.programs.classes)):
                self.of_class(number)  # on every device, outputs must be able to take the memory

    @property
    def name(self) -> str:
        """The name of the function, with which its events begin."""
        return f"@{self.programs.function.name}"

    @property
    def mesh(self) -> Mesh:
        """The mesh it is for."""
        return self.programs.mesh

    def of_class(self, number: int) -> DeviceProgram:
        """The program of the ranks of a class."""
        if number not in self._by_class:
            self._by_class[number] = self._device_program(
                self.programs.program(self.programs.classes[number][0])
            )
        return self._by_class[number]

    def _device_program(self, function: Function) -> DeviceProgram:
        early = (
            dict.fromkeys(self.order.made_early(function), GRADIENTS)
            if self.order and self.categories
            else {}
        )
        function, calls, chains = arranged(function, self.order, fused=self.fused)
        donated = donations(function, self.donate, Kinds.of(self.programs.function))
        return DeviceProgram(function, self.categories | early, self.seconds, donated, calls, chains)

    @property
    def writes_inputs(self) -> bool:
        """Whether a device writes into its inputs."""
        return bool(self.donate) or any(op.operator.reuses for op in self.programs.function.ops)

    def inputs(self, mesh: Mesh, *args: Any) -> list[tuple[Any, ...]]:
        """The inputs, given in order or by name in one argument, dealt out by their layouts."""
        if mesh != self.mesh:
            raise ValueError(f"{self.name} is laid out on {self.mesh!r} and cannot run on {mesh!r}")
        arrays = checked_arrays(self.programs.function, one_of(self.name, args))
        for number in range(len(self.programs.classes)):
            _ = self.of_class(number).steps, self.of_class(number).held  # made once, before they are sent
        shards = [
            layout.shard(array, mesh) for layout, array in zip(self.programs.inputs, arrays, strict=True)
        ]
        return [tuple(shard[rank] for shard in shards) for rank in range(mesh.size)]

    def __call__(self, device: Device, *inputs: Any) -> tuple[Array, ...]:
        """The outputs of this device, of its shards of the inputs."""
        for entry in self._own_operators:
            OPERATORS.setdefault(entry.name, entry)
        program = self.of_class(self.programs.class_of(device.rank))
        function = self.programs.program(device.rank)
        if function is not self.programs.program(
            self.programs.classes[self.programs.class_of(device.rank)][0]
        ):
            program = self._device_program(function)  # its parts begin elsewhere
        with device.compute(self.name, seconds=0.0):  # the library's Python between the ops has no price
            for category, nbytes in program.held:
                device.hold(category, nbytes)
            return program.run(device, program.own(inputs))

    def result(self, mesh: Mesh, outputs: Sequence[Any]) -> tuple[Array, ...]:
        """The outputs, each put together by its layout."""
        shards = zip(*outputs, strict=True)
        pairs = zip(self.programs.outputs, shards, strict=True)
        return tuple(layout.unshard(own, mesh) for layout, own in pairs)

    def __getstate__(self) -> dict[str, Any]:
        """Devices get the prepared programs, and the operators that are not the library's."""
        kinds = {op.kind for program in self._by_class.values() for op in program.function.ops}
        entries = (OPERATORS[kind] for kind in sorted(kinds))
        own = tuple(entry for entry in entries if not entry.rule.__module__.startswith("parallelism."))
        return self.__dict__ | {"_own_operators": own}
