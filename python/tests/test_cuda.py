# SPDX-License-Identifier: Apache-2.0
"""Tensors on GPUs, with ranks as threads that go round the GPUs: rows bit by bit against the oracle, streams, graphs, gradients.
Needs a GPU that the library supports, and a library with CUDA."""
import threading

import numpy as np
import pytest

import oracle
import switchyard as sy

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

EXPERTS, TOPK, HIDDEN, TOKENS, WORLD = 7, 3, 64, 33, 2
SHAPE = {"experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": TOKENS}


def over_ranks(function, heap_bytes, *arguments):
    """Each rank on its GPU, on a stream of its own."""
    ready = threading.Barrier(WORLD)

    def rank(group, *arguments):
        torch.cuda.set_device(group.rank % torch.cuda.device_count())
        torch.empty(1, device="cuda")
        ready.wait()  # nobody starts the GPU's context while others wait on it
        with torch.cuda.stream(torch.cuda.Stream()):
            result = function(group, *arguments)
            torch.cuda.current_stream().synchronize()
        return result

    return sy.run_ranks(rank, WORLD, *arguments, heap_bytes=heap_bytes, backend="cuda", timeout=60)


def on_gpu(given, dtype=torch.float32):
    return (torch.from_numpy(given.x).to("cuda", dtype), torch.from_numpy(given.ids).cuda(),
            None if given.weights is None else torch.from_numpy(given.weights).cuda())


def inputs_of(seed, dtype=torch.float32):
    inputs = oracle.make_inputs(WORLD, seed=seed, tokens=[29, 17], **SHAPE)
    return [given._replace(x=torch.from_numpy(given.x).to(dtype).float().numpy()) for given in inputs]


def equal(got, want):
    return torch.equal(got.cpu().float() if got.is_floating_point() else got.cpu(), torch.from_numpy(np.asarray(want)))


