#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Text rules: an SPDX line is present, there are no leftovers (unfinished-work marks, tabs, trailing blanks, conflict marks),
and every file named by a document or comment exists.

Usage: lint_text.py [FILE...]   (default: every tracked file)
"""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPDX = "SPDX-License-Identifier: Apache-2.0"
NEEDS_SPDX = {".c", ".h", ".cpp", ".hpp", ".cu", ".cuh", ".def", ".py", ".sh", ".cmake", ".in", ".map", ".js", ".css"}
NEEDS_SPDX_NAMES = {"CMakeLists.txt", "dev", "run"}
BINARY = {".safetensors", ".npy", ".png", ".bin", ".gz"}
# Written in pieces so that this file passes its own check.
UNFINISHED = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b")
CONFLICT = re.compile(r"^(<{7} |={7}$|>{7} )")
NAMED_FILE = re.compile(r"(?<![\w./<$-])((?:docs|src|include|oracle|tests|scripts|cmake|tools|bench|examples|data)/[\w./-]+"
                        r"\.(?:md|hpp|cpp|h|c|cuh|cu|py|sh|def|cmake|safetensors))\b")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
COMMENT = re.compile(r"(//|#|^\s*\*|/\*)")


def tracked():
    out = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in out.split("\n") if name]


def check_line(path, number, line, markdown):
    """Messages about one line."""
    found = []
    if UNFINISHED.search(line):
        found.append("unfinished work is tracked elsewhere, not in the tree")
    if "\t" in line:
        found.append("tab character")
    if line != line.rstrip():
        found.append("blanks at the end of the line")
    if CONFLICT.match(line):
        found.append("conflict mark")
    if markdown or (COMMENT.search(line) and not line.startswith("#include")):  # the compiler checks includes
        found += [f"names {name}, which does not exist" for name in NAMED_FILE.findall(line) if not (ROOT / name).exists()]
    if markdown:
        found += [f"links to {target}, which does not exist" for target in LINK.findall(line)
                  if not (path.parent / target).exists()]
    return [f"{path.relative_to(ROOT)}:{number}: {text}" for text in found]


def check(name):
    path = ROOT / name
    if path.suffix in BINARY or not path.is_file() or path.is_symlink():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        return [f"{name}: not UTF-8 text; binary files belong to the suffixes {' '.join(sorted(BINARY))}"]
    messages = []
    if (path.suffix in NEEDS_SPDX or path.name in NEEDS_SPDX_NAMES) and not any(SPDX in line for line in lines[:2]):
        messages.append(f"{name}:1: the first line (the second, after #!) must hold '{SPDX}'")
    if lines[-1] != "":
        messages.append(f"{name}:{len(lines)}: no newline at the end of the file")
    if name == "LICENSE" or name.endswith(".json"):
        return messages
    for number, line in enumerate(lines, 1):
        messages += check_line(path, number, line, path.suffix == ".md")
    return messages


def main():
    messages = [message for name in (sys.argv[1:] or tracked()) for message in check(name)]
    print("\n".join(messages), end="\n" if messages else "")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
