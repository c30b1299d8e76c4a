#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the DeepEP drop-in (docs/deep_ep.md) from Python: a low-latency pair in a CUDA graph, and normal mode at prefill size.
Ranks are processes, one per GPU, started by torchrun or by this program. bench/python_host_time.py measures the host time of
calls.

    PYTHONPATH=python python3 bench/python_drop_in.py --json drop_in.json
    PYTHONPATH=python torchrun --nproc-per-node 2 bench/python_drop_in.py
    PYTHONPATH=python python3 bench/python_drop_in.py --tool build/cuda/bin/switchyard

With --tool, `switchyard bench` measures the same calls in the same run on the same GPUs. Its figures are printed next to the
Python figures, with their ratio and its upper bound.

Times are measured between CUDA events; each figure is the median over repetitions of the slowest rank's time. Before each
repetition, the L2 cache is overwritten, the GPU is kept busy for a millisecond while the host enqueues the call, and a
one-token call makes the ranks begin together. The results of calls are checked before the calls are timed. A pair that is
compared with the tool's is measured in the same way: in a graph that contains the events, with a cold L2 cache, and after the
ranks have met.
"""
import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing

import switchyard as sy
from switchyard import deep_ep

#: Results of get_dispatch_layout, named like the parameters of dispatch.
LAYOUT = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=0, help="processes that are started; 0: one for each GPU (ignored under torchrun)")
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda", help="cpu: shows that the program runs; its times mean little")
    parser.add_argument("--parts", default="graph,normal", help="which of graph (GPUs only) and normal, with a comma between them")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a rank in normal mode (4096)")
    parser.add_argument("--decode-tokens", type=int, default=128, help="tokens of a rank in low-latency mode (128)")
    parser.add_argument("--hidden", type=int, default=7168, help="columns of a row, bf16 (7168)")
    parser.add_argument("--experts", type=int, default=256, help="experts in all (256)")
    parser.add_argument("--topk", type=int, default=8, help="experts of a token (8)")
    parser.add_argument("--num-sms", type=int, default=0, help="multiprocessors of a call of normal mode; 0: nobody names a number (0)")
    parser.add_argument("--tool", metavar="FILE", help="the command line tool, which measures the same beside")
    parser.add_argument("--repetitions", type=int, default=50, help="of each time (50)")
    parser.add_argument("--json", metavar="FILE", help="where rank 0 writes the figures and what they were taken on")
    return parser.parse_args()


#: Maximum ratio of a call's time in Python to its time in C++.
PAIR_BAR, NORMAL_BAR = 1.03, 1.05


def measure_by_tool(given, world, *options):
    """Runs `switchyard bench` with these options and returns the only run in its JSON output."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tool.json")
        shape = {"ranks": world, "hidden": given.hidden, "num_experts": given.experts, "topk": given.topk}
        words = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
        # The tool's ranks are also processes.
        command = [given.tool, "bench", "--backend", "cuda", "--processes", *words, *options, "--json", path]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        with open(path, encoding="utf-8") as file:
            return json.load(file)["runs"][0]


#: Cycles for which a GPU is kept busy before a timed call: about a millisecond, during which the host enqueues the call.
BUSY_CYCLES = 2_000_000


