#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the layers of src (cmake/Layers.cmake): every permission in a SEES list is used by an include, no layer other than
arch queries the compilation's target machine, and only one file of host code names the GPU runtime.

The build itself fails on includes not permitted by a list."""
import re
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parent.parent / "src"
INCLUDE = re.compile(r'^\s*#\s*include "([^"]+)"', re.M)
SOURCES = {".hpp", ".cpp", ".cu", ".cuh", ".def"}
# Device code that is neither in an op of arch nor in an annotation of base/macros.hpp.
MACHINE = re.compile(r"^\s*#\s*(?:if|ifdef|elif)\b.*__(?:CUDA_ARCH|CUDACC|HIP)|\basm\b\s*(?:volatile)?\s*\(", re.M)
MACHINE_ALLOWED = ("arch/", "base/macros.hpp")

RUNTIME = re.compile(r"\b(?:cuda|hip)[A-Z]\w*")
RUNTIME_ALLOWED = ("arch/gpu_runtime.hpp", "heap/gpu/driver.cpp")
NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', re.S)


def layers():
    """Yields (folder, permissions) of every layer."""
    for lists in sorted(SRC.rglob("CMakeLists.txt")):
        text = re.sub(r"#[^\n]*", "", lists.read_text())
        for call in re.findall(r"switchyard_layer\(([^)]*)\)", text):
            words = call.split()
            keywords = {"SEES", "SOURCES", "CUDA_SOURCES", "LINK", "LIBRARY", "PUBLIC_API"}
            sees = []
            if "SEES" in words:
                for word in words[words.index("SEES") + 1:]:
                    if word in keywords:
                        break
                    sees.append(word)
            yield words[0], sees


def sources(folder):
    return (path for path in sorted((SRC / folder).rglob("*")) if path.suffix in SOURCES)


def reachable(folder):
    """Names of all files in src that the layer includes, directly or indirectly."""
    found, left = set(), list(sources(folder))
    while left:
        for name in INCLUDE.findall(left.pop().read_text()):
            if name not in found and (SRC / name).is_file():
                found.add(name)
                left.append(SRC / name)
    return found


def main():
    problems = []
    for folder, sees in layers():
        included = reachable(folder)
        for permitted in sees:
            if not any(name == permitted or name.startswith(permitted + "/") for name in included):
                problems.append(f"src/{folder}: SEES names {permitted}, but nothing there includes it, not through others either")
    for path in sources("."):
        name = path.relative_to(SRC).as_posix()
        if not name.startswith(MACHINE_ALLOWED) and MACHINE.search(path.read_text()):
            problems.append(f"src/{name}: assembly, and what depends on the machine, belong to arch (annotations: base/macros.hpp)")
        runtime = RUNTIME.search(NOT_CODE.sub("", path.read_text()))
        if runtime and name not in RUNTIME_ALLOWED:
            problems.append(f"src/{name}: {runtime[0]} belongs to src/arch/gpu_runtime.hpp")
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
