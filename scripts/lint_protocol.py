#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that protocols exist once, for all archs:
- every function defined in src/protocol compiles for host and device, except those in HOST_ONLY;
- flag operations outside src/protocol and src/arch are listed in FLAGS_ELSEWHERE, with their number and a reason."""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOR_ALL_ARCHS = re.compile(r"\b(SWITCHYARD_FN|SWITCHYARD_INLINE|constexpr|consteval)\b")
SCOPE = re.compile(r"\b(namespace|struct|class|union|enum|concept)\b")

# File, or file:function, and the reason.
HOST_ONLY = {
    "src/protocol/call.hpp:operation_name": "text for errors",
    "src/protocol/counts.hpp:all_agree": "the host's check; kernels use the overload for a warp",
    "src/protocol/counts.hpp:publish_placement_of": "part of the CPU's relay; on GPUs, a kernel copies the message by words",
    "src/protocol/normal/chunks.hpp:records_by_chunk": "tables of a handle in host memory; on GPUs, the plan kernel writes them",
}
FLAG_OPERATION = re.compile(
    r"\b(store_release|load_acquire|publish_to|publish_for|publish_all|publish_entry|poll_from|add_acq_rel)\s*(<|\()|\bfetch_add\s*<"
    r"|\b(release|acquire)_order\b")
# File, or folder with any number: (number of operations, reason).
FLAGS_ELSEWHERE = {
    "src/exchange/fused/": (None, "roles of one kernel, whose warps run different code; docs/design/0048"),
    "src/exchange/gpu/frame.cuh": (5, "prologue of kernels: abort word, fault record, epoch"),
    "src/exchange/gpu/tracing.cu": (2, "questions of the host about the GPU's clock"),
    "src/exchange/hosts/frame.cuh": (3, "prologue of kernels after a round; words by which the host follows replays"),
    "src/exchange/hosts/gin.cu": (1, "word by which the host ends rounds that a kernel drives"),
    "src/exchange/normal/frame.cuh": (4, "soft faults and halted objects, between a kernel and its host"),
    "src/exchange/normal/hosts/control.cu": (1, "a proxy's part of the exchange of counts and placements, copied by words"),
    "src/exchange/normal/plan/plan.cu": (3, "the plan kernel: arrivals of its blocks, and the counts that it sends"),
}


def code_of(text):
    """The text without comments, strings and preprocessor lines; newlines are kept."""
    blank = lambda match: re.sub(r"[^\n]", " ", match.group())
    text = re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", blank, text, flags=re.S)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.M)


def functions(code):
    """(line, name, head) of every function definition outside other functions."""
    depth, scopes, head, begin = 0, [0], "", 0
    for at, char in enumerate(code):
        if depth > scopes[-1]:  # in a body or an initializer
            depth += {"{": 1, "}": -1}.get(char, 0)
            continue
        if char == "{" and head.count("(") > head.count(")"):  # an initializer within an expression
            depth += 1
        elif char == "{":
            plain = re.sub(r"template <[^{;]*?>\s*(?=struct|class|concept)", "", head)
            depth += 1
            if SCOPE.search(plain.split("(")[0]) and ")" not in plain:
                scopes.append(depth)
            elif name := re.search(r"(operator\s*\(\)|operator\W+|~?\w+)\s*\(", re.sub(r"\b(alignas|__launch_bounds__|requires)\s*\([^)]*\)", "", head)):
                yield code.count("\n", 0, begin + len(head) - len(head.lstrip())) + 1, name.group(1), head
            head, begin = "", at + 1
        elif char == "}":
            scopes.pop()
            depth -= 1
            head, begin = "", at + 1
        elif char == ";":
            head, begin = "", at + 1
        else:
            head += char


def main():
    names = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found, used = [], set()
    for name in names:
        path = ROOT / name
        if path.suffix not in (".hpp", ".cuh", ".cu", ".cpp") or not path.exists():
            continue
        code = code_of(path.read_text())
        if name.startswith("src/protocol/"):
            for line, function, head in functions(code):
                if FOR_ALL_ARCHS.search(head):
                    continue
                keys = {name, f"{name}:{function}"} & set(HOST_ONLY)
                used |= keys
                if not keys:
                    found.append(f"{name}:{line}: {function} is neither SWITCHYARD_FN nor constexpr")
        elif not name.startswith("src/arch/"):
            number = len(FLAG_OPERATION.findall(code))
            key = next((key for key in FLAGS_ELSEWHERE if name == key or key.endswith("/") and name.startswith(key)), None)
            listed = FLAGS_ELSEWHERE.get(key, (0, ""))[0]
            if listed is not None and number != listed:
                found.append(f"{name}: {number} flag operations, {listed} in scripts/lint_protocol.py")
            used |= {key} if key and number else set()
    found += [f"scripts/lint_protocol.py: {key} is not needed" for key in (HOST_ONLY.keys() | FLAGS_ELSEWHERE.keys()) - used]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
