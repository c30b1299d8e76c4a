#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generates the code that repeats the contents of the C headers
(docs/design/0062-one-description-of-the-interface.md).

Usage: generate.py [--check] [--new-layout]

With --check, nothing is written, and an out-of-date generated file is an error. A moved or removed
member is also an error, because programs compiled against an older header use its old offset;
--new-layout allows it.
"""
from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from headers import Interface, Member, Refused, Struct, read  # noqa: E402
from twins import ENUMERATIONS, FILLED, TAKEN, Twin  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 128
MADE = "Generated from include/switchyard/c by scripts/interface/generate.py; change the headers and run it."
EXCHANGE, LAYER = "switchyard", "switchyard_layer"


def wrapped(words: list[str], indent: str, separator: str = " ", width: int = WIDTH, tail: str = "") -> list[str]:
    """`words` joined by `separator` and broken into lines."""
    lines, line = [], indent
    for number, word in enumerate(words):
        piece = word + (separator.rstrip() if number + 1 < len(words) else "")
        if line != indent and len(line) + len(piece) + 1 + len(tail) > width:
            lines.append(line.rstrip() + tail)
            line = indent
        line += piece + " "
    return lines + [line.rstrip()]


# ---- C: the INIT macros ----

def init_value(member: Member) -> str:
    value = member.default or ("NULL" if member.pointer or member.type.endswith("_function") else
                               {"double": "0.0", "float": "0.0f"}.get(member.type, "0"))
    return value if member.count == 1 else "{" + ", ".join([value] * member.count) + "}"


def init_header(interface: Interface) -> str:
    lines = ["// SPDX-License-Identifier: Apache-2.0", f"// {MADE}", "/// \\file",
             "/// C ABI: the SY_..._INIT macros. Each initializes the struct of the same name: struct_size, and the defaults that SY_DEFAULT",
             "/// marks in the struct. The headers of the structs include this header.", "#pragma once", "", "#include <stddef.h>", "",
             "// clang-format off"]
    for struct in interface.structs.values():
        if struct.sized:
            values = [f"sizeof({struct.name})"] + [init_value(member) for member in struct.members[1:]]
            one = f"#define {struct.macro} {{ " + ", ".join(values) + " }"
            if len(one) <= WIDTH:
                lines.append(one)
            else:
                lines += [f"#define {struct.macro} {{ \\"] + wrapped(values, "    ", ", ", WIDTH - 4, " \\")
                lines[-1] += " }"
    return "\n".join([*lines, "// clang-format on", ""])


# ---- C++: layouts, defaults, conversions ----

def is_enumeration(interface: Interface, type: str) -> bool:
    return type in ENUMERATIONS and type in interface.enumerations


def joined(conditions: list[str], indent: str = "              ") -> list[str]:
    lines = wrapped(conditions, indent, " && ", WIDTH - 2)
    lines[0] = "static_assert(" + lines[0].lstrip()
    lines[-1] += ");"
    return lines


def layout_lines(struct: Struct) -> list[str]:
    fields = struct.members[1:] if struct.sized else struct.members
    return joined([f"sizeof({struct.name}) == {struct.size}"] + [f"offsetof({struct.name}, {each.name}) == {each.offset}" for each in fields])


def enumeration_lines(interface: Interface, name: str) -> list[str]:
    twin, prefix, _ = ENUMERATIONS[name]
    return joined([f"{each} == static_cast<int>({twin}::{each[len(prefix):].lower()})" for each in interface.enumerations[name]])


def default_lines(interface: Interface, struct: Struct, twin: Twin) -> list[str]:
    conditions = []
    for member in struct.members[1:]:
        path = twin.members.get(member.name, member.name)
        if path is None or member.name.startswith("reserved") or member.count > 1:
            continue
        theirs = f"{twin.type}{{}}.{path}"
        if is_enumeration(interface, member.type) or member.type == "sy_bool":
            theirs = f"static_cast<int>({theirs})"
        conditions.append(f"kInit<{struct.name}>.{member.name} == {theirs}")
    return joined(conditions)


def taken_lines(interface: Interface, struct: Struct, twin: Twin) -> list[str]:
    lines = [f"inline {twin.type} twin_of(const {struct.name}& c, [[maybe_unused]] const char* name) {{", f"  {twin.type} twin;"]
    for member in struct.members[1:]:
        path = twin.members.get(member.name, member.name)
        low, high = (0, 0) if member.name.startswith("reserved") else twin.ranges.get(member.name, (None, None))
        if low is not None:
            names = {(1 << 31) - 1: "INT32_MAX", (1 << 63) - 1: "INT64_MAX"}
            lines.append(f'  require_range_of(name, "{member.name}", c.{member.name}, {low}, {names.get(high, high)});')
        if path is None or member.name.startswith("reserved"):
            continue
        if member.count > 1:
            lines += [f"  twin.{path}[{i}] = c.{member.name}[{i}];" for i in range(member.count)]
        elif is_enumeration(interface, member.type):
            lines.append(f'  twin.{path} = to_enum_of<{ENUMERATIONS[member.type][0]}>(name, "{member.name}", c.{member.name});')
        elif member.type == "sy_bool":
            lines.append(f'  twin.{path} = to_bool_of(name, "{member.name}", c.{member.name});')
        elif member.name.endswith("_ms") and member.type == "int64_t":
            lines.append(f"  twin.{path} = std::chrono::milliseconds(c.{member.name});")
        elif member.type == "char" and member.pointer:
            lines.append(f'  require_of(name, "{member.name}", c.{member.name});' if member.name in twin.needed else
                         f"  if (c.{member.name}) twin.{path} = c.{member.name};")
            lines += [f"  twin.{path} = c.{member.name};"] if member.name in twin.needed else []
        else:
            lines.append(f"  twin.{path} = c.{member.name};")
    lines += ["  return twin;", "}"]
    if None in twin.members.values():  # from_c() would lose a member
        return lines
    named = f'const char* name = "{twin.argument}"' if twin.argument else "const char* name"
    lines += [f"inline {twin.type} from_c(const {struct.name}* given, {named}) {{"]
    if twin.optional:
        lines.append("  if (!given) return {};")
    return [*lines, f"  return twin_of(read_struct(given, kInit<{struct.name}>, name), name);", "}"]


def filled_lines(interface: Interface, struct: Struct, twin: Twin) -> list[str]:
    values = [f"sizeof({struct.name})"]
    for member in struct.members[1:]:
        value = f"from.{twin.members.get(member.name, member.name)}"
        values.append(f"static_cast<{member.type}>({value})" if is_enumeration(interface, member.type) else value)
    lines = wrapped(values, "                    ", ", ", WIDTH - 4)
    lines[0] = f"  write_struct(to, {struct.name}{{" + lines[0].lstrip()
    if len(lines[0]) > WIDTH:
        lines = [f"  write_struct(to, {struct.name}{{"] + wrapped(values, "      ", ", ", WIDTH - 4)
    lines[-1] += "});"
    return [f"inline void fill({struct.name}* to, const {twin.type}& from) {{", *lines, "}"]


def conversions(interface: Interface, library: str, includes: list[str], about: list[str]) -> str:
    lines = ["// SPDX-License-Identifier: Apache-2.0", f"// {MADE}", *about, "#pragma once", "", "// clang-format off"]
    lines += [f"#include {each}" for each in includes] + ["", "namespace switchyard::detail {", ""]
    structs = [struct for struct in interface.structs.values() if struct.library == library]
    mine = [name for name in ENUMERATIONS if (name in LAYER_ENUMERATIONS) == (library == LAYER)]
    lines += ["// Values of the enumerations."]
    for name in mine:
        lines += enumeration_lines(interface, name)
    lines += ["", "// Members never move; new members are appended. No struct has padding, so every byte belongs to a member."]
    for struct in structs:
        lines += layout_lines(struct)
    if library == EXCHANGE:
        lines += ["", "/// The value of the INIT macro of T.", "template <class T>", "inline constexpr T kInit{};"]
    for struct in structs:
        twin = TAKEN.get(struct.name)
        if twin or struct.name in FILLED:
            lines += ["", f"// {struct.name}"]
        if twin:
            lines += ["template <>", f"inline constexpr {struct.name} kInit<{struct.name}> = {struct.macro};"]
            lines += default_lines(interface, struct, twin) if twin.literal else []
            lines += taken_lines(interface, struct, twin)
        if struct.name in FILLED:
            lines += filled_lines(interface, struct, FILLED[struct.name])
    return "\n".join([*lines, "", "}  // namespace switchyard::detail", "// clang-format on", ""])


LAYER_ENUMERATIONS = ("sy_weight_storage", "sy_weight_order", "sy_epilogue", "sy_scale_granularity", "sy_output_scaling", "sy_moe_exchange", "sy_moe_form")


def struct_list(interface: Interface) -> str:
    names = sorted(struct.name for struct in interface.structs.values() if struct.sized)
    return "\n".join(["// SPDX-License-Identifier: Apache-2.0", f"// {MADE}",
                      "// SY_STRUCT(name) for each struct that begins with struct_size.", *[f"SY_STRUCT({name})" for name in names],
                      "#undef SY_STRUCT", ""])


# ---- Python ----

CTYPES = {"size_t": "c_size_t", "int64_t": "c_int64", "uint64_t": "c_uint64", "double": "c_double", "int32_t": "c_int32",
          "uint32_t": "c_uint32", "float": "c_float"}


def class_name(struct: Struct) -> str:
    return "".join(word.capitalize() for word in struct.name[3:].split("_"))


def ctype(member: Member) -> str:
    if member.pointer or member.type.endswith("_function"):
        kind = "c_char_p" if member.type == "char" else "c_void_p"
    else:
        kind = CTYPES.get(member.type, "c_int32")
    return kind if member.count == 1 else f"{kind} * {member.count}"


def python_default(interface: Interface, value: str) -> str:
    if value == "INFINITY":
        return 'float("inf")'
    if value.startswith("SY_"):
        return str(interface.value(value))
    return re.sub(r"(?<=\d)f$", "", value)


def python_head(about: str) -> list[str]:
    return ["# SPDX-License-Identifier: Apache-2.0", f"# {MADE}", f'"""{about}"""', "from __future__ import annotations", ""]


def python_structs(interface: Interface) -> str:
    lines = python_head("The structs of include/switchyard/c with their members and the defaults of their SY_..._INIT macros.")
    types = sorted({word for struct in interface.structs.values() for member in struct.members for word in [ctype(member).split()[0]]})
    lines += ["import ctypes", *wrapped(types, "    ", ", ", 140)]
    lines[-1] = "from ctypes import " + lines[-1].lstrip()
    lines += ["", "from .struct import Struct"]
    for struct in interface.structs.values():
        lines += ["", "", f"class {class_name(struct)}({'Struct' if struct.sized else 'ctypes.Structure'}):",
                  f'    """{struct.name}"""' if not struct.sized else f'    name = "{struct.name}"']
        defaults = [f'"{each.name}": {python_default(interface, each.default)}' for each in struct.members if each.default]
        if not struct.sized:
            lines.append("")
        if defaults:
            made = wrapped(defaults, "                ", ", ", 138)
            lines += ["    defaults = {" + made[0].lstrip(), *made[1:]]
            lines[-1] += "}"
        fields = wrapped([f'("{each.name}", {ctype(each)})' for each in struct.members], "                ", ", ", 139)
        lines += ["    _fields_ = [" + fields[0].lstrip(), *fields[1:]]
        lines[-1] += "]"
    names = wrapped([class_name(struct) for struct in interface.structs.values() if struct.sized], "       ", ", ", 138)
    return "\n".join([*lines, "", "", "ALL = (" + names[0].lstrip(), *names[1:]]) + ")\n"


def letter(interface: Interface, argument: str) -> str:
    if "char*" in argument and "**" not in argument:
        return "s"
    if "*" in argument:
        return "p"
    type = argument.replace("const ", "").split()[0]
    if type in interface.enumerations or type in ("int32_t", "int"):
        return "i"
    return {"int64_t": "l", "size_t": "z", "uint32_t": "u", "ptrdiff_t": "l", "double": "d"}[type]


def python_signatures(interface: Interface) -> str:
    lines = python_head("The functions of include/switchyard/c that return an sy_code: a letter for each argument.")
    lines[2:3] = ['"""The functions of include/switchyard/c that return an sy_code, with a letter for each argument: `p` a pointer, `s` a string, `i` an',
                  "int32_t, `u` a uint32_t, `l` an int64_t, `z` a size_t, `d` a double.", '"""']
    for library, name in ((EXCHANGE, "EXCHANGE"), (LAYER, "LAYER")):
        entries = [f'"{each.name}": "{"".join(letter(interface, argument) for argument in each.arguments)}"'
                   for each in interface.functions if each.library == library and each.result == "sy_code"]
        lines += ["#: Functions of lib" + library + ".", f"{name} = {{", *wrapped(entries, "    ", ", ", 140), "}"]
    return "\n".join([*lines, ""])


