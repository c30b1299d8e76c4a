#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_exports.py LIBRARY [C_HEADERS]: the shared library exports the C ABI of those headers completely, the public C++ API, and
nothing else."""
import re
import subprocess
import sys
from pathlib import Path

PUBLIC_CXX = re.compile(r"^(vtable for |typeinfo for |typeinfo name for )?switchyard::(?!detail::)")


def main():
    library, headers = sys.argv[1], sorted(Path(sys.argv[2]).glob("*.h")) if len(sys.argv) > 2 else []
    command = ["nm", "-D", "--defined-only", "--format=posix", library]
    mangled = [line.split()[0].split("@")[0] for line in subprocess.run(command, capture_output=True, text=True,
                                                                      check=True).stdout.splitlines()]
    names = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout.splitlines()
    c_names = {name for name in names if re.fullmatch(r"sy_\w+", name)}
    strangers = [name for name in names
                 if name not in c_names and not PUBLIC_CXX.match(name) and not name.startswith("SWITCHYARD_")]
    text = "\n".join(re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text(), flags=re.S) for header in headers)
    declared = set(re.findall(r"\b(sy_\w+)\s*\([^;{]*\)\s*;", re.sub(r"typedef[^;]*;", "", text)))
    problems = [f"exported but not public: {name}" for name in strangers]
    problems += [f"declared but not exported: {name}" for name in sorted(declared - c_names)]
    problems += [f"exported but not declared in a C header: {name}" for name in sorted(c_names - declared)]
    public_cxx = len(names) - len(c_names) - len(strangers)
    if public_cxx == 0 or (headers and not declared):
        problems.append("found no C++ symbol" if public_cxx == 0 else "found no function in the C headers")
    print("\n".join(problems))
    print(f"{len(c_names)} C functions, {public_cxx} C++ symbols")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
