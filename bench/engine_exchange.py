#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times Switchyard inside vLLM's own classes on 2 GPUs, compared with DeepEP V1 and with direct calls (docs/how_to/vllm.md).

    PYTHONPATH=python python3 bench/engine_exchange.py --deep-ep FOLDER --json engines.json

prefill   prepare and finalize in vLLM's modular kernel, format Standard (SWITCHYARD_VLLM=all2all); DeepEP's high-throughput class
decode    the same in the format BatchedExperts, eager and in vLLM's CUDAGraphWrapper; DeepEP's low-latency class. A graph has a
          fixed cost, given as "one small kernel"; models capture many layers in a graph, so "in a graph of 8" is the time of a call
          without this cost
layer     a whole layer through vLLM's runner (SWITCHYARD_VLLM=layer), bf16 and block fp8, and direct calls of the layer: separate
          form with order="per_rank", and the plug-in's configuration
host      host times of a decode step: "through vLLM"; "vLLM alone", the same step with methods that do nothing in place of the
          plug-in's; "direct calls in vLLM", with methods that only call the library; and "called directly", repeated calls
          without vLLM. A call takes longer in vLLM, because vLLM's code evicts the library and the driver from the caches.
          Differences are computed from the times of the same repetition

FOLDER: for torch 2.11 and CUDA 13, the unpacked wheel of tokenspeed-deepep 1.2.1.post20251110, which is DeepEP 1.2.1.
Needs the sources of vLLM 0.33 (scripts/clients.sh), with stand-ins for compiled modules
(python/tests/helpers/engines/vllm_stand_ins.py). Experts compute no products: they return at once ("none") or copy their rows
("copy"). GPU times (gpu_times.py) include high-throughput DeepEP's wait for the host. Results are checked before they are timed. Each
part runs in separate processes with a deadline; its failures are recorded in the output and do not affect other parts.
"""
import argparse
import contextlib
import ctypes
import glob
import os
import random
import statistics
import subprocess
import sys
import time
import traceback

from engine_layers import LOW_LATENCY, Layers
from gpu_times import GpuTimes
from rank_processes import RANKS, ROOT, parts_of, play_all

PARTS = ("prefill", "decode", "layer", "host")
#: Number of calls in a large graph.
MANY = 8
HIGH_THROUGHPUT = "deepep_high_throughput"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"which of {', '.join(PARTS)}, with a comma between them")
    parser.add_argument("--deep-ep", metavar="FOLDER", help="folder of the package deep_ep (V1), which is measured beside")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a rank in prefill and layer (4096)")
    parser.add_argument("--decode-tokens", type=int, default=128, help="tokens of a rank in decode and host (128)")
    parser.add_argument("--hidden", type=int, default=7168, help="columns of a row (7168)")
    parser.add_argument("--experts", type=int, default=256, help="experts in prefill, decode and host (256)")
    parser.add_argument("--layer-experts", type=int, default=128, help="experts in layer (128)")
    parser.add_argument("--intermediate", type=int, default=2048, help="intermediate size in layer (2048)")
    parser.add_argument("--topk", type=int, default=8, help="experts of a token (8)")
    parser.add_argument("--repetitions", type=int, default=30, help="of each GPU time (30); host times have 20 times as many")
    parser.add_argument("--seconds", type=float, default=50, help="deadline of each part (50)")
    parser.add_argument("--json", metavar="FILE", help="where the figures, and what they were taken on, are written")
    return parser.parse_args()


# ---- One rank ----


class Bench(Layers):
    """One rank of one part. Figures are sent to the starting process as they are measured."""

    def __init__(self, rank, given, end, peer):
        import torch
        import torch.distributed as dist
        from clients import source_of
        from vllm_host import import_vllm

        self.rank, self.given, self.end, self.peer = rank, given, end, peer
        self.torch, self.dist = torch, dist
        if peer:
            load_peer(peer)
        source_of("vllm")
        import_vllm("cuda", [])
        import vllm_ranks

        vllm_ranks.use_device("cuda", rank)
        self.vllm, self.device = vllm_ranks, vllm_ranks.DEVICE

    def send(self, kind, part, name, **more):
        if self.rank == 0 or kind == "error":
            self.end.send({"kind": kind, "part": part, "name": name, "rank": self.rank, **more})

    @contextlib.contextmanager
    def attempt(self, part, name):
        """Records an exception of the block as the result of `name`."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.send("error", part, name, error=f"{type(error).__name__}: {error}"[:600])

    @contextlib.contextmanager
    def configured(self, store, backend, max_tokens, captured=0):
        """Enters vLLM's configuration of data-parallel ranks."""
        with self.vllm.vllm_with(self.rank, RANKS, store, backend) as config, self.torch.no_grad():
            config.scheduler_config.max_num_batched_tokens = max_tokens
            config.compilation_config.max_cudagraph_capture_size = captured
            self.times = GpuTimes(self.device, self.given.repetitions)
            yield config

    def inputs(self, tokens, experts):
        """Returns x, ids that are distinct within each token, and weights."""
        torch = self.torch
        generator = torch.Generator().manual_seed(self.rank)
        x = torch.randn((tokens, self.given.hidden), generator=generator).bfloat16()
        ids = torch.rand((tokens, experts), generator=generator).topk(self.given.topk, 1).indices
        weights = torch.rand(ids.shape, generator=generator) + 0.5
        return x.to(self.device), ids.to(self.device), weights.to(self.device)

    # ---- Times ----

    def host_times(self, calls):
        """This rank's host times in microseconds of the functions of `calls`, by name, one per repetition: the median of four calls.
        The functions alternate, because the speed of a host drifts, in a random order that is the same on all ranks, because the
        first calls are slower after a function that runs other code. Few calls are in flight, so no call waits for a free entry of
        the queue. A function with an attribute `before` calls it first, untimed."""
        taken = {name: [] for name in calls}
        for repetition in range(5 * self.given.repetitions):
            for name in random.Random(repetition).sample(list(calls), len(calls)):
                call = calls[name]
                getattr(call, "before", int)()
                self.torch.cuda.synchronize()
                four = []
                for _ in range(4):
                    begin = time.perf_counter_ns()
                    call()
                    four.append((time.perf_counter_ns() - begin) / 1e3)
                taken[name].append(statistics.median(four))
        self.torch.cuda.synchronize()
        return {name: each[10:] for name, each in taken.items()}

    def typical(self, taken):
        """Returns the median of `taken` on the rank where it is largest."""
        everybody = [None] * RANKS
        self.dist.all_gather_object(everybody, statistics.median(taken))
        return max(everybody)

    def figure(self, part, name, microseconds, **more):
        self.send("figure", part, name, us=round(microseconds, 2), **more)
        return microseconds

    def compared(self, part, name, ours, other, bar):
        """Records the ratio of two times and its upper bound."""
        if ours and other:
            self.send("ratio", part, name, ratio=round(ours / other, 3), bar=bar)

    # ---- vLLM's modular kernel ----

    def kernel(self, config, backend, tokens, copy):
        """Returns prepare/finalize for `backend`, a pass of vLLM's kernel with experts that compute nothing, and its inputs."""
        from vllm.model_executor.layers.fused_moe import all2all_utils, modular_kernel
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation

        vllm, experts = self.vllm, self.given.experts
        moe = vllm.moe_config(config, (self.given.hidden, 128, experts, self.given.topk), max_num_tokens=tokens,
                              max_capture_size=tokens if backend == LOW_LATENCY else 0)
        quant = vllm.quant_config_of({})
        made = all2all_utils.maybe_make_prepare_finalize(moe, quant, allow_new_interface=True)
        base = vllm.BatchedExperts if backend == LOW_LATENCY else vllm.RowExperts

        class Identity(base):
            def apply(self, output, hidden_states, *others, **more):
                if copy:
                    output.copy_(hidden_states)

        sizes = dict(max_num_tokens=made.max_num_tokens_per_rank(), num_dispatchers=RANKS) if backend == LOW_LATENCY else {}
        whole = modular_kernel.FusedMoEKernel(made, Identity(moe, quant, **sizes))
        here = experts // RANKS
        matrices = (self.torch.empty((here, 256, self.given.hidden), dtype=self.torch.bfloat16, device=self.device),
                    self.torch.empty((here, self.given.hidden, 128), dtype=self.torch.bfloat16, device=self.device))
        expert_map = vllm.map_of(range(self.rank * here, (self.rank + 1) * here), experts)
        x, ids, weights = self.inputs(tokens, experts)
        dtype = made.topk_indices_dtype()  # the router of vLLM makes ids of this type
        ids = ids.to(dtype or self.torch.int32)

        def call(*_):
            return whole.apply(x, *matrices, weights, ids, MoEActivation.SILU, experts, expert_map, False)

        return made, call, (x, ids, weights)

    def check(self, out, want):
        assert (out.float() - want).norm() <= 1e-2 * want.norm(), "wrong sums"

    # ---- Parts ----

    def prefill(self, store):
        """Prepare and finalize of many tokens in the format Standard."""
        self.both(store, "prefill", HIGH_THROUGHPUT, self.given.tokens, 0, self.prefill_of, 0.6)

    def decode(self, store):
        """Prepare and finalize of few tokens in the format BatchedExperts, eager and in graphs."""
        self.both(store, "decode", LOW_LATENCY, self.given.decode_tokens, self.given.decode_tokens, self.decode_of, 0.6)

    def both(self, store, part, backend, tokens, captured, measure, bar):
        """Measures the plug-in's class and vLLM's own class for `backend`, and compares the times by name."""
        from switchyard.engines import vllm as plugin

        found = {}
        with self.configured(store, backend, tokens, captured) as config:
            for library in ("switchyard", "deep_ep"):
                with self.attempt(part, library):
                    if library == "deep_ep" and not self.peer:
                        raise RuntimeError(self.given.no_peer)
                    plugin.install("all2all") if library == "switchyard" else plugin.uninstall()
                    self.vllm.manager_of(backend)
                    found[library] = measure(config, library, tokens)
        for name, ours in found.get("switchyard", {}).items():
            self.compared(part, name, ours, found.get("deep_ep", {}).get(name), bar)

    def prefill_of(self, config, library, tokens):
        found = {}
        for experts in ("copy", "none"):
            made, call, (x, ids, _) = self.kernel(config, HIGH_THROUGHPUT, tokens, experts == "copy")
            with self.vllm.one_pass(config, (tokens,) * RANKS, self.rank, True):
                if experts == "copy":
                    owners = ids // (self.given.experts // RANKS)
                    self.check(call(), x.float() * sum((owners == r).any(1) for r in range(RANKS)).unsqueeze(1))
                name = f"experts {experts}"
                about = {"tokens": tokens, "implementation": type(made).__name__}
                found[name] = self.figure("prefill", f"{library}, {name}", self.times.of(call), **about)
        return found

    def decode_of(self, config, library, tokens):
        _, call, (x, _, weights) = self.kernel(config, LOW_LATENCY, tokens, True)
        self.check(call(), x.float() * weights.sum(1, keepdim=True))
        made, call, _ = self.kernel(config, LOW_LATENCY, tokens, False)
        order = "per_rank" if library == "switchyard" else "per_route"
        about = {"tokens": tokens, "order": order, "implementation": type(made).__name__}
        found = {"eager": self.figure("decode", f"{library}, eager", self.times.of(call), **about)}
        replay = self.captured(config, call, tokens)
        found["graph"] = one = self.figure("decode", f"{library}, graph", self.times.of(replay), **about)

        def many():
            for _ in range(MANY - 1):
                call()
            return call()  # vLLM's wrapper refuses graphs without an output

        for form, run, first in (("eager", many, found["eager"]), ("graph", self.captured(config, many, tokens), one)):
            name = f"in {'a graph' if form == 'graph' else 'eager calls'} of {MANY}"
            found[name] = self.figure("decode", f"{library}, {name}", (self.times.of(run, MANY) - first) / (MANY - 1), **about)
        if library == "switchyard":
            kernel = self.times.token.zero_
            self.figure("decode", "one small kernel, eager", self.times.of(kernel))
            self.figure("decode", "one small kernel, graph", self.times.of(self.captured(config, kernel, tokens)))
        return found

    def captured(self, config, call, tokens):
        """Returns a replay of `call` in vLLM's CUDAGraphWrapper."""
        from vllm.compilation.cuda_graph import CUDAGraphWrapper
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import BatchDescriptor, set_forward_context

        wrapper = CUDAGraphWrapper(call, config, CUDAGraphMode.FULL)

        def run():
            with set_forward_context(None, config, num_tokens=tokens, num_tokens_across_dp=self.torch.tensor((tokens,) * RANKS),
                                     cudagraph_runtime_mode=CUDAGraphMode.FULL, batch_descriptor=BatchDescriptor(num_tokens=tokens)):
                wrapper()

        self.torch.cuda.synchronize()
        self.dist.barrier()
        run()  # captures
        self.dist.barrier()
        return run


