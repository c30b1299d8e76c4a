#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that every tracked source is built: the nearest CMakeLists.txt at or above its folder must list it."""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT = {".c", ".cpp", ".cu"}
SEPARATE = ("tests/abi/consumer/", "bench/peers/")  # separate projects, and a benchmark that needs a peer's headers


def owner(path):
    """The CMakeLists.txt in the folder of `path`, or the nearest one above it."""
    for folder in path.parents:
        if (ROOT / folder / "CMakeLists.txt").exists():
            return folder / "CMakeLists.txt"
    return None


def main():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    missing = []
    for name in names:
        path = Path(name)
        if path.suffix not in BUILT or name.startswith(SEPARATE):
            continue
        lists = owner(path)
        entry = path.relative_to(lists.parent).as_posix()
        words = re.findall(r"[\w./-]+", re.sub(r"#[^\n]*", "", (ROOT / lists).read_text()))
        if entry not in words and path.stem not in words:  # loops over test names list stems
            missing.append(f"{name}: not listed in {lists}")
    print("\n".join(missing), end="\n" if missing else "")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
