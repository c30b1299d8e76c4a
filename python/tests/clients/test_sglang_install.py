# SPDX-License-Identifier: Apache-2.0
"""Installation of the plug-in for SGLang into its own registries: nothing without the variable, undo, conflicts, versions, and what
is refused when a model is built."""
import importlib.metadata
import logging
import os
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import switchyard as sy  # noqa: E402
from sglang_ranks import config_of, deep_gemm_available, dispatcher_of, over_ranks, prefill, tokens_of, topk_output  # noqa: E402

TARGET = "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"


def _attributes():
    """Returns the identities of all attributes of SGLang's modules and of their classes."""
    import sglang.srt.layers.moe.ep_moe.layer  # noqa: F401
    import sglang.srt.plugins  # noqa: F401

    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "sglang" and type(module) is types.ModuleType:
            for attribute, value in list(vars(module).items()):
                found[name, attribute] = id(value)
                if isinstance(value, type) and value.__module__ == name:
                    inside = {each: what for each, what in vars(value).items() if not each.startswith("__")}
                    found.update({(name, attribute, each): id(what) for each, what in inside.items()})
    return found


def _registries():
    from sglang.srt.layers.moe.moe_runner import runner
    from sglang.srt.plugins.hook_registry import HookRegistry

    return dict(HookRegistry._hooks), set(HookRegistry._patched), dict(runner._CUSTOM_RUNNER_CORE_FACTORIES)


def _changed(before):
    after = _attributes()
    return {key for key in before if after.get(key) != before[key]}


# ---- Without the variable, and undo ----


def _unset(rank, world):
    from switchyard import plugins
    from switchyard.engines import sglang  # noqa: F401

    before, registries = _attributes(), _registries()
    for value in (None, "", "0"):
        os.environ.pop("SWITCHYARD_SGLANG", None) if value is None else os.environ.update(SWITCHYARD_SGLANG=value)
        plugins.sglang()
    assert not _changed(before) and _registries() == registries
    os.environ["SWITCHYARD_SGLANG"] = "layers"
    with pytest.raises(sy.InvalidArgument, match="SWITCHYARD_SGLANG = 'layers': must be 'all2all', 'layer' or '0'"):
        plugins.sglang()
    assert not _changed(before) and _registries() == registries


def _undone(rank, world):
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from switchyard import plugins
    from switchyard.engines import sglang

    other = types.ModuleType("a_module_that_imported_the_function")
    other.create, sys.modules[other.__name__] = layer.create_moe_dispatcher, other
    original = layer.create_moe_dispatcher
    sglang.install("all2all"), sglang.uninstall()  # loads the modules of both
    sglang.install("layer"), sglang.uninstall()
    before, registries = _attributes(), _registries()
    for choice in ("all2all", "layer", "all2all"):
        os.environ["SWITCHYARD_SGLANG"] = choice
        plugins.sglang()
        plugins.sglang()  # again, without effect
        assert layer.create_moe_dispatcher.__wrapped__ is original and other.create is layer.create_moe_dispatcher
        assert {key[:2] for key in _changed(before)} <= {("sglang.srt.layers.moe.fused_moe_triton.layer", "create_moe_dispatcher")}
        assert ("deep_gemm" in _registries()[2]) == (choice == "layer")
        with pytest.raises(sy.InvalidArgument, match=f"{choice!r} is installed; call uninstall"):
            sglang.install("layer" if choice == "all2all" else "all2all")
        sglang.uninstall()
        sglang.uninstall()
        assert not _changed(before) and _registries() == registries and other.create is original
    with pytest.raises(sy.InvalidArgument, match="choice = 'both': must be 'all2all' or 'layer'"):
        sglang.install("both")
    del sys.modules[other.__name__]


# ---- Other plug-ins ----


