#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Size rules: at most 500 lines per file, 60 per function and 150 per kernel entry (__global__).

Usage: lint_sizes.py [FILE...]   (default: every tracked source)
Exceptions are listed in scripts/lint_sizes.allow, one per line: `path lines reason` or `path:function lines reason`. An
unnecessary entry is also an error, which keeps the list accurate.
"""
import re
import subprocess
import sys
from pathlib import Path

MAX_FILE, MAX_FUNCTION, MAX_KERNEL = 500, 60, 150
ROOT = Path(__file__).resolve().parent.parent
ALLOW = ROOT / "scripts" / "lint_sizes.allow"
BRACED = {".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"}
SIZED = BRACED | {".py", ".sh", ".cmake", ".js", ".css", ""}
NOT_A_FUNCTION = re.compile(r"\b(namespace|class|struct|enum|union|extern)\b[^()]*$|^\s*(do|else|try)\s*$|=\s*$")
CONTROL = {"if", "for", "while", "switch", "catch", "constexpr"}


def blank_literals(text):
    """Replaces comments, strings and preprocessor lines with spaces but keeps every newline."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"(?P<d>[^()\\ ]{0,16})\(.*?\)(?P=d)"|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])\'(?:\\.|[^\'\\\n])+\''
        r"|^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.S | re.M)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def signature_name(head):
    """Name of the function whose signature is `head`, or None if the brace after `head` opens something else."""
    head = head.strip()
    if "(" not in head or NOT_A_FUNCTION.search(head):
        return None
    depth, start = 0, None
    for i, c in enumerate(head):  # the first parenthesis that is not inside template brackets belongs to the parameters
        if c == "(" and depth == 0:
            match = re.search(r"([~\w]+|operator\s*\S+)\s*$", head[:i])
            word = match.group(1) if match else None
            if word in CONTROL:
                return None
            if word in ("requires", "noexcept", "alignas", "__attribute__", "__launch_bounds__", "decltype", "explicit"):
                depth += 1
                continue
            start = word
            break
        depth += c == "("
        depth -= c == ")"
    return start


def functions(text):
    """Yields (name, first line, number of lines, is_kernel) for every outermost function body."""
    text = blank_literals(text)
    stack, head_from, line_of = [], 0, [0]
    for i, c in enumerate(text):
        if c == "\n":
            line_of.append(i + 1)
    from bisect import bisect_right

    def line(pos):
        return bisect_right(line_of, pos)

    for match in re.finditer(r"[{};]", text):
        i, c = match.start(), match.group()
        if c == "{":
            inside = any(entry is not None for entry in stack)
            head = text[head_from:i]
            name = None if inside else signature_name(head)
            first = head_from + len(head) - len(head.lstrip())
            stack.append((name, first, "__global__" in head) if name else None)
        elif c == "}" and stack:
            entry = stack.pop()
            if entry:
                yield entry[0], line(entry[1]), line(i) - line(entry[1]) + 1, entry[2]
        head_from = i + 1


def tracked():
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [n for n in names if n and Path(n).suffix in SIZED and not n.startswith("data/") and n not in ("LICENSE", "VERSION")]


def read_allowed():
    allowed = {}
    for row in ALLOW.read_text().splitlines() if ALLOW.exists() else []:
        if row.strip() and not row.startswith("#"):
            key, lines, reason = row.split(None, 2)
            assert reason, f"{ALLOW.name}: no reason for {key}"
            allowed[key] = int(lines)
    return allowed


def check(name, allowed, used):
    """Messages about one file."""
    text = (ROOT / name).read_text(errors="replace")
    lines = text.count("\n")
    messages = []
    if lines > MAX_FILE:
        used.add(name)
        if lines > allowed.get(name, MAX_FILE):
            messages.append(f"{name}: {lines} lines, at most {allowed.get(name, MAX_FILE)} are allowed")
    if Path(name).suffix in BRACED:
        for function, first, length, kernel in functions(text):
            limit = MAX_KERNEL if kernel else MAX_FUNCTION
            key = f"{name}:{function}"
            if length > limit:
                used.add(key)
                if length > allowed.get(key, limit):
                    messages.append(f"{name}:{first}: function {function} has {length} lines, at most {allowed.get(key, limit)} "
                                    "are allowed")
    return messages


def main():
    everything = len(sys.argv) == 1
    names = tracked() if everything else [n for n in sys.argv[1:] if Path(n).suffix in SIZED and (ROOT / n).is_file()]
    allowed, used, messages = read_allowed(), set(), []
    for name in names:
        if (ROOT / name).is_file():
            messages += check(name, allowed, used)
    if everything:
        messages += [f"scripts/lint_sizes.allow: '{key}' is not needed any more" for key in sorted(set(allowed) - used)]
    print("\n".join(messages), end="\n" if messages else "")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
