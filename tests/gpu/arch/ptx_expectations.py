#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads the PTX of tests/gpu/arch/ptx_expectations.cu and checks that every ordered op has its instructions, in order and with
the right scope. Covers every arch class (bulk: Cuda, lanes: CudaLanes, inline: CudaInline) on sm_90, sm_100 and, without bulk
copies, sm_80. Needs nvcc, no GPU.

Usage: ptx_expectations.py [NVCC [FOLDER OF GENERATED HEADERS]]
"""
import concurrent.futures
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TARGETS = ["90a", "100a", "80"]

# Ordering within a warp, within a block, and between bulk copies and ordinary accesses.
SYNC, BLOCK, PROXY = r"bar\.warp\.sync", r"bar(rier)?\.sync\s", r"fence\.proxy\.async"
FENCE = {"sys": r"fence\.acq_rel\.sys", "gpu": r"fence\.acq_rel\.gpu"}
ACQUIRE = {s: rf"ld\.acquire\.{s}\.global\.u64" for s in ("sys", "gpu")}
RELEASE = {s: rf"st\.release\.{s}\.global\.u64" for s in ("sys", "gpu")}
FLAG = {s: rf"st\.relaxed\.{s}\.global\.u64" for s in ("sys", "gpu")}
ADD = {s: rf"atom\.acq_rel\.{s}\.global\.add\.u64" for s in ("sys", "gpu")}
# Ordinary accesses of rows.
STORE = r"\bst(\.global|\.shared)?(\.v[24])?\.[bufs]\d+"
LOAD = r"\bld(\.global|\.shared)?(\.cs)?(\.v[24])?\.[bufs]\d+"
# Bulk copies.
EXPECT, ARRIVED = r"mbarrier\.arrive\.expect_tx", r"mbarrier\.try_wait"
BULK_LOAD, BULK_STORE = r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier", r"cp\.async\.bulk\.global\.shared::cta"
COMMIT, READ, DONE = r"cp\.async\.bulk\.commit_group", r"cp\.async\.bulk\.wait_group\.read 0", r"cp\.async\.bulk\.wait_group 0"
# Words of sentinel rows.
SENTINEL, SENTINEL_WORD = r"st\.relaxed\.sys\.global\.v4\.u32", r"st\.relaxed\.sys\.global\.u32"
LOOK, LOOK_WORD = r"ld\.relaxed\.sys\.global\.v4\.u32", r"ld\.relaxed\.sys\.global\.u32"

# Ops that do not move awaited data and do not order anything.
WITHOUT_ORDER = {"prefetch", "fetch_words", "lanes_where", "lanes_union", "count_where", "locate", "locate_many", "out_of_line",
                 "out_of_line_if_cheap", "now_ns", "pause"}


def expectations(arch, bulk):
    """For each op: instructions that must appear in this order, and instructions that must not appear. `bulk`: whether rows are
    copied in bulk."""
    inline = arch == "inline"
    proxy = [PROXY] if bulk else []
    # After settle: moved rows and lane writes.
    moved = [BULK_LOAD, ARRIVED, BULK_STORE, COMMIT, DONE, SYNC] if bulk else [STORE, SYNC]
    written = [STORE, *proxy, SYNC]
    release = [SYNC, RELEASE["sys"]]
    sentinel = ([SENTINEL] if inline else [SENTINEL, SENTINEL_WORD], [STORE])
    return {
        **{f"load_acquire_{name}": ([ACQUIRE[s], SYNC, *proxy], [r"ld\.relaxed", rf"\.{other}\b"])
           for name, s, other in (("system", "sys", "gpu"), ("device", "gpu", "sys"))},
        **{f"store_release_{name}": ([SYNC, RELEASE[s]], [r"st\.relaxed", rf"\.{other}\b"])
           for name, s, other in (("system", "sys", "gpu"), ("device", "gpu", "sys"))},
        **{name: ([SYNC, FENCE[s], FLAG[s]], [FENCE[other], FLAG[other]])
           for name, s, other in (("publish_to_system", "sys", "gpu"), ("publish_to_device", "gpu", "sys"))},
        **{name: ([ACQUIRE[s], SYNC, *proxy], [r"ld\.relaxed", ACQUIRE[other]])
           for name, s, other in (("poll_from_system", "sys", "gpu"), ("poll_from_device", "gpu", "sys"))},
        **{f"fetch_add_{name}": ([SYNC, ADD[s], SYNC, *proxy], [rf"\.{other}\b"])
           for name, s, other in (("system", "sys", "gpu"), ("device", "gpu", "sys"))},
        "block_sync": ([STORE, BLOCK, *proxy, LOAD], []),
        "take": ([r"atom\.relaxed\.gpu\.global\.add\.u64"], [r"acq_rel", r"fence\.acq"]),
        "post": ([FLAG["sys"]], [r"fence\.acq", r"st\.release"]),
        "peek": ([r"ld\.relaxed\.sys\.global\.u64"], [r"ld\.acquire"]),
        "count": ([r"red\.relaxed\.gpu\.global\.add\.u64"], [r"acq_rel", r"\batom\."]),
        "count_max": ([r"red\.relaxed\.gpu\.global\.max\.u64"], [r"acq_rel", r"\batom\."]),
        "publish_entry": ([FENCE["sys"], BLOCK, FLAG["sys"]], [FENCE["gpu"], r"st\.release"]),
        "copy_released": ([*moved, *release], []),
        "multicast_to_published": ([*moved, SYNC, FENCE["sys"], FLAG["sys"]], []),
        "multicast_fetched_added": ([*moved, SYNC, ADD["gpu"]], []),
        "fill_zero_released": ([*written, *release], []),
        "for_lanes_released": ([*written, *release], []),
        "reduce_released": ([*written, *release], []),
        "reduce_from_released": ([*written, *release], []),
        "map_row_released": ([*written, *release], []),
        "quantize_to_released": ([*written, *release], []),
        "quantize_row_copied": ([STORE, PROXY, SYNC, PROXY, SYNC, BULK_STORE, COMMIT, DONE, SYNC, *release] if bulk else
                                [STORE, SYNC, STORE, SYNC, *release], []),
        "copy_drained": ([PROXY, SYNC, BULK_STORE, COMMIT, READ, SYNC, r"st(\.shared)?\.u8"] if bulk else
                         [STORE, SYNC, r"st(\.shared)?\.u8"], []),
        "source_drained": ([BULK_LOAD, ARRIVED, BULK_STORE, COMMIT, READ, SYNC, r"st\.global\.u8"] if bulk else
                           [STORE, SYNC, r"st\.global\.u8"], []),
        "stage_refilled": ([READ, EXPECT, BULK_LOAD, ARRIVED, BULK_STORE, COMMIT, DONE, SYNC] if bulk else [STORE, SYNC], []),
        "acquired_then_copied": ([ACQUIRE["sys"], SYNC, *proxy, BULK_LOAD if bulk else LOAD], []),
        "written_then_copied": ([*written, BULK_LOAD if bulk else LOAD], []),
        "multicast_sentinel": sentinel,
        "multicast_sentinel_copies": sentinel,
        "reduce_sentinel": sentinel,
        "map_row_sentinel": ([SENTINEL], [STORE]),
        "has_arrived": ([LOOK, FENCE["sys"], SYNC, LOAD], [FENCE["gpu"], r"ld(\.global)?(\.cs)?\.v4"]),
        "blank_row_released": ([*written, *release], []),
        # Inline: the words read are the words that are summed and then blanked. Otherwise a fence precedes the second read of
        # the rows (elsewhere in the text) and the blanking.
        "reduce_if_arrived": ([LOOK, LOOK_WORD, STORE, SYNC, STORE], [r"ld(\.global)?(\.cs)?\.v4"]) if inline else
                       ([LOOK, LOOK_WORD, FENCE["sys"], SYNC, SYNC, STORE], [FENCE["gpu"]]),
    }


def single_expectations(bulk):
    """Expectations for kernels that exist only once."""
    settled = [DONE] if bulk else [SYNC]
    init = [r"mbarrier\.init", r"fence\.mbarrier_init\.release\.cluster"] if bulk else []
    return {
        "construction": ([*init, SYNC], []),
        # With tracing off, no code; with tracing on, the clock before and after, and the timer for the anchor.
        "span_not_traced": (settled, [r"clock64", r"globaltimer", r"smid"]),
        "span_traced": ([r"clock64", *settled, r"clock64", r"globaltimer"], []),
    }


def kernels(ptx):
    """Returns the text of each kernel by name, starting at its op, with called functions inlined."""
    pattern = r"(\.entry|\.func)(?:\s*\([^()]*\))?\s+([\w$]+)\s*\([^()]*\)[^{};]*\{(.*?)\n\}\n(?!\s*// end inline asm)"
    parts = {name: (kind, body) for kind, name, body in re.findall(pattern, ptx, re.S)}

    def whole(name):
        return re.sub(r"call\.uni\s*(?:\([^()]*\),\s*)?([\w$]+),[^;]*;",
                      lambda call: whole(call[1]) if call[1] in parts else call[0], parts[name][1])

    return {name: whole(name).partition("// op begins")[2] for name, (kind, _) in parts.items() if kind == ".entry"}


def missing(text, order, forbidden):
    """Returns the error in a kernel's text, or an empty string."""
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


