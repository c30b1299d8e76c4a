# SPDX-License-Identifier: Apache-2.0
"""MoE layers of torchtitan, divided by torchtitan, with our dispatcher: outputs and gradients compared with float64 and with
torchtitan's own layer on one rank. No stand-ins."""
import dataclasses
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import switchyard as sy  # noqa: E402
from deep_ep_ranks import over_groups  # noqa: E402
from torchtitan_ranks import EXPERTS, HIDDEN, OURS, TOKENS, check_torchtitan, dims_of, divided_layer, inputs_of, layer_config, updated  # noqa: E402

from torchtitan.config import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models.common.token_dispatcher import (AllToAllTokenDispatcher, HybridEPTokenDispatcher, MinimalAsyncEPTokenDispatcher,  # noqa: E402
                                                       TorchAOTokenDispatcher)

from switchyard.engines import _found, torchtitan as ours  # noqa: E402


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("routing, dtype, backend", [
    ("any", torch.float32, "partial_dtensor"), ("any", torch.bfloat16, "spmd_types"), ("skewed", torch.bfloat16, "partial_dtensor"),
    ("skewed", torch.float32, "spmd_types"), ("empty", torch.float32, "spmd_types"), ("empty", torch.bfloat16, "partial_dtensor")])
def test_outputs_and_gradients(routing, dtype, backend, world):
    over_groups("cpu", world, check_torchtitan, backend, dtype, routing == "skewed", 1 if routing == "empty" else None, {})


@pytest.mark.parametrize("given", [{"pad_multiple": 16}, {"static_shapes": True}, {"pad_multiple": 16, "static_shapes": True}],
                         ids=["padded", "static", "both"])
def test_row_shapes(given):
    over_groups("cpu", 2, check_torchtitan, "partial_dtensor", torch.bfloat16, False, None, given)


# ---- Rows, layers, checkpoints ----


def _rows(group, given, rows_of):
    layer = divided_layer(dims_of(group.size(), "partial_dtensor"), group.size(), torch.bfloat16, given)
    dispatcher = layer.routed_experts.token_dispatcher
    x = inputs_of(group.rank(), torch.bfloat16)[0][0]
    scores, ids = torch.rand(len(x), 3), torch.arange(len(x) * 3).reshape(len(x), 3) % EXPERTS
    rows, counts, routing = dispatcher.dispatch(x, scores, ids, None)
    rows_of(rows, counts, routing)
    ours.close()


def _exact(rows, counts, routing):
    assert counts.sum() == len(rows) == (routing.row_source >= 0).sum()


def _padded(rows, counts, routing):
    assert counts.sum() == len(rows) > (routing.row_source >= 0).sum() and (counts % 24 == 0).all()
    assert (rows[routing.row_source < 0] == 0).all()


def _static(rows, counts, routing):
    assert len(rows) == 2 * TOKENS * 3 > counts.sum()


@pytest.mark.parametrize("given, rows_of", [({}, _exact), ({"pad_multiple": 24}, _padded), ({"static_shapes": True}, _static)])
def test_rows(given, rows_of):
    over_groups("cpu", 2, _rows, given, rows_of)


class _Calls:
    """Counts the communication of an exchange."""

    def __enter__(self):
        self.dispatches = self.combines = 0
        self._own = sy.Exchange._dispatch, sy.Exchange._combine

        def dispatch(exchange, *given, **keywords):
            self.dispatches += 1
            return self._own[0](exchange, *given, **keywords)

        def combine(exchange, *given, **keywords):
            self.combines += 1
            return self._own[1](exchange, *given, **keywords)

        sy.Exchange._dispatch, sy.Exchange._combine = dispatch, combine
        return self

    def __exit__(self, *_):
        sy.Exchange._dispatch, sy.Exchange._combine = self._own


def _checkpoint(group, policy):
    world = group.size()
    dims, (x, grad) = dims_of(world, "partial_dtensor"), inputs_of(group.rank(), torch.bfloat16)
    plain = torch.nn.Sequential(*(divided_layer(dims, world, torch.bfloat16, seed=seed) for seed in (0, 1)))
    again = torch.nn.Sequential(*(policy.build()._wrap_block(divided_layer(dims, world, torch.bfloat16, seed=seed)) for seed in (0, 1)))
    assert plain[0].routed_experts.token_dispatcher._exchange is plain[1].routed_experts.token_dispatcher._exchange
    made, counts = [], []
    for model in (plain, again):
        tokens = x.clone().requires_grad_()
        with _Calls() as calls:
            out = model(tokens)
            out.backward(grad)
        counts.append((calls.dispatches, calls.combines))
        made.append([out.detach(), tokens.grad, *(p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters())])
    for first, second in zip(*made):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    ours.close()
    return counts


def _full(group):
    counts = _checkpoint(group, FullAC.Config())
    assert counts[1][0] > counts[0][0], counts  # forward is repeated


def _selective(group):
    counts = _checkpoint(group, SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=[]))
    assert counts[1][0] > counts[0][0], counts


@dataclasses.dataclass
class _Run:
    activation_checkpoint: SelectiveAC.Config

    def traverse(self, kind):
        yield "activation_checkpoint", self.activation_checkpoint, self, "activation_checkpoint"


def _selective_of_ours(group):
    run = _Run(SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=[]))
    apply_overrides(OverrideConfig(imports=["switchyard.engines.torchtitan.selective_checkpoint"]), run)
    counts = _checkpoint(group, run.activation_checkpoint)
    assert counts[1] == counts[0], counts  # no communication is repeated


@pytest.mark.parametrize("scenario", [_full, _selective, _selective_of_ours], ids=lambda scenario: scenario.__name__[1:])
def test_activation_checkpoints(scenario):
    over_groups("cpu", 2, scenario)


