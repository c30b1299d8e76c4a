# SPDX-License-Identifier: Apache-2.0
"""Scenarios in vLLM about the plug-in itself: what it changes, what it refuses, and ranks that fail. Imported only in the processes
of vllm_host."""
import logging
import os
import sys

import torch
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.config import kernel as kernel_config
from vllm.config.logging import LoggingConfig
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import all2all
from vllm.forward_context import set_forward_context
from vllm.logger import configure_logging
from vllm.model_executor.layers.fused_moe import all2all_utils
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig, fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.oracle import fp8, unquantized
from vllm.model_executor.layers.quantization.utils.quant_utils import (kFp8Dynamic128Sym, kFp8DynamicTensorSym,
                                                                       kFp8Static128BlockSym, kFp8StaticTensorSym)
from vllm.v1.worker.worker_base import WorkerWrapperBase

import switchyard as sy
from switchyard import plugins
from switchyard.engines import vllm as plugin
from vllm_ranks import BatchedExperts, RowExperts, inputs_of, layers_of, manager_of, moe_config, one_pass, vllm_with

SHAPE = (384, 128, 8, 3)
STEPS = {f"WorkerWrapperBase.{name}" for name in ("execute_model", "sample_tokens", "execute_dummy_batch")}
ALL2ALL = {"DeepEPHTAll2AllManager", "DeepEPLLAll2AllManager", "DeepEPHTPrepareAndFinalize", "DeepEPLLPrepareAndFinalize",
           "DEEPEP_QUANT_BLOCK_SHAPE", "CompilationConfig.set_splitting_ops_for_v1", *STEPS}
LAYER = {"bind_passthrough_all2all_backend", "PassThroughPrepareAndFinalize", "PassThroughAll2AllManager", "_get_priority_backends", "backend_to_kernel_cls",
         *STEPS}


def sentence(call, *arguments, **keywords):
    """Returns the sentence of the error that `call` raises, or "" if it raises none."""
    try:
        call(*arguments, **keywords)
    except sy.SwitchyardError as error:
        return str(error)
    return ""


def attributes():
    """Returns the identity of every attribute of every loaded module of vLLM and of the classes defined there."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "vllm":
            for each, value in list(vars(module).items()):
                found[name, each] = id(value)
                if isinstance(value, type) and value.__module__ == name:
                    found.update({(name, f"{each}.{its}"): id(inner) for its, inner in list(vars(value).items())})
    return found


def changed(before, after):
    """Returns the names of attributes that differ, without Python's and pydantic's caches."""
    names = {key[1] for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    names = {each for each in names if "__" not in each and "_abc_" not in each}
    return {each for each in names if each.split(".")[0] == each or each.split(".")[0] not in names}  # not members of other classes


def only_while_requested(rank, world, store):
    """Checks which attributes of vLLM differ with each value of SWITCHYARD_VLLM, and that uninstall() restores them."""
    from switchyard.engines.vllm import _all2all, _layer  # noqa: F401  (imports of the plug-in are part of the first state)

    before = attributes()
    for value in (None, "", "0"):
        os.environ.pop("SWITCHYARD_VLLM", None)
        if value is not None:
            os.environ["SWITCHYARD_VLLM"] = value
        plugins.vllm()
        assert not changed(before, attributes())
    for choice, names in (("all2all", ALL2ALL), ("layer", LAYER)):
        os.environ["SWITCHYARD_VLLM"] = choice
        plugins.vllm()
        during = attributes()
        assert changed(before, during) == names, changed(before, during) ^ names
        plugins.vllm()  # vLLM may load plug-ins repeatedly
        assert not changed(during, attributes())
        assert "call uninstall() before" in sentence(plugin.install, "layer" if choice == "all2all" else "all2all")
        plugin.uninstall()
        plugin.uninstall()
        assert before == {key: value for key, value in attributes().items() if key in before}
        assert not changed(before, attributes())


def conflicts(rank, world, store):
    """Checks that a place of another plug-in is an error, before and after ours, and that nothing is then changed."""
    def of_another_plug_in(*arguments, **keywords):
        pass

    plugin.install("all2all")
    plugin.uninstall()
    found = []
    for choice, owner, name in (("all2all", all2all, "DeepEPLLAll2AllManager"),
                                ("all2all", CompilationConfig, "set_splitting_ops_for_v1"), ("layer", fp8, "backend_to_kernel_cls"),
                                ("layer", WorkerWrapperBase, "execute_model")):
        original = vars(owner)[name]
        setattr(owner, name, of_another_plug_in)
        before = attributes()
        found.append(sentence(plugin.install, choice))
        assert not changed(before, attributes())
        setattr(owner, name, original)
    plugin.install("layer")
    original, kernel_config.bind_passthrough_all2all_backend = kernel_config.bind_passthrough_all2all_backend, of_another_plug_in
    during = attributes()
    found.append(sentence(plugin.uninstall))
    assert not changed(during, attributes())
    kernel_config.bind_passthrough_all2all_backend = original
    plugin.uninstall()
    return found


def other_version(rank, world, store, version):
    """Returns the sentence of install() with another installed version of vLLM, after which nothing differs."""
    from switchyard.engines.vllm import _all2all, _layer  # noqa: F401

    folder = os.path.join(os.path.dirname(store), f"vllm-{version}.dist-info")
    os.makedirs(folder)
    with open(os.path.join(folder, "METADATA"), "w") as file:
        file.write(f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n")
    sys.path.insert(0, os.path.dirname(store))
    before = attributes()
    found = sentence(plugin.install, "all2all")
    assert not changed(before, attributes())
    return found


def graphs(rank, world, store):
    """Returns vLLM's CUDA graph mode with deepep_high_throughput and data parallelism: before, during and after the plug-in."""
    def mode():
        made = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
        made.set_splitting_ops_for_v1(all2all_backend="deepep_high_throughput", data_parallel_size=2)
        return made.cudagraph_mode.name

    found = [mode()]
    plugin.install("all2all")
    found.append(mode())
    plugin.uninstall()
    return [*found, mode()]