def python_enumerations(interface: Interface) -> str:
    lines = python_head("Names and values of the enumerations of include/switchyard/c.")
    for name, (_, prefix, table) in ENUMERATIONS.items():
        if table:
            words = ", ".join(f'"{each[len(prefix):].lower()}": {value}' for each, value in interface.enumerations[name].items())
            lines.append(f"{table} = {{{words}}}")
    types = wrapped([f'"{type}": {table}' for type, _, table in ENUMERATIONS.values() if table], "             ", ", ", 140)
    lines += ["#: The tables by the C++ type that messages of the library name.", "CPP_TYPES = {" + types[0].lstrip(), *types[1:]]
    lines[-1] += "}"
    bits = ", ".join(f"{value}: {bits}" for value, bits in interface.dtype_bits.items())
    return "\n".join([*lines, "#: Bits of an element of each row type.", f"DTYPE_BITS = {{{bits}}}", ""])


# ---- All of it ----

def made(interface: Interface) -> dict[str, str]:
    """Contents of the files generated from the headers, by path."""
    about = ["// Structs of libswitchyard and their C++ counterparts. from_c() reads a struct of any version and throws ArgumentError for a",
             "// value that the C++ type cannot express; twin_of() converts a struct that has been read; fill() writes the members of the",
             "// caller's version. A struct with members that C++ does not have has no from_c(): capi/call_options.hpp."]
    unknown = [name for name in interface.enumerations if name not in ENUMERATIONS and name != "sy_bool"]
    unknown += [name for name in (*TAKEN, *FILLED) if name not in interface.structs]
    if unknown:
        raise Refused(f"scripts/interface/twins.py does not fit the headers: {', '.join(unknown)}")
    exchange = ['<chrono>', '<cstddef>', '<cstdint>', '"capi/views.hpp"', '"switchyard/c/expert_map.h"', '"switchyard/c/ledger.h"',
                '"switchyard/c/low_latency.h"',
                '"switchyard/c/switchyard.h"', '"switchyard/c/trace.h"', '"switchyard/c/tuning.h"', '"switchyard/expert_map.hpp"',
                '"switchyard/ledger.hpp"', '"switchyard/low_latency.hpp"', '"switchyard/normal.hpp"', '"switchyard/trace.hpp"', '"switchyard/tuning.hpp"']
    layer = ['<cstddef>', '<cstdint>', '"capi/structs.hpp"', '"switchyard/c/gemm_gradients.h"', '"switchyard/c/layer.h"',
             '"switchyard/gemm_gradients.hpp"', '"switchyard/layer.hpp"']
    return {
        "include/switchyard/c/init.h": init_header(interface),
        "src/capi/structs.hpp": conversions(interface, EXCHANGE, exchange, about),
        "src/capi/layer/structs.hpp": conversions(interface, LAYER, layer,
                                                  ["// Structs of libswitchyard_layer and their C++ counterparts; capi/structs.hpp has those of libswitchyard."]),
        "src/capi/structs.def": struct_list(interface),
        "python/switchyard/_abi/structs.py": python_structs(interface),
        "python/switchyard/_abi/signatures.py": python_signatures(interface),
        "python/switchyard/_abi/enumerations.py": python_enumerations(interface),
    }


