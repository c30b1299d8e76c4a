# SPDX-License-Identifier: Apache-2.0
"""Errors of calls that SGLang replays: each step of its unmodified ModelRunner raises them, although no call is made in Python. The
graphs are stand-ins that compute nothing."""
import contextlib
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import sglang_ranks  # noqa: E402
import switchyard as sy  # noqa: E402
from sglang_passes import install_layer, layer_of, load  # noqa: E402
from sglang_ranks import deep_gemm_available, dispatcher_of, over_ranks, prefill, tokens_of, topk_output, weights_of  # noqa: E402

MODULE = "sglang.srt.model_executor.model_runner"
HIDDEN = 64


class _Graph:
    """A runner of a captured graph, or of passes without one. It returns the batch's mode. recorded: a call whose error Python does
    not learn, like that of a call in a graph on a GPU."""

    def __init__(self, graph):
        self.can_run_graph, self.recorded = lambda batch: graph, lambda: None

    def execute(self, batch, **keywords):
        with contextlib.suppress(sy.SwitchyardError):
            self.recorded()
        return batch.forward_mode.name


def _runner():
    """Returns a ModelRunner without a model, whose passes reach the stand-ins. It decodes and idles in graphs."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    made = ModelRunner.__new__(ModelRunner)
    made.forward_pass_id, made.device, made.is_draft_worker, made.enable_elastic_ep = 0, "cuda", False, False
    made.msprobe_debugger = made.canary_manager = made.eplb_manager = made.hisparse_coordinator = made.prefill_cuda_graph_runner = None
    made.req_to_token_pool = made.device_timer = None
    made.attn_backend = types.SimpleNamespace(init_forward_metadata=lambda batch: None)
    made.model = types.SimpleNamespace(shared_experts_config=None, forward_split_prefill=lambda *arguments: "SPLIT_PREFILL")
    made.model_config = types.SimpleNamespace(num_hidden_layers=2)
    made.decode_cuda_graph_runner, made.eager_runner = _Graph(True), _Graph(False)
    made._prepare_eager_forward_batch = lambda batch: None
    return made


#: Modes of passes: in graphs, also of an idle data-parallel rank and of speculative decoding, and outside graphs.
MODES = ("DECODE", "IDLE", "TARGET_VERIFY", "EXTEND", "SPLIT_PREFILL")


class _Batch:
    """A batch of one sequence in `mode`. Optional attributes are None."""

    batch_size, split_index = 1, 0

    def __init__(self, mode):
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self.forward_mode = ForwardMode[mode]

    def __getattr__(self, name):
        return None

    def apply_deprecated_skip_attn_backend_init(self, given):
        pass


def _step(runner, mode="DECODE"):
    """Returns the output of a pass of `runner`."""
    made = runner.forward(_Batch(mode))
    assert made.can_run_graph == (mode in MODES[:3]), mode
    return made.logits_output


def _installed(choice, rank, world):
    """Installs the plug-in and builds a layer. Returns Switchyard's exchanges and a call of the layer."""
    from switchyard.engines import sglang
    from switchyard.engines.sglang import _shared

    x, ids, weights = tokens_of(world, HIDDEN)[rank]
    if choice == "layer":
        install_layer({"SWITCHYARD_SGLANG_MAX_TOKENS": "24"})
        with deep_gemm_available():
            made = layer_of(world, HIDDEN)
            load(made, rank, world, *weights_of(HIDDEN))
    else:
        sglang.install(choice)
        made = dispatcher_of(world, HIDDEN).dispatch

    def call():
        with deep_gemm_available(), prefill(False):
            made(hidden_states=x, topk_output=topk_output(ids, weights))

    return _shared._shared[0][1], call


def _together(world):
    torch.distributed.barrier(sglang_ranks._groups[world])


def _aborted(rank, world, choice):
    """Rank 1 aborts each group in turn; rank 0 makes no call. Closed groups are ignored."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from switchyard.engines import sglang

    original, runner = ModelRunner.forward, _runner()
    exchanges, _ = _installed(choice, rank, world)
    assert ModelRunner.forward.__wrapped__ is original
    assert [_step(runner, mode) for mode in MODES] == list(MODES)
    groups = [*exchanges._others(), exchanges.group]
    assert len(groups) == 2
    for group in groups:
        assert _step(runner) == "DECODE"  # the groups that are still open have no error
        _together(world)
        if rank == 1:
            group.abort()
        _together(world)
        for mode in MODES if rank == 0 else ():
            with pytest.raises(sy.PeerFailed, match="check: rank 1"):
                _step(runner, mode)
            assert original(runner, _Batch(mode)).logits_output == mode  # only the plug-in raises
        _together(world)
        group.close()
    assert _step(runner) == "DECODE"
    sglang.uninstall()
    assert ModelRunner.forward is original and _step(runner) == "DECODE"


def _dead(rank, world, choice):
    """Rank 1 does not take part in the call that rank 0 replays."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from switchyard.engines import sglang

    exchanges, call = _installed(choice, rank, world)
    runner = _runner()
    runner.decode_cuda_graph_runner.recorded = call
    assert _step(runner) == "DECODE"  # creates the exchange
    runner.decode_cuda_graph_runner.recorded = lambda: None
    _together(world)
    if rank == 0:
        for group in exchanges._others():
            group.set_timeout(0.5)
        runner.decode_cuda_graph_runner.recorded = call
        for _ in range(2):
            with pytest.raises((sy.PeerTimeout, sy.PeerFailed), match="waited for rank 1.*rank 0 reported"):
                _step(runner)
    _together(world)
    if rank == 1:  # rank 0 has reported its timeout to it
        with pytest.raises(sy.PeerFailed, match="waited for rank 1.*rank 0 reported"):
            _step(runner, "IDLE")
    sglang.uninstall()  # also restores the method after an error
    assert not hasattr(ModelRunner.forward, "__wrapped__") and _step(runner) == "DECODE"