# ---- Refusals ----


def refused_by_all2all(rank, world, store):
    """Returns the sentences of configurations that the all-to-all form does not support, by subject."""
    plugin.install("all2all")
    found = {}
    with vllm_with(rank, world, store, "deepep_low_latency") as config:
        its = config.parallel_config
        for name in ("enable_dbo", "enable_elastic_ep", "enable_fault_tolerance"):
            setattr(its, name, True)
            found[name] = sentence(manager_of, "deepep_low_latency")
            setattr(its, name, False)
        manager_of("deepep_low_latency")

        def build(quant, changes=None, experts=BatchedExperts, **attributes):
            moe = moe_config(config, SHAPE, **(changes or {}))
            made = all2all_utils.maybe_make_prepare_finalize(moe, quant, allow_new_interface=True)
            sizes = dict(max_num_tokens=made.max_num_tokens_per_rank(), num_dispatchers=world)
            FusedMoEKernel(made, type(experts.__name__, (experts,), attributes)(moe, quant, **sizes))

        plain, scale = FusedMoEQuantConfig.make(), torch.ones(1)
        found["one scale"] = sentence(build, fp8_w8a8_moe_quant_config(w1_scale=scale, w2_scale=scale))
        reduces = {"finalize_weight_and_reduce_impl": RowExperts.finalize_weight_and_reduce_impl}
        found["reduces"] = sentence(build, plain, **reduces)
        os.environ["VLLM_DEEPEPLL_NVFP4_DISPATCH"] = "1"
        found["nvfp4"] = sentence(build, FusedMoEQuantConfig.make("nvfp4"))
        found["tokens"] = sentence(build, plain, {"max_num_tokens": 70000})
        found["experts"] = sentence(build, plain, {"num_local_experts": 3})
        found["supported"] = sentence(build, plain)
    return found


