#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures which steps of a call between two hosts overlap, using a timeline of the kernels of one dispatch and one combine.

    PYTHONPATH=python SWITCHYARD_NCCL=.../libnccl.so.2 python3 bench/hosts_overlap.py --json hosts_overlap.json

Two processes with one GPU each act as two hosts with different names, for NCCL as well, so rows travel over NCCL's sockets on
this machine. torch's profiler reports when each kernel began and ended. For each call, the program prints the time during which
a round was in flight and how much of that time overlapped with the call's other kernels. The --json file lists all kernels of
both ranks.
"""
import argparse
import json
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.profiler import ProfilerActivity, profile

import switchyard as sy

NETWORK = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
#: Name fragments of our kernels that run between rounds. A round is one NCCL kernel.
STEPS = ("announce", "deliver", "plan", "offer", "judge", "pack_hosts", "send_hosts", "forward_hosts", "finish_hosts", "make_hosts",
         "give_hosts", "sum_hosts")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a rank (4096)")
    parser.add_argument("--hidden", type=int, default=7168, help="columns of a row, bf16 (7168)")
    parser.add_argument("--experts", type=int, default=256, help="experts in all (256)")
    parser.add_argument("--topk", type=int, default=8, help="experts of a token (8)")
    parser.add_argument("--json", metavar="FILE", help="where the timelines are written")
    return parser.parse_args()


def kernels_of(call):
    """[(name, begin, end)] in microseconds, relative to the first kernel."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        call()
        torch.cuda.synchronize()
    found = []
    for event in recorded.profiler.kineto_results.events():
        if not str(event.device_type()).endswith("CUDA"):
            continue
        name = "round" if "nccl" in event.name().lower() else next((step for step in STEPS if step in event.name()), None)
        if name:
            found.append((name, event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3))
    found.sort(key=lambda each: each[1])
    first = found[0][1] if found else 0
    return [(name, round(begin - first, 1), round(end - first, 1)) for name, begin, end in found]


def overlap(kernels):
    """Durations in microseconds: the call, its rounds, and the part of the rounds that overlaps with the call's other
    kernels."""
    edges = sorted({edge for _, begin, end in kernels for edge in (begin, end)})
    in_rounds = beside = 0
    for begin, end in zip(edges, edges[1:]):
        names = [name for name, b, e in kernels if b <= begin and end <= e]
        in_rounds += (end - begin) * ("round" in names)
        beside += (end - begin) * ("round" in names and any(name != "round" for name in names))
    return {"us": edges[-1] - edges[0], "rounds_us": round(in_rounds, 1), "beside_us": round(beside, 1)}


def run(rank, given, store, out_path):
    os.environ.update(NETWORK, NCCL_HOSTID=f"host-{rank}")
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    shape = {"hidden": given.hidden, "num_experts": given.experts, "topk": given.topk, "max_tokens": given.tokens}
    heap = 2 * sy.Exchange.heap_bytes(2, backend="cuda", dtype="bf16", **shape)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn((given.tokens, given.hidden), generator=generator).bfloat16().cuda()
    ids = torch.rand((given.tokens, given.experts), generator=generator).topk(given.topk, 1).indices.cuda()
    figures = {}
    with sy.Group.from_process_group(dist.group.WORLD, heap, backend="cuda", host="ab"[rank]) as group:
        exchange = sy.Exchange(group, dtype="bf16", **shape)
        for _ in range(3):
            rows, handle = exchange.dispatch(x, ids)
            exchange.combine(rows, handle, order="per_host")
        for name, call in (("dispatch", lambda: exchange.dispatch(x, handle=handle)),
                           ("combine", lambda: exchange.combine(rows, handle, order="per_host"))):
            torch.cuda.synchronize()
            group.barrier()
            kernels = kernels_of(call)
            figures[name] = {**overlap(kernels), "kernels": kernels}
        group.barrier()
        del rows, handle, exchange
    everybody = [None, None]
    dist.all_gather_object(everybody, figures)
    if rank == 0:
        for name in figures:
            for r, each in enumerate(everybody):
                print("{}, rank {}: {us:.0f} us; rounds under way {rounds_us:.0f}, beside other kernels {beside_us:.0f}".format(name, r, **each[name]))
        about = {"device": torch.cuda.get_device_name(), "nccl": ".".join(map(str, torch.cuda.nccl.version())), "torch": torch.__version__,
                 "library": sy.library_version(), "date": time.strftime("%Y-%m-%d"), "config": {name: value for name, value in vars(given).items() if name not in ("json", "tool")}, "environment": NETWORK}
        with open(out_path, "w", encoding="utf-8") as file:
            json.dump({**about, "ranks": everybody}, file)
            file.write("\n")
    dist.destroy_process_group()


def main():
    given = arguments()
    if torch.cuda.device_count() < 2:
        raise SystemExit("hosts_overlap: two GPUs are needed")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (given, os.path.join(folder, "store"), given.json or os.devnull), 2)


if __name__ == "__main__":
    main()