@pytest.mark.parametrize("size", ["automatic", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rank_major(dtype, size):
    inputs = inputs_of(1, dtype)

    def rank(group):
        exchange = sy.Exchange(group, dtype=dtype, **SHAPE)
        x, ids, weights = on_gpu(inputs[group.rank], dtype)
        rows, handle = exchange.dispatch(x, ids, weights, size=size)
        want = oracle.rank_major(inputs, EXPERTS, group.rank)
        count = len(want.x)
        assert rows.is_cuda and rows.dtype == dtype and rows.shape[0] >= count and handle.rows == count
        assert equal(rows[:count], want.x) and equal(handle.topk_ids[:count], want.ids)
        assert equal(handle.topk_weights[:count], want.weights) and equal(handle.source_token[:count], want.tokens)
        out, summed = exchange.combine(rows, handle, weights=handle.topk_weights)
        valid = (ids >= 0) & (ids < EXPERTS)
        assert torch.equal(summed, torch.where(valid, weights, 0))
        if dtype == torch.float32:
            assert equal(out, oracle.combine_rank_major(inputs, EXPERTS, group.rank, lambda r: oracle.rank_major(inputs, EXPERTS, r).x))
        again, _ = exchange.dispatch(x * 2, handle=handle)
        assert torch.equal(again[:count], rows[:count] * 2)
        assert np.array_equal(handle.counts().tokens_per_expert, [(want.ids == e).sum() for e in range(len(group.experts_of(EXPERTS)))])

    over_ranks(rank, sy.Exchange.heap_bytes(WORLD, backend="cuda", dtype=dtype, **SHAPE))


@pytest.mark.parametrize("order", ["per_rank", "per_route"])
def test_expert_major(order):
    inputs = inputs_of(2)
    config = dict(SHAPE, dtype="f32", layout="expert_major", align=4)

    def made(r):
        return oracle.expert_major(inputs, EXPERTS, r, 4).x * np.float32(r + 2)

    def rank(group):
        exchange = sy.Exchange(group, **config)
        rows, handle = exchange.dispatch(*on_gpu(inputs[group.rank]))
        want = oracle.expert_major(inputs, EXPERTS, group.rank, 4)
        count = len(want.x)
        assert equal(rows[:count], want.x) and equal(handle.row_source[:count], want.source)
        assert equal(handle.offsets, np.cumsum(want.aligned).astype(np.int32)) and handle.offsets.is_cuda
        y = exchange.allocate_rows(handle)
        y[:count] = rows[:count] * (group.rank + 2)
        out = exchange.combine(y, handle, order=order)
        assert equal(out, oracle.combine_expert_major(inputs, EXPERTS, group.rank, made, order, True, 4))

    over_ranks(rank, sy.Exchange.heap_bytes(WORLD, backend="cuda", **config))


def test_wrong_memory():
    inputs = inputs_of(1)

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", **SHAPE)
        x, ids, _ = on_gpu(inputs[group.rank])
        with pytest.raises((sy.InvalidArgument, sy.PeerFailed)):
            exchange.dispatch(x.cpu(), ids.cpu())

    over_ranks(rank, sy.Exchange.heap_bytes(WORLD, backend="cuda", dtype="f32", **SHAPE))


@pytest.mark.parametrize("scales", [None, "f32"])
def test_low_latency_and_graphs(scales):
    inputs = [given._replace(ids=np.array([[e, (e + 1) % EXPERTS, (e + 3) % EXPERTS] for e in range(len(given.ids))]) % EXPERTS)
              for given in inputs_of(3, torch.bfloat16)]
    config = dict(SHAPE, dtype="bf16", scales=scales, scale_order="column_major")

    def rank(group):
        ll = sy.LowLatency(group, **config)
        x, ids, weights = on_gpu(inputs[group.rank], torch.bfloat16)
        received = ll.dispatch(x, ids, weights)
        y = ll.make_rows(received)

        def experts():
            values = received.x.float()
            if scales is not None:
                values = values * received.scales.repeat_interleave(128, 2)[:, :, :HIDDEN]
            y.copy_(values)

        experts()
        out = ll.combine(y, received)
        reference = x.float() * weights.sum(1, keepdim=True)
        torch.testing.assert_close(out.float(), reference, rtol=0.1 if scales else 0.02, atol=0.05)
        torch.cuda.current_stream().synchronize()
        group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            ll.dispatch(x, ids, weights)
            experts()
            captured = ll.combine(y, received)
        x.mul_(2)
        for _ in range(3):
            graph.replay()
        torch.cuda.current_stream().synchronize()
        torch.testing.assert_close(captured.float(), 2 * reference, rtol=0.1 if scales else 0.02, atol=0.1)
        group.barrier()
        del graph

    over_ranks(rank, sy.LowLatency.heap_bytes(WORLD, **config))


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_gradients(layout):
    """Of the pair: those that follow from out[t] = sum of weights times x (expert-major), or the number of ranks times x."""
    inputs = inputs_of(4)
    config = dict(SHAPE, dtype="f32", layout=layout, routing_gradients=True)

    def rank(group):
        exchange = sy.Exchange(group, **config)
        x, ids, weights = on_gpu(inputs[group.rank])
        x.requires_grad_(), weights.requires_grad_()
        rows, handle = exchange.dispatch(x, ids, weights)
        valid = (ids >= 0) & (ids < EXPERTS)
        if layout == "expert_major":
            exchange.combine(rows, handle, order="per_route").sum().backward()
            want_x = torch.where(valid, weights.detach(), 0).sum(1, keepdim=True).expand_as(x)
            want_weights = torch.where(valid, x.detach().sum(1, keepdim=True), 0)
        else:
            own = torch.where(handle.topk_ids >= 0, handle.topk_weights, 0).sum(1, keepdim=True)
            exchange.combine(rows * own, handle).sum().backward()
            want_x = torch.where(valid, weights.detach(), 0).sum(1, keepdim=True).expand_as(x)
            want_weights = torch.where(valid, x.detach().sum(1, keepdim=True), 0)
        torch.testing.assert_close(x.grad, want_x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(weights.grad, want_weights, rtol=1e-4, atol=1e-3)

    over_ranks(rank, sy.Exchange.heap_bytes(WORLD, backend="cuda", **config))


def _nccl(rank, world, path):
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    inputs = inputs_of(5)
    with sy.Group.from_process_group(heap_bytes=sy.Exchange.heap_bytes(world, backend="cuda", dtype="f32", **SHAPE)) as group:
        assert (group.rank, group.size, group.backend) == (rank, world, "cuda")
        exchange = sy.Exchange(group, dtype="f32", **SHAPE)
        rows, handle = exchange.dispatch(*on_gpu(inputs[rank]))
        want = oracle.rank_major(inputs, EXPERTS, rank).x
        assert equal(rows[:len(want)], want)
        del rows, handle, exchange
        torch.cuda.synchronize()
        group.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="NCCL wants a GPU for each rank")
def test_process_groups_of_nccl(tmp_path):
    import torch.multiprocessing as mp

    mp.spawn(_nccl, args=(WORLD, str(tmp_path / "store")), nprocs=WORLD)
