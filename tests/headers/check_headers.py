#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that every header compiles standalone.

  public    compiles the headers of include/ with g++ and clang++ and nothing else on the include path, and C headers also as
            pedantic C11. A header that documents Error must include it, so that callers can catch it.
  internal  compiles the headers of src/, each with the view of its layer, in which an include that points to a higher layer
            fails. Headers that include CUDA headers are checked only if those are installed; otherwise, their names are
            printed. A header that a source of the build includes before all others has been compiled alone there, and is not
            compiled again.
  cuda      compiles the internal headers that include CUDA headers.
  baseline  compiles the sources that Highway compiles once per instruction set, for a processor that supports more than the
            last of these sets (-march=sapphirerapids, which is what -march=native means there).
"""
import argparse
import json
import os
import re
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
    """Yields tuples of name, command and text to compile."""
    cxx = [compilers(["g++"])] + [c for c in [shutil.which("clang++") or shutil.which("clang++-14")] if c]
    cc = [compilers(["gcc"])] + [c for c in [shutil.which("clang") or shutil.which("clang-14")] if c]
    print("compilers:", *cxx, *cc)
    roots = [ROOT / "include", build / "include"]
    include = [f"-I{root}" for root in roots]
    for root in roots:
        for path in sorted((root / "switchyard").rglob("*.h*")):
            name = path.relative_to(root).as_posix()
            # The text includes the header twice: the second inclusion must be harmless.
            text = f'#include "{name}"\n#include "{name}"\nextern int declaration;\n'
            if path.suffix == ".hpp" and "Error(" in path.read_text(encoding="utf-8"):
                text += "static_assert(sizeof(switchyard::Error) > 0 && switchyard::ErrorCode::ok == switchyard::ErrorCode(0));\n"
            for compiler in cxx:
                yield name, [compiler, "-xc++", "-std=c++20", "-Wpedantic", *WARN, *include], text
            if path.suffix == ".h":
                for compiler in cc:
                    yield name, [compiler, "-xc", "-std=c11", "-pedantic-errors", "-Wstrict-prototypes", *WARN, *include], text


def layers_of(build):
    """Returns the (view, folder) pair of each layer."""
    return [line.split() for line in (build / "view" / "layers.txt").read_text().splitlines()]


def included_first(build):
    """Returns the headers that are included first by some source file of the build."""
    sources = {Path(entry["file"]) for entry in json.loads((build / "compile_commands.json").read_text())}
    found = set()
    for path in sources:
        if path.is_relative_to(ROOT / "src"):
            first = re.search(r'^#include ["<]([^">]+)', path.read_text(encoding="utf-8"), re.M)
            found.update(first.groups() if first else ())
    return found


def internal_jobs(build):
    compiler = shutil.which("clang++") or shutil.which("clang++-14") or compilers(["g++"])  # clang++ is faster
    include = [f"-I{ROOT / 'include'}", f"-I{build / 'include'}"]
    layers, compiled = layers_of(build), included_first(build)
    for view, folder in layers:
        for path in sorted((ROOT / "src" / folder).rglob("*.hpp")):
            name = path.relative_to(ROOT / "src").as_posix()
            inner = any(path.is_relative_to(ROOT / "src" / other) for _, other in layers if len(other) > len(folder))
            # An -inl.hpp file is compiled once per instruction set, with its own macros. A header of a sub-layer is checked
            # with that sub-layer.
            if name.endswith("-inl.hpp") or inner or name in compiled:
                continue
            command = [compiler, "-xc++", "-std=c++20", "-DHWY_SHARED_DEFINE", "-DSWITCHYARD_HAS_GPU_CODE=0", "-Wall", "-Wextra", "-Werror",
                       f"-I{build / 'view' / view}", *include]
            yield name, command, f'#include "{name}"\n'


def needs_cuda(name):
    """Whether a header of src includes a CUDA header, directly or through other headers of src."""
    seen, left = set(), [name]
    while left:
        at = ROOT / "src" / left.pop()
        if at in seen or not at.is_file():
            continue
        seen.add(at)
        for found in re.findall(r'^#include ["<]([^">]+)', at.read_text(encoding="utf-8"), re.M):
            if re.fullmatch(r"cuda\w*\.h", found):
                return True
            left.append(found)
    return False


def cuda_jobs(build):
    return (job for job in internal_jobs(build) if needs_cuda(job[0]))


def baseline_jobs(build):
    layers = layers_of(build)
    include = [f"-I{ROOT / 'include'}", f"-I{build / 'include'}"]
    for path in sorted((ROOT / "src").rglob("*.cpp")):
        text = path.read_text(encoding="utf-8")
        if "hwy/foreach_target.h" in text:
            name = path.relative_to(ROOT / "src").as_posix()
            view = max((layer for layer in layers if name.startswith(layer[1] + "/")), key=lambda layer: len(layer[1]))[0]
            command = [compilers(["g++"]), "-xc++", "-std=c++20", "-O2", "-march=sapphirerapids", "-ffp-contract=off", "-DHWY_SHARED_DEFINE",
                       "-Wall", "-Wextra", "-Werror", f"-I{build / 'view' / view}", *include]
            yield name, command, text


def compile_alone(job):
    """Returns ("", output) if the text compiles, otherwise the kind of failure: "cuda" for a missing CUDA header."""
    name, command, text = job
    run = subprocess.run([*command, "-fsyntax-only", "-"], input=text, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return "", ""
    if re.search(r"fatal error: '?cuda\w*\.h'?(: No such file| file not found)", run.stderr):
        return "cuda", name
    return "error", f"FAIL {name}: {' '.join(command)}\n{run.stderr}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["public", "internal", "cuda", "baseline"])
    parser.add_argument("build", type=Path, help="build folder (generated headers, views)")
    args = parser.parse_args()
    kinds = {"public": public_jobs, "internal": internal_jobs, "cuda": cuda_jobs, "baseline": baseline_jobs}
    jobs = list(kinds[args.kind](args.build.resolve()))
    if not jobs:
        sys.exit("nothing to compile found")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(compile_alone, jobs))
    failures = [text for why, text in results if why == "error"]
    need_cuda = [name for why, name in results if why == "cuda"]
    if need_cuda and args.kind != "internal":  # users of the public headers do not need CUDA
        failures += [f"FAIL {name}: includes headers of CUDA" for name in need_cuda]
        need_cuda = []
    print("\n".join(failures))
    if need_cuda:
        print(f"not checked, because CUDA's headers are not installed: {len(need_cuda)} headers: {' '.join(need_cuda)}")
    checked = len(jobs) - len(need_cuda)
    print(f"{checked - len(failures)} of {checked} compilations passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
