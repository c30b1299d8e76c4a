#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads the PTX of every library kernel, and of the kernels that a user's file instantiates through the public header
switchyard/cuda/row_function.cuh. Without tracing, they must contain no tracing code. Needs nvcc, no GPU.

A span begins and ends with a read of %clock or %clock64, and a record contains its %smid. Neither may therefore occur in a
kernel that is not compiled for a traced arch, or in a function that it calls. Each traced kernel must contain both; otherwise
the check would detect nothing.

Usage: untraced_ptx.py NVCC INCLUDE [NCCL]   (the folder of generated headers; that of NCCL's headers, without which one file is skipped)
"""
import concurrent.futures
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TRACED = "TracedArch"
# The file that needs NCCL's headers.
OF_NCCL = ROOT / "src/exchange/hosts/gin.cu"
# Files written by users of the library.
USERS = ("tests/gpu/kernels/flat_function.cu",)
# Kernels that are not part of a call.
NEVER_TRACED = ("answer_kernel", "copy_out_kernel", "count_kept_kernel", "routing_layout_kernel", "select_slots_kernel", "spread_kernel")
# Phases of a multi-host call: only the plan and the wait for placements are traced.
NEVER_TRACED += ("_hosts_kernel",)
# Marks beside a call, which write a record and no span.
NEVER_TRACED += ("mark_kernel",)


def functions(ptx):
    """Yields (kind, name, body) of each kernel entry and function."""
    parts = re.split(r"^(?:\.(?:visible|weak|extern)\s+)*\.(entry|func)\b", ptx, flags=re.M)
    for kind, text in zip(parts[1::2], parts[2::2]):
        name = re.search(r"(?:\(\.param[^)]*\)\s*)?([A-Za-z_$][\w$]*)", text).group(1)
        if "{" in text:
            yield kind, name, text


def problem_of(kind, name, body):
    """Returns the error in one function, or an empty string."""
    marks = [mark for mark in ("%clock", "%smid") if mark in body]
    if TRACED not in name:
        return f"{' and '.join(marks)} where tracing is off" if marks else ""
    return "" if kind == "func" or len(marks) == 2 else "a traced kernel records nothing"


def ptx_of(nvcc, headers, source):
    return subprocess.run(
        [nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-arch=compute_90a", "-ptx", "-o", "-", "-I", ROOT / "src", "-I",
         ROOT / "include", "-I", ROOT / "tests", *(part for folder in headers for part in ("-I", folder)), source], check=True, capture_output=True, text=True).stdout


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__.strip().splitlines()[-1])
    _, nvcc, *headers = sys.argv
    users = [ROOT / path for path in USERS]
    sources = sorted(path for path in (ROOT / "src/exchange").rglob("*.cu") if path != OF_NCCL or len(headers) == 2) + users
    passed, failed = 0, 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for source, ptx in zip(sources, pool.map(lambda s: ptx_of(nvcc, headers, s), sources)):
            entries = {True: 0, False: 0}
            problems = []
            for kind, name, body in functions(ptx):
                if problem := problem_of(kind, name, body):
                    problems.append(f"{name}: {problem}")
                if kind == "entry" and not any(word in name for word in NEVER_TRACED):
                    entries[TRACED in name] += 1
            if entries[True] != entries[False] or (source in users and not entries[True]):
                problems.append(f"{entries[True]} traced kernels, {entries[False]} others")
            print(f"{'FAIL' if problems else 'ok':4} {source.relative_to(ROOT)}: {entries[False]} kernels with tracing and without", *problems, sep="\n     ")
            passed, failed = passed + (not problems), failed + bool(problems)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
