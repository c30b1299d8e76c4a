#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares an exchange between two hosts with NCCL's all_to_all, on one machine with two GPUs that NCCL treats as two machines.

    SWITCHYARD_NCCL=.../nvidia/nccl/lib/libnccl.so.2 python3 bench/nccl_all_to_all.py --tool build/cuda/bin/switchyard --json hosts.json

First, `switchyard bench` measures normal mode with `--ranks` ranks on two named hosts, one GPU per host, over NCCL's sockets on
this machine. Then one process per GPU sends the bytes that the ranks of one GPU would send to those of the other. It does so
once with one row per (token, rank) and once with one row per (token, expert), each time with one all_to_all on a communicator
of the two GPUs. Both measurements use NCCL's network: shared memory and NVLink between the GPUs are disabled. Each time is the
median over calls of the slower process's time.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing

NETWORK = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
#: Minimum bytes with one row per (token, rank) and per (token, expert), as multiples of our bytes, and the minimum time ratio
#: as a fraction of the measured byte ratio.
BYTES_BAR, TIME_BAR = {"token_rank_pairs": 1.3, "routes": 3.0}, 0.8


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", required=True, metavar="FILE", help="the command line tool, built for GPUs")
    parser.add_argument("--ranks", type=int, default=8, help="ranks on both hosts together (8)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a rank (4096)")
    parser.add_argument("--hidden", type=int, default=7168, help="columns of a row, bf16 (7168)")
    parser.add_argument("--experts", type=int, default=256, help="experts in all (256)")
    parser.add_argument("--topk", type=int, default=8, help="experts of a token (8)")
    parser.add_argument("--layout", default="rank_major", choices=["rank_major", "expert_major"], help="of the received rows (rank_major)")
    parser.add_argument("--order", default="per_host", choices=["per_host", "per_rank", "per_route"], help="of combine's sum (per_host)")
    parser.add_argument("--iterations", type=int, default=20, help="timed calls of each, at least 20 (20)")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="after which the tool is ended (300)")
    parser.add_argument("--json", metavar="FILE", help="where all figures are written")
    return parser.parse_args()


def measure_exchange(given):
    """Runs `switchyard bench` and returns the run from its JSON output."""
    hosts = ",".join("ab"[rank % 2] for rank in range(given.ranks))  # assigned to GPUs in turn: one GPU per host
    environment = {**os.environ, **NETWORK, "SWITCHYARD_HOST": hosts}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tool.json")
        words = [word for name in ("ranks", "tokens", "hidden", "num_experts", "topk", "layout", "order", "iterations")
                 for word in (f"--{name}", str(getattr(given, name)))]
        subprocess.run([given.tool, "bench", "--backend", "cuda", *words, "--warmup", "3", "--json", path], env=environment, check=True,
                       timeout=given.timeout)
        with open(path, encoding="utf-8") as file:
            return json.load(file)


def exchange_by_nccl(rank, given, sizes, store, out_path):
    """Runs one GPU. `sizes`: number of bytes sent to the other GPU, by name."""
    os.environ.update(NETWORK, NCCL_HOSTID=f"host-{rank}")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    figures = {}
    for name, size in sizes.items():
        size = size // 16 * 16
        sent, received = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        sent.fill_(rank + 1)
        splits = [0, size] if rank == 0 else [size, 0]
        taken = []
        for _ in range(3 + given.iterations):
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            dist.all_to_all_single(received, sent, splits, splits)
            end.record()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
        assert bool((received == 2 - rank).all()), "all_to_all: other bytes than were sent"
        everybody = [None, None]
        dist.all_gather_object(everybody, taken[3:])
        figures[name] = {"bytes_per_gpu": size, "p50_us": statistics.median(map(max, zip(*everybody))) * 1e6}
        del sent, received
    if rank == 0:
        with open(out_path, "w", encoding="utf-8") as file:
            json.dump({"version": ".".join(map(str, torch.cuda.nccl.version())), "all_to_all": figures}, file)
    dist.destroy_process_group()


def compare(run, nccl):
    """Returns the compared figures and whether they meet the required ratios."""
    network, rows = run["network"], run["config"]["hidden"] * 2
    found = []
    for call in ("dispatch", "combine"):
        ours_bytes, ours = network[call + "_bytes"] / 2, run[call]["p50_us"]
        for name, bar in BYTES_BAR.items():
            bytes_ratio, time_ratio = network[name] * rows / 2 / ours_bytes, nccl["all_to_all"][name]["p50_us"] / ours
            found.append({"call": call, "beside": name, "us": ours, "bytes_per_gpu": ours_bytes, "all_to_all_us": nccl["all_to_all"][name]["p50_us"],
                          "times_the_bytes": bytes_ratio, "times_the_time": time_ratio, "bytes_bar": bar, "time_bar": TIME_BAR * bytes_ratio,
                          "met": bytes_ratio >= bar and time_ratio >= TIME_BAR * bytes_ratio})
    return found


def main():
    given = arguments()
    if given.iterations < 20:
        raise SystemExit("nccl_all_to_all: --iterations: at least 20")
    if torch.cuda.device_count() < 2:
        raise SystemExit("nccl_all_to_all: two GPUs are needed")
    document = measure_exchange(given)
    run = document["runs"][0]
    rows = run["config"]["hidden"] * 2
    sizes = {name: int(run["network"][name] * rows / 2) for name in BYTES_BAR}
    with tempfile.TemporaryDirectory() as folder:
        out_path = os.path.join(folder, "nccl.json")
        torch.multiprocessing.spawn(exchange_by_nccl, (given, sizes, os.path.join(folder, "store"), out_path), 2)
        with open(out_path, encoding="utf-8") as file:
            nccl = json.load(file)
    found = compare(run, nccl)
    for each in found:
        print("{call:9} {us:10.0f} us, {bytes_per_gpu:.3g} bytes; all_to_all of {beside}: {all_to_all_us:.0f} us, {times_the_bytes:.2f} times the bytes "
              "(bar {bytes_bar}), {times_the_time:.2f} times the time (bar {time_bar:.2f}): {0}".format("met" if each["met"] else "missed", **each))
    if given.json:
        document.update(nccl=nccl, beside_nccl=found, date=time.strftime("%Y-%m-%d"), device=torch.cuda.get_device_name(), environment=NETWORK)
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