def refused_by_layer(rank, world, store):
    """Returns the sentences of configurations that the whole layer does not support, by subject."""
    plugin.install("layer")
    found = {}
    with vllm_with(rank, world, store, "allgather_reducescatter") as config:
        its = config.parallel_config
        bind = kernel_config.bind_passthrough_all2all_backend
        found["moe_backend"] = sentence(bind, "triton", its)
        its.all2all_backend = "deepep_high_throughput"
        found["all2all_backend"] = sentence(bind, "auto", its)
        its.all2all_backend = "allgather_reducescatter"
        bind("auto", its)
        bind("auto", its)
        assert its.all2all_backend == "passthrough"

        def select(quantization=None, **changes):
            moe = moe_config(config, SHAPE, **changes)
            if quantization is None:
                return unquantized.select_unquantized_moe_backend(moe)[1].__name__
            return fp8.select_fp8_moe_backend(moe, *quantization)[1].__name__

        assert select() == "SwitchyardExperts"
        found["other backend"] = sentence(fp8.backend_to_kernel_cls, fp8.Fp8MoeBackend.DEEPGEMM)
        for name, changes in {
            "use_ep": {"use_ep": False}, "dp_size": {"dp_size": 1},
            "activation": {"activation": MoEActivation.GELU}, "has_bias": {"has_bias": True}, "swiglu_limit": {"swiglu_limit": 7.0},
            "in_dtype": {"in_dtype": torch.float32}, "topk": {"experts_per_token": 33},
            "tensor scales": {"quantization": (kFp8StaticTensorSym, kFp8DynamicTensorSym)},
            "block scales on the CPU": {"quantization": (kFp8Static128BlockSym, kFp8Dynamic128Sym)},
        }.items():
            found[name] = sentence(select, **changes)
        its.enable_dbo = True
        found["enable_dbo"] = sentence(select)
        its.enable_dbo = False
        # vLLM selects experts for LoRA, and for quantizations of other oracles, without its lists of backends.
        experts = unquantized.backend_to_kernel_cls(unquantized.UnquantizedMoeBackend.TRITON)[0]
        found["lora"] = sentence(experts, moe_config(config, SHAPE, is_lora_enabled=True), FusedMoEQuantConfig.make())
        moe = moe_config(config, SHAPE)
        made = all2all_utils.maybe_make_prepare_finalize(moe, FusedMoEQuantConfig.make(), allow_new_interface=True)
        found["other experts"] = sentence(FusedMoEKernel, made, RowExperts(moe, FusedMoEQuantConfig.make()))
    return found


# ---- Ranks that fail ----


