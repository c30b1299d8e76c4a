#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times FlashInfer 0.7.4's expert-parallel layers for Hopper and Switchyard's, on 2 GPUs in the same run.

    pip install --no-deps --target FOLDER flashinfer-python==0.7.4 'apache-tvm-ffi<0.2' ninja nvidia-ml-py filelock requests tqdm packaging
    PYTHONPATH=FOLDER python3 bench/peers/flashinfer_layers.py --build  # needs nvcc, not a GPU; compiles for the sizes in the options
    PYTHONPATH=python:FOLDER python3 bench/peers/flashinfer_layers.py --json flashinfer.json

bf16   sm90_bf16_bf16_bf16_push_cake ("cake"), in its default configuration
fp8    sm90_fp8_fp8_bf16_push_cuda ("push"), in its default configuration, which returns fp8 rows, and with bf16 rows; its products
       promote sums to float32 every 128 columns

Both exchange rows through peer memory that one process shares with another by file descriptors; multicast is not used. FlashInfer
compiles its kernels with nvcc when it creates a layer; --build compiles them in advance, to flashinfer/data/aot. Import needs
torch 2.11 or newer with cuda-bindings.

A layer's time is that of the whole call with bf16 tokens, which includes dispatch and quantization; `dispatch_us` is the part until
the end of FlashInfer's dispatch. `preparation_s` is the host time of a layer's creation and first call. Forms take turns in each of
three rounds. Each expert has its own copy of the same matrices, scaled by a power of two: the result is then known for all tokens,
and is checked before a layer is timed. Each part runs in separate processes with a deadline; a form that cannot run has an entry
with its error.
"""
import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpu_times import GpuTimes  # noqa: E402
from rank_processes import RANKS, parts_of, play_all  # noqa: E402

PARTS = ("bf16", "fp8")
#: Maximum relative errors by type of the products, and for experts' rows that return as fp8: their rounding alone is 2.6e-2.
BARS = {"bf16": 1e-2, "fp8": 5e-2}
FP8_ROWS_BAR = 6e-2
ROUNDS = 3
#: Multiprocessors of an H100 or H200, on which FlashInfer's products depend.
MULTIPROCESSORS = 132
EXACT = "fp8, float32 sums beyond 128 elements"

#: Writes the sources of the push layer's two products where FlashInfer looks for their binaries. Arguments: local experts, routes of
#: a rank, H, I, multiprocessors.
PRODUCTS = """
#include "fp8_moe_jit.cuh"
int main(int, char** argv) {
  using namespace deep_gemm::jit;
  const uint32_t experts = atoi(argv[1]), rows = atoi(argv[2]), h = atoi(argv[3]), i = atoi(argv[4]);
  for (const auto& [n, k] : {std::pair{2 * i, h}, std::pair{h, i}}) {
    const auto [m_block, n_block, stages, multicast, bytes] = get_best_gemm_config(rows, n, k, experts, atoi(argv[5]));
    const auto folder = flashinfer::sm90_push_fp8::jit::grouped_kernel_cache_path(n, k, m_block, n_block, 128, experts, stages,
                                                                                  multicast, false);
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "kernel.cu") << generateKernel(n, k, m_block, n_block, 128, experts, stages, multicast,
                                                          deep_gemm::GemmType::GroupedWithOffset);
  }
}
"""


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"which of {', '.join(PARTS)}, with a comma between them")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a rank (4096)")
    parser.add_argument("--hidden", type=int, default=7168, help="columns of a row (7168)")
    parser.add_argument("--intermediate", type=int, default=2048, help="intermediate size (2048)")
    parser.add_argument("--experts", type=int, default=128, help="experts (128)")
    parser.add_argument("--topk", type=int, default=8, help="experts of a token (8)")
    parser.add_argument("--repetitions", type=int, default=20, help="of each time in each round (20)")
    parser.add_argument("--seconds", type=float, default=45, help="deadline of each part (45)")
    parser.add_argument("--json", metavar="FILE", help="where the figures, and what they were taken on, are written")
    parser.add_argument("--build", action="store_true", help="only compile FlashInfer's kernels")
    return parser.parse_args()


def products_folder():
    """Returns the cache of the push layer's products."""
    from flashinfer.jit import env

    return Path(env.FLASHINFER_AOT_DIR) / "deep_gemm"


