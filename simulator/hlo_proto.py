"""The wire format of XLA's dumps: the fields of xla.HloProto that are read here, and no others.

Numbers from xla/service/hlo.proto and xla/xla_data.proto; a protobuf parser skips the rest.
"""

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from alloclab.policies.errors import InputError

#: Message -> field -> number and kind; ``*`` marks repeated fields.
_FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    "HloProto": {"hlo_module": (1, "Module"), "buffer_assignment": (3, "BufferAssignment")},
    "Module": {
        "name": (1, "string"),
        "computations": (3, "*Computation"),
        "entry_computation_id": (6, "int"),
        "input_output_alias": (8, "AliasConfig"),
    },
    "Computation": {"instructions": (2, "*Instruction"), "id": (5, "int"), "root_id": (6, "int")},
    "Instruction": {
        "name": (1, "string"),
        "opcode": (2, "string"),
        "tuple_index": (13, "int"),
        "parameter_number": (9, "int"),
        "id": (35, "int"),
        "operand_ids": (36, "*int"),
        "called_computation_ids": (38, "*int"),
    },
    "AliasConfig": {"entries": (1, "*AliasEntry")},
    "AliasEntry": {"output_shape_index": (1, "*int"), "parameter_number": (2, "int")},
    "BufferAssignment": {
        "logical_buffers": (1, "*LogicalBuffer"),
        "buffer_aliases": (2, "*BufferAlias"),
        "buffer_allocations": (3, "*Allocation"),
        "heap_simulator_traces": (4, "*Trace"),
    },
    "LogicalBuffer": {"id": (1, "int"), "size": (2, "int"), "defined_at": (3, "Location")},
    "Location": {
        "instruction_name": (2, "string"),
        "shape_index": (3, "*int"),
        "instruction_id": (4, "int"),
    },
    "BufferAlias": {"source_buffer_id": (1, "int"), "location": (2, "Location")},
    "Allocation": {
        "index": (1, "int"),
        "size": (2, "int"),
        "is_thread_local": (3, "bool"),
        "is_entry_computation_parameter": (5, "bool"),
        "parameter_number": (6, "int"),
        "maybe_live_out": (7, "bool"),
        "color": (8, "int"),
        "assigned": (9, "*Assigned"),
        "is_tuple": (11, "bool"),
        "is_constant": (12, "bool"),
    },
    "Assigned": {"logical_buffer_id": (1, "int"), "offset": (2, "int"), "size": (3, "int")},
    "Trace": {"events": (1, "*Event"), "whole_module_simulation": (2, "bool")},
    "Event": {
        "kind": (1, "int"),
        "buffer_id": (2, "int"),
        "computation_name": (3, "string"),
        "instruction_name": (4, "string"),
        "share_with": (5, "int"),
    },
}


@cache
def _message(name: str) -> Any:
    field = descriptor_pb2.FieldDescriptorProto
    types = {"int": field.TYPE_INT64, "bool": field.TYPE_BOOL, "string": field.TYPE_STRING}
    file = descriptor_pb2.FileDescriptorProto(
        name="alloclab/hlo.proto", package="alloclab.hlo", syntax="proto3"
    )
    for message, fields in _FIELDS.items():
        added = file.message_type.add(name=message)
        for key, (number, kind) in fields.items():
            each = added.field.add(name=key, number=number)
            repeated = kind.startswith("*")
            each.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            if kind.lstrip("*") in types:
                each.type = types[kind.lstrip("*")]
            else:
                each.type = field.TYPE_MESSAGE
                each.type_name = f".alloclab.hlo.{kind.lstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"alloclab.hlo.{name}"))


def parse(message: str, data: bytes, place: str) -> Any:
    """Parse a serialized message, such as ``HloProto`` or ``BufferAssignment``.

    Raises:
        InputError: the bytes at ``place`` are not such a message.
    """
    parsed = _message(message)()
    try:
        parsed.ParseFromString(data)
    except DecodeError as error:
        raise InputError(f"{place}: cannot be read as an xla.{message}: {error}") from None
    return parsed


def read_hlo(path: str | Path) -> Any:
    """Read ``*after_optimizations.hlo.pb``, written with xla_dump_to and xla_dump_hlo_as_proto.

    Raises:
        InputError: not such a file, or one with no buffer assignment in it.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    hlo = parse("HloProto", data, str(path))
    if not hlo.buffer_assignment.buffer_allocations:
        raise InputError(
            f"{path}: holds no buffer assignment; expected the module after optimizations"
        )
    return hlo


def join(module: bytes, assignment: bytes) -> Any:
    """An HloProto of a serialized HloModuleProto and BufferAssignmentProto."""
    hlo = _message("HloProto")()
    hlo.hlo_module.ParseFromString(module)
    hlo.buffer_assignment.ParseFromString(assignment)
    return hlo
