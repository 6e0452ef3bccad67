"""Execution traces of MLCommons Chakra, for ASTRA-sim and other simulators: one protobuf file for each rank.

This is the only module that imports ``protobuf``.  The messages are those of ``et_def.proto`` beside it.
"""

from __future__ import annotations

import json
import re
from functools import cache
from os import PathLike
from pathlib import Path
from typing import IO, Any

from parallelism.trace.execution_nodes import ExecutionNodes, Node
from parallelism.trace.trace import Trace
from parallelism.whole_files import written_whole

SCHEMA = Path(__file__).with_name("et_def.proto")
VERSION = "0.0.4"
"""The version of Chakra's schema."""
GROUPS = "comm_groups.json"
_FIELDS = {
    "num_ops": "int64_val",
    "tensor_size": "uint64_val",
    "comm_size": "int64_val",
    "comm_type": "int64_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
    "pg_name": "string_val",
    "root": "int32_val",
    "bytes_sent": "int64_val",
    "bytes_received": "int64_val",
    "start_seconds": "double_val",
    "duration_seconds": "double_val",
    "is_cpu_op": "bool_val",
}
"""The field of `AttributeProto` in which ASTRA-sim looks for each attribute."""


def chakra(trace: Trace, folder: str | PathLike[str]) -> tuple[Path, ...]:
    """Writes ``trace.N.et`` for each rank N into ``folder``, which is made if it is not there; returns these files.

    ASTRA-sim takes them as ``--workload-configuration=folder/trace`` and ``--comm-group-configuration=
    folder/comm_groups.json``, which names the groups of ranks.  A node's ``duration_micros`` is the trace's time, to
    whole microseconds, such that the rounding of a rank does not add up; its attribute ``duration_seconds`` is exact.
    `parallelism.trace.execution_nodes` says what becomes a node, and on what it depends.

    ``ImportError`` without ``protobuf``: ``pip install vcluster[chakra]``.  ``ValueError`` for a trace of some ranks.
    """
    messages = _messages()
    nodes = ExecutionNodes(trace)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / f"trace.{rank}.et" for rank in range(trace.size))
    for rank, path in enumerate(paths):
        with written_whole(path, encoding=None) as file:
            _write(file, messages["GlobalMetadata"](version=VERSION))
            for node in nodes.of_rank(rank):
                _write(file, _message(messages, node))
    with written_whole(folder / GROUPS) as file:
        lines = (f'"{number}": {json.dumps(ranks)}' for ranks, number in nodes.groups.items())
        file.write("{" + ",\n ".join(lines) + "}\n")
    return paths


def _message(messages: dict[str, Any], node: Node) -> Any:
    start, end = (
        round(seconds * 1e6) for seconds in (node.start_seconds, node.start_seconds + node.duration_seconds)
    )
    made = messages["Node"](
        id=node.id,
        name=node.name,
        type=node.type,
        ctrl_deps=node.control,
        data_deps=node.data,
        start_time_micros=start,
        duration_micros=end - start,
    )
    attributes = {
        **node.attributes,
        "is_cpu_op": False,
        "start_seconds": node.start_seconds,
        "duration_seconds": node.duration_seconds,
    }
    if "comm_type" in attributes:
        attributes["comm_type"] = (
            messages["CollectiveCommType"].values_by_name[attributes["comm_type"]].number
        )
    for name, value in attributes.items():
        made.attr.add(name=name, **{_FIELDS[name]: value})
    return made


def _write(file: IO[bytes], message: Any) -> None:
    """A message after its length as a varint."""
    content = message.SerializeToString()
    length = len(content)
    while length > 127:
        file.write(bytes([length & 127 | 128]))
        length >>= 7
    file.write(bytes([length]))
    file.write(content)


# -- the schema --------------------------------------------------------------------------------------------------------


@cache
def _messages() -> dict[str, Any]:
    """The classes of the messages of the schema by their names, and its enums."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise ImportError('Chakra traces are written by protobuf: pip install "vcluster[chakra]"') from error
    file = _schema(descriptor_pb2)
    pool = descriptor_pool.DescriptorPool()  # of its own: Chakra's package registers the same names
    pool.AddSerializedFile(file.SerializeToString())
    classes = {
        each.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{each.name}"))
        for each in file.message_type
    }
    return classes | {
        each.name: pool.FindEnumTypeByName(f"{file.package}.{each.name}") for each in file.enum_type
    }


def _schema(library: Any) -> Any:
    """The schema, a statement on each line, as protobuf describes one."""
    file = library.FileDescriptorProto(name=SCHEMA.name)
    field = library.FieldDescriptorProto
    of_type: dict[str, dict[str, Any]] = {}  # how a field says that it has a type of the schema
    inside: list[Any] = []
    for line in re.sub(r"//.*", "", SCHEMA.read_text("ascii")).splitlines():
        match line.replace(";", " ").split():
            case ["syntax", "=", name]:
                file.syntax = name.strip('"')
            case ["package", name]:
                file.package = name
            case ["message" | "enum" as what, name, "{"]:
                whole = what == "message"
                inside.append((file.message_type if whole else file.enum_type).add(name=name))
                of_type[name] = {
                    "type": field.TYPE_MESSAGE if whole else field.TYPE_ENUM,
                    "type_name": f".{file.package}.{name}",
                }
            case ["oneof", name, "{"]:
                inside.append(inside[-1])
                inside[-1].oneof_decl.add(name=name)
            case ["}"]:
                inside.pop()
            case [name, "=", number]:
                inside[-1].value.add(name=name, number=int(number))
            case [*label, type, name, "=", number]:
                inside[-1].field.add(
                    name=name,
                    number=int(number),
                    label=field.LABEL_REPEATED if label else field.LABEL_OPTIONAL,
                    oneof_index=0 if len(inside) > 1 else None,
                    **of_type.get(type) or {"type": getattr(field, f"TYPE_{type.upper()}")},
                )
    return file