# ---- Processes ----


def load_peer(folder):
    """Imports deep_ep from `folder`, with the NVSHMEM library that pip installs with torch. If Buffer lacks the parameter that vLLM
    passes for fault tolerance, which is False here, a subclass accepts it."""
    import inspect

    import torch  # noqa: F401  (its libraries)

    found = [each for place in (folder, *sys.path) for each in glob.glob(os.path.join(place, "nvidia/nvshmem/lib/libnvshmem_host.so.3"))]
    if found:
        ctypes.CDLL(found[0], mode=ctypes.RTLD_GLOBAL)
    sys.path.insert(0, folder)
    import deep_ep

    if "enable_shrink" not in inspect.signature(deep_ep.Buffer.__init__).parameters:
        class Buffer(deep_ep.Buffer):
            def __init__(self, *given, enable_shrink=False, **keywords):
                super().__init__(*given, **keywords)

        deep_ep.Buffer = Buffer


def peer_error(folder):
    """Returns the reason for a failed import of deep_ep from `folder` in a separate process, or ""."""
    if not folder:
        return "no --deep-ep"
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r}); import engine_exchange; engine_exchange.load_peer({folder!r})"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "import deep_ep: no answer in 60 s"
    return "" if done.returncode == 0 else f"import deep_ep: exit code {done.returncode}: {done.stderr.strip()[-400:]}"


def run(rank, part, store, given, end):
    sys.path[:0] = [str(ROOT / folder) for folder in ("python", "python/tests/helpers", "python/tests/helpers/engines")]
    bench = Bench(rank, given, end, "" if given.no_peer else given.deep_ep)
    getattr(bench, part)(store)
    bench.torch.cuda.synchronize()


def main():
    given = arguments()
    parts = parts_of(given, PARTS)
    given.no_peer = peer_error(given.deep_ep)
    play_all(run, parts, given)


if __name__ == "__main__":
    main()
