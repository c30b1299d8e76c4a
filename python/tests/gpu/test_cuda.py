# SPDX-License-Identifier: Apache-2.0
"""Tensors on GPUs: rows compared bitwise with the oracle, streams, graphs, gradients. Ranks are processes distributed over the
GPUs. Needs a supported GPU and a library with CUDA."""
import subprocess
import sys
import time

import numpy as np
import pytest

import oracle
import switchyard as sy
from clone import EXAMPLES
from processes import run_processes

torch = pytest.importorskip("torch")

from gpu_ranks import over_gpus  # noqa: E402  (needs torch)

EXPERTS, TOPK, HIDDEN, TOKENS, WORLD = 7, 3, 64, 33, 2
SHAPE = {"num_experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": TOKENS}


@pytest.fixture(autouse=True)
def gpus():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.cuda.device_count()


def over_ranks(scenario, heap_bytes, *arguments):
    over_gpus(WORLD, scenario, heap_bytes, *arguments)


def inputs_of(seed, dtype=torch.float32):
    """Inputs of all ranks, rows rounded to the type."""
    inputs = oracle.make_inputs(WORLD, seed=seed, tokens=[29, 17], **SHAPE)
    return [given._replace(x=torch.from_numpy(given.x).to(dtype).float().numpy()) for given in inputs]


def on_gpu(given, dtype=torch.float32):
    return torch.from_numpy(given.x).to("cuda", dtype), torch.from_numpy(given.ids).cuda(), torch.from_numpy(given.weights).cuda()


def equal(got, want):
    return torch.equal(got.cpu().float() if got.is_floating_point() else got.cpu(), torch.from_numpy(np.asarray(want)))


def _rank_major(group, dtype, size):
    inputs = inputs_of(1, dtype)
    exchange = sy.Exchange(group, dtype=dtype, **SHAPE)
    x, ids, weights = on_gpu(inputs[group.rank], dtype)
    rows, handle = exchange.dispatch(x, ids, weights, size=size)
    want = oracle.rank_major(inputs, EXPERTS, group.rank)
    count = len(want.x)
    assert rows.is_cuda and rows.dtype == dtype and rows.shape[0] >= count and handle.rows == count
    assert equal(rows[:count], want.x) and equal(handle.topk_ids[:count], want.ids)
    assert equal(handle.topk_weights[:count], want.weights) and equal(handle.source_token[:count], want.tokens)
    out, summed = exchange.combine(rows, handle, topk_weights=handle.topk_weights)
    assert torch.equal(summed, torch.where((ids >= 0) & (ids < EXPERTS), weights, 0))
    if dtype == torch.float32:
        assert equal(out, oracle.combine_rank_major(inputs, EXPERTS, group.rank, lambda r: oracle.rank_major(inputs, EXPERTS, r).x))
    kept = rows[:count].clone()
    del rows
    again, _ = exchange.dispatch(x * 2, handle=handle)
    assert torch.equal(again[:count], kept * 2)
    assert np.array_equal(handle.counts().tokens_per_expert, [(want.ids == e).sum() for e in range(len(group.experts_of(EXPERTS)))])


def _no_tokens(group, weighted):
    """A rank without tokens, which may pass no weights even if the others do, combines what it has received."""
    inputs = inputs_of(1)
    inputs[0] = inputs[0]._replace(x=inputs[0].x[:0], ids=inputs[0].ids[:0], weights=inputs[0].weights[:0])
    exchange = sy.Exchange(group, dtype="f32", **SHAPE)
    x, ids, weights = on_gpu(inputs[group.rank])
    rows, handle = exchange.dispatch(x, ids, weights if weighted and len(x) else None)
    want = oracle.rank_major(inputs, EXPERTS, group.rank)
    if weighted and len(x):
        assert equal(handle.topk_weights[: len(want.x)], want.weights)
    out = exchange.combine(rows, handle)
    assert equal(out, oracle.combine_rank_major(inputs, EXPERTS, group.rank, lambda r: oracle.rank_major(inputs, EXPERTS, r).x))


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_no_tokens(weighted):
    over_ranks(_no_tokens, sy.Exchange.heap_bytes(WORLD, backend="cuda", dtype="f32", **SHAPE), weighted)


