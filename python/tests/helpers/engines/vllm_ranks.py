# SPDX-License-Identifier: Apache-2.0
"""Scenarios of one rank in vLLM: its parallel state, modular kernel and MoE layer, with plain torch experts. Imported only in the
processes of vllm_host."""
import contextlib

import torch
import torch.distributed as dist
import vllm.v1.executor  # noqa: F401
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import all2all
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.fused_moe import all2all_utils
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig,
                                                         RoutingMethodType, fp8_w8a8_moe_quant_config)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate, TopKWeightAndReduceNoOP
from vllm.platforms import current_platform, interface
from vllm.v1.worker import workspace

from switchyard._abi import repeated
from switchyard.engines import vllm as plugin

MANAGERS = {"deepep_high_throughput": "DeepEPHTAll2AllManager", "deepep_low_latency": "DeepEPLLAll2AllManager"}
MAX_TOKENS = 24
#: Device of this rank's tensors.
DEVICE = torch.device("cpu")


def use_device(name, rank):
    """Selects the device of this process: "cpu", or "cuda" for one of the GPUs. On GPUs, vLLM's communicator class, which needs NCCL
    and a GPU for each rank, is replaced by its base class."""
    global DEVICE
    if name == "cuda":
        DEVICE = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(DEVICE)
        current_platform.get_device_communicator_cls = interface.Platform.get_device_communicator_cls


# ---- vLLM's configuration and parallel state ----


@contextlib.contextmanager
def vllm_with(rank, world, store, backend, **parallel):
    """Enters a configuration of `world` data-parallel ranks with expert parallelism; yields the configuration."""
    config = VllmConfig(device_config=DeviceConfig(device=DEVICE.type))
    its = config.parallel_config
    its.data_parallel_size, its.data_parallel_rank, its.enable_expert_parallel = world, rank, True
    its.all2all_backend, its.is_moe_model = backend, True
    config.scheduler_config.max_num_batched_tokens = MAX_TOKENS
    for name, value in parallel.items():
        setattr(its, name, value)
    with set_current_vllm_config(config):
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        parallel_state.init_distributed_environment(world, rank, "env://", rank if DEVICE.index is None else DEVICE.index, "gloo")
        parallel_state.initialize_model_parallel(1, 1, backend="gloo")
        workspace.init_workspace_manager(DEVICE)
        yield config


def manager_of(backend):
    """Creates and returns the manager for `backend`, in place of CudaCommunicator, which needs NCCL."""
    group = parallel_state.get_ep_group()
    made = getattr(all2all, MANAGERS[backend])(group.cpu_group, None)
    group.device_communicator.all2all_manager = made
    return made


def moe_config(config, shape, **changes):
    """Returns vLLM's configuration of a layer. shape: hidden, intermediate, experts, topk."""
    hidden, intermediate, experts, topk = shape
    its = config.parallel_config
    world, rank = its.data_parallel_size, its.data_parallel_rank
    parallel = FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=world, ep_size=world, tp_rank=0, pcp_rank=0, dp_rank=rank, ep_rank=rank, sp_size=1,
        use_ep=True, all2all_backend=its.all2all_backend, enable_eplb=False)
    here = experts // world + (rank < experts % world)
    keywords = dict(num_experts=experts, experts_per_token=topk, hidden_dim=hidden, intermediate_size=intermediate,
                    num_local_experts=here, num_logical_experts=experts, activation=MoEActivation.SILU, device=DEVICE,
                    routing_method=RoutingMethodType.Renormalize, moe_parallel_config=parallel, in_dtype=torch.bfloat16,
                    max_num_tokens=MAX_TOKENS)
    parallel_changes = {name: changes.pop(name) for name in list(changes) if hasattr(parallel, name) and name not in keywords}
    for name, value in parallel_changes.items():
        setattr(parallel, name, value)
    return FusedMoEConfig(**{**keywords, **changes})


# ---- Inputs and the oracle, in float64 ----


