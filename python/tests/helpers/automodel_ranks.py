# SPDX-License-Identifier: Apache-2.0
"""MoE layers of NeMo Automodel on ranks of gloo, with the drop-in as deep_ep. No stand-ins: the
dispatcher is set to Automodel's own permutation in torch, because the fused one is a kernel of Transformer Engine."""
import contextlib
import gc

import pytest

from megatron_ranks import DTYPE, EXPERTS, HIDDEN, INNER, TOPK, fetched, parameters

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
            layer = MoE(config, BackendConfig(**{"dispatcher": "deepep", "experts": "torch_mm", "gate_precision": "float32", **backend}))
            router, first, second = parameters()
            with torch.no_grad():
                layer.gate.weight.copy_(router)
                layer.experts.gate_and_up_projs.copy_(first.transpose(1, 2))
                layer.experts.down_projs.copy_(second.transpose(1, 2))
            mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
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
