# SPDX-License-Identifier: Apache-2.0
"""DeepEP calls of other projects, in their order and with their argument names, through `import deep_ep`. The tests do not need
any of these projects."""
import pytest

torch = pytest.importorskip("torch")

from deep_ep_ranks import (EXPERTS, HIDDEN, MAX_TOKENS, NVL, PLACES, TOPK, calc_diff, inputs_of, laid_out, over_groups, summed,  # noqa: E402
                           tensors, weighted)
from switchyard import deep_ep as drop_in  # noqa: E402


# ---- vLLM ----


def _vllm_high_throughput(group):
    import deep_ep

    buffer = deep_ep.Buffer(group=group, num_nvl_bytes=NVL, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=1,
                            explicitly_destroy=True)
    deep_ep.Buffer.set_num_sms(20)
    inputs, rank = inputs_of(buffer.group_size), buffer.rank
    x, ids, weights = tensors(inputs[rank])
    config = deep_ep.Buffer.get_dispatch_config(buffer.group_size)
    previous = buffer.capture()
    per_rank, per_rdma, per_expert, where, event = buffer.get_dispatch_layout(
        topk_idx=ids, num_experts=EXPERTS, previous_event=previous, async_finish=False, allocate_on_comm_stream=False)
    received, its_ids, its_weights, counts, handle, event = buffer.dispatch(
        x=x, handle=None, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma, is_token_in_rank=where,
        num_tokens_per_expert=per_expert, topk_idx=ids, topk_weights=weights, expert_alignment=1, config=config,
        previous_event=previous, async_finish=True, allocate_on_comm_stream=False)
    if event.event is not None:
        event.current_stream_wait()
    assert isinstance(counts, list) and sum(counts) == int((its_ids >= 0).sum())
    out, _, event = buffer.combine(x=received, handle=handle, topk_weights=None,
                                   config=deep_ep.Buffer.get_combine_config(buffer.group_size), previous_event=None,
                                   async_finish=True, allocate_on_comm_stream=False)
    event.current_stream_wait()
    assert calc_diff(out, summed(inputs, rank)) < 5e-6
    buffer.destroy()


def _vllm_low_latency(group):
    import deep_ep

    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank=MAX_TOKENS, hidden=HIDDEN,
                                                         num_ranks=group.size(), num_experts=EXPERTS)
    buffer = deep_ep.Buffer(group=group, num_nvl_bytes=0, num_rdma_bytes=size, low_latency_mode=True,
                            num_qps_per_rank=EXPERTS // group.size(), allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False,
                            explicitly_destroy=True, enable_shrink=False)
    inputs, rank = inputs_of(buffer.group_size, repeats=False), buffer.rank
    a1, topk_ids, topk_weights = tensors(inputs[rank])
    buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, EXPERTS)
    expert_x, counts, handle, _, hook = buffer.low_latency_dispatch(
        a1, topk_ids, MAX_TOKENS, EXPERTS, use_fp8=False, round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=True)
    hook()
    output = torch.empty_like(a1)
    y = expert_x.float().nan_to_num(0, 0, 0).bfloat16()
    _, _, hook = buffer.low_latency_combine(y, topk_ids, topk_weights, handle, async_finish=False, zero_copy=False,
                                            return_recv_hook=True, out=output)
    hook()
    assert calc_diff(output, weighted(a1, topk_ids, topk_weights)) < 1e-5
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    buffer.destroy()


# ---- SGLang: one buffer for prefill and decode ----


def _sglang(group):
    from deep_ep import Buffer, Config

    world = group.size()
    hidden_bytes = HIDDEN * 2
    nvl = rdma = 0
    for config in (Buffer.get_dispatch_config(world), Buffer.get_combine_config(world)):
        nvl = max(config.get_nvl_buffer_size_hint(hidden_bytes, world), nvl)
        rdma = max(config.get_rdma_buffer_size_hint(hidden_bytes, world), rdma)
    rdma = max(Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, HIDDEN, world, EXPERTS), rdma)
    buffer = Buffer(group, nvl, rdma, low_latency_mode=True, num_qps_per_rank=EXPERTS // world, allow_mnnvl=True)
    inputs, rank = inputs_of(world, repeats=False), buffer.rank
    x, ids, weights = tensors(inputs[rank])

    previous = Buffer.capture()
    per_rank, per_rdma, per_expert, where, previous = buffer.get_dispatch_layout(
        ids, EXPERTS, previous_event=previous, async_finish=True, allocate_on_comm_stream=True)
    received, its_ids, its_weights, counts, handle, event = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma,
        is_token_in_rank=where, num_tokens_per_expert=per_expert, previous_event=previous, async_finish=True,
        allocate_on_comm_stream=True, expert_alignment=128, config=Config(num_sms=20, num_max_nvl_chunked_send_tokens=6,
                                                                          num_max_nvl_chunked_recv_tokens=256,
                                                                          num_max_rdma_chunked_send_tokens=6,
                                                                          num_max_rdma_chunked_recv_tokens=128))
    event.current_stream_wait()
    assert sum(counts) % 128 == 0
    out, _, event = buffer.combine(received, handle, async_finish=True, previous_event=Buffer.capture(), allocate_on_comm_stream=True,
                                   config=None)
    event.current_stream_wait()
    assert calc_diff(out, summed(inputs, rank)) < 5e-6

    buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, EXPERTS)
    hidden, masked_m, handle, event, hook = buffer.low_latency_dispatch(
        x, ids, MAX_TOKENS, EXPERTS, use_fp8=True, async_finish=False, return_recv_hook=True)
    hook()
    assert masked_m.dtype == torch.int32 and hidden[1].stride(1) == 1
    y = (hidden[0].float() * hidden[1].repeat_interleave(128, 2)).nan_to_num(0, 0, 0).bfloat16()
    combined, event, hook = buffer.low_latency_combine(x=y, topk_idx=ids, topk_weights=weights, handle=handle, async_finish=False,
                                                       return_recv_hook=True)
    hook()
    assert calc_diff(combined, weighted(x, ids, weights)) < 9e-4