def build(given):
    """Compiles the modules that the layers load, and copies them to where FlashInfer looks first."""
    os.environ.update(FLASHINFER_CUDA_ARCH_LIST="9.0a")  # modules are found by a hash that includes it
    from flashinfer.moe_ep.kernel_src.sm90.cake_bf16_megamoe.shim import cake_jit as cake
    from flashinfer.moe_ep.kernel_src.sm90.push_style_megamoe.shim.gemm import gen_sm90_push_fp8_moe_gemm_module
    from flashinfer.moe_ep.kernel_src.sm90.push_style_megamoe.shim.jit import gen_sm90_push_a2a_module

    names = ("compact", "combine_prereduced", "combine_tail_prereduced", "dispatch", "dispatch_grid")
    products = gen_sm90_push_fp8_moe_gemm_module()
    specs = [gen_sm90_push_a2a_module(), products,
             *(getattr(cake, f"gen_sm90_cake_bf16_{name}_module")() for name in names),
             *map(cake.gen_sm90_cake_bf16_grouped_gemm_module, ("fc1_gated", "fc2", "fc1_gated_signal", "fc2_early"))]
    for spec in specs:
        if not spec.is_aot:
            spec.build(verbose=False)
            spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(spec.get_library_path(), spec.aot_path)
        print(spec.aot_path, flush=True)
    build_products(given, products)


