# SPDX-License-Identifier: Apache-2.0
"""Reads the C headers of include/switchyard/c, which describe the interface: structs, enumerations and functions.

The headers are plain C. Two names in them express what C cannot: SY_DEFAULT(value) after a member, and the type sy_bool.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

#: Sizes of the non-pointer types. Enumerations are int32_t.
SIZES = {"size_t": 8, "int64_t": 8, "uint64_t": 8, "double": 8, "int32_t": 4, "uint32_t": 4, "float": 4}


class Refused(Exception):
    """A header that the generator cannot read or that violates a rule of the interface."""


@dataclass
class Member:
    """A member of a struct. `type` omits const; `count` is the array length."""

    name: str
    type: str
    pointer: str
    count: int
    default: str | None
    offset: int = 0
    size: int = 0


@dataclass
class Struct:
    name: str
    library: str
    members: list[Member]
    size: int = 0

    @property
    def sized(self) -> bool:
        return self.members[0].name == "struct_size"

    @property
    def macro(self) -> str:
        return f"SY_{self.name[3:].upper()}_INIT"


@dataclass
class Function:
    name: str
    library: str
    result: str
    arguments: list[str]


@dataclass
class Interface:
    structs: dict[str, Struct] = field(default_factory=dict)
    enumerations: dict[str, dict[str, int]] = field(default_factory=dict)  # type: {enumerator: value}
    dtype_bits: dict[int, int] = field(default_factory=dict)  # value of a row type: bits of an element
    functions: list[Function] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)  # name: library

    def value(self, enumerator: str) -> int:
        return next(values[enumerator] for values in self.enumerations.values() if enumerator in values)


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)


def table_rows(path: Path, macro: str) -> list[list[str]]:
    """The rows of a .def file: the arguments of each `macro(...)`."""
    text = without_comments(path.read_text(encoding="utf-8"))
    return [[each.strip() for each in row.split(",")] for row in re.findall(rf"^{macro}\(([^)]*)\)", text, re.M)]


def read_member(struct: str, text: str) -> Member:
    found = re.fullmatch(r"(?:const )?(\w+)\s*(\*(?: const\*)?|)\s*(\w+)(?:\[(\d+)\])?(?: SY_DEFAULT\((.*)\))?", " ".join(text.split()))
    if not found:
        raise Refused(f"{struct}: cannot read the member '{text.strip()}'")
    return Member(found[3], found[1], found[2].replace(" const", ""), int(found[4] or 1), found[5])


def lay_out(struct: Struct, interface: Interface) -> None:
    """Computes offsets and rejects padding, because a program compiled against an older header must not set bytes that belong
    to no member."""
    at = 0
    for member in struct.members:
        function = member.type.endswith("_function")
        size = 8 if member.pointer or function else 4 if member.type in interface.enumerations else SIZES.get(member.type, 0)
        if not size:
            raise Refused(f"{struct.name}::{member.name}: unknown type {member.type}")
        if at % size:
            raise Refused(f"{struct.name}::{member.name} would leave padding before it: reorder, or append an int32_t reserved")
        member.offset, member.size = at, size * member.count
        at += member.size
    if struct.sized and at % 8:
        raise Refused(f"{struct.name} has {at} bytes, not a multiple of 8: append an int32_t reserved")
    struct.size = at


def read_header(path: Path, root: Path, interface: Interface) -> None:
    text = path.read_text(encoding="utf-8")
    said = re.search(r"\bLibrary\s+(?:///\s*)?(switchyard\w*)", text)
    library = interface.headers[path.name] = said[1] if said else "switchyard"
    code = without_comments(text)
    code = re.sub(r"#define (?:[^\n]*\\\n)*[^\n]*", "", code)

    for name, body in re.findall(r"typedef int32_t (sy_\w+);\s*enum \{(.*?)\};", code, re.S):
        values = {key: int(value) for key, value in re.findall(r"(SY_\w+)\s*=\s*(-?\d+)", body)}
        if "dtypes.def" in body:
            rows = table_rows(root / "include/switchyard/dtypes.def", "SY_ROW_TYPE")
            values = {f"SY_DTYPE_{row[1]}": int(row[2]) for row in rows}
            interface.dtype_bits = {int(row[2]): int(row[3]) for row in rows}
        interface.enumerations[name] = values
    for name in re.findall(r"typedef int32_t (sy_\w+);(?!\s*enum)", code):
        interface.enumerations[name] = {}

    for name, body, closing in re.findall(r"typedef struct (sy_\w+) \{(.*?)\} (sy_\w+);", code, re.S):
        if name != closing:
            raise Refused(f"{path.name}: struct {name} ends as {closing}")
        members = []
        if "statistics.def" in body:
            text_of = without_comments((root / "include/switchyard/statistics.def").read_text(encoding="utf-8"))
            kinds = {"MOVED": "uint64_t", "TIME": "double"}
            rows = re.findall(r"^SY_STATISTIC_(MOVED|TIME)\((\w+)\)", text_of, re.M)
            body = re.sub(r"#[^\n]*", "", body) + "".join(f"{kinds[kind]} {member};" for kind, member in rows)
        for each in body.split(";"):
            if each.strip():
                members.append(read_member(name, each))
        interface.structs[name] = Struct(name, library, members)

    code = re.sub(r"typedef struct sy_\w+ \{.*?\} sy_\w+;|typedef[^;]*;", "", code, flags=re.S)
    for result, name, arguments in re.findall(r"((?:const )?\w+\*?)\s+(sy_\w+)\(([^;{]*?)\);", code, re.S):
        given = [" ".join(each.split()) for each in arguments.split(",")]
        interface.functions.append(Function(name, library, result, [] if given == ["void"] else given))


def read(root: Path) -> Interface:
    """The interface described by the headers under `root`."""
    interface = Interface()
    folder = root / "include/switchyard/c"
    first = [folder / "types.h"]
    for path in first + sorted(path for path in folder.glob("*.h") if path.name not in ("types.h", "init.h")):
        read_header(path, root, interface)
    for struct in interface.structs.values():
        lay_out(struct, interface)
    return interface