class Bench:
    """One rank."""

    def __init__(self, given):
        self.given = given
        self.cuda = given.backend == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.figures = []
        self.meeting = None  # memory of all ranks for meetings, and its handle
        self.flushed = torch.empty(64 << 20, dtype=torch.float32, device=self.device) if self.cuda else None

    def buffer(self, group, max_tokens):
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(max_tokens, self.given.hidden, group.size(), self.given.experts)
        return deep_ep.Buffer(group, 64 << 20, hint, low_latency_mode=True, explicitly_destroy=True, backend=self.given.backend)

    def config(self):
        return deep_ep.Config(self.given.num_sms) if self.given.num_sms else None

    def inputs(self, tokens):
        """Returns x, ids that are distinct within each token, and weights."""
        generator = torch.Generator().manual_seed(self.rank)
        x = torch.randn((tokens, self.given.hidden), generator=generator).bfloat16()
        ids = torch.rand((tokens, self.given.experts), generator=generator).topk(self.given.topk, 1).indices
        return x.to(self.device), ids.to(self.device), torch.rand(ids.shape, generator=generator).to(self.device)

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize()

    def by_tool(self, *options):
        """The tool's measurements with these options, on all ranks; None without a tool."""
        if not self.given.tool or not self.cuda:
            return None
        self.synchronize()
        found = [measure_by_tool(self.given, self.world, *options) if self.rank == 0 else None]
        dist.broadcast_object_list(found, 0)
        return found[0]

    def print_compared(self, part, name, microseconds, in_cpp, bar, **more):
        """Prints microseconds next to the tool's measurement `in_cpp` (None if the tool did not measure the call)."""
        if in_cpp is not None:
            more = {**more, "C++": round(in_cpp, 2), "ratio": round(microseconds / in_cpp, 3), "at most": bar}
        self.print_figure(part, name, microseconds, **more)

    def print_figure(self, part, name, microseconds, **more):
        figure = {"part": part, "name": name, "us": round(microseconds, 2), **more}
        self.figures.append(figure)
        if self.rank == 0:
            rest = "  ".join(f"{key} {value}" for key, value in more.items())
            print(f"{part:8} {name:44} {microseconds:9.2f} us  {rest}", flush=True)

    def slowest(self, taken):
        """Medians over repetitions of the slowest rank's times."""
        everybody = [None] * self.world
        dist.all_gather_object(everybody, taken)
        return statistics.median(map(max, zip(*everybody)))

    def gpu_time(self, align, call):
        """Time of `call` in microseconds, measured after `align`, which makes the ranks begin together."""
        taken = []
        for repetition in range(self.given.repetitions + 5):
            self.synchronize()
            dist.barrier()
            if self.flushed is not None:
                self.flushed.fill_(repetition)
                torch.cuda._sleep(BUSY_CYCLES)
            align()
            if self.cuda:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                call()
                end.record()
                torch.cuda.synchronize()
                taken.append(begin.elapsed_time(end) * 1e3)
            else:
                started = time.perf_counter_ns()
                call()
                taken.append((time.perf_counter_ns() - started) / 1e3)
        return self.slowest(taken[5:])

    def aligned(self, buffer):
        """A call that ends at about the same time on all ranks."""
        x, ids, _ = self.inputs(1)
        return lambda: buffer.low_latency_dispatch(x, ids, 16, self.given.experts, use_fp8=False)

    def graph(self):
        if not self.cuda:
            return
        max_tokens = self.given.decode_tokens
        buffer = self.buffer(dist.group.WORLD, max_tokens)
        x, ids, weights = self.inputs(max_tokens)
        for fp8 in (True, False):
            def pair():
                received, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, max_tokens, self.given.experts, use_fp8=fp8)
                y = buffer.get_next_low_latency_combine_buffer(handle)
                return buffer.low_latency_combine(y, ids, weights, handle, zero_copy=True)[0]

            for _ in range(3):
                pair()
            self.synchronize()
            dist.barrier()
            pairs, graph = 20, torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(pairs):
                    pair()
            name = f"dispatch {'fp8' if fp8 else 'bf16'} and combine"
            self.print_figure("graph", name, self.gpu_time(lambda: None, graph.replay) / pairs, pairs=pairs)
            self.print_figure("graph", name + ", eager", self.gpu_time(pair, pair))
            dist.barrier()
            del graph
            tool = None
            for before, meeting in (("a call", self.aligned(buffer)), ("a barrier", self.barrier())):
                if meeting is not None:
                    tool = self.pair_beside_tool(f"{name}, one, cold, behind {before}", pair, meeting, fp8, tool)
        self.synchronize()
        buffer.destroy()

    def barrier(self):
        """One small kernel in which all ranks meet, like the tool's; None if this torch does not support it."""
        if self.meeting is None:
            try:
                from torch.distributed import _symmetric_memory
                place = _symmetric_memory.empty(1024, dtype=torch.uint8, device=self.device)
                self.meeting = place, _symmetric_memory.rendezvous(place, dist.group.WORLD)
            except (ImportError, RuntimeError) as error:
                if self.rank == 0:
                    print(f"graph    no barrier: {error}", flush=True)
                return None
        return lambda: self.meeting[1].barrier(channel=0)

    def pair_beside_tool(self, name, pair, align, fp8, tool):
        """Measures a pair as the tool does: with events inside a graph and a cold L2 cache, after the ranks have met. `tool` is
        the tool's measurement or None if there is none yet; the measurement is returned."""
        try:
            begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        except TypeError:
            if self.rank == 0:
                print(f"graph    {name}: this torch has no events inside graphs", flush=True)
            return tool
        graph, taken = torch.cuda.CUDAGraph(), []
        align()
        align()  # creates both results of its shape
        self.synchronize()
        dist.barrier()
        with torch.cuda.graph(graph):
            self.flushed.fill_(1)
            align()
            begin.record()
            pair()
            end.record()
        dist.barrier()
        for _ in range(4 * self.given.repetitions + 5):  # no pauses, like the tool: a waiting GPU enters a sleep state
            graph.replay()
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3)
        dist.barrier()
        del graph
        rows = ("--quantize", "f32", "--scale-order", "column_major") if fp8 else ()
        tool = tool or self.by_tool("--mode", "low_latency", "--tokens", str(self.given.decode_tokens), *rows)
        self.print_compared("graph", name, self.slowest(taken[5:]), tool and tool["both_per_route"]["p50_us"], PAIR_BAR)
        return tool

    def normal(self):
        tokens, experts, world = self.given.tokens, self.given.experts, self.world
        sms = ("--sms", str(self.given.num_sms)) if self.given.num_sms else ()
        tool = self.by_tool("--tokens", str(tokens), *sms)
        buffer, config = self.buffer(dist.group.WORLD, 16), self.config()
        align = self.aligned(buffer)
        x, ids, weights = self.inputs(tokens)
        keywords = dict(zip(LAYOUT, buffer.get_dispatch_layout(ids, experts)))
        keywords.update(topk_idx=ids, topk_weights=weights, config=config)
        max_tokens = world * tokens
        rows, _, _, _, handle, _ = buffer.dispatch(x, **keywords)
        out, _, _ = buffer.combine(rows, handle, config=config)
        want = x.float() * keywords["is_token_in_rank"].sum(1, keepdim=True)
        assert torch.allclose(out.float(), want, rtol=0.02, atol=0.02), "combine: wrong sums"
        where = keywords["is_token_in_rank"]
        sent = int(where.sum()) - int(where[:, self.rank].sum())
        more = {"rows": rows.shape[0], "sent": sent}

        calls = {  # by their names in the tool's results
            "dispatch(handle=...)": ("cached_dispatch", lambda: buffer.dispatch(x, handle=handle, config=config)),
            "combine": ("combine", lambda: buffer.combine(rows, handle, config=config)),
            "dispatch(num_worst_tokens=...)": ("dispatch", lambda: buffer.dispatch(x, num_worst_tokens=max_tokens, **keywords)),
        }
        taken = {}
        for name, (there, call) in calls.items():
            taken[name] = self.gpu_time(align, call), tool and tool[there]["p50_us"]
            rate = round(sent * self.given.hidden * 2 / taken[name][0] / 1e3, 1)
            self.print_compared("normal", name, *taken[name], NORMAL_BAR, **more, **{"GB/s": rate})
        for name in ("dispatch(handle=...)", "dispatch(num_worst_tokens=...)"):
            both, in_cpp = zip(taken[name], taken["combine"])
            self.print_compared("normal", name + " + combine", sum(both), tool and sum(in_cpp), NORMAL_BAR)
        exact = self.gpu_time(align, lambda: buffer.dispatch(x, **keywords))
        self.print_figure("normal", "dispatch, exact, with its wait for the host", exact, **{"C++": tool and round(tool["dispatch"]["p50_us"], 2)})
        self.print_figure("normal", "get_dispatch_layout", self.gpu_time(align, lambda: buffer.get_dispatch_layout(ids, experts)))
        self.print_figure("normal", "copy of the received rows, part of dispatch", self.gpu_time(align, rows.clone))
        del rows, handle
        self.synchronize()
        dist.barrier()
        buffer.destroy()


def run(rank, world, store, given):
    if given.backend == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    else:
        torch.set_num_threads(1)
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    bench = Bench(given)
    for part in given.parts.split(","):
        {"graph": bench.graph, "normal": bench.normal}[part]()
    if bench.rank == 0 and given.json:
        about = {"device": torch.cuda.get_device_name() if bench.cuda else "cpu", "ranks": bench.world, "torch": torch.__version__,
                 "library": sy.library_version(), "date": time.strftime("%Y-%m-%d"), "config": {name: value for name, value in vars(given).items() if name not in ("json", "tool")}}
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({**about, "figures": bench.figures}, file, indent=1)
            file.write("\n")
    dist.barrier()
    dist.destroy_process_group()


def main():
    given = arguments()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # ranks meet through ordinary flags
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, given)
        return
    ranks = given.ranks or (torch.cuda.device_count() if given.backend == "cuda" else 2)
    if ranks < 1:
        raise SystemExit("python_drop_in: no GPU; --backend cpu shows that the program runs")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (ranks, os.path.join(folder, "store"), given), ranks)


if __name__ == "__main__":
    main()