def build_products(given, module):
    """Compiles the products that FlashInfer generates for a shape, with the options of deep_gemm/compiler.cuh."""
    from flashinfer.jit import env

    csrc, generated, folder = Path(env.FLASHINFER_CSRC_DIR), Path(env.FLASHINFER_GEN_SRC_DIR) / module.name, products_folder()
    internal = csrc / "nv_internal"
    folder.mkdir(parents=True, exist_ok=True)
    source, program = folder / "products.cu", folder / "products"
    source.write_text(PRODUCTS, encoding="utf-8")
    data = csrc.parent
    folders = (generated, csrc, internal, internal / "include", internal / "tensorrt_llm", data / "include", data / "spdlog" / "include",
               data / "cutlass" / "include")
    common = [internal / "cpp" / "common" / f"{name}.cpp" for name in ("logger", "stringUtils", "tllmException", "envUtils")]
    subprocess.run(["nvcc", "-std=c++17", "-arch=sm_90a", *(f"-I{each}" for each in folders), source, *common, "-o", program, "-lnvrtc",
                    "-lcuda"], check=True)
    sizes = (given.experts // RANKS, given.tokens * given.topk, given.hidden, given.intermediate, MULTIPROCESSORS)
    subprocess.run([program, *map(str, sizes)], check=True, env={**os.environ, "TRTLLM_DG_CACHE_DIR": str(folder)})
    options = ("-std=c++17 --gpu-architecture=sm_90a --ptxas-options=-allow-expensive-optimizations=true --ptxas-options=--register-usage-level=10 "
               "--diag-suppress=161,174,177,940 -D__FORCE_INCLUDE_CUDA_FP16_HPP_FROM_FP16_H__=1 -D__FORCE_INCLUDE_CUDA_BF16_HPP_FROM_BF16_H__=1 "
               "-O3 -cubin --expt-relaxed-constexpr --expt-extended-lambda "
               "--compiler-options=-fPIC,-O3,-Wno-deprecated-declarations,-Wno-abi").split()
    for kernel in sorted(folder.glob("cache/*/kernel.cu")):
        to = kernel.with_name("nvcc_kernel.cubin")
        subprocess.run(["nvcc", kernel, "-o", to, *options, f"-I{generated}", f"-I{internal / 'tensorrt_llm'}"], check=True)
        print(to, flush=True)


class Bench:
    """One rank of one part."""

    def __init__(self, rank, given, store):
        import torch
        import torch.distributed as dist

        torch.cuda.set_device(rank)
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=RANKS)
        self.rank, self.given, self.torch, self.dist = rank, given, torch, dist
        self.device = torch.device("cuda", rank)
        self.times = GpuTimes(self.device, given.repetitions)
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn((given.tokens, given.hidden), generator=generator).bfloat16().to(self.device)
        ids = torch.rand((given.tokens, given.experts), generator=generator).topk(given.topk, 1).indices
        self.ids = ids.int().to(self.device)
        self.weights = (torch.rand(ids.shape, generator=generator) + 0.5).to(self.device)

    def matrices(self):
        """Returns w13 [L, 2 I, H] (gate, up) and w2 [L, H, I] in bf16, and the factors [E] by which w2 differs between experts."""
        torch, given = self.torch, self.given
        source, here = torch.Generator(device=self.device).manual_seed(7), given.experts // RANKS
        w13 = torch.randn((2 * given.intermediate, given.hidden), generator=source, device=self.device).mul_(given.hidden**-0.5).bfloat16()
        w2 = torch.randn((given.hidden, given.intermediate), generator=source, device=self.device).mul_(given.intermediate**-0.5).bfloat16()
        factors = 2.0 ** (torch.arange(given.experts, device=self.device) % 3 - 1)
        mine = factors[self.rank * here:(self.rank + 1) * here].bfloat16()
        return w13.repeat(here, 1, 1), w2 * mine[:, None, None], factors

    def expected(self, w13, w2, factors):
        """The layer's result in float32, from the matrices of an expert with factor 1 in any float type."""
        torch = self.torch
        gate, up = (self.x.float() @ w13.float().T).chunk(2, -1)
        y = (torch.nn.functional.silu(gate) * up) @ w2.float().T
        return y * (self.weights * factors[self.ids.long()]).sum(1, keepdim=True)

    def ours(self, w13, w2, scales, **options):
        """Returns a MoeLayer's forward pass, and its implementation."""
        import switchyard as sy

        given = self.given
        config = dict(hidden=given.hidden, intermediate=given.intermediate, num_experts=given.experts, topk=given.topk,
                      max_tokens=given.tokens, storage="view", captured=False, dtype="bf16" if scales[0] is None else "fp8_e4m3", **options)
        group = sy.Group.from_process_group(self.dist.group.WORLD, sy.MoeLayer.heap_bytes(RANKS, backend="cuda", **config), backend="cuda",
                                            device=self.rank, timeout=30, rendezvous_timeout=60)
        layer, out = sy.MoeLayer(group, w13, w2, w13_scales=scales[0], w2_scales=scales[1], **config), self.torch.empty_like(self.x)
        return lambda: layer.forward(self.x, self.ids, self.weights, out=out), layer.implementation

    def theirs(self, kernel, weights, transformed=None):
        """Returns two forward passes of FlashInfer's layer; the second records an event after its dispatch."""
        from flashinfer import moe_ep

        given = self.given
        layer = moe_ep.MoEEpLayer(
            moe_ep.BootstrapConfig(world_size=RANKS, rank=self.rank, device=self.rank),
            moe_ep.FleetParams(num_experts=given.experts, max_tokens_per_rank=given.tokens, token_hidden_size=given.hidden),
            weights, backend=moe_ep.MegaConfig(megakernel=kernel, preprocess_weights=transformed is None, transformed_weights=transformed))
        out = self.torch.empty_like(self.x)
        call = moe_ep.MoEEpTensors(hidden_states=self.x, topk_ids=self.ids, topk_weights=self.weights, output=out)

        def marked(event):
            layer.stage_inputs(call)
            event.record()
            layer.compute_staged(output=out)

        return lambda: layer.forward(call), marked

    # ---- Parts ----

    def bf16(self, forms):
        from flashinfer import moe_ep

        w13, w2, factors = self.matrices()
        want = self.expected(w13[0], w2[0] / factors[self.first()], factors)
        for form, options in (("separate, per_rank", {"form": "separate", "order": "per_rank"}), ("automatic", {})):
            forms.begin()
            forms.add(f"switchyard, {form}", *self.ours(w13, w2, (None, None), **options), want, BARS["bf16"], "bf16, float32 sums")
        config = moe_ep.Sm90_Bf16_Bf16_Bf16_PushCake_MegaMoeConfig(intermediate_size=self.given.intermediate, top_k=self.given.topk)
        with forms.attempt("flashinfer, cake"):
            call, marked = self.theirs(config, moe_ep.MoEWeightPack(w13, w2))
            forms.add("flashinfer, cake", call, config.kernel_name, want, BARS["bf16"], "bf16, float32 sums", marked)

    def fp8(self, forms):
        from flashinfer import moe_ep
        from flashinfer.moe_ep.kernel_src.sm90.push_style_megamoe import make_sm90_push_weights

        w13, w2, factors = self.matrices()
        packed = make_sm90_push_weights(w13, w2)
        del w13, w2

        def unpacked(data, scales):
            return data[0].float() * scales[0].repeat_interleave(128, 0).repeat_interleave(128, 1)

        want = self.expected(unpacked(packed.w13_fp8, packed.w13_sf), unpacked(packed.w2_fp8, packed.w2_sf) / factors[self.first()], factors)
        scales = packed.w13_sf, packed.w2_sf
        for form, options, arithmetic in (("separate, per_rank, exact", {}, EXACT),
                                          ("separate, per_rank, fast", {"accumulate": "fast"}, "fp8, sums of the tensor cores")):
            forms.begin()
            call = self.ours(packed.w13_fp8, packed.w2_fp8, scales, form="separate", order="per_rank", **options)
            forms.add(f"switchyard, {form}", *call, want, BARS["fp8"], f"{arithmetic}, bf16 rows return")
        for rows, options in (("fp8", {}), ("bf16", {"combine_dtype": "bf16", "grouped_combine": False})):
            config = moe_ep.Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig(intermediate_size=self.given.intermediate, top_k=self.given.topk, **options)
            with forms.attempt(f"flashinfer, push, {rows} rows return"):
                call, marked = self.theirs(config, None, packed)
                bar = FP8_ROWS_BAR if rows == "fp8" else BARS["fp8"]
                forms.add(f"flashinfer, push, {rows} rows return", call, config.kernel_name, want, bar,
                          f"{EXACT}, {rows} rows return", marked)

    def first(self):
        return self.rank * (self.given.experts // RANKS)


class Forms:
    """Layers of one part: each is checked when it is added; run() times them in turn."""

    def __init__(self, bench, part, end):
        self.bench, self.part, self.end, self.calls = bench, part, end, {}
        self.begin()

    def begin(self):
        """Begins the preparation of the next form."""
        self.began = time.perf_counter()

    def send(self, kind, name, **more):
        if self.bench.rank == 0 or kind == "error":
            self.end.send({"kind": kind, "part": self.part, "name": name, "rank": self.bench.rank, **more})

    def attempt(self, name):
        """Context of a form that may fail. The form is timed only if it works on all ranks."""
        forms = self

        class Attempt:
            def __enter__(self):
                forms.begin()

            def __exit__(self, kind, error, trace):
                if error is not None and not isinstance(error, Exception):
                    return False
                if error is not None:
                    traceback.print_exception(kind, error, trace)
                    forms.send("error", name, error=f"{kind.__name__}: {error}"[:600])
                worked = [None] * RANKS
                forms.bench.dist.all_gather_object(worked, error is None)
                if not all(worked):
                    forms.calls.pop(name, None)
                return True

        return Attempt()

    def add(self, name, call, implementation, want, bar, arithmetic, marked=None):
        """marked(event): performs `call` and records the event after its dispatch."""
        got = call().float()
        prepared = time.perf_counter() - self.began
        error = ((got - want).norm() / want.norm()).item()
        assert error <= bar, f"{name}: relative error {error}"
        for _ in range(3):
            again = call()
        assert ((again.float() - want).norm() / want.norm()).item() <= bar
        about = {"implementation": implementation, "arithmetic": arithmetic, "relative_error": round(error, 5), "largest_allowed_error": bar,
                 "preparation_s": round(prepared, 2)}
        self.calls[name] = call, marked, about

    def dispatch_us(self, marked):
        """The median over repetitions of the time until the slowest rank's dispatch ends."""
        torch, times, taken = self.bench.torch, self.bench.times, []
        for _ in range(times.repetitions):
            times.align(1)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            marked(end)
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3)
        return round(times.slowest(taken), 1)

    def run(self):
        taken = {name: [] for name in self.calls}
        for _ in range(ROUNDS):
            for name, (call, *_) in self.calls.items():
                taken[name].append(self.bench.times.of(call))
        for name, (_, marked, about) in self.calls.items():
            if marked:
                about["dispatch_us"] = self.dispatch_us(marked)
            self.send("figure", name, us=round(statistics.median(taken[name]), 1), rounds=[round(each, 1) for each in taken[name]],
                      tokens=self.bench.given.tokens, **about)


# ---- Processes ----


def rank_of(rank, part, store, given, end):
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    os.environ.setdefault("TRTLLM_DG_CACHE_DIR", str(products_folder()))
    bench = Bench(rank, given, store)
    forms = Forms(bench, part, end)
    getattr(bench, part)(forms)
    forms.run()
    bench.torch.cuda.synchronize()


def main():
    given = arguments()
    if given.build:
        return build(given)
    return play_all(rank_of, parts_of(given, PARTS), given)


if __name__ == "__main__":
    main()
