#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""one_bool.py SOURCE_DIR: checks that adding a bool to an options struct changes three generated files and that a moved member
is rejected. Together with the five files edited by hand, the addition touches eight, listed in
docs/design/0062-one-description-of-the-interface.md."""
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COPIED = ("include/switchyard", "scripts/interface", "src/capi", "python/switchyard/_abi")
HEADER = "include/switchyard/c/low_latency.h"
STRUCT = "typedef struct sy_low_latency_combine_options {"
MADE = ["include/switchyard/c/init.h", "python/switchyard/_abi/structs.py", "src/capi/structs.hpp"]


def generate(tree):
    return subprocess.run([sys.executable, tree / "scripts/interface/generate.py"], capture_output=True, text=True)


def main():
    source = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        for folder in COPIED:
            shutil.copytree(source / folder, tree / folder)
        problems = []
        if generate(tree).stdout:
            problems.append("the committed files are not what the generator makes")
        text = (tree / HEADER).read_text(encoding="utf-8")
        begin = text.index(STRUCT)
        reserved = text.index("  int32_t reserved;", begin)
        (tree / HEADER).write_text(text[:reserved] + "  sy_bool another SY_DEFAULT(1);" + text[reserved + len("  int32_t reserved;"):], encoding="utf-8")
        ended = generate(tree)
        made = sorted(line.split()[1] for line in ended.stdout.splitlines())
        if made != MADE:
            problems.append(f"one bool changed {made}, not {MADE}: {ended.stderr}")
        begin += len(STRUCT + "\n  size_t struct_size;")
        (tree / HEADER).write_text(text[:begin] + "\n  int64_t first;" + text[begin:], encoding="utf-8")
        ended = generate(tree)
        if ended.returncode != 1 or "sy_low_latency_combine_options::order was at byte 8, and is at 16" not in ended.stderr:
            problems.append(f"a member that moved was not refused: {ended.stderr}")
    print("\n".join(problems) or f"one bool changed {len(made)} files that are made")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
