#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_exports.py LIBRARY SOURCE_DIR: checks that the shared library exports all C functions in its headers, the public C++
API, and nothing else. A public header of a library other than libswitchyard names that library ("Library switchyard_layer").
Exports of libswitchyard for libraries that depend on it: the C functions declared in the headers of src/capi listed in
INNER_HEADERS, and the member functions of the classes in INNER."""
import re
import subprocess
import sys
from pathlib import Path

PUBLIC_CXX = re.compile(r"^(vtable for |typeinfo for |typeinfo name for )?switchyard::(?!detail::)")
# The demangled name of a template function begins with its return type: "switchyard::DType switchyard::detail::f<...>(...)".
INNER_CXX = re.compile(r"^[^(]*?\sswitchyard::detail::\w+")
EXCHANGE = "switchyard"
INNER_HEADERS = ("internal_exports.hpp",)
INNER_CLASSES = {"switchyard::detail::FusedMoe": "exchange/fused/fused_moe.hpp",
                 "switchyard::detail::StepTrace": "exchange/group/step_trace.hpp"}
#: Friends of public classes, which therefore declare them.
FRIENDS = {"switchyard::detail::LowLatencyCalls": "exchange/low_latency/known_memory.hpp",
           "switchyard::detail::NormalCalls": "exchange/normal/known_memory.hpp"}
INNER = {**INNER_CLASSES, **FRIENDS}


def library_of(header):
    """Returns the library named in the comment of a public header."""
    said = re.search(r"\bLibrary\s+(?:///\s*)?(switchyard\w*)", header)
    return said[1] if said else EXCHANGE


def without_comments(text):
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)


def functions(text):
    """Returns the C functions declared in a header."""
    declarations = re.sub(r"typedef[^;]*;", "", without_comments(text))
    return set(re.findall(r"\b(sy_\w+)\s*\([^;{]*\)\s*(?:noexcept\s*)?;", declarations))


def cxx_functions(header):
    """Returns the functions that a public C++ header declares in namespace scope, that is, without indentation, and does not
    define."""
    text = re.sub(r"^namespace (?:switchyard::)?detail \{.*?^\}", "", without_comments(header), flags=re.M | re.S)
    found = re.findall(r"^(?!inline|constexpr|template|using|typedef|friend|struct|class|enum|#)[A-Za-z_][\w:<>,&* ]*?\b([a-z_]\w*)\([^;{}]*\)[^;{}()]*;", text, flags=re.M)
    inline = re.findall(r"^(?:inline|constexpr|template)[^;{}]*?\b([a-z_]\w*)\(", text, flags=re.M)
    return set(found) - set(inline)


def exported(library):
    """Returns demangled names, without symbol versions."""
    command = ["nm", "-D", "--defined-only", "--format=posix", library]
    mangled = [line.split()[0].split("@")[0] for line in subprocess.run(command, capture_output=True, text=True,
                                                                      check=True).stdout.splitlines()]
    return subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout.splitlines()


def main():
    library, source = Path(sys.argv[1]), Path(sys.argv[2])
    name = library.name.split(".")[0].removeprefix("lib")
    public = source / "include" / "switchyard"
    headers = [text for text in (path.read_text(encoding="utf-8") for path in sorted(public.glob("c/*.h"))) if library_of(text) == name]
    declared = {function for text in headers for function in functions(text)}
    texts = [(source / "src" / "capi" / header).read_text(encoding="utf-8") for header in INNER_HEADERS if name == EXCHANGE]
    inner = {function for text in texts for function in functions(text)}
    documented = {word for path in public.rglob("*.hpp") for word in re.findall(r"\w+", without_comments(path.read_text(encoding="utf-8")))}

    public_cxx = {function for path in public.rglob("*.hpp") if "detail" not in path.parts
                  for header in [path.read_text(encoding="utf-8")] if library_of(header) == name for function in cxx_functions(header)}

    names = exported(library)
    c_names = {each for each in names if re.fullmatch(r"sy_\w+", each)}
    cxx = [each for each in names if PUBLIC_CXX.match(each) and not INNER_CXX.match(each)]
    members = {kind: {each for each in names if each.startswith(kind + "::") or each == f"typeinfo for {kind}"} for kind in INNER if name == EXCHANGE}
    inner_cxx = set().union(*members.values())
    strangers = [each for each in names if each not in c_names and each not in cxx and each not in inner_cxx
                 and not each.startswith("SWITCHYARD_")]
    strangers += [each for each in cxx if re.search(r"switchyard::(\w+)", each)[1] not in documented]
    problems = [f"exported but not public: {each}" for each in strangers]
    problems += [f"declared but not exported: {each}" for each in sorted((declared | inner) - c_names)]
    problems += [f"exported but not declared in a C header of {name}: {each}" for each in sorted(c_names - declared - inner)]
    problems += [f"no member function of {kind} is exported" for kind, found in members.items() if not found]
    problems += [f"{kind} is not declared in src/{INNER[kind]}" for kind in members
                 if not re.search(rf"^(class|struct) {kind.split('::')[-1]} ", (source / "src" / INNER[kind]).read_text(encoding="utf-8"), re.M)]
    problems += [f"internal, but declared in a public header: {kind}" for kind in INNER_CLASSES if kind.split("::")[-1] in documented]
    exported_cxx = {found[1] for each in cxx if (found := re.search(r"switchyard::(\w+)[(<]", each))}
    problems += [f"declared in a public C++ header but not exported: switchyard::{each}" for each in sorted(public_cxx - exported_cxx)]
    if not cxx:
        problems.append("found no C++ symbol")
    if (headers or name == EXCHANGE) and not declared or name == EXCHANGE and not inner:
        problems.append("found no function in the C headers")
    print("\n".join(problems))
    print(f"{len(c_names)} C functions, {len(cxx)} C++ symbols, {len(public_cxx)} free C++ functions")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
