#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times Switchyard inside vLLM's own classes on 2 GPUs, compared with DeepEP V1 and with direct calls (docs/how_to/vllm.md).

    PYTHONPATH=python python3 bench/engine_exchange.py --deep-ep FOLDER --json engines.json

prefill   prepare and finalize in vLLM's modular kernel, format Standard (SWITCHYARD_VLLM=all2all); DeepEP's high-throughput class
decode    the same in the format BatchedExperts, eager and in vLLM's CUDAGraphWrapper; DeepEP's low-latency class
layer     a whole layer through vLLM's runner (SWITCHYARD_VLLM=layer), bf16 and block fp8, and direct calls of the layer: separate
          form with order="per_rank", and the plug-in's configuration
host      host time of a decode step through vLLM, and of direct calls of the same functions

Needs the sources of vLLM 0.33 (scripts/clients.sh), with stand-ins for compiled modules
(python/tests/helpers/engines/vllm_stand_ins.py). Experts compute no products: they return at once ("none") or copy their rows
("copy"). CUDA events measure GPU times, which include high-throughput DeepEP's wait for the host. Each figure is the median over
repetitions of the slowest rank's time. Each repetition first overwrites the L2 cache, runs an all-reduce so that the ranks begin
together, and keeps the GPU busy for a millisecond while the host enqueues the call. Results are checked before they are timed. Each
part runs in separate processes with a deadline; its failures are recorded in the output and do not affect other parts.
"""
import argparse
import contextlib
import ctypes
import glob
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
PARTS = ("prefill", "decode", "layer", "host")
#: Cycles of the kernel that keeps a GPU busy before a timed call: about a millisecond.
BUSY_CYCLES = 2_000_000
HIGH_THROUGHPUT, LOW_LATENCY = "deepep_high_throughput", "deepep_low_latency"


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


class Bench:
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
            self.nccl = self.dist.new_group(list(range(RANKS)), backend="nccl")
            self.flushed = self.torch.empty(64 << 20, dtype=self.torch.int32, device=self.device)
            self.token = self.torch.zeros(1, device=self.device)
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

    def align(self):
        self.flushed.zero_()
        self.dist.all_reduce(self.token, group=self.nccl)
        self.torch.cuda._sleep(BUSY_CYCLES)

    def slowest(self, taken):
        everybody = [None] * RANKS
        self.dist.all_gather_object(everybody, taken)
        return statistics.median(map(max, zip(*everybody)))

    def gpu_time(self, call):
        """Time of `call` in microseconds."""
        torch, taken = self.torch, []
        for repetition in range(self.given.repetitions + 5):
            self.align()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if repetition >= 5:
                taken.append(begin.elapsed_time(end) * 1e3)
        return self.slowest(taken)

    def host_time(self, call):
        """Host time of `call` in microseconds. Few calls are in flight, so no call waits for a free entry of the queue."""
        taken = []
        for repetition in range(20 * self.given.repetitions):
            if repetition % 4 == 0:
                self.torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            call()
            taken.append((time.perf_counter_ns() - begin) / 1e3)
        self.torch.cuda.synchronize()
        return self.slowest(taken[40:])

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
        self.both(store, "decode", LOW_LATENCY, self.given.decode_tokens, self.given.decode_tokens, self.decode_of, 0.65)

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
                found[name] = self.figure("prefill", f"{library}, {name}", self.gpu_time(call), **about)
        return found

    def decode_of(self, config, library, tokens):
        _, call, (x, _, weights) = self.kernel(config, LOW_LATENCY, tokens, True)
        self.check(call(), x.float() * weights.sum(1, keepdim=True))
        made, call, _ = self.kernel(config, LOW_LATENCY, tokens, False)
        about = {"tokens": tokens, "order": "per_route", "implementation": type(made).__name__}
        found = {"eager": self.figure("decode", f"{library}, eager", self.gpu_time(call), **about)}
        replay = self.captured(config, call, tokens)
        found["graph"] = self.figure("decode", f"{library}, graph", self.gpu_time(replay), **about)
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

    # ---- Whole layers ----

    def weights_of(self, dtype, shape):
        """Returns a layer's weights on this rank, small random values, and their scales (bf16: None)."""
        torch, (hidden, intermediate, experts, _) = self.torch, shape
        made, scales, here = [], [], experts // RANKS
        for rows, columns in ((2 * intermediate, hidden), (hidden, intermediate)):
            bf16 = torch.randn((1, rows, columns), device=self.device).mul_(columns**-0.5).bfloat16().repeat(here, 1, 1)
            made.append(bf16 if dtype == "bf16" else (bf16 * 64).to(torch.float8_e4m3fn))
            size = (here, rows // 128, columns // 128)
            scales.append(None if dtype == "bf16" else torch.full(size, 1 / 64, device=self.device))
        return made, scales

    def runner(self, config, dtype, shape, routing):
        """Returns vLLM's runner of a layer with random weights, and the weights and scales that it reads."""
        from vllm.model_executor.layers.quantization.fp8 import Fp8Config

        fp8 = dtype == "fp8"
        block = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
        made = self.vllm.layers_of(config, shape, routing, {}, quant_config=block if fp8 else None, count=1)[0]
        its = made.routed_experts
        (w13, w2), scales = self.weights_of(dtype, shape)
        its.w13_weight.data.copy_(w13)
        its.w2_weight.data.copy_(w2)
        if fp8:
            its.w13_weight_scale_inv.data.copy_(scales[0])
            its.w2_weight_scale_inv.data.copy_(scales[1])
        del w13, w2
        its.quant_method.process_weights_after_loading(its)
        return made, (its.w13_weight.data, its.w2_weight.data), scales

    def direct(self, weights, scales, dtype, shape, tokens, **options):
        """Returns a MoeLayer that reads the same weights, and its group."""
        import switchyard as sy

        hidden, intermediate, experts, topk = shape
        config = dict(hidden=hidden, intermediate=intermediate, num_experts=experts, topk=topk, max_tokens=tokens, storage="view",
                      dtype="fp8_e4m3" if dtype == "fp8" else "bf16", **options)
        group = sy.Group.from_process_group(self.dist.group.WORLD, sy.MoeLayer.heap_bytes(RANKS, backend="cuda", **config), backend="cuda",
                                            device=self.device.index, timeout=30, rendezvous_timeout=60)
        return sy.MoeLayer(group, *weights, w13_scales=scales[0], w2_scales=scales[1], **config), group

    def passes(self, config, tokens):
        """Returns vLLM's context of a forward pass."""
        from vllm.forward_context import set_forward_context

        return set_forward_context(None, config, num_tokens=tokens, num_tokens_across_dp=self.torch.tensor((tokens,) * RANKS))

    def layer(self, store):
        """A whole layer through vLLM's extension point, and called directly."""
        from switchyard.engines import vllm as plugin

        given = self.given
        shape, tokens = (given.hidden, given.intermediate, given.layer_experts, given.topk), given.tokens
        plugin.install("layer")
        with self.configured(store, "allgather_reducescatter", tokens) as config:
            config.kernel_config.set_platform_defaults(config)
            for dtype in ("bf16", "fp8"):
                with self.attempt("layer", dtype):
                    self.layer_of(config, dtype, shape, tokens)
                self.torch.cuda.empty_cache()

    def layer_of(self, config, dtype, shape, tokens):
        x, ids, weights = self.inputs(tokens, shape[2])
        ids, out, kept = ids.int(), self.torch.empty_like(x), x.clone()  # vLLM may write results to x
        runner, matrices, scales = self.runner(config, dtype, shape, (weights, ids))
        logits = self.torch.zeros((tokens, shape[2]), device=self.device)
        with self.passes(config, tokens):
            through = runner(x.clone(), logits).clone()
            made = runner.routed_experts.quant_method.moe_kernel.fused_experts._layer
            ours = self.figure("layer", f"{dtype}, through vLLM", self.gpu_time(lambda: runner(x, logits)), tokens=tokens,
                               implementation=made.implementation)
        same = self.figure("layer", f"{dtype}, same layer called directly", self.gpu_time(lambda: made.forward(kept, ids, weights, out=out)))
        separate, group = self.direct(matrices, scales, dtype, shape, tokens, form="separate", order="per_rank")
        separate.forward(kept, ids, weights, out=out)
        self.check(through, out.float())
        best = self.figure("layer", f"{dtype}, separate, per_rank", self.gpu_time(lambda: separate.forward(kept, ids, weights, out=out)),
                           implementation=separate.implementation)
        self.compared("layer", f"{dtype}, through vLLM / separate", ours, best, 0.95)
        self.compared("layer", f"{dtype}, through vLLM / same layer", ours, same, None)
        self.dist.barrier()
        group.close()

    # ---- Host times ----

    def host(self, store):
        """Host time of decode steps through vLLM and of the calls that they make."""
        from switchyard.engines import vllm as plugin

        tokens, given = self.given.decode_tokens, self.given
        with self.configured(store, LOW_LATENCY, tokens, tokens) as config:
            with self.attempt("host", "exchange"):
                plugin.install("all2all")
                self.vllm.manager_of(LOW_LATENCY)
                made, call, (x, ids, weights) = self.kernel(config, LOW_LATENCY, tokens, False)
                exchange, received, out = made._exchange, made._received, self.torch.empty_like(x)
                y = self.torch.empty_like(received.x)

                def pair():
                    exchange.dispatch(x, ids, output=received)
                    exchange.combine(y, received, topk_weights=weights, out=out)

                self.host_figures("exchange", call, pair)
            with self.attempt("host", "layer"):
                plugin.uninstall()
                plugin.install("layer")
                config.parallel_config.all2all_backend = "allgather_reducescatter"
                config.kernel_config.set_platform_defaults(config)
                shape = (given.hidden, 256, given.experts, given.topk)
                runner, _, _ = self.runner(config, "bf16", shape, (weights, ids.int()))
                logits = self.torch.zeros((tokens, given.experts), device=self.device)
                with self.passes(config, tokens):
                    runner(x, logits)
                    made = runner.routed_experts.quant_method.moe_kernel.fused_experts._layer
                    self.host_figures("layer", lambda: runner(x, logits), lambda: made.forward(x, ids, weights, out=out))

    def host_figures(self, name, through, bare):
        for call in (through, bare):
            call()
        ours = self.figure("host", f"{name}, through vLLM", self.host_time(through))
        direct = self.figure("host", f"{name}, called directly", self.host_time(bare))
        self.send("difference", "host", name, us=round(ours - direct, 2), bar=25)


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
    try:
        sys.path[:0] = [str(ROOT / folder) for folder in ("python", "python/tests/helpers", "python/tests/helpers/engines")]
        bench = Bench(rank, given, end, "" if given.no_peer else given.deep_ep)
        getattr(bench, part)(store)
        bench.torch.cuda.synchronize()
    except BaseException as error:
        traceback.print_exc()
        end.send({"kind": "error", "part": part, "name": "part", "rank": rank, "error": f"{type(error).__name__}: {error}"[:600]})
    end.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no teardown of groups whose peers may have failed


def play(part, given, entries):
    """Runs one part and appends its entries."""
    context, deadline = multiprocessing.get_context("spawn"), time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        store = os.path.join(folder, "store")
        ranks = [context.Process(target=run, args=(rank, part, store, given, pipes[rank][1])) for rank in range(RANKS)]
        for process, (_, theirs) in zip(ranks, pipes):
            process.start()
            theirs.close()
        open_ends = {ours for ours, _ in pipes}
        while open_ends and time.monotonic() < deadline:
            for ours in wait(list(open_ends), max(0, deadline - time.monotonic())):
                try:
                    entries.append(ours.recv())
                    print(json.dumps(entries[-1]), flush=True)
                except EOFError:
                    open_ends.discard(ours)
        for rank, process in enumerate(ranks):
            process.join(max(0, deadline - time.monotonic()))
            if process.exitcode != 0:
                error = f"no end in {given.seconds} s" if process.exitcode is None else f"exit code {process.exitcode}"
                entries.append({"kind": "error", "part": part, "name": "part", "rank": rank, "error": error})
                process.kill()


def about(given):
    """Returns the conditions of the measurement."""
    import torch

    sys.path.insert(0, str(ROOT / "python"))
    import switchyard as sy

    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return {"device": torch.cuda.get_device_name(), "ranks": RANKS, "torch": torch.__version__, "library": sy.library_version(),
            "commit": os.environ.get("SWITCHYARD_COMMIT") or git.stdout.strip(), "date": time.strftime("%Y-%m-%d"),
            "config": {name: value for name, value in vars(given).items() if name != "json"}}


def main():
    given = arguments()
    parts = given.only.split(",")
    if set(parts) - set(PARTS):
        raise SystemExit(f"engine_exchange: --only {given.only}: choose from {', '.join(PARTS)}")
    given.no_peer = peer_error(given.deep_ep)
    entries = []
    for part in parts:
        play(part, given, entries)
        if given.json:  # after each part: failures of later parts lose no figures
            with open(given.json, "w", encoding="utf-8") as file:
                json.dump({**about(given), "entries": entries}, file, indent=1)
                file.write("\n")


if __name__ == "__main__":
    main()