# The read-only path must never read data written by a peer.
READ_ONLY_PATH = r"\bld\S*\.nc\b"
WEAKER = [("acquire", "relaxed"), ("release", "relaxed"), ("acq_rel", "relaxed"), (".sys", ".gpu"), (".gpu", ".cta"),
          ("wait_group 0", "wait_group.read 0")]


def unnoticed(text, order, forbidden):
    """Tests the check itself: it must fail if one kind of instruction is removed from the text or weakened."""
    for pattern in order:
        if not missing(re.sub(pattern, "removed", text), order, forbidden):
            return f"the check does not notice that '{pattern}' is gone"
        instruction = re.search(pattern, text)[0]
        for strong, weak in WEAKER:
            changed = text.replace(instruction, instruction.replace(strong, weak))
            if changed != text and not missing(changed, order, forbidden):
                return f"the check does not notice '{instruction.replace(strong, weak)}'"
    return ""


def expected_of(target):
    """Returns the expectations for each kernel."""
    has_bulk = target != "80"
    expected = single_expectations(has_bulk)
    for arch in ("bulk", "lanes", "inline"):
        bulk = has_bulk and arch == "bulk"
        for name, (order, forbidden) in expectations(arch, bulk).items():
            absent = [] if bulk else [r"cp\.async", r"mbarrier", PROXY]
            expected[f"{name}__{arch}"] = (order, [*forbidden, READ_ONLY_PATH, *absent])
    return expected