# ---- What is refused, and when ----


def _overridden(config, given=None):
    apply_overrides(OverrideConfig(imports=[(OURS, given or {})]), config)
    return config.routed_experts.token_dispatcher


def test_fields_of_the_replaced_dispatcher():
    made = _overridden(updated(layer_config(), 2))
    assert (type(made), made.hidden_dim, made.num_max_tokens_per_rank, made.num_experts, made.static_shapes) == \
        (ours.TokenDispatcher.Config, HIDDEN, TOKENS, EXPERTS, False)
    config = layer_config("hybridep")
    config.routed_experts.token_dispatcher = HybridEPTokenDispatcher.Config(
        num_experts=EXPERTS, top_k=3, non_blocking_capacity_factor=1.0, pad_multiple=16, hidden_dim=HIDDEN, num_max_tokens_per_rank=7)
    made = _overridden(config, {"dtype": "f32"})
    assert (made.static_shapes, made.pad_multiple, made.num_max_tokens_per_rank, made.dtype) == (True, 16, 7, "f32")
    config.routed_experts.token_dispatcher = MinimalAsyncEPTokenDispatcher.Config(
        num_experts=EXPERTS, top_k=3, hidden_dim=HIDDEN, num_max_tokens_per_rank=7, dtype=torch.float32)
    assert _overridden(config).dtype == "f32"
    config.routed_experts.token_dispatcher = TorchAOTokenDispatcher.Config(num_experts=EXPERTS, top_k=3, pad_multiple=32)
    assert _overridden(config, {"hidden_dim": HIDDEN, "num_max_tokens_per_rank": 8}).pad_multiple == 32


@pytest.mark.parametrize("change, given, sentence", [
    ({}, {}, r"hidden_dim = None: must be a positive integer; a model with comm_backend='deepep' supplies it"),
    ({}, {"hidden_dim": HIDDEN, "num_max_tokens_per_rank": 0}, r"num_max_tokens_per_rank = 0: must be a positive integer"),
    ({}, {"hidden_dim": HIDDEN, "num_max_tokens_per_rank": 8, "dtype": "fp8"}, r"dtype = 'fp8': must be 'bf16', 'f16' or 'f32'"),
])
def test_fields_refused_at_build(change, given, sentence):
    config = layer_config("standard")
    assert isinstance(config.routed_experts.token_dispatcher, AllToAllTokenDispatcher.Config)
    _overridden(config, given)
    with pytest.raises(sy.InvalidArgument, match=sentence):
        config.build()


def test_overrides_refused():
    config = updated(layer_config("hybridep"), 2)
    config.routed_experts.token_dispatcher.non_blocking_capacity_factor = 0.5
    with pytest.raises(sy.InvalidArgument, match=r"non_blocking_capacity_factor = 0.5: this dispatcher drops no tokens; use 1.0"):
        _overridden(config)
    with pytest.raises(ValueError, match="tokens"):
        _overridden(updated(layer_config(), 2), {"tokens": 3})


def test_other_versions(monkeypatch):
    assert {each.name: each.tested for each in _found.ENGINES}["torchtitan"] == ours.SUPPORTED
    monkeypatch.setattr("switchyard.engines._patches.installed", lambda _: "0.4.1")
    with pytest.raises(sy.InvalidArgument, match=r"torchtitan 0\.4\.1: this plug-in was tested with torchtitan 0\.3 .*its own dispatcher"):
        _overridden(updated(layer_config(), 2))


def test_meshes_refused():
    class Mesh:
        def size(self):
            return 3

    dispatcher = _overridden(updated(layer_config(), 2)).build()
    with pytest.raises(sy.InvalidArgument, match="the model was not parallelized"):
        dispatcher.dispatch(*[torch.zeros(1)] * 4)
    with pytest.raises(sy.InvalidArgument, match=r"expert_parallel_degree = 1: this dispatcher requires at least 2"):
        dispatcher.wire_meshes(ep_mesh=None)
    with pytest.raises(sy.InvalidArgument, match=r"num_experts = 8: must be a multiple of expert_parallel_degree, 3"):
        dispatcher.wire_meshes(ep_mesh=Mesh())


def _wide(group):
    layer = divided_layer(dims_of(2, "partial_dtensor"), 2, torch.float32, {"dtype": "bf16"})
    with pytest.raises(sy.InvalidArgument, match=r"tokens are torch.float32: the exchange is for dtype = 'bf16'; pass dtype = 'f32'"):
        layer(inputs_of(group.rank(), torch.float32)[0])
    ours.close()


def test_wide_tokens():
    over_groups("cpu", 2, _wide)


def test_imports_change_nothing(environment):
    """Attributes of torchtitan's modules before and after importing the plug-in, and the registry without it."""
    program = f"""
import sys
import switchyard, switchyard.plugins, switchyard.engines
assert not any(name.split('.')[0] == 'torchtitan' for name in sys.modules)
import torchtitan_ranks
from torchtitan.config.override import _REGISTRY
assert not _REGISTRY
def seen():
    found = {{}}
    for name, module in list(sys.modules.items()):
        if name.split('.')[0] == 'torchtitan':
            for key, value in vars(module).items():
                found[name, key] = id(value)
                if isinstance(value, type):
                    found.update({{(name, key, each): id(of) for each, of in vars(value).items()}})
    return found
before = seen()
assert len(before) > 1000
import switchyard.engines.torchtitan
after = seen()
assert [key for key in before if after.get(key) != before[key]] == []
assert sorted(_REGISTRY) == ['switchyard.engines.torchtitan.selective_checkpoint', {OURS!r}]
"""
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