def _conflicts(rank, world):
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.moe_runner import register_moe_runner_core, runner
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
    from switchyard.engines import sglang

    def theirs(original, *arguments, **keywords):
        return original(*arguments, **keywords)

    HookRegistry.register(TARGET, theirs, HookType.AROUND, source=HookSource("rival", "rival"))
    for choice in ("all2all", "layer"):
        with pytest.raises(sy.InvalidArgument, match="create_moe_dispatcher has a hook of rival: two plug-ins cannot replace"):
            sglang.install(choice)
    del HookRegistry._hooks[TARGET]

    original = layer.create_moe_dispatcher
    theirs.__module__ = "rival"
    layer.create_moe_dispatcher = theirs
    with pytest.raises(sy.InvalidArgument, match="create_moe_dispatcher was replaced by rival"):
        sglang.install("all2all")
    layer.create_moe_dispatcher = original

    register_moe_runner_core("deep_gemm", theirs)
    before = _registries()
    with pytest.raises(sy.InvalidArgument, match="the MoE runner 'deep_gemm' was replaced by rival"):
        sglang.install("layer")
    assert _registries() == before and layer.create_moe_dispatcher is original  # completely or not at all
    del runner._CUSTOM_RUNNER_CORE_FACTORIES["deep_gemm"]

    sglang.install("layer")
    ours = layer.create_moe_dispatcher
    layer.create_moe_dispatcher = theirs
    with pytest.raises(sy.InvalidArgument, match="was replaced after this plug-in: remove the other plug-in first"):
        sglang.uninstall()
    layer.create_moe_dispatcher = ours
    core = runner._CUSTOM_RUNNER_CORE_FACTORIES.pop("deep_gemm")
    register_moe_runner_core("deep_gemm", theirs)
    with pytest.raises(sy.InvalidArgument, match="'deep_gemm' was replaced after this plug-in"):
        sglang.uninstall()
    assert layer.create_moe_dispatcher is ours
    runner._CUSTOM_RUNNER_CORE_FACTORIES["deep_gemm"] = core
    sglang.uninstall()
    assert layer.create_moe_dispatcher is original


# ---- Versions ----


def _other_version(rank, world):
    from switchyard.engines import _patches, sglang

    before, registries, known = _attributes(), _registries(), _patches.version
    assert importlib.metadata.version("sglang") == "0.5.23"
    try:
        for found in ("0.5.22", "0.5.230", "0.5", "0.6.23", "1.5.23"):
            _patches.version = lambda name, found=found: found
            match = f"sglang {found}: this plug-in was tested with sglang 0.5.23 .*; SWITCHYARD_DEEP_EP=1 enables the drop-in for"
            with pytest.raises(sy.InvalidArgument, match=match):
                sglang.install("all2all")
        for found in ("0.5.23", "0.5.23+cu130", "0.5.23.post1"):
            _patches.version = lambda name, found=found: found
            sglang.install("all2all"), sglang.uninstall()
    finally:
        _patches.version = known
    assert not _changed(before) and _registries() == registries


def test_versions_with_two_parts(monkeypatch):
    """The vLLM plug-in names two parts."""
    from switchyard.engines import _patches

    monkeypatch.setattr(_patches, "version", lambda name: "0.33.7+cu130")
    assert _patches.require_version("engine", ["0.32", "0.33"], "") == "0.33.7+cu130"
    for supported in (["0.3"], ["0.33.1"], ["0.33.7.1"], ["33"]):
        with pytest.raises(sy.InvalidArgument, match="engine 0.33.7"):
            _patches.require_version("engine", supported, "use another")


# ---- SGLang's loader of plug-ins ----


def _loaded(rank, world, version, value="all2all"):
    """The loader logs the exceptions of plug-ins and continues, so a refusal must also end the construction of a layer."""
    from sglang.srt import plugins as loader
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from switchyard.engines import _patches, sglang
    from switchyard.engines.sglang._dispatcher import Dispatcher

    point = importlib.metadata.EntryPoint("switchyard", "switchyard.plugins:sglang", "sglang.srt.plugins")
    before, known, entries = _attributes(), _patches.version, loader.entry_points
    os.environ["SWITCHYARD_SGLANG"] = value
    loader.entry_points, loader._plugins_loaded = lambda group: [point] if group == point.group else [], False
    install = sglang._install
    if value == "broken":
        def broken(choice):
            raise OSError("no such library")

        sglang._install, os.environ["SWITCHYARD_SGLANG"] = broken, "all2all"
    _patches.version = lambda name: version
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("switchyard")
    logger.addHandler(handler), logger.setLevel(logging.INFO)
    try:
        loader.load_plugins()
        if value == "broken":
            with pytest.raises(OSError, match="no such library"):
                layer.create_moe_dispatcher(config_of(world, 64), None)
        elif value != "all2all":
            with pytest.raises(sy.InvalidArgument, match=f"SWITCHYARD_SGLANG = {value!r}: must be 'all2all', 'layer' or '0'"):
                layer.create_moe_dispatcher(config_of(world, 64), None)
        elif version == "0.5.23":
            assert type(dispatcher_of(world, 64)) is Dispatcher and type(dispatcher_of(world, 64)) is Dispatcher
            assert dispatcher_of(world, 64)._inners[0]._exchanges._low_latency  # exists before the first request
            assert [each for each in records if "Switchyard" in each] == [
                "Switchyard moves the tokens of MoE layers between 1 ranks (cpu)"]
        else:
            with pytest.raises(sy.InvalidArgument, match=f"sglang {version}: this plug-in was tested with sglang 0.5.23"):
                layer.create_moe_dispatcher(config_of(world, 64), None)
    finally:
        logger.removeHandler(handler)
        _patches.version, loader.entry_points, loader._plugins_loaded, sglang._install = known, entries, False, install
        sglang.uninstall()
    changed = {key for key in _changed(before) if key[1] not in ("entry_points", "_plugins_loaded")}
    assert not changed, changed


