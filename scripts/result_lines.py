#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Formats result files (bench/results) with one line per run, which keeps them small and their
diffs readable. Numbers, strings and the order of keys stay unchanged.

Usage: result_lines.py FILE...           rewrites the files
       result_lines.py --check FILE...   lists files with another format, and files that no page
                                         cites
"""
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def line_of(value):
    return json.dumps(value, ensure_ascii=False)


def holds_runs(value):
    """True for a list of objects, and for any value that contains one."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, dict) for item in value)
    return isinstance(value, dict) and any(holds_runs(item) for item in value.values())


def lines_of(value, indent=""):
    """Text of a value. In an object that contains runs, each member and each run takes one line. A run takes one line even if
    it contains lists (of its checks, for example), unless it has its own `runs`."""
    inner = indent + " "
    if isinstance(value, dict) and holds_runs(value):
        members = [f"{inner}{line_of(key)}: {lines_of(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(members) + f"\n{indent}}}"
    if isinstance(value, list) and holds_runs(value):
        items = [inner + (lines_of(item, inner) if "runs" in item else line_of(item)) for item in value]
        return "[\n" + ",\n".join(items) + f"\n{indent}]"
    return line_of(value)


def laid_out(text):
    return lines_of(json.loads(text)) + "\n"


def cited_names():
    """All Markdown files, any of which may cite a result: documents, notes next to the results, and others."""
    pages = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return "\n".join((ROOT / page).read_text() for page in pages)


def problems(names):
    texts = cited_names()
    for name in names:
        path = Path(name)
        if path.name not in texts:
            yield f"{name}: no Markdown page cites it; history keeps it"
        if path.suffix == ".json" and path.read_text() != laid_out(path.read_text()):
            yield f"{name}: scripts/result_lines.py writes it one run per line"


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return 0 if len(sys.argv) > 1 else 2
    check = sys.argv[1:2] == ["--check"]
    names = sys.argv[2:] if check else sys.argv[1:]
    if check:
        found = list(problems(names))
        print("\n".join(found), end="\n" if found else "")
        return 1 if found else 0
    for name in names:
        Path(name).write_text(laid_out(Path(name).read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