def inputs_of(world, shape, tokens, skew=False):
    """Returns weights (w13 [E, 2 I, H], w2 [E, H, I]) and by rank (x, ids, weights), identical on all ranks."""
    hidden, intermediate, experts, topk = shape
    source = torch.Generator().manual_seed(7)
    w13 = (torch.randn(experts, 2 * intermediate, hidden, generator=source) / hidden**0.5).bfloat16()
    w2 = (torch.randn(experts, hidden, intermediate, generator=source) / intermediate**0.5).bfloat16()
    by_rank = []
    for count in tokens:
        x = torch.randn(count, hidden, generator=source).bfloat16()
        ids = torch.rand(count, topk if skew else experts, generator=source).argsort(1)[:, :topk].to(torch.int32)
        by_rank.append((x, ids.contiguous(), torch.rand(count, topk, generator=source) + 0.5))
    return w13, w2, by_rank


def mlp(x, w13, w2):
    """SwiGLU in the type of `x`."""
    gate, up = (x @ w13.to(x.dtype).T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ w2.to(x.dtype).T


def expected(x, ids, weights, w13, w2, as_seen=None, compute=mlp):
    """The layer in float64. as_seen: expert -> the tokens as that expert's rank computes with them (default: x). compute: an expert."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            if ids[t, k] >= 0:
                expert = int(ids[t, k])
                row = (x if as_seen is None else as_seen(expert))[t].double()
                out[t] += weights[t, k].double() * compute(row, w13[expert], w2[expert])
    return out


def error_of(out, right):
    out = out.cpu()
    return float((out.double() - right).norm() / right.norm()) if right.numel() else float(out.numel())


# ---- Plain torch experts of vLLM's interface ----


def dequantized(x, scales):
    if scales is None or scales.numel() == 1:
        return x.float() * (1 if scales is None else scales.item())
    return (x.float().unflatten(-1, (-1, 128)) * scales.float().unsqueeze(-1)).flatten(-2)


def quantize_in_torch(x, group, column_major_scales=False, **others):
    """Stand-in for a GPU kernel of vLLM: fp8 rows with a scale per `group` columns."""
    groups = x.float().unflatten(-1, (-1, group))
    scales = (groups.abs().amax(-1) / 448).clamp(min=1e-10)
    return (groups / scales.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn), scales


def quantize_all_in_torch(x, scale=None, use_per_token_if_dynamic=False):
    """Stand-in for a compiled operator of vLLM: fp8 rows with one scale."""
    scale = (x.float().abs().amax() / 448).reshape(1) if scale is None else scale
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


class _Experts(mk.FusedMoEExpertsModular):
    quantized_inputs = False

    _supports_current_device = _supports_no_act_and_mul = staticmethod(lambda: True)
    _supports_quant_scheme = staticmethod(lambda weight_key, activation_key: True)
    _supports_activation = _supports_parallel_config = staticmethod(lambda each: True)


class RowExperts(_Experts):
    """Standard: weights and reduces rows [R, H] over the experts of this rank."""

    activation_format = staticmethod(lambda: mk.FusedMoEActivationFormat.Standard)

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M, N, K, *others):
        return (0,), (0,), (M, K)

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, a1q_scale,
              expert_tokens_meta, apply_router_weight_on_input, **others):
        rows, results = dequantized(hidden_states, a1q_scale), torch.zeros((*topk_ids.shape, output.shape[-1]), device=output.device)
        local = expert_map[topk_ids.long()]
        for row, k in (local >= 0).nonzero().tolist():
            results[row, k] = mlp(rows[row], w1[local[row, k]], w2[local[row, k]])
        counts = torch.bincount(local[local >= 0], minlength=w1.shape[0])
        assert counts.tolist() == expert_tokens_meta.expert_num_tokens.tolist(), (counts, expert_tokens_meta.expert_num_tokens)
        self.seen = (hidden_states.dtype, tuple(hidden_states.shape), int(counts.sum()), output.data_ptr())
        self.write(output, results, 1 if apply_router_weight_on_input else topk_weights.unsqueeze(-1))

    def write(self, output, results, weights):
        output.copy_((results * weights).sum(1))


class RouteExperts(RowExperts):
    """Standard: unweighted rows [R, K, H], which finalize weights and reduces."""

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(self, M, N, K, topk, *others):
        return (0,), (0,), (M, topk, K)

    def write(self, output, results, weights):
        output.copy_(results)


class BatchedExperts(_Experts):
    """BatchedExperts: unweighted rows [L, R, H]; rows after an expert's count become NaN."""

    activation_format = staticmethod(lambda: mk.FusedMoEActivationFormat.BatchedExperts)

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts, *others):
        return (0,), (0,), (local_num_experts, M, K)

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, a1q_scale,
              expert_tokens_meta, **others):
        output.fill_(float("nan"))
        counts = expert_tokens_meta.expert_num_tokens.tolist()
        for expert, count in enumerate(counts):
            rows = dequantized(hidden_states[expert, :count], None if a1q_scale is None else a1q_scale[expert, :count])
            output[expert, :count] = mlp(rows, w1[expert], w2[expert]).to(output.dtype)
        self.seen = (hidden_states.dtype, tuple(hidden_states.shape), sum(counts), output.data_ptr())


