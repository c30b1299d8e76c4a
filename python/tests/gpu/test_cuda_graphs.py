# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of normal mode captured by torch, compared with the oracle, and the kernels of captured calls. Graphs of low
latency are in test_cuda.py; those of the drop-in's calls are in test_cuda_deep_ep.py. Ranks are processes distributed over the
GPUs."""
import ctypes

import pytest

import oracle
import switchyard as sy

torch = pytest.importorskip("torch")

from deep_ep_ranks import EXPERTS as FEW, LARGE, MAX_TOKENS, calc_diff, dispatch_all, inputs_of as few_inputs, tensors  # noqa: E402
from test_cuda import EXPERTS, SHAPE, WORLD, equal, inputs_of, on_gpu, over_ranks  # noqa: E402
from test_cuda_deep_ep import captured, inputs, on_two, summed, worst  # noqa: E402

LAYOUTS = {"rank_major": {"dtype": "f32", **SHAPE}, "expert_major": {"dtype": "f32", "layout": "expert_major", "expert_alignment": 4, **SHAPE}}


@pytest.fixture(autouse=True)
def gpus():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")


def pool_of(layout, times):
    """A pool of `times` times the memory that one eager call of each kind takes."""
    pool = sy.Exchange.memory_required(WORLD, backend="cuda", **LAYOUTS[layout]).pool_bytes
    return dict(LAYOUTS[layout], pool_bytes=times * pool)


def heap_of(config):
    return sy.Exchange.heap_bytes(WORLD, backend="cuda", **config)


def together(group):
    """Waits until all work is complete on this rank and on the others."""
    torch.cuda.current_stream().synchronize()
    group.barrier()


def capture(group, work):
    """Returns a graph of `work` and the result of `work`."""
    together(group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        result = work()
    together(group)
    return graph, result


def received(inputs, layout, rank):
    """Returns the rows that a dispatch delivers to `rank`."""
    return oracle.rank_major(inputs, EXPERTS, rank) if layout == "rank_major" else oracle.expert_major(inputs, EXPERTS, rank, 4)


def sums(inputs, layout, rank):
    """Returns the sums of rows after each rank r has multiplied its rows by r + 2."""
    def made(r):
        return received(inputs, layout, r).x * (r + 2)

    if layout == "rank_major":
        return oracle.combine_rank_major(inputs, EXPERTS, rank, made)
    return oracle.combine_expert_major(inputs, EXPERTS, rank, made, "per_rank", True, 4)


def _whole(group, config, layout, size):
    """A dispatch with counts, experts' rows in symmetric memory, and combine: rows, routing and weights differ between
    replays."""
    exchange = sy.Exchange(group, **config)
    x, ids, weights = on_gpu(inputs_of(1)[group.rank])
    how = {"capacity": exchange._most_rows} if size == "capacity" else {"size": size}

    def step():
        rows, handle = exchange.dispatch(x, ids, weights, **how)
        y = exchange.allocate_rows(handle)
        torch.mul(rows[:len(y)], group.rank + 2, out=y)
        return rows, handle, exchange.combine(y, handle, apply_weights=layout == "expert_major")

    for _ in range(2):
        step()
    graph, (rows, handle, out) = capture(group, step)
    for seed in (5, 6, 7):
        inputs = inputs_of(seed)
        for static, value in zip((x, ids, weights), on_gpu(inputs[group.rank])):
            static.copy_(value)
        together(group)
        graph.replay()
        want = received(inputs, layout, group.rank)
        count = len(want.x)
        assert equal(rows[:count], want.x) and equal(out, sums(inputs, layout, group.rank))
        if layout == "rank_major":
            assert equal(handle.topk_ids[:count], want.ids) and equal(handle.source_token[:count], want.tokens)
        else:
            assert equal(handle.row_source[:count], want.source) and equal(handle.aligned_per_expert, want.aligned)
        together(group)
    eager = step()[2]  # eager again, after replays
    assert torch.equal(eager, out)
    together(group)
    del graph, rows, handle


@pytest.mark.parametrize("size", ["worst_case", "capacity"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole(layout, size):
    config = pool_of(layout, 2)
    over_ranks(_whole, heap_of(config), config, layout, size)


def _training_step(group, config, layout):
    """Forward, backward and a step of gradient descent, captured as a whole: bitwise equal to the same number of eager
    steps."""
    exchange = sy.Exchange(group, **config)
    x, ids, weights = on_gpu(inputs_of(8)[group.rank])
    begun, target = (x.clone(), weights.clone()), torch.linspace(-1, 1, x.numel(), device="cuda").view_as(x)
    x.requires_grad_(), weights.requires_grad_()

    def step():
        x.grad = weights.grad = None
        rows, handle = exchange.dispatch(x, ids, weights)
        if layout == "expert_major":
            out = exchange.combine(rows * 2, handle, order="per_route")
        else:
            of_row = torch.where(handle.topk_ids >= 0, handle.topk_weights, 0).sum(1, keepdim=True)
            out = exchange.combine(rows * 2 * of_row, handle)
        loss = (out - target).square().sum()
        loss.backward()
        with torch.no_grad():
            for each in (x, weights):
                each.sub_(each.grad, alpha=1e-3)
        return loss.detach()

    losses = [step().item() for _ in range(4)]
    ended = x.detach().clone(), weights.detach().clone()
    with torch.no_grad():
        x.copy_(begun[0]), weights.copy_(begun[1])
    graph, loss = capture(group, step)
    for want in losses:
        graph.replay()
        assert loss.item() == want
        together(group)
    assert torch.equal(x, ended[0]) and torch.equal(weights, ended[1]) and losses[-1] < losses[0]
    del graph


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_step(layout):
    config = dict(pool_of(layout, 4), routing_gradients=True)
    over_ranks(_training_step, heap_of(config), config, layout)


def _by_handle(group, config, layout):
    """The handle of an eager dispatch, with sums in a preallocated tensor."""
    exchange = sy.Exchange(group, **config)
    inputs = inputs_of(2)
    x, ids, weights = on_gpu(inputs[group.rank])
    base, out = x.clone(), torch.full_like(x, -1)
    first, handle = exchange.dispatch(x, ids, weights)
    del first

    def step():
        rows, same = exchange.dispatch(x, handle=handle)
        assert same is handle
        assert exchange.combine(rows.mul_(group.rank + 2), handle, apply_weights=layout == "expert_major", out=out) is out
        return rows

    step()
    graph, rows = capture(group, step)
    want, summed = received(inputs, layout, group.rank).x, sums(inputs, layout, group.rank)
    for factor in (1, 2, 4):  # exact
        torch.mul(base, factor, out=x)
        together(group)
        graph.replay()
        assert equal(rows[:len(want)], want * (factor * (group.rank + 2))) and equal(out, summed * factor)
        together(group)
    del graph, rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_by_handle(layout):
    config = pool_of(layout, 2)
    over_ranks(_by_handle, heap_of(config), config, layout)


def _shared_memory(group, config, graphs):
    """Many graphs with different inputs in a pool for two calls, launched in turn."""
    exchange = sy.Exchange(group, **config)
    exchange.use_graph_memory(exchange.make_graph_memory())
    made = []
    for number in range(graphs):
        inputs = inputs_of(10 + number)
        x, ids, weights = on_gpu(inputs[group.rank])

        def step(x=x, ids=ids, weights=weights):
            rows, handle = exchange.dispatch(x, ids, weights)
            y = exchange.allocate_rows(handle)
            torch.mul(rows[:len(y)], group.rank + 2, out=y)
            return exchange.combine(y, handle, apply_weights=False)

        if number == 0:
            step()
        graph, out = capture(group, step)
        made.append((graph, out, inputs, (x, ids, weights)))
    for _ in range(2):
        for graph, out, inputs, _ in made:
            out.fill_(-1)
            together(group)
            graph.replay()
            assert equal(out, sums(inputs, "rank_major", group.rank))
            together(group)
    exchange.use_graph_memory(None)
    x, ids, weights = made[0][3]
    rows, handle = exchange.dispatch(x, ids, weights)  # eager calls can use the rest of the pool
    assert equal(rows[:handle.rows], received(made[0][2], "rank_major", group.rank).x)
    together(group)
    made.clear()
    del graph


def test_shared_memory():
    config = pool_of("rank_major", 2)
    over_ranks(_shared_memory, heap_of(config), config, 6)


# ---- Kernels of captured calls of the drop-in ----


class KernelNode(ctypes.Structure):
    """The driver's CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [("function", ctypes.c_void_p), ("shape", ctypes.c_uint * 7), ("given", ctypes.c_void_p), ("extra", ctypes.c_void_p),
                ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p)]


