#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every header compiles alone.

  public    the headers of include/, with g++ and clang++ and nothing else on the include path; C headers also as pedantic C11.
            One that speaks of Error brings it: callers can catch what it documents
  internal  the headers of src/, each against the view of its layer: an include that points to a higher layer fails
"""
import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
WARN = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Werror"]


def compilers(names):
    found = [path for path in (shutil.which(name) for name in names) if path]
    if not found:
        sys.exit(f"none of {', '.join(names)} found")
    return found[0]


def public_jobs(build):
    """(what, command, text to compile)"""
    cxx = [compilers(["g++"])] + [c for c in [shutil.which("clang++") or shutil.which("clang++-14")] if c]
    cc = [compilers(["gcc"])] + [c for c in [shutil.which("clang") or shutil.which("clang-14")] if c]
    print("compilers:", *cxx, *cc)
    roots = [ROOT / "include", build / "include"]
    include = [f"-I{root}" for root in roots]
    for root in roots:
        for path in sorted((root / "switchyard").rglob("*.h*")):
            name = path.relative_to(root).as_posix()
            # Twice: the second inclusion must be harmless.
            text = f'#include "{name}"\n#include "{name}"\nextern int declaration;\n'
            if path.suffix == ".hpp" and "Error(" in path.read_text(encoding="utf-8"):
                text += "static_assert(sizeof(switchyard::Error) > 0 && switchyard::ErrorCode::ok == switchyard::ErrorCode(0));\n"
            for compiler in cxx:
                yield name, [compiler, "-xc++", "-std=c++20", "-Wpedantic", *WARN, *include], text
            if path.suffix == ".h":
                for compiler in cc:
                    yield name, [compiler, "-xc", "-std=c11", "-pedantic-errors", "-Wstrict-prototypes", *WARN, *include], text


def internal_jobs(build):
    compiler = shutil.which("clang++") or shutil.which("clang++-14") or compilers(["g++"])  # the faster one
    include = [f"-I{ROOT / 'include'}", f"-I{build / 'include'}"]
    layers = [line.split() for line in (build / "view" / "layers.txt").read_text().splitlines()]
    for view, folder in layers:
        for path in sorted((ROOT / "src" / folder).rglob("*.hpp")):
            name = path.relative_to(ROOT / "src").as_posix()
            inner = any(path.is_relative_to(ROOT / "src" / other) for _, other in layers if len(other) > len(folder))
            if name.endswith("-inl.hpp") or inner:  # compiled once per instruction set, with macros of its own; or of a sub-layer
                continue
            command = [compiler, "-xc++", "-std=c++20", "-DHWY_SHARED_DEFINE", "-DSWITCHYARD_HAS_GPU_CODE=0", "-Wall", "-Wextra", "-Werror",
                       f"-I{build / 'view' / view}", *include]
            yield name, command, f'#include "{name}"\n'


def compile_alone(job):
    name, command, text = job
    run = subprocess.run([*command, "-fsyntax-only", "-"], input=text, capture_output=True, text=True, check=False)
    return None if run.returncode == 0 else f"FAIL {name}: {' '.join(command)}\n{run.stderr}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["public", "internal"])
    parser.add_argument("build", type=Path, help="build folder (generated headers, views)")
    args = parser.parse_args()
    jobs = list((public_jobs if args.kind == "public" else internal_jobs)(args.build.resolve()))
    if not jobs:
        sys.exit("no header found")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = [result for result in pool.map(compile_alone, jobs) if result]
    print("\n".join(failures))
    print(f"{len(jobs) - len(failures)} of {len(jobs)} compilations passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