# ---- Scenarios ----


def use_plain_operators():
    """Replaces three operators of vLLM's GPU extension, which its unmodified functions call."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe import utils

    utils.per_token_group_quant_fp8 = quantize_in_torch
    ops.scaled_fp8_quant = quantize_all_in_torch
    ops.moe_sum = lambda rows, out: out.copy_(rows.float().sum(1))


def seen_by(world, shape, by_rank, rank, options):
    """Returns `as_seen` of the oracle for this rank's tokens."""
    x, experts = by_rank[rank][0], shape[2]
    if options.get("fp8") == "block":
        rows = dequantized(*quantize_in_torch(x, 128))
        return lambda expert: rows
    if options.get("fp8") != "one_scale":
        return None

    def as_seen(expert):
        owners = torch.tensor([r for r in range(world) for _ in range(experts // world + (r < experts % world))])
        sent = [its_x[(owners[its_ids.long()] == owners[expert]).any(1)] for its_x, its_ids, _ in by_rank]
        scale = torch.cat(sent).float().abs().amax() / 448
        return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale

    return as_seen


def poisoned(made):
    """Fills rows after the received ones with NaN, and records the memory that the experts are given for outputs."""
    exchange, given = made._exchange, []
    dispatch, allocate = exchange.dispatch, exchange.allocate_rows

    def dispatched(x, *arguments, **keywords):
        rows, handle = dispatch(x, *arguments, **keywords)
        for each in rows if isinstance(rows, tuple) else (rows,):
            each.view(torch.uint8)[handle.source_token < 0] = 0xff
        return rows, handle

    def allocated(*arguments):
        rows = allocate(*arguments)
        given.append(rows.data_ptr())
        return rows

    exchange.dispatch, exchange.allocate_rows = dispatched, allocated
    return given


@contextlib.contextmanager
def one_pass(config, tokens, rank, known):
    """If `known`, enters vLLM's context of a forward pass with the token counts of all ranks."""
    if not known:
        yield
        return
    with set_forward_context(None, config, num_tokens=tokens[rank], num_tokens_across_dp=torch.tensor(tokens)):
        with get_forward_context().dp_metadata.sp_local_sizes(1):
            yield


def quant_config_of(options):
    one = torch.ones(1, device=DEVICE)
    if not options.get("fp8"):
        return FusedMoEQuantConfig.make()
    return fp8_w8a8_moe_quant_config(w1_scale=one, w2_scale=one, block_shape=[128, 128] if options["fp8"] == "block" else None)


def map_of(here, experts):
    """Returns vLLM's expert_map of a rank with the experts `here`."""
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    expert_map[here] = torch.arange(len(expert_map[here]), dtype=torch.int32)
    return expert_map.to(DEVICE)


def kernel(rank, world, store, backend, shape, tokens, options):
    """Runs vLLM's modular kernel three times; returns the largest error and facts about the experts' inputs."""
    use_plain_operators()
    plugin.install("all2all")
    w13, w2, by_rank = inputs_of(world, shape, tokens, options.get("skew", False))
    x, ids, weights = by_rank[rank]
    on_device = [each.to(DEVICE) for each in by_rank[rank]]
    with vllm_with(rank, world, store, backend) as config:
        moe, quant, manager = moe_config(config, shape), quant_config_of(options), manager_of(backend)
        order = torch.arange(shape[2])
        if options.get("physical"):
            order = torch.randperm(shape[2], generator=torch.Generator().manual_seed(3))
        tables = (order, order.argsort(), order) if options.get("physical") else ()  # global -> physical, its inverse, unused
        tables = tuple(each.to(DEVICE) for each in tables) or None
        made = all2all_utils.maybe_make_prepare_finalize(moe, quant, tables, allow_new_interface=True)
        batched = backend == "deepep_low_latency"
        sizes = dict(max_num_tokens=made.max_num_tokens_per_rank(), num_dispatchers=made.num_dispatchers()) if batched else {}
        experts = (BatchedExperts if batched else RouteExperts if options.get("routes") else RowExperts)(moe, quant, **sizes)
        whole = mk.FusedMoEKernel(made, experts)
        given = [] if batched else poisoned(made)
        first = sum(shape[2] // world + (r < shape[2] % world) for r in range(rank))
        here = order.argsort()[first:first + moe.num_local_experts]
        expert_map = map_of(here, shape[2])
        on_input, errors = options.get("on_input", False), []
        seen = seen_by(world, shape, by_rank, rank, options)
        scaled, factors = ((x * weights).bfloat16(), torch.ones_like(weights)) if on_input else (x, weights)
        right = expected(scaled, ids, factors, w13, w2, seen)
        matrices, (x, ids, weights) = (w13[here].to(DEVICE), w2[here].to(DEVICE)), on_device
        for _ in range(3):
            with one_pass(config, tokens, rank, options.get("known")):
                out = whole.apply(x, *matrices, weights, ids, MoEActivation.SILU, shape[2], expert_map, on_input)
            assert out.dtype == torch.bfloat16 and out.shape == x.shape
            errors.append(error_of(out, right))
        in_place = bool(given) and experts.seen[3] == given[-1]
        manager.destroy()
        return max(errors), getattr(experts, "seen", None), in_place


def layers_of(config, shape, weights, options, shared=None, quant_config=None, count=2, prefix="layers"):
    """Returns layers built by vLLM's factory, with a router that returns `weights`. prefix: differs between calls with the same
    `config`, because vLLM registers layers by name."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    hidden, intermediate, experts, topk = shape
    with DEVICE:
        return [FusedMoEFactory(experts, topk, hidden, intermediate, params_dtype=torch.bfloat16, prefix=f"{prefix}.{n}.mlp",
                                custom_routing_function=lambda hidden_states, gating_output, topk, renormalize: weights,
                                apply_router_weight_on_input=options.get("on_input", False), shared_experts=shared,
                                quant_config=quant_config) for n in range(count)]


def whole_layer(rank, world, store, shape, tokens, options):
    """Builds vLLM's layers with its factory, loads weights, and runs its runner; returns errors by step, and for each call of the fast
    path, whether it applied."""
    fast, original = [], repeated.Layer.__call__

    def noted(self, *arguments):
        result = original(self, *arguments)
        fast.append(result is not None)
        return result

    repeated.Layer.__call__ = noted  # in the process of this scenario
    plugin.install("layer")
    hidden, _, experts, _ = shape
    w13, w2, by_rank = inputs_of(world, shape, tokens, options.get("skew", False))
    x, ids, weights = by_rank[rank]
    on_input = options.get("on_input", False)
    scaled, factors = ((x * weights).bfloat16(), torch.ones_like(weights)) if on_input else (x, weights)
    with vllm_with(rank, world, store, "allgather_reducescatter") as config, torch.no_grad():
        config.kernel_config.set_platform_defaults(config)
        assert config.parallel_config.all2all_backend == "passthrough"
        shared = torch.nn.Linear(hidden, hidden, bias=False).bfloat16().to(DEVICE) if options.get("shared") else None
        given, *routing = (each.to(DEVICE) for each in by_rank[rank])
        layers = layers_of(config, shape, tuple(routing[::-1]), options, shared)
        first = sum(experts // world + (r < experts % world) for r in range(rank))
        here = slice(first, first + layers[0].routed_experts.local_num_experts)

        def load(layer, factor):
            its = layer.routed_experts
            its.w13_weight.data.copy_(w13[here] * factor)
            its.w2_weight.data.copy_(w2[here])
            its.quant_method.process_weights_after_loading(its)

        def run(layer, factor):
            with set_forward_context(None, config, num_tokens=len(x), num_tokens_across_dp=torch.tensor(tokens)):
                out = layer(given.clone(), torch.zeros(len(x), experts, device=DEVICE))
            right = expected(scaled, ids, factors, w13 * factor, w2)
            return error_of(out, right if shared is None else right + shared(given).double().cpu())

        for n, layer in enumerate(layers):
            load(layer, n + 1)
        errors = [run(layers[0], 1), run(layers[1], 2), run(layers[0], 1)]
        load(layers[0], 4)  # a reload at the same addresses
        errors += [run(layers[0], 4), run(layers[1], 2)]
        made = layers[0].routed_experts.quant_method.moe_kernel
        if options.get("moved"):
            its = layers[1].routed_experts
            its.w13_weight.data = its.w13_weight.data * 4
            errors.append(run(layers[1], 8))
        plugin.uninstall()
        errors.append(run(layers[0], 4))
        return errors, type(made.fused_experts).__name__, type(made.prepare_finalize).__name__, fast


def fp8_layer(rank, world, store, shape):
    """Builds a layer of an fp8 checkpoint with vLLM's quantization method and returns the arguments of MoeLayer, which has no fp8
    on the CPU and is replaced. shape: multiples of 128."""
    from switchyard.engines.vllm import _layer
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    calls = []

    class Recorder:
        group = type("Group", (), {"rank": rank, "size": world, "experts_of": lambda self, experts: range(experts // world)})()

        def forward(self, x, topk_ids, topk_weights=None, *, out):
            calls.append((x.dtype, tuple(x.shape), topk_weights is not None, out.dtype))
            out.fill_(rank + 1)

    def layer(self, weights, **config):
        calls.append([(each.dtype, tuple(each.shape), each.data_ptr()) for each in weights] + [config])
        return Recorder()

    plugin.install("layer")
    _layer.MoeLayer.memory_required = staticmethod(lambda world, **config: None)
    _layer.Ranks.layer = layer
    _, _, by_rank = inputs_of(world, shape, (6,) * world)
    x, ids, weights = by_rank[rank]
    with vllm_with(rank, world, store, "allgather_reducescatter") as config, torch.no_grad():
        config.kernel_config.set_platform_defaults(config)
        config.parallel_config.world_size = 1
        quantization = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
        runner = layers_of(config, shape, (weights, ids), {}, quant_config=quantization)[0]
        its = runner.routed_experts
        its.quant_method.process_weights_after_loading(its)
        with set_forward_context(None, config, num_tokens=len(x), num_tokens_across_dp=torch.tensor((6,) * world)):
            out = runner(x, torch.zeros(len(x), shape[2]))
        own = [its.w13_weight, its.w2_weight, its.w13_weight_scale_inv, its.w2_weight_scale_inv]
        assert [each[2] for each in calls[0][:4]] == [each.data_ptr() for each in own]
        return [each[:2] for each in calls[0][:4]], calls[0][4], calls[1:], out.unique().tolist()