def failing_rank(rank, world, store, backend):
    """Rank 1 ends without notice during the second pass. Returns the error of each other rank's pass and of the worker's step."""
    os.environ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = "5"
    plugin.install("all2all")
    w13, w2, by_rank = inputs_of(world, SHAPE, (4,) * world)
    x, ids, weights = by_rank[rank]
    with vllm_with(rank, world, store, backend) as config:
        moe, quant = moe_config(config, SHAPE), FusedMoEQuantConfig.make()
        manager = manager_of(backend)
        made = all2all_utils.maybe_make_prepare_finalize(moe, quant, allow_new_interface=True)
        batched = backend == "deepep_low_latency"
        sizes = dict(max_num_tokens=made.max_num_tokens_per_rank(), num_dispatchers=world) if batched else {}
        whole = FusedMoEKernel(made, (BatchedExperts if batched else RowExperts)(moe, quant, **sizes))
        here = slice(rank * SHAPE[2] // world, (rank + 1) * SHAPE[2] // world)
        expert_map = torch.full((SHAPE[2],), -1, dtype=torch.int32)
        expert_map[here] = torch.arange(moe.num_local_experts, dtype=torch.int32)

        class Worker:
            def execute_model(self, scheduler_output):
                if scheduler_output == "pass":
                    whole.apply(x, w13[here], w2[here], weights, ids, MoEActivation.SILU, SHAPE[2], expert_map, False)
                return "done"

            def sample_tokens(self, grammar_output):
                return f"tokens {grammar_output}"

            def execute_dummy_batch(self):
                return None

        wrapper = WorkerWrapperBase()
        wrapper.worker, wrapper.mm_receiver_cache = Worker(), None
        assert wrapper.execute_model("pass") == "done" and wrapper.sample_tokens(3) == "tokens 3"
        if rank == 1:
            manager.destroy()  # leaves the group, as an ending process does
            return None
        found = []
        for step in (lambda: wrapper.execute_model("pass"), lambda: wrapper.execute_model("no pass"), lambda: wrapper.sample_tokens(3),
                     wrapper.execute_dummy_batch):
            try:
                step()
                found.append("")
            except sy.SwitchyardError as error:
                found.append(f"{type(error).__name__}: {error}")
        return found


def heap_with_graphs(rank, world, store):
    """Returns the heap of an exchange on GPUs without graphs, with graphs of 8 tokens, and of exchanges of 24 and of 8 tokens."""
    from switchyard.engines.vllm import _ranks

    class Stop(Exception):
        pass

    class Ranks(_ranks.Ranks):
        def _group(self, heap_bytes):
            raise Stop(heap_bytes)

    _ranks.backend = lambda: "cuda"
    made, found = Ranks(type("ProcessGroup", (), {"size": lambda self: 2})()), []
    for captured, max_tokens in ((0, 24), (8, 24), (0, 8)):
        try:
            made.exchange(captured, hidden=384, num_experts=8, topk=3, max_tokens=max_tokens, dtype=torch.bfloat16)
        except Stop as stop:
            found.append(stop.args[0])
    return found


def failing_layer(rank, world, store):
    """Rank 1 ends without notice. Returns the error of the other rank's pass through vLLM's runner."""
    os.environ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = "5"
    plugin.install("layer")
    _, _, by_rank = inputs_of(world, SHAPE, (4,) * world)
    x, ids, weights = by_rank[rank]
    with vllm_with(rank, world, store, "allgather_reducescatter") as config, torch.no_grad():
        config.kernel_config.set_platform_defaults(config)
        runner = layers_of(config, SHAPE, (weights, ids), {})[0]
        its = runner.routed_experts
        its.quant_method.process_weights_after_loading(its)
        with set_forward_context(None, config, num_tokens=4, num_tokens_across_dp=torch.tensor((4,) * world)):
            runner(x.clone(), torch.zeros(4, SHAPE[2]))
            if rank == 1:
                os._exit(0)
            try:
                runner(x.clone(), torch.zeros(4, SHAPE[2]))
            except sy.SwitchyardError as error:
                return f"{type(error).__name__}: {error}"
    return ""


def terminated(rank, world, store):
    """Ends as a process does in which torch calls std::terminate."""
    os.write(2, b"terminate called: the cause\n")
    os.abort()


def destroyed_manager(rank, world, store):
    """Returns the number of open groups of a layer before and after vLLM destroys its manager."""
    from switchyard.engines.vllm import _ranks

    plugin.install("layer")
    _, _, by_rank = inputs_of(world, SHAPE, (4,) * world)
    x, ids, weights = by_rank[rank]
    with vllm_with(rank, world, store, "allgather_reducescatter") as config, torch.no_grad():
        config.kernel_config.set_platform_defaults(config)
        manager = all2all.PassThroughAll2AllManager(parallel_state.get_ep_group().cpu_group, None)
        runner = layers_of(config, SHAPE, (weights, ids), {})[0]
        its = runner.routed_experts
        its.quant_method.process_weights_after_loading(its)
        with set_forward_context(None, config, num_tokens=4, num_tokens_across_dp=torch.tensor((4,) * world)):
            runner(x.clone(), torch.zeros(4, SHAPE[2]))
        torch.distributed.barrier(manager.cpu_group)
        before = sum(not group.closed for group in _ranks._groups)
        manager.destroy()
        manager.destroy()  # without effect
        return before, sum(not group.closed for group in _ranks._groups)


def log(rank, world, store):
    """Returns the lines that the plug-in writes to vLLM's log while a layer is built."""
    lines = []

    class Handler(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    configure_logging(LoggingConfig())
    logging.getLogger("vllm.switchyard").addHandler(Handler())
    plugin.install("all2all")
    with vllm_with(rank, world, store, "deepep_high_throughput") as config:
        moe, quant = moe_config(config, SHAPE), FusedMoEQuantConfig.make()
        manager_of("deepep_high_throughput")
        for _ in range(2):  # two layers of the same shape share the exchange
            FusedMoEKernel(all2all_utils.maybe_make_prepare_finalize(moe, quant, allow_new_interface=True), RowExperts(moe, quant))
    return lines


def token_counts(rank, world, store):
    """Without sequence parallelism, vLLM has a size per data-parallel rank, and all ranks of one dispatch the same tokens."""
    from switchyard.engines.vllm._standard import tokens_of_all_ranks

    assert tokens_of_all_ranks(world) is None
    with vllm_with(rank, world, store, "deepep_high_throughput") as config:
        with one_pass(config, (5, 3), rank, True):
            return [tokens_of_all_ranks(each) for each in (2, 4, 16)]
