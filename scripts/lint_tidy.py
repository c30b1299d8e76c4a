#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs clang-tidy over given files of a build, several of them at a time.

usage: lint_tidy.py CLANG_TIDY BUILD [FILE...]

BUILD is a folder with compile_commands.json (build/release); FILEs are relative to the root of the tree. Files that BUILD does not
compile are skipped; without FILEs, every file of src/, oracle/ and tools/ is checked. clang-tidy spends nearly all its time on headers,
so files of one folder with equal flags are checked as one file that includes them all; if their names collide, each is checked separately.
Writes into build/lint. Exit code 1 if there are findings, 2 if nothing was checked."""
import concurrent.futures
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINT = ROOT / "build/lint"
MAX_TOGETHER = 12
# GCC's precompiled headers do not work with clang, and files do not depend on them.
PRECOMPILED = re.compile(r" -Winvalid-pch -include \S*cmake_pch\.hxx")
# clang does not support all of GCC's warning options. The path analysis stops after a 28th of its default number of nodes: the
# rest takes most of the time.
ARGUMENTS = ["--quiet", "-p", str(LINT), "--extra-arg=-Wno-unknown-warning-option"]
for word in ("-Xclang", "-analyzer-config", "-Xclang", "max-nodes=8000"):
    ARGUMENTS.append("--extra-arg=" + word)


def flags_of_files(build):
    """{file: (folder of the command, command without file and output)}, from the first command of each file."""
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        command = re.sub(r" -o \S+ -c \S+", "", PRECOMPILED.sub("", entry["command"]))
        for path in sources_of(Path(entry["file"])):
            if path.suffix == ".cpp" and path.is_relative_to(ROOT):
                found.setdefault(str(path.relative_to(ROOT)), (entry["directory"], command))
    return found


def sources_of(path):
    """The file itself, or the sources of a unity file that CMake generated."""
    if not re.fullmatch(r"unity_\d+_cxx\.cxx", path.name):
        return [path]
    return [Path(name) for name in re.findall(r'^#include "(.+)"', path.read_text(), re.M)]


def units_of(names, flags):
    """Lists of files that are checked together."""
    groups = {}
    for name in sorted(names):
        groups.setdefault((os.path.dirname(name), flags[name]), []).append(name)
    return [group[at : at + MAX_TOGETHER] for group in groups.values() for at in range(0, len(group), MAX_TOGETHER)]


def write_unit(unit, flags, number):
    """Writes the file that includes a unit's files. Returns its name and command."""
    directory, command = flags[unit[0]]
    path = LINT / "units" / f"{os.path.dirname(unit[0]).replace('/', '_')}_{number}.cpp"
    path.write_text("".join(f'#include "{ROOT / name}"\n' for name in unit))
    return {"directory": directory, "file": str(path), "command": f"{command} -c {shlex.quote(str(path))}"}


def read(tool, path):
    """Runs clang-tidy on a file. Returns its findings, and whether the file compiles."""
    run = subprocess.run([tool, *ARGUMENTS, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return run.returncode == 0, run.stdout, "[clang-diagnostic-error]" not in run.stdout


def main():
    tool, build, *names = sys.argv[1:]
    flags = flags_of_files(ROOT / build)
    wanted = names or [name for name in flags if re.match(r"(src|oracle|tools)/", name)]
    units = units_of([name for name in wanted if name in flags], flags)
    if not units:
        print(f"{build} compiles none of these files")
        return 2
    (LINT / "units").mkdir(parents=True, exist_ok=True)
    entries = [write_unit(unit, flags, number) for number, unit in enumerate(units)]
    alone = [{"directory": d, "file": str(ROOT / name), "command": f"{c} -c {ROOT / name}"} for name, (d, c) in flags.items()]
    (LINT / "compile_commands.json").write_text(json.dumps(entries + alone, indent=1))

    def check(unit, entry):
        good, text, compiles = read(tool, entry["file"])
        if compiles or len(unit) == 1:
            return good, text
        results = [read(tool, str(ROOT / name)) for name in unit]
        return all(result[0] for result in results), "".join(result[1] for result in results)

    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(pool.map(check, units, entries))
    print("".join(text for good, text in results if not good), end="")
    return 0 if all(good for good, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