def moved(interface: Interface) -> list[str]:
    """Members whose offsets differ from the committed assertions. A reserved member, which had to be 0, may be replaced."""
    problems = []
    for path in ("src/capi/structs.hpp", "src/capi/layer/structs.hpp"):
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        for struct, member, offset in re.findall(r"offsetof\((sy_\w+), (\w+)\) == (\d+)", text):
            members = interface.structs[struct].members if struct in interface.structs else []
            now = [each.offset for each in members if each.name == member]
            taken = member.startswith("reserved") and any(each.offset == int(offset) for each in members)
            if now != [int(offset)] and not taken:
                problems.append(f"{struct}::{member} was at byte {offset}, and is {f'at {now[0]}' if now else 'gone'}")
    return problems


def main() -> int:
    options = sys.argv[1:]
    if {"-h", "--help"} & set(options):
        print(__doc__.strip())
        return 0
    if set(options) - {"--check", "--new-layout"}:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        interface = read(ROOT)
        files = made(interface)
    except Refused as error:
        print(f"interface: {error}", file=sys.stderr)
        return 1
    problems = [] if "--new-layout" in options else moved(interface)
    if problems:
        print("\n".join([*problems, "Append members instead, or say --new-layout."]), file=sys.stderr)
        return 1
    differ = [path for path, text in files.items() if not (ROOT / path).is_file() or (ROOT / path).read_text(encoding="utf-8") != text]
    if "--check" in options:
        for path in differ:
            print(f"{path} is not what scripts/interface/generate.py makes: run it")
        return 1 if differ else 0
    for path in differ:
        (ROOT / path).write_text(files[path], encoding="utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