def kernels_of(graph):
    """Returns the names of the graph's kernels, as generated by the compiler. Fails if it has nodes of another kind."""
    driver, raw, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(raw, None, ctypes.byref(number)) == 0
    nodes, names = (ctypes.c_void_p * number.value)(), []
    assert driver.cuGraphGetNodes(raw, nodes, ctypes.byref(number)) == 0
    for node in nodes:
        kind, params, name = ctypes.c_int(-1), KernelNode(), ctypes.c_char_p()
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        assert kind.value == 0, f"node {len(names)} is no kernel but of kind {kind.value}"
        assert driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(params)) == 0
        if params.function:
            assert driver.cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(params.function)) == 0
        else:
            assert driver.cuKernelGetName(ctypes.byref(name), ctypes.c_void_p(params.kernel)) == 0
        names.append(name.value.decode())
    return names


def _kernels(buffer, low_latency, fp8):
    """A dispatch and a combine are two kernels, and torch adds none. Those of low latency are compiled for these calls, not
    generic."""
    x, ids, weights = tensors(few_inputs(buffer.group_size, repeats=False)[buffer.rank])

    def pair():
        if low_latency:
            *_, handle, _, _ = buffer.low_latency_dispatch(x, ids, MAX_TOKENS, FEW, use_fp8=fp8)
            buffer.get_next_low_latency_combine_buffer(handle)
            return buffer.low_latency_combine(x, ids, weights, handle, zero_copy=True)
        rows, *_ = buffer.dispatch(x, handle=known)
        return buffer.combine(rows, known)

    if not low_latency:
        *_, known, _ = dispatch_all(buffer, x, ids, weights, FEW)
    for _ in range(2):
        pair()
    torch.cuda.synchronize()
    buffer.runtime.barrier()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        pair()
    names = kernels_of(graph)
    assert len(names) == 2, names
    if low_latency:
        assert "KnownDispatch" in names[0] and "KnownCombine" in names[1], names
    buffer.runtime.barrier()
    del graph


