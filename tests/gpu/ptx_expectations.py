#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads the PTX of tests/gpu/ptx_expectations.cu: every ordered op has its instructions, in order, at its scope. Needs nvcc, no GPU.

Usage: ptx_expectations.py [NVCC]
"""
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SYNC = r"bar\.warp\.sync"
PROXY = r"fence\.proxy\.async"
# Instructions that must appear in this order, and some that must not appear at all.
EXPECTED = {
    "load_acquire_system": ([r"ld\.acquire\.sys\.global\.u64", SYNC, PROXY], [r"ld\.relaxed"]),
    "load_acquire_device": ([r"ld\.acquire\.gpu\.global\.u64", SYNC, PROXY], [r"ld\.relaxed", r"\.sys"]),
    "store_release_system": ([SYNC, r"st\.release\.sys\.global\.u64"], [r"st\.relaxed"]),
    "publish_system": ([SYNC, r"fence\.acq_rel\.sys", r"st\.relaxed\.sys\.global\.u64"], [r"fence\.acq_rel\.gpu"]),
    "poll_all_system": ([r"ld\.acquire\.sys\.global\.u64", SYNC, PROXY], [r"ld\.relaxed", r"ld\.acquire\.gpu"]),
    "fetch_add_device": ([SYNC, r"atom\.acq_rel\.gpu\.global\.add\.u64", SYNC, PROXY], []),
    "take": ([r"atom\.relaxed\.gpu\.global\.add\.u64"], [r"acq_rel", r"fence\.acq"]),
    "post": ([r"st\.relaxed\.sys\.global\.u64"], [r"fence\.acq", r"st\.release"]),
    "peek": ([r"ld\.relaxed\.sys\.global\.u64"], [r"ld\.acquire"]),
    # Its fence is the kernel's frame's.
    "publish_entry": ([r"st\.relaxed\.sys\.global\.u64"], [r"fence\.acq", r"st\.release"]),
    "copy_then_settle_then_release": (
        [r"cp\.async\.bulk\.shared::cluster\.global", r"mbarrier\.try_wait", r"cp\.async\.bulk\.global\.shared::cta",
         r"cp\.async\.bulk\.commit_group", r"cp\.async\.bulk\.wait_group 0", SYNC, r"st\.release\.sys\.global\.u64"], []),
    "copy_then_drain": ([r"cp\.async\.bulk\.global\.shared::cta", r"cp\.async\.bulk\.commit_group",
                         r"cp\.async\.bulk\.wait_group\.read 0", SYNC], []),
    # Tracing: no code where it is off; where it is on, the clock before and after, and the anchor's timer.
    "span_not_traced": ([r"cp\.async\.bulk\.wait_group 0"], [r"clock64", r"globaltimer", r"smid"]),
    "span_traced": ([r"globaltimer", r"clock64", r"cp\.async\.bulk\.wait_group 0", r"clock64"], []),
}


def kernels(ptx):
    """Text of each kernel by name."""
    parts = re.split(r"\.visible \.entry (\w+)\(", ptx)
    return dict(zip(parts[1::2], parts[2::2]))


def missing(text, order, forbidden):
    """What is wrong with a kernel's text, or an empty string."""
    at = 0
    for pattern in order:
        match = re.compile(pattern).search(text, at)
        if not match:
            return f"no '{pattern}' behind the {at}th character"
        at = match.end()
    for pattern in forbidden:
        if re.search(pattern, text):
            return f"'{pattern}' must not appear"
    return ""


def main():
    nvcc = sys.argv[1] if len(sys.argv) > 1 else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    ptx = subprocess.run(
        [nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-arch=compute_90a", "-ptx", "-o", "-", "-I", ROOT / "src", "-I",
         ROOT / "include", ROOT / "tests/gpu/ptx_expectations.cu"], check=True, capture_output=True, text=True).stdout
    found, passed, failed = kernels(ptx), 0, 0
    for name, (order, forbidden) in EXPECTED.items():
        problem = missing(found[name], order, forbidden) if name in found else "kernel not found"
        # The check itself: with one instruction struck out of the text it must complain.
        if not problem and not missing(re.sub(order[-1], "removed", found[name]), order, forbidden):
            problem = f"the check does not notice that '{order[-1]}' is gone"
        print(f"{'FAIL' if problem else 'ok':4} {name} {problem}")
        passed, failed = passed + (not problem), failed + bool(problem)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