# ---- Installation ----


def _deferred(rank, world):
    """The plug-in does not import the model runner, and replaces its method when the first layer is built."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from switchyard.engines import sglang

    original, module = ModelRunner.forward, sys.modules.pop(MODULE)
    try:
        _installed("all2all", rank, world)
        assert MODULE not in sys.modules
        sglang.uninstall()
        sglang.install("all2all")
        assert MODULE not in sys.modules
    finally:
        sys.modules[MODULE] = module
    assert ModelRunner.forward is original
    dispatcher_of(world, HIDDEN)
    ours = ModelRunner.forward
    assert ours.__wrapped__ is original
    dispatcher_of(world, HIDDEN)
    assert ModelRunner.forward is ours
    sglang.uninstall()
    assert ModelRunner.forward is original


def _conflicts(rank, world):
    """Another plug-in's replacement is an error; its hooks in SGLang's registry are not."""
    from sglang.srt.model_executor import model_runner
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from switchyard.engines import sglang
    from switchyard.engines.sglang import _shared

    runner_class, original, seen = model_runner.ModelRunner, model_runner.ModelRunner.forward, []

    def theirs(self, *arguments, **keywords):
        return original(self, *arguments, **keywords)

    theirs.__module__ = "rival"
    runner_class.forward = theirs
    with pytest.raises(sy.InvalidArgument, match="ModelRunner.forward was replaced by rival: two plug-ins cannot replace"):
        sglang.install("all2all")
    runner_class.forward = original
    sglang.install("all2all")
    runner_class.forward = theirs
    with pytest.raises(sy.InvalidArgument, match="ModelRunner.forward was replaced by rival"):
        dispatcher_of(world, HIDDEN)
    assert not _shared._shared and runner_class.forward is theirs
    runner_class.forward = original
    dispatcher_of(world, HIDDEN)
    ours, runner_class.forward = runner_class.forward, theirs
    with pytest.raises(sy.InvalidArgument, match="ModelRunner.forward was replaced after this plug-in: remove the other plug-in first"):
        sglang.uninstall()
    assert runner_class.forward is theirs
    runner_class.forward = ours
    sglang.uninstall()
    del model_runner.ModelRunner
    with pytest.raises(sy.InvalidArgument, match="model_runner.ModelRunner does not exist in this version of SGLang"):
        sglang.install("all2all")
    model_runner.ModelRunner = runner_class

    target = f"{MODULE}.ModelRunner.forward"
    HookRegistry.register(target, lambda result, *arguments, **keywords: seen.append(result), HookType.AFTER)
    HookRegistry.apply_hooks()
    try:
        hooked = runner_class.forward
        exchanges, _ = _installed("all2all", rank, world)
        assert _step(_runner()) == "DECODE" and len(seen) == 1
        exchanges.group.abort()
        with pytest.raises(sy.PeerFailed):
            _step(_runner())
        sglang.uninstall()
        assert runner_class.forward is hooked
    finally:
        runner_class.forward = original
        del HookRegistry._hooks[target]
        HookRegistry._patched.discard(target)


def _needs(choice):
    try:
        choice == "layer" and sy.MoeLayer.heap_bytes(2, hidden=64, intermediate=64, num_experts=2, topk=1, max_tokens=2)
    except sy.errors.LibraryNotFound:
        pytest.skip("no library switchyard_layer")


@pytest.mark.parametrize("scenario", [_aborted, _dead], ids=lambda each: each.__name__[1:])
@pytest.mark.parametrize("choice", ["all2all", "layer"])
def test_steps_raise_errors_of_replayed_calls(choice, scenario):
    _needs(choice)
    over_ranks(2, scenario, choice, ranks=2)


@pytest.mark.parametrize("scenario", [_deferred, _conflicts], ids=lambda each: each.__name__[1:])
def test_installation(scenario):
    over_ranks(1, scenario, ranks=2)