@pytest.mark.parametrize("low_latency, fp8", [(True, True), (True, False), (False, False)])
def test_kernels(low_latency, fp8):
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        pytest.skip("this torch does not show its graphs")
    on_two(_kernels, low_latency, fp8)


def _graphs_of_the_drop_in(buffer, graphs):
    """Many graphs of normal mode, whose calls together need several times the size of the pool. They are launched in turn."""
    made = []
    for number in range(graphs):
        _, x, ids, weights = inputs(buffer, number)

        def step(x=x, ids=ids, weights=weights):
            per_rank, _, per_expert, where, _ = buffer.get_dispatch_layout(ids, LARGE["num_experts"])
            rows, *_, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=per_rank,
                                                  num_tokens_per_expert=per_expert, is_token_in_rank=where, num_worst_tokens=worst(buffer))
            return buffer.combine(rows, handle)[0]

        if number == 0:
            step(), step()
        graph, out = captured(buffer, step)
        made.append((graph, x, ids, out))
    for _ in range(2):
        for graph, x, ids, out in made:
            out.fill_(-1)
            torch.cuda.synchronize()
            buffer.runtime.barrier()
            graph.replay()
            torch.cuda.synchronize()
            assert calc_diff(out, summed(x, ids, buffer.group_size)) < 5e-6
    buffer.runtime.barrier()
    made.clear()
    del graph


def test_graphs_of_the_drop_in():
    on_two(_graphs_of_the_drop_in, 40)
