#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_exports.py LIBRARY C_HEADERS: the shared library exports the C ABI completely, the public C++ API, and nothing else."""
import re
import subprocess
import sys
from pathlib import Path

PUBLIC_CXX = re.compile(r"^(vtable for |typeinfo for |typeinfo name for )?switchyard::(?!detail::)")


def main():
    library, headers = sys.argv[1], Path(sys.argv[2])
    command = ["nm", "-D", "--defined-only", "--format=posix", library]
    mangled = [line.split()[0].split("@")[0] for line in subprocess.run(command, capture_output=True, text=True,
                                                                      check=True).stdout.splitlines()]
    names = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout.splitlines()
    c_names = {name for name in names if re.fullmatch(r"sy_\w+", name)}
    strangers = [name for name in names
                 if name not in c_names and not PUBLIC_CXX.match(name) and not name.startswith("SWITCHYARD_")]
    text = "\n".join(re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text(), flags=re.S) for header in sorted(headers.glob("*.h")))
    declared = set(re.findall(r"\b(sy_\w+)\s*\([^;{]*\)\s*;", re.sub(r"typedef[^;]*;", "", text)))
    problems = [f"exported but not public: {name}" for name in strangers]
    problems += [f"declared in {headers} but not exported: {name}" for name in sorted(declared - c_names)]
    problems += [f"exported but not declared in {headers}: {name}" for name in sorted(c_names - declared)]
    if not declared:
        problems.append(f"found no function in {headers}")
    print("\n".join(problems))
    print(f"{len(c_names)} C functions, {len(names) - len(c_names) - len(strangers)} C++ symbols")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
