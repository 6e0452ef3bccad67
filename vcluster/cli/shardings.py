"""`python -m vcluster shardings`: every way to split an operator over the axes of a mesh, as a table."""

from ast import literal_eval
from collections.abc import Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from parallelism.auto_sharding import WAITS, OpSharding, op_shardings
from parallelism.display import WIDTH, in_columns
from parallelism.display.quantities import nbytes
from parallelism.ir import Op, TensorType, Value, operator
from parallelism.ir.core.table import meaning
from parallelism.mesh import Mesh
from parallelism.sharding import TensorSharding
from vcluster.cli.command_line import Parser, WrongWords, mesh_of, wholes

MOST_INPUTS = 6


def shardings(program: str, words: Sequence[str]) -> int:
    """Print all shardings of an operator on a mesh."""
    arguments = Parser(
        {
            "operator": {"help": "an operator of the table, such as matmul"},
            "shapes": {
                "nargs": "*",
                "type": wholes,
                "default": [],
                "metavar": "SHAPE",
                "help": "of each input, such as 8,16,32 (default: of as many matrices as the operator takes)",
            },
            "--mesh": {
                "required": True,
                "metavar": "x=2,y=4",
                "help": "the axes and their numbers of devices",
            },
            "--dtype": {"default": "f4", "metavar": "NAME", "help": "of all inputs (default: f4)"},
            "--attribute": {
                "action": "append",
                "default": [],
                "metavar": "NAME=VALUE",
                "help": "of the operator, such as axis=1; may be repeated",
            },
        },
        prog=f"{program} shardings",
        description="""\
Lists every way to split an operator over the axes of a mesh: the letter of its
rule that each axis splits, the layouts that it takes and leaves, and what the
first device computes. A part of a sum that is left pending is "partial".""",
        epilog=f"""\
  {program} shardings matmul --mesh x=2,y=4
  {program} shardings matmul 64,512 512,2048 --mesh x=2,y=4
  {program} shardings einsum 8,16 16,32 --mesh x=2 \\
      --attribute equation="'ij,jk->ik'\"""",
    ).parse(words)
    mesh = mesh_of(arguments, Mesh(x=1), any_axes=True, most=None)
    try:
        operator(arguments.operator)
        attributes = dict(map(_attribute, arguments.attribute))
        op = _op(arguments.operator, arguments.shapes, arguments.dtype, attributes, mesh)
        found = op_shardings(op, mesh)
    except (ValueError, TypeError) as error:
        raise WrongWords(str(error)) from None
    print(table(op, mesh, found))
    return 0


def table(op: Op, mesh: Mesh, found: Sequence[OpSharding]) -> str:
    """The shardings, a line each in 80 columns; more lines where the layouts of inputs and outputs need them."""
    head = f"{op.kind}, {op.rule}: {', '.join(str(value.type) for value in op.inputs)} on {mesh!r}"
    rows = [[*mesh.axes, "flops", "bytes", "takes", "leaves"]]
    for each in found:
        letters = ["-" if letter is None else letter for letter in each.letters]
        takes, leaves = (list(map(_short, side)) for side in (each.inputs, each.outputs))
        figures = [f"{each.flops:.3g}", nbytes(each.nbytes) + ("" if each.is_even else " *")]
        if max(map(len, takes), default=0) + max(map(len, leaves), default=0) < WIDTH // 2 and len(takes) < 3:
            takes = [" ".join(takes)]
        first = [*letters, *figures]
        for take, leave in zip_longest(takes or [""], leaves, fillvalue=""):
            rows.append([*first, take, leave])
            first = [""] * len(first)
    lines = in_columns(rows, len(rows[0]))
    told = [f"{len(found)} shardings; flops and bytes are those of one device"]
    if any(WAITS in each.letters for each in found):
        told.append(f"{WAITS}: a sum that is pending in what it takes stays pending")
    if not all(each.is_even for each in found):
        told.append("*: some devices have less than this one")
    return "\n".join([*wrap(head, WIDTH), "", *lines, "", *told])


def _short(layout: TensorSharding) -> str:
    return layout.short().replace("None", "-").replace(", ", ",")


def _attribute(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--attribute takes NAME=VALUE, got {text!r}")
    try:
        return name, literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _op(
    kind: str, shapes: Sequence[tuple[int, ...]], dtype: str, attributes: dict[str, Any], mesh: Mesh
) -> Op:
    """The operator on inputs of these shapes; without shapes, on as many square matrices as it takes."""
    extent = 8 * mesh.size
    tries = [shapes] if shapes else [[(extent, extent)] * count for count in range(1, MOST_INPUTS + 1)]
    refused: Exception | None = None
    for each in tries:
        inputs = tuple(Value(f"x{number}", TensorType(dtype, shape)) for number, shape in enumerate(each))
        op = Op(kind, inputs, tuple(sorted(attributes.items())), ())
        try:
            types = meaning(kind, op.types, op.attributes).outputs
        except (ValueError, TypeError) as error:
            refused = refused or error
            continue
        return Op(kind, inputs, op.attributes, tuple(Value(f"y{n}", type) for n, type in enumerate(types)))
    if shapes:
        raise ValueError(str(refused))
    raise ValueError(
        f"{kind} does not take matrices alone ({refused}): give the shapes of its inputs, as 8,16, and "
        "its attributes, as --attribute axis=1"
    )