@pytest.mark.parametrize("size", ["automatic", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rank_major(dtype, size):
    over_ranks(_rank_major, sy.Exchange.heap_bytes(WORLD, backend="cuda", dtype=dtype, **SHAPE), dtype, size)


ROWS_OF_FOUR = dict(SHAPE, dtype="f32", layout="expert_major", expert_alignment=4)


def _expert_major(group, order):
    inputs = inputs_of(2)
    exchange = sy.Exchange(group, **ROWS_OF_FOUR)
    rows, handle = exchange.dispatch(*on_gpu(inputs[group.rank]))
    want = oracle.expert_major(inputs, EXPERTS, group.rank, 4)
    count = len(want.x)
    assert equal(rows[:count], want.x) and equal(handle.row_source[:count], want.source)
    assert equal(handle.offsets, np.cumsum(want.aligned).astype(np.int32)) and handle.offsets.is_cuda
    y = exchange.allocate_rows(handle)
    y[:count] = rows[:count] * (group.rank + 2)
    out = exchange.combine(y, handle, order=order)
    made = [oracle.expert_major(inputs, EXPERTS, r, 4).x * np.float32(r + 2) for r in range(WORLD)]
    assert equal(out, oracle.combine_expert_major(inputs, EXPERTS, group.rank, made.__getitem__, order, True, 4))
    assert handle.device_invalid_ids.is_cuda and handle.device_invalid_ids.item() == handle.invalid_ids


@pytest.mark.parametrize("order", ["per_rank", "per_route"])
def test_expert_major(order):
    over_ranks(_expert_major, sy.Exchange.heap_bytes(WORLD, backend="cuda", **ROWS_OF_FOUR), order)


def _wrong_memory(group):
    exchange = sy.Exchange(group, dtype="f32", **SHAPE)
    x, ids, _ = on_gpu(inputs_of(1)[group.rank])
    try:
        exchange.dispatch(x.cpu(), ids.cpu())
    except sy.InvalidArgument as error:
        assert "must be on a GPU" in str(error)
    else:
        raise AssertionError("tensors in host memory were taken")
    raise SystemExit(0)  # the group has ended


def test_wrong_memory():
    over_ranks(_wrong_memory, sy.Exchange.heap_bytes(WORLD, backend="cuda", dtype="f32", **SHAPE))


def _other_gpu(group, which):
    """Mistakes after successful calls, for which torch has reported the location of the tensors."""
    ll, exchange = sy.LowLatency(group, dtype="f32", **SHAPE), sy.Exchange(group, dtype="f32", **SHAPE)
    x, ids, weights = on_gpu(inputs_of(1)[group.rank])
    rows, handle = exchange.dispatch(x, ids)
    for _ in range(3):
        received = ll.dispatch(x, ids, weights)
        y = ll.make_rows(received)
        ll.combine(y, received, topk_weights=weights)
        exchange.combine(rows, handle)
    torch.cuda.synchronize()
    group.barrier()
    if group.rank == 0:
        there = f"cuda:{(x.get_device() + 1) % torch.cuda.device_count()}"
        calls = {"x": lambda: ll.dispatch(x.to(there), ids, weights), "ids": lambda: ll.dispatch(x, ids.to(there), weights),
                 "weights": lambda: ll.dispatch(x, ids, weights.to(there)),
                 "weights of combine": lambda: ll.combine(y, received, topk_weights=weights.to(there)),
                 "y": lambda: exchange.combine(rows.to(there), handle)}
        with pytest.raises(sy.InvalidArgument, match="lies on GPU"):
            calls[which]()
    else:  # the mistake ends the group; a rank that left earlier would be the error instead
        with pytest.raises(sy.PeerFailed, match="rank 0"):
            for _ in range(3000):
                group.check()
                time.sleep(0.01)
    raise SystemExit(0)


@pytest.mark.parametrize("which", ["x", "ids", "weights", "weights of combine", "y"])
def test_other_gpu(which, gpus):
    if gpus < 2:
        pytest.skip("needs two GPUs")
    heap = sy.Exchange.heap_bytes(WORLD, backend="cuda", dtype="f32", **SHAPE) + sy.LowLatency.heap_bytes(WORLD, dtype="f32", **SHAPE)
    over_ranks(_other_gpu, heap, which)


def _low_latency(group, scales):
    """Eagerly and from a graph."""
    ids = np.array([[e, e + 1, e + 3] for e in range(TOKENS)]) % EXPERTS
    inputs = [given._replace(ids=ids[:len(given.ids)]) for given in inputs_of(3, torch.bfloat16)]
    ll = sy.LowLatency(group, dtype="bf16", scales=scales, scale_order="column_major", **SHAPE)
    x, ids, weights = on_gpu(inputs[group.rank], torch.bfloat16)
    received = ll.dispatch(x, ids, weights)
    y = ll.make_rows(received)

    def experts():
        values = received.x.float()
        y.copy_(values if scales is None else values * received.scales.repeat_interleave(128, 2)[:, :, :HIDDEN])

    experts()
    tolerance = {"rtol": 0.1 if scales else 0.02, "atol": 0.1}
    reference = x.float() * weights.sum(1, keepdim=True)
    torch.testing.assert_close(ll.combine(y, received).float(), reference, **tolerance)
    counts = [sum(int((given.ids == e).sum()) for given in inputs) for e in group.experts_of(EXPERTS)]
    assert equal(received.rows, np.array(counts, np.int32))
    torch.cuda.current_stream().synchronize()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        ll.dispatch(x, ids, weights)
        experts()
        captured = ll.combine(y, received)
    x.mul_(2)
    torch.cuda.current_stream().synchronize()
    group.barrier()
    for _ in range(3):
        graph.replay()
    torch.cuda.current_stream().synchronize()
    torch.testing.assert_close(captured.float(), 2 * reference, **tolerance)
    group.barrier()
    del graph


@pytest.mark.parametrize("scales", [None, "f32"])
def test_low_latency(scales):
    over_ranks(_low_latency, sy.LowLatency.heap_bytes(WORLD, dtype="bf16", scales=scales, scale_order="column_major", **SHAPE), scales)


def _gradients(group, layout):
    """Gradients of the sum of a token's rows times their weights, with experts that return their input unchanged."""
    exchange = sy.Exchange(group, dtype="f32", layout=layout, routing_gradients=True, **SHAPE)
    x, ids, weights = on_gpu(inputs_of(4)[group.rank])
    x.requires_grad_(), weights.requires_grad_()
    rows, handle = exchange.dispatch(x, ids, weights)
    if layout == "expert_major":
        out = exchange.combine(rows, handle, order="per_route")
    else:
        out = exchange.combine(rows * torch.where(handle.topk_ids >= 0, handle.topk_weights, 0).sum(1, keepdim=True), handle)
    out.sum().backward()
    valid = (ids >= 0) & (ids < EXPERTS)
    torch.testing.assert_close(x.grad, torch.where(valid, weights.detach(), 0).sum(1, keepdim=True).expand_as(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weights.grad, torch.where(valid, x.detach().sum(1, keepdim=True), 0), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_gradients(layout):
    heap = sy.Exchange.heap_bytes(WORLD, backend="cuda", dtype="f32", layout=layout, routing_gradients=True, **SHAPE)
    over_ranks(_gradients, heap, layout)


def _rows_of_the_caller(group, quantize):
    """Eagerly, by the handle, and from a graph that runs with other rows."""
    exchange = sy.Exchange(group, dtype="f32", layout="expert_major", **SHAPE)
    x, ids, weights = on_gpu(inputs_of(6)[group.rank])
    own, handle = exchange.dispatch(x, ids, weights, quantize=quantize)
    count, parts = handle.rows, (lambda each: each if isinstance(each, tuple) else (each,))
    want = [each[:count].clone() for each in parts(own)]
    del own
    rows = torch.zeros(exchange._most_rows, HIDDEN, dtype=torch.float8_e4m3fn if quantize else torch.float32, device="cuda")
    out = rows if quantize is None else (rows, torch.zeros(exchange._most_rows, 4, device="cuda"))
    call = lambda **how: exchange.dispatch(x, *(() if "handle" in how else (ids, weights)), quantize=quantize, out=out, **how)
    same = lambda got, expected: all(torch.equal(a[:count].view(torch.uint8), b.view(torch.uint8)) for a, b in zip(parts(got), expected))
    for _ in range(3):
        got, again = call()
        assert parts(got)[0].data_ptr() == rows.data_ptr() and same(got, want) and again.rows == count
    if quantize is None:
        mine, copied = exchange.allocate_rows(handle), exchange.last_call().copied_bytes
        assert same(exchange.dispatch(x, handle=handle, out=mine)[0], want)
        assert exchange.last_call().copied_bytes < copied  # all but one of a token's rows on this rank are copies
        del mine  # frees its memory, which is needed below
    rows.view(torch.uint8).zero_()
    assert same(call(handle=handle)[0], want)
    torch.cuda.current_stream().synchronize()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        captured, kept = call()
    x.mul_(2)
    doubled = [each.clone() for each in want]
    doubled[-1].mul_(2)  # a factor that is a power of two changes only the scales
    torch.cuda.current_stream().synchronize()
    group.barrier()
    for _ in range(3):
        graph.replay()
    torch.cuda.current_stream().synchronize()
    assert same(captured, doubled)
    group.barrier()
    del graph, kept


@pytest.mark.parametrize("quantize", [None, "f32"])
def test_rows_of_the_caller(quantize):
    heap = sy.Exchange.heap_bytes(WORLD, backend="cuda", dtype="f32", layout="expert_major", **SHAPE)
    over_ranks(_rows_of_the_caller, heap, quantize)


def _compiled(group, layout, size):
    """Two layers with checkpoints; low latency."""
    from torch.utils.checkpoint import checkpoint

    exchange = sy.Exchange(group, dtype="f32", layout=layout, routing_gradients=True, **SHAPE)
    x, ids, weights = on_gpu(inputs_of(7)[group.rank])
    x.requires_grad_(), weights.requires_grad_()

    def layer(x, ids, weights):
        rows, handle = exchange.dispatch(x, ids, weights, size=size)
        factor = 1 if layout == "expert_major" else torch.where(handle.topk_ids >= 0, handle.topk_weights, 0).sum(1, keepdim=True)
        rows = torch.where((handle.row_source if layout == "expert_major" else handle.source_token)[:, None] >= 0, rows, 0)
        return torch.tanh(exchange.combine(torch.relu(rows) * factor, handle))

    def model(x, ids, weights):
        for _ in range(2):
            x = checkpoint(layer, x, ids, weights, use_reentrant=False, context_fn=sy.keep_plans)
        return x

    def results(function):
        out = function(x, ids, weights)
        return (out.detach(), *torch.autograd.grad(out.square().sum(), (x, weights)))

    for got, want in zip(results(torch.compile(model, backend="aot_eager", fullgraph=True)), results(model)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", ["exact", "automatic"])
@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_compiled(layout, size):
    heap = sy.Exchange.heap_bytes(WORLD, backend="cuda", dtype="f32", layout=layout, routing_gradients=True, **SHAPE)
    over_ranks(_compiled, heap, layout, size)


def _low_latency_of_the_caller(group):
    ll = sy.LowLatency(group, dtype="bf16", scales=None, **SHAPE)
    x, ids, weights = on_gpu(inputs_of(8, torch.bfloat16)[group.rank], torch.bfloat16)
    want = ll.dispatch(x, ids, weights)
    memory = torch.zeros_like(want.x)
    output = ll.make_output(memory=memory)
    there = torch.arange(memory.shape[1], device="cuda")[None, :, None] < want.rows[:, None, None]
    got = ll.dispatch(x, ids, weights, output=output)
    assert got.x.data_ptr() == memory.data_ptr() and torch.equal(got.rows, want.rows)
    assert torch.equal(torch.where(there, memory, 0), torch.where(there, want.x, 0))

    def layer(x, ids, weights):
        received = ll.dispatch(x, ids, weights)
        return ll.combine(torch.where(there, received.x, 0) * 2, received)

    assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x, ids, weights), layer(x, ids, weights))


def test_low_latency_of_the_caller():
    over_ranks(_low_latency_of_the_caller, sy.LowLatency.heap_bytes(WORLD, dtype="bf16", scales=None, **SHAPE))


def _grouped_gemm(group, layout):
    """Compared with torch, with the rows of a dispatch: row i of the result corresponds to row i."""
    inputs = inputs_of(9, torch.bfloat16)
    x, ids, weights = on_gpu(inputs[group.rank], torch.bfloat16)
    here, generator = len(group.experts_of(EXPERTS)), torch.Generator("cuda").manual_seed(group.rank)
    w13 = torch.randn(here, 256, HIDDEN, device="cuda", generator=generator).bfloat16()
    w2 = torch.randn(here, HIDDEN, 128, device="cuda", generator=generator).bfloat16()
    up, down = sy.GroupedGemm(w13, epilogue="swiglu"), sy.GroupedGemm(w2)
    assert (up.columns, down.columns) == (128, HIDDEN)
    if layout == "low_latency":
        ll = sy.LowLatency(group, dtype="bf16", scales=None, **SHAPE)
        rows = ll.dispatch(x, ids, weights)
        given, y = rows.x, ll.make_rows(rows)
        extents = [(e, rows.x[e, :n], y[e, :n]) for e, n in enumerate(rows.rows.tolist())]
    else:
        exchange = sy.Exchange(group, dtype="bf16", layout="expert_major", expert_alignment=8, **SHAPE)
        given, rows = exchange.dispatch(x, ids, weights)
        y, counts = exchange.allocate_rows(rows), rows.counts()
        extents = [(e, given[f:f + n], y[f:f + n]) for e, (f, n) in enumerate(zip(counts.expert_first_row, counts.tokens_per_expert))]
    assert down(up(given, rows), rows, out=y) is y
    for e, of, got in extents:
        both = of.float() @ w13[e].float().T
        middle = (torch.nn.functional.silu(both[:, :128]) * both[:, 128:]).bfloat16()
        torch.testing.assert_close(got.float(), middle.float() @ w2[e].float().T, rtol=0.05, atol=2.0)


@pytest.mark.parametrize("layout", ["expert_major", "low_latency"])
def test_grouped_gemm(layout):
    try:
        sy._abi.ffi.layer_library()
    except sy.LibraryNotFound:
        pytest.skip("no library of the layer")
    heap = sy.Exchange.heap_bytes(WORLD, backend="cuda", dtype="bf16", layout="expert_major", expert_alignment=8, **SHAPE)
    over_ranks(_grouped_gemm, heap + sy.LowLatency.heap_bytes(WORLD, dtype="bf16", scales=None, **SHAPE), layout)


def _traced(group):
    exchange = sy.Exchange(group, dtype="f32", **SHAPE)
    given = on_gpu(inputs_of(10)[group.rank])
    exchange.dispatch(*given)
    torch.cuda.current_stream().synchronize()
    group.barrier()
    trace = sy.Trace(group, events_per_track=256)
    with trace:
        rows, handle = exchange.dispatch(*given)
        exchange.combine(rows, handle, apply_weights=False)
        torch.cuda.current_stream().synchronize()
        group.barrier()
    trace.gather()
    spans = {(p.name, p.rank): p.spans for p in trace.summary()}
    assert all(spans[name, r] >= 1 for name in ("dispatch", "combine", "send_rows") for r in range(WORLD))


def test_traces():
    over_ranks(_traced, sy.Exchange.heap_bytes(WORLD, backend="cuda", dtype="f32", **SHAPE))


def _ledger(group):
    exchange = sy.Exchange(group, dtype="f32", layout="expert_major", **SHAPE)
    combine = sy.LedgerCombine(group, dtype="f32", **SHAPE)
    x, ids, weights = on_gpu(inputs_of(11)[group.rank])
    rows, handle = exchange.dispatch(x, ids, weights)
    prepared = combine.prepare(handle.ledger())
    group.barrier()
    assert torch.equal(combine.combine(rows * 2, prepared, weights), exchange.combine(rows * 2, handle, order="per_route"))


def test_ledgers():
    heap = sy.Exchange.heap_bytes(WORLD, backend="cuda", dtype="f32", layout="expert_major", **SHAPE)
    over_ranks(_ledger, heap + sy.LedgerCombine.heap_bytes(WORLD, backend="cuda", dtype="f32", **SHAPE))


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


def test_process_groups_of_nccl(gpus, tmp_path):
    if gpus < WORLD:
        pytest.skip("NCCL wants a GPU for each rank")
    assert run_processes("spawn", _nccl, WORLD, str(tmp_path / "store"), seconds=300) == [0] * WORLD


@pytest.mark.parametrize("experts, world", [(1, 1), (8, 1), (7, 3), (2, 4), (256, 8), (300, 64), (20000, 5)])
@pytest.mark.parametrize("tokens, topk", [(0, 3), (1, 32), (333, 5), (4097, 8), (65536, 2)])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_routing_layout(experts, world, tokens, topk, kind):
    """Counted on the GPU, twice and in a graph, and compared with the counts of the host."""
    ids = torch.randint(-1, experts, (tokens, topk), generator=torch.Generator().manual_seed(tokens)).to(kind)
    want, given = sy.routing_layout(ids, num_experts=experts, world=world), ids.cuda()
    for _ in range(2):
        got = sy.routing_layout(given, num_experts=experts, world=world)
        for here, there in zip(got, want):
            assert equal(here, there) and here.dtype == torch.from_numpy(there).dtype
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sy.routing_layout(given, num_experts=experts, world=world)
    given.fill_(0)
    graph.replay()
    for here, there in zip(got, sy.routing_layout(given.cpu(), num_experts=experts, world=world)):
        assert equal(here, there)


def test_routing_layout_refuses():
    ids = torch.zeros((4, 2), dtype=torch.int64, device="cuda")
    for wrong in ({"num_experts": 0, "world": 1}, {"num_experts": 40000, "world": 1}, {"num_experts": 4, "world": 65}):
        with pytest.raises(sy.InvalidArgument, match="num_experts|world"):
            sy.routing_layout(ids, **wrong)
    with pytest.raises(sy.InvalidArgument, match="not dense"):
        sy.routing_layout(ids.t(), num_experts=4, world=1)


def test_the_example_of_serving(environment):
    """Its steps are replays of a graph; the program itself checks the last one."""
    program = EXAMPLES / "08_serving.py"
    if not program.is_file():
        pytest.skip("the tests are not in a clone")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD), str(program), "cuda"]
    done = subprocess.run(command, check=True, timeout=300, env=environment, capture_output=True, text=True)
    assert f"tokens/s on {WORLD} ranks, cuda" in done.stdout