def ops_left_out(source):
    """Returns the ops in src/arch/ops.hpp that no kernel here calls although other code may depend on their order."""
    listed = re.search(r"//   moving rows(.*?)\n//\n", (ROOT / "src/arch/ops.hpp").read_text(), re.S)[1]
    return [op for op in re.findall(r"A::(\w+)", listed) if op not in WITHOUT_ORDER and not re.search(rf"A::{op}\b", source)]


def ptx_of(nvcc, generated, source, target):
    return subprocess.run(
        [nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-arch=compute_{target}", "-ptx", "-o", "-",
         "-I", ROOT / "src", "-I", ROOT / "include", "-I", generated, source], check=True, capture_output=True, text=True).stdout


def main():
    nvcc = sys.argv[1] if len(sys.argv) > 1 else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    generated = sys.argv[2] if len(sys.argv) > 2 else ROOT / "build/cuda/include"
    source = ROOT / "tests/gpu/arch/ptx_expectations.cu"
    passed, failed = 0, 0
    for op in ops_left_out(source.read_text()):
        print(f"FAIL {op}: an op without an expectation")
        failed += 1
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda target: ptx_of(nvcc, generated, source, target), TARGETS))
    for target, text in zip(TARGETS, texts):
        found = kernels(text)
        expected = expected_of(target)
        for name in sorted(found.keys() | expected.keys()):
            if name not in found or name not in expected:
                problem = "kernel not found" if name not in found else "a kernel without an expectation"
            else:
                problem = missing(found[name], *expected[name]) or unnoticed(found[name], *expected[name])
            print(f"{'FAIL' if problem else 'ok':4} sm_{target} {name} {problem}")
            passed, failed = passed + (not problem), failed + bool(problem)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
