# SPDX-License-Identifier: Apache-2.0
"""MoE layers of NeMo Automodel on ranks of gloo, with the drop-in as deep_ep. No stand-ins: the
dispatcher is set to Automodel's own permutation in torch, because the fused one is a kernel of Transformer Engine."""
import contextlib
import gc

import pytest

import deep_ep_ranks
from megatron_ranks import DTYPE, EXPERTS, HIDDEN, INNER, TOPK, compare, fetched, inputs_of, parameters

torch = pytest.importorskip("torch")

fetched("nemo-automodel")


@contextlib.contextmanager
def automodel(group, **backend):
    """Provides the modules of Automodel and a function that makes its layer, divided by Automodel, in a program where
    ``import deep_ep`` finds the drop-in."""
    from switchyard import deep_ep
    deep_ep.install()
    try:
        from nemo_automodel.components.models.common.utils import BackendConfig
        from nemo_automodel.components.moe.config import MoEConfig
        from nemo_automodel.components.moe.layers import MoE
        from nemo_automodel.components.moe.megatron import fused_a2a, token_dispatcher
        from nemo_automodel.components.moe.parallelizer import ExpertParallel

        fused_a2a.Buffer = deep_ep.Buffer  # that of this test, whichever test imported the module first

        def make():
            config = MoEConfig(
                n_routed_experts=EXPERTS, n_shared_experts=0, n_activated_experts=TOPK, n_expert_groups=1, n_limited_groups=1, train_gate=True,
                gate_bias_update_factor=0.0, aux_loss_coeff=0.0, score_func="softmax", route_scale=1.0, dim=HIDDEN, inter_dim=INNER,
                moe_inter_dim=INNER, norm_topk_prob=False, dtype=DTYPE)
            layer = MoE(config, BackendConfig(**{"dispatcher": "deepep", "experts": "torch_mm", "gate_precision": "float32", **backend})).to(deep_ep_ranks.memory())
            router, first, second = parameters()
            with torch.no_grad():
                layer.gate.weight.copy_(router)
                layer.experts.gate_and_up_projs.copy_(first.transpose(1, 2))
                layer.experts.down_projs.copy_(second.transpose(1, 2))
            mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, deep_ep_ranks.memory())
            ExpertParallel()._apply(layer.experts, mesh)
            layer.experts.token_dispatcher._comm_manager.permute_fusion = False
            return layer

        yield make, fused_a2a
    finally:
        token_dispatcher.MoEFlexTokenDispatcher.shared_deepep_manager = None
        fused_a2a._buffer = None
        gc.collect()
        deep_ep.uninstall()


def gradients_of(layer, x):
    """Gradients of tokens, router, first [L, 2 I, H] and second [L, H, I]."""
    experts = layer.experts
    return [x.grad, layer.gate.weight.grad, *(each.grad.to_local().transpose(1, 2) for each in (experts.gate_and_up_projs, experts.down_projs))]


def check_automodel(group, tokens, skewed, empty, backend):
    """Runs Automodel's layer twice and compares outputs and gradients with float64. tokens: of the even ranks. empty: the rank without
    tokens, or None. backend: settings of Automodel's BackendConfig."""
    from switchyard import deep_ep

    rank, world = group.rank(), group.size()
    inputs = [inputs_of(r, 0 if r == empty else tokens - 5 * (r % 2), skewed) for r in range(world)]
    with automodel(group, **backend) as (make, fused_a2a):
        layer = make()
        assert type(layer.experts).__name__ == "GroupedExpertsDeepEP" and issubclass(fused_a2a.Buffer, deep_ep.Buffer)
        for _ in range(2):  # the second time with the buffer of the first
            layer.zero_grad()
            x = inputs[rank][0].clone().requires_grad_()
            out = layer(x[None])
            assert out.dtype == x.dtype and fused_a2a._buffer is not None
            out.backward(inputs[rank][1][None])
            compare(out.detach(), gradients_of(layer, x), rank, world, inputs)