# ---- Megatron-LM: autograd functions around both calls ----


def _after_this_stream(asynchronous):
    """Keyword arguments of a call that is ordered after all work enqueued on the current stream so far."""
    from deep_ep.utils import EventHandle, EventOverlap

    previous = EventOverlap(EventHandle()) if asynchronous else None
    return {"previous_event": previous, "async_finish": asynchronous, "allocate_on_comm_stream": asynchronous}


class FusedDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ids, probs, buffer, asynchronous):
        keywords = _after_this_stream(asynchronous)
        per_rank, per_rdma, per_expert, where, event = buffer.get_dispatch_layout(ids, EXPERTS, **keywords)
        received, its_ids, its_probs, counts, handle, after = buffer.dispatch(
            x, topk_idx=ids, topk_weights=probs, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma,
            is_token_in_rank=where, num_tokens_per_expert=per_expert, **keywords)
        if asynchronous:
            after.current_stream_wait()
        ctx.buffer, ctx.handle, ctx.asynchronous = buffer, handle, asynchronous
        return received, its_ids, its_probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx, grad, grad_ids, grad_probs, grad_counts, grad_handle):
        grad, grad_probs = grad.contiguous(), grad_probs.float()
        grad_x, grad_weights, after = ctx.buffer.combine(grad, ctx.handle, topk_weights=grad_probs, **_after_this_stream(ctx.asynchronous))
        if ctx.asynchronous:
            after.current_stream_wait()
        return grad_x, None, grad_weights, None, None


class FusedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, handle, buffer):
        out, _, _ = buffer.combine(y, handle=handle, async_finish=False, previous_event=None, allocate_on_comm_stream=False)
        ctx.handle, ctx.buffer = handle, buffer
        return out

    @staticmethod
    def backward(ctx, grad):
        grad_y, _, _, _, _, _ = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle, previous_event=None, async_finish=False,
                                                    allocate_on_comm_stream=False)
        return grad_y, None, None


def _megatron(group):
    import deep_ep

    buffer = deep_ep.Buffer(group, NVL, 0)
    assert buffer.group is group and buffer.num_nvl_bytes == NVL and buffer.num_rdma_bytes == 0
    inputs, rank = inputs_of(buffer.group_size), buffer.rank
    for asynchronous in (False, True):
        x, ids, probs = tensors(inputs[rank])
        x.requires_grad_(), probs.requires_grad_()
        received, its_ids, its_probs, counts, handle = FusedDispatch.apply(x, ids, probs, buffer, asynchronous)
        scale = torch.where(its_ids >= 0, its_probs, 0).sum(1, keepdim=True).to(received.dtype)
        FusedCombine.apply(received * scale, handle, buffer).float().sum().backward()
        want = torch.where(ids >= 0, probs.detach(), 0).sum(1, keepdim=True).expand(-1, HIDDEN)
        torch.testing.assert_close(x.grad.float(), want, rtol=0.02, atol=0.02)
        torch.testing.assert_close(probs.grad, torch.where(ids >= 0, x.detach().float().sum(1, keepdim=True), 0), rtol=0.02, atol=0.5)


# ---- lmdeploy, Automodel, slime ----


def _lmdeploy(group):
    import deep_ep
    from deep_ep import Buffer

    made = []

    class Patched(Buffer):  # slime wraps Buffer.__init__
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            made.append(self)

    Buffer.set_num_sms(20)
    rdma = Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, HIDDEN, group.size(), EXPERTS)
    buffer = Patched(group, NVL, rdma, low_latency_mode=True, num_qps_per_rank=EXPERTS // group.size(), allow_mnnvl=True,
                     explicitly_destroy=True)
    assert made == [buffer] and isinstance(buffer, deep_ep.Buffer)
    buffer.set_num_sms(20)
    assert (buffer.low_latency_mode, buffer.group_size, Buffer.num_sms) == (True, group.size(), 20)
    inputs, rank = inputs_of(buffer.group_size, repeats=False), buffer.rank
    x, ids, weights = tensors(inputs[rank])
    (q, scales), count, handle, event, hook = buffer.low_latency_dispatch(x, ids, MAX_TOKENS, EXPERTS, use_fp8=True, async_finish=True,
                                                                         return_recv_hook=False)
    event.current_stream_wait()
    *_, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **laid_out(buffer, ids))
    assert deep_ep.Buffer.is_sm90_compiled() and TOPK == ids.shape[1]
    buffer.destroy()


def _installed(group, caller):
    drop_in.install()
    try:
        caller(group)
        torch.distributed.barrier(group)
    finally:
        drop_in.uninstall()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("caller", [_vllm_high_throughput, _vllm_low_latency, _sglang, _megatron, _lmdeploy],
                         ids=lambda caller: caller.__name__[1:])
def test_callers(caller, where, world):
    if world == 1 and caller in (_vllm_high_throughput, _sglang):
        if where == "cuda":
            pytest.skip("they ask for the settings of a number of ranks, which one is not")
        world = 4
    over_groups(where, world, _installed, caller)
