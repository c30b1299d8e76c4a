# SPDX-License-Identifier: Apache-2.0
"""Ranks for tests of the plug-in for SGLang, as processes of a team, with SGLang's own layers in them, and plain torch to compare
with. Stand-ins besides those of sglang_sources: the group coordinator (its process group of gloo is real), and the statement that
DeepGEMM is available, where a test names it."""
import contextlib
import functools
import os
import secrets
import tempfile
import types

import torch

import sglang_sources
from team import run_on_team

RANKS = 4
EXPERTS, TOPK, INNER = 8, 3, 128

#: In a process of a team: process groups by their number of ranks.
_groups = {}

#: In a process of a team: "cpu" or "cuda", the memory of the rank's tensors.
place = "cpu"


@functools.lru_cache(None)
def _folder():
    """The folder in which torch's process groups meet."""
    return tempfile.TemporaryDirectory()


def over_ranks(world, scenario, *arguments, ranks=RANKS, device="cpu"):
    """Calls ``scenario(rank, world, *arguments)`` on the first `world` ranks of a team of `ranks`, in SGLang's context for expert
    parallelism with DeepEP. The plug-in is not installed; it is uninstalled at the end. device: "cpu", or "cuda", which distributes
    the ranks over the GPUs."""
    sglang_sources.check()
    path = os.path.join(_folder().name, secrets.token_hex(8))
    run_on_team("spawn", ranks, _rank, path, device, world, scenario, arguments, seconds=400, name=f"sglang on {device}")


def _rank(rank, ranks, path, device, world, scenario, arguments):
    global place
    place = device
    os.environ["SWITCHYARD_DEEP_EP_BACKEND"] = device
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.empty(1, device="cuda")
    sglang_sources.importable()
    if not _groups:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
        _groups.update({n: torch.distributed.new_group(list(range(n))) for n in (1, 2, ranks)})
    if rank < world:
        from switchyard.engines import sglang as plugin

        with context(world, rank):
            try:
                scenario(rank, world, *arguments)
                if world > 1:
                    torch.distributed.barrier(_groups[world])
            finally:
                plugin.uninstall()


@contextlib.contextmanager
def context(world, rank):
    """SGLang's process-wide configuration, with all flags at their defaults except for DeepEP."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe.utils import DeepEPMode, MoeA2ABackend, MoeRunnerBackend
    from sglang.srt.server_args import ServerArgs

    runtime_context.reset_context()
    runtime_context._CONTEXT.set_server_args(ServerArgs(model_path="none"))
    group = types.SimpleNamespace(device_group=_groups[world], world_size=world, rank_in_group=rank, barrier=lambda: None)
    sizes = {"tp_group": group, "tp_size": world, "attn_tp_size": world, "moe_ep_size": world, "moe_ep_rank": rank,
             "moe_tp_size": 1, "moe_tp_rank": 0}
    moe = runtime_context.get_flags().moe
    with runtime_context.get_parallel().override(**sizes), \
            moe.override(a2a_backend=MoeA2ABackend.DEEPEP, deepep_mode=DeepEPMode.AUTO, runner_backend=MoeRunnerBackend.DEEP_GEMM):
        yield


def prefill(flag=True):
    """The next passes are prefill, or decode."""
    from sglang.srt.runtime_context import get_forward

    return get_forward().scoped(is_extend_in_batch=flag)


@contextlib.contextmanager
def deep_gemm_available():
    """Stand-in for the compiled module deep_gemm: SGLang then sends fp8 in prefill and aligns experts to 128 rows."""
    from sglang.srt.layers import deep_gemm_wrapper

    before, deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM, True
    try:
        yield
    finally:
        deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM = before


# ---- Inputs and plain torch ----


def tokens_of(world, hidden, seed=0, tokens=(9, 0, 12, 4), skew=False, experts=EXPERTS):
    """Returns, for every rank, x bf16 [T, H], ids int32 [T, K] without repetition and with some -1, weights [T, K]. skew: all
    tokens choose the first experts."""
    made = []
    for rank in range(world):
        random = torch.Generator().manual_seed(100 * seed + rank)
        count = tokens[rank]
        scores = torch.rand(count, experts, generator=random)
        ids = torch.arange(TOPK).expand(count, TOPK).clone() if skew else scores.argsort(1)[:, :TOPK]
        ids = torch.where((torch.rand(count, TOPK, generator=random) < 0.1) & (not skew), -1, ids).int()
        weights = torch.rand(count, TOPK, generator=random) + 0.1
        made.append(tuple(each.to(place) for each in (torch.randn(count, hidden, generator=random).bfloat16(), ids, weights)))
    return made


def weights_of(hidden, experts=EXPERTS, seed=0):
    """Returns w13 [E, 2 I, H], gate rows first, and w2 [E, H, I] of all experts, in bf16."""
    random = torch.Generator().manual_seed(seed)
    return ((torch.randn(experts, 2 * INNER, hidden, generator=random) / hidden ** 0.5).bfloat16().to(place),
            (torch.randn(experts, hidden, INNER, generator=random) / INNER ** 0.5).bfloat16().to(place))


def mlp(x, w13, w2):
    """Returns one expert's output in float32."""
    gate, up = (x.float() @ w13.float().T).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up @ w2.float().T


def wanted(x, ids, weights, w13, w2, compute=mlp):
    """Returns the layer's output in float32, token by token. compute: an expert."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for t, (row, factors) in enumerate(zip(ids.tolist(), weights.tolist())):
        for expert, factor in zip(row, factors):
            if expert >= 0:
                out[t] += factor * compute(x[t:t + 1], w13[expert], w2[expert])[0]
    return out


def off(a, b):
    """Returns the relative error."""
    assert a.shape == b.shape and a.isfinite().all()
    return ((a.float() - b).norm() / b.norm()).item() if b.numel() else 0.0


def topk_output(ids, weights):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return StandardTopKOutput(weights, ids, None)


def config_of(world, hidden, **changes):
    """Returns SGLang's MoeRunnerConfig."""
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    return MoeRunnerConfig(**{"num_experts": EXPERTS, "num_local_experts": EXPERTS // world, "hidden_size": hidden, "top_k": TOPK,
                              "intermediate_size_per_partition": INNER, "params_dtype": torch.bfloat16, "layer_id": 0, **changes})


def dispatcher_of(world, hidden, rows="bf16", **changes):
    """Returns what SGLang's create_moe_dispatcher returns for a bf16 layer, configured as after loading."""
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    made = layer.create_moe_dispatcher(config_of(world, hidden, **changes), UnquantizedFusedMoEMethod(use_deep_gemm=True))
    made.set_quant_config({"dispatcher_output_dtype": rows})
    return made