# ---- What is refused when the model is built ----


def _other_backends(rank, world):
    """The factory is SGLang's for other backends."""
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher
    from sglang.srt.layers.moe.utils import MoeA2ABackend
    from sglang.srt.runtime_context import get_flags
    from switchyard.engines import sglang

    for choice in ("all2all", "layer"):
        sglang.install(choice)
        with get_flags().moe.override(a2a_backend=MoeA2ABackend.NONE):
            made = layer.create_moe_dispatcher(config_of(world, 64, num_fused_shared_experts=0), None)
        assert type(made) is StandardDispatcher
        sglang.uninstall()


def _refused(rank, world):
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.runtime_context import get_exec, get_flags, get_parallel
    from switchyard.engines import sglang

    sglang.install("all2all")

    def refused(match, hidden=64, rows="bf16", **changes):
        with pytest.raises(sy.InvalidArgument, match=match):
            dispatcher_of(world, hidden, rows, **changes)

    refused("9 experts on 2 ranks: must be a multiple", num_experts=9)
    refused("--dtype torch.float16: Switchyard's plug-in needs --dtype bfloat16", params_dtype=torch.float16)
    refused("hidden size 60: must be a multiple of 8", hidden=60)
    refused("33 experts per token: must be 1 to 32", top_k=33)
    refused("rows in nvfp4: Switchyard sends bf16 or fp8; use --deepep-dispatcher-output-dtype bf16 or fp8", rows="nvfp4")
    refused("rows in mxfp8", rows="mxfp8")
    refused("fp8 rows of hidden size 64: .* need a multiple of 128; use --deepep-dispatcher-output-dtype bf16", rows="fp8")
    with pytest.raises(sy.InvalidArgument, match="fp8 rows of hidden size 64"):  # other methods than bf16 do not choose later
        layer.create_moe_dispatcher(config_of(world, 64), None)
    with get_exec().moe.override(deepep_dispatcher_output_dtype="mxfp4"):
        refused("rows in mxfp4")
    with get_flags().moe.override(sbo_enabled=True):
        refused("--enable-single-batch-overlap: not available .* use --enable-two-batch-overlap")
    with get_parallel().override(moe_ep_size=1, moe_ep_rank=0, moe_tp_size=world, moe_tp_rank=rank):
        refused("--ep-size 1 with --tp-size 2: Switchyard needs --ep-size 2, so that each expert is on one rank")
    os.environ["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] = "70000"
    refused("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK = 70000: must be 1 to 65535")
    del os.environ["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"]
    deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0 = True
    try:
        refused("DeepGEMM packs scales on this GPU .Blackwell.: Switchyard is for Hopper GPUs")
    finally:
        deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0 = False
    with deep_gemm_available(), prefill(True):  # a refusal leaves nothing behind
        made, (x, ids, weights) = dispatcher_of(world, 64), tokens_of(world, 64)[rank]
        output = made.dispatch(hidden_states=x, topk_output=topk_output(ids, weights))
        made.combine(combine_input=(output.hidden_states, output.topk_ids, output.topk_weights))
        with pytest.raises(sy.InvalidArgument, match="single-batch overlap is not available"):
            made.set_overlap_args(object(), {})


@pytest.mark.parametrize("scenario", [_unset, _undone, _conflicts, _other_version, _other_backends],
                         ids=lambda each: each.__name__[1:])
def test_installation(scenario):
    over_ranks(1, scenario, ranks=2)


@pytest.mark.parametrize("version, value", [("0.5.23", "all2all"), ("0.5.24", "all2all"), ("0.5.23", "layers"), ("0.5.23", "broken")])
def test_loader_of_plug_ins(version, value):
    over_ranks(1, _loaded, version, value, ranks=2)


def test_refused_when_the_model_is_built():
    over_ranks(2, _refused, ranks=2)
