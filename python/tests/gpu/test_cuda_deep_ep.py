# SPDX-License-Identifier: Apache-2.0
"""The drop-in for DeepEP on GPUs: streams, events, lifetimes, calls that do not wait, and CUDA graphs. Results are checked by
drop_in/test_deep_ep.py, which also runs on GPUs. Ranks are processes distributed over the GPUs."""
import os

import pytest

torch = pytest.importorskip("torch")

from deep_ep_ranks import (EXPERTS, LARGE, MAX_TOKENS, calc_diff, check_low_latency, dequantised, dispatch_all, inputs_of,  # noqa: E402
                           make_buffer, over_groups, over_ranks, ranks_of, received_of, same, seeded, tensors, weighted)
from processes import run_processes  # noqa: E402
import switchyard as sy  # noqa: E402
from switchyard import deep_ep  # noqa: E402

#: Cycles of kernels that keep a stream busy: for some milliseconds, and for more than a second.
SHORT, LONG = 10_000_000, 2_000_000_000
TOKENS = (200, 170)


@pytest.fixture(autouse=True)
def gpus():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")


def on_two(scenario, *arguments):
    over_ranks("cuda", 2, scenario, *arguments)


def inputs(buffer, seed=0):
    everybody = seeded(buffer.group_size, TOKENS, seed=seed, **LARGE)
    return everybody, *(each.cuda() for each in everybody[buffer.rank])


def summed(x, ids, world):
    """Returns the combined rows of a dispatch."""
    return x.float() * ranks_of(ids, LARGE["num_experts"], world).sum(1, keepdim=True)


def worst(buffer):
    return max(TOKENS) * buffer.group_size


def captured(buffer, work):
    """Returns a graph of `work` and the result of `work`. Ranks begin together."""
    torch.cuda.synchronize()
    buffer.runtime.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def end_of(event, hook=None):
    """Waits like a caller that is about to use results."""
    if hook is not None:
        hook()
    elif event.event is not None:
        event.current_stream_wait()


# ---- Streams and events ----

WAYS = [(False, False, False), (False, True, False), (True, False, False), (True, True, False), (True, True, True)]


def _every_way(buffer, default_stream, previous, asynchronous, on_comm):
    """The inputs of a call are written late on the current stream, which is busy again right after the call. The results must
    be those of the content written before the event, or before the call."""
    with torch.cuda.stream(torch.cuda.default_stream() if default_stream else torch.cuda.Stream()):
        _each_form(buffer, previous, asynchronous, on_comm)


def _each_form(buffer, previous, asynchronous, on_comm):
    everybody, x, ids, weights = inputs(buffer)
    want = received_of(everybody, LARGE["num_experts"], buffer.rank)[0]
    *_, kept, _ = dispatch_all(buffer, x, ids, weights, LARGE["num_experts"])

    def keywords():
        return {"previous_event": buffer.capture() if previous else None, "async_finish": asynchronous,
                "allocate_on_comm_stream": on_comm}

    for form in ("counts", "worst", "cached"):
        late = torch.zeros_like(x)
        torch.cuda._sleep(SHORT)
        late.copy_(x)
        how = keywords()
        if previous:
            torch.cuda._sleep(SHORT)
        if form == "cached":
            rows, *_, event = buffer.dispatch(late, handle=kept, **how)
            handle = kept
        else:
            per_rank, _, per_expert, where, chained = buffer.get_dispatch_layout(ids, LARGE["num_experts"], **how)
            if chained.event is not None:
                how["previous_event"] = chained
            rows, _, _, _, handle, event = buffer.dispatch(
                late, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=per_rank, is_token_in_rank=where,
                num_tokens_per_expert=per_expert, num_worst_tokens=worst(buffer) if form == "worst" else 0, **how)
        assert (event.event is not None) == asynchronous
        end_of(event)
        y = rows.clone()
        out, _, event = buffer.combine(y, handle, **keywords())
        del late, rows
        end_of(event)
        assert same(y[:len(want)], want)
        assert calc_diff(out, summed(x, ids, buffer.group_size)) < 5e-6


@pytest.mark.parametrize("previous, asynchronous, on_comm", WAYS)
@pytest.mark.parametrize("default_stream", [False, True])
def test_every_way(default_stream, previous, asynchronous, on_comm):
    on_two(_every_way, default_stream, previous, asynchronous, on_comm)


def _rows_arrive(buffer, row_memory):
    """Rows that a dispatch by handle delivers and a combine reads are copied or not, depending on the available memory."""
    everybody, x, ids, weights = inputs(buffer)
    want = received_of(everybody, LARGE["num_experts"], buffer.rank)[0]
    os.environ.update({} if row_memory is None else {"SWITCHYARD_DEEP_EP_ROW_MEMORY": row_memory})
    try:
        *_, handle, _ = dispatch_all(buffer, x, ids, weights, LARGE["num_experts"])
    finally:
        os.environ.pop("SWITCHYARD_DEEP_EP_ROW_MEMORY", None)
    copied = lambda: handle.exchange.last_call().copied_bytes > 0
    rows, *_ = buffer.dispatch(x, handle=handle)
    found = [copied()]
    for y in (rows, rows.clone()):
        out, _, _ = buffer.combine(y, handle)
        assert calc_diff(out, summed(x, ids, buffer.group_size)) < 5e-6
        found.append(copied())
    assert same(rows, want) and found == ([False, False, True] if row_memory is None else [True, True, True])


@pytest.mark.parametrize("row_memory", [None, "0"])
def test_rows_arrive_where_they_are_kept(row_memory):
    on_two(_rows_arrive, row_memory)


def _mixed(buffer):
    """Calls on several streams and in several ways, ordered by the caller only through the returned events."""
    everybody, x, ids, weights = inputs(buffer)
    want = received_of(everybody, LARGE["num_experts"], buffer.rank)[0]
    small, small_ids, small_weights = tensors(inputs_of(buffer.group_size, repeats=False)[buffer.rank])
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    *_, handle, _ = dispatch_all(buffer, x, ids, weights, LARGE["num_experts"])
    for step in range(4):
        rows, *_, event = buffer.dispatch(x * (step + 1), handle=handle, async_finish=step % 2 == 1)
        end_of(event)
        with torch.cuda.stream(other):
            received, _, its_handle, event, hook = buffer.low_latency_dispatch(
                small, small_ids, MAX_TOKENS, EXPERTS, use_fp8=False, async_finish=step % 2 == 0, return_recv_hook=step % 2 == 1)
            end_of(event, hook)
            out, *_ = buffer.low_latency_combine(received.nan_to_num(0, 0, 0), small_ids, small_weights, its_handle)
        summed_rows, _, _ = buffer.combine(rows, handle)
        torch.cuda.synchronize()
        assert same(rows, want * (step + 1)) and calc_diff(out, weighted(small, small_ids, small_weights)) < 1e-5
        assert calc_diff(summed_rows, summed(x, ids, buffer.group_size) * (step + 1)) < 5e-6


def test_mixed():
    on_two(_mixed)


def _lifetimes(buffer):
    """The caller drops the inputs of an asynchronous call at once, and their memory is rewritten on the current stream."""
    everybody, x, ids, weights = inputs(buffer)
    want = received_of(everybody, LARGE["num_experts"], buffer.rank)[0]
    *_, handle, _ = dispatch_all(buffer, x, ids, weights, LARGE["num_experts"])
    comm = buffer.get_comm_stream()
    assert isinstance(comm, torch.cuda.Stream) and comm != torch.cuda.current_stream()
    for on_comm in (False, True):
        temporary = x * 3
        ready = buffer.capture()
        with torch.cuda.stream(comm):
            torch.cuda._sleep(SHORT)
        rows, *_, event = buffer.dispatch(temporary, handle=handle, previous_event=ready, async_finish=True,
                                          allocate_on_comm_stream=on_comm)
        del temporary
        event.extra_tensors = None
        garbage = [torch.full_like(x, 77) for _ in range(8)]
        event.current_stream_wait()
        assert same(rows, want * 3)
        del rows, garbage


def test_lifetimes():
    on_two(_lifetimes)


def _comm_stream(buffer):
    """Work that the caller enqueues on the communication stream precedes later calls."""
    everybody, x, ids, weights = inputs(buffer)
    want = received_of(everybody, LARGE["num_experts"], buffer.rank)[0]
    *_, handle, _ = dispatch_all(buffer, x, ids, weights, LARGE["num_experts"])
    late = torch.zeros_like(x)
    comm = buffer.get_comm_stream()
    comm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(comm):
        torch.cuda._sleep(SHORT)
        late.copy_(x)
    rows, *_ = buffer.dispatch(late, handle=handle)
    assert same(rows, want)


def test_comm_stream():
    on_two(_comm_stream)


def _hook_elsewhere(buffer):
    """A hook called while another stream is current receives on the sending stream."""
    given = inputs_of(buffer.group_size, repeats=False)
    x, ids, weights = tensors(given[buffer.rank])
    stats = torch.zeros(EXPERTS // buffer.group_size, dtype=torch.int32, device="cuda")
    torch.cuda._sleep(SHORT)
    received, count, handle, _, hook = buffer.low_latency_dispatch(x, ids, MAX_TOKENS, EXPERTS, use_fp8=True, round_scale=True,
                                                                   cumulative_local_expert_recv_stats=stats, return_recv_hook=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        hook()
    check_low_latency(received, count, handle, given, buffer.rank)
    assert same(stats, count)


def test_hook_elsewhere():
    on_two(_hook_elsewhere)


# ---- Calls that do not wait ----


def _no_waits(buffer):
    """Calls return while the stream is still busy with earlier work, and do not make torch wait."""
    everybody, x, ids, weights = inputs(buffer)
    small, small_ids, small_weights = tensors(inputs_of(buffer.group_size, repeats=False)[buffer.rank])
    *_, handle, _ = dispatch_all(buffer, x, ids, weights, LARGE["num_experts"])

    def calls():
        rows, _, its_weights, _, its_handle, _ = dispatch_all(buffer, x, ids, weights, LARGE["num_experts"], num_worst_tokens=worst(buffer))
        buffer.combine(rows, its_handle, topk_weights=its_weights, bias=x)
        rows, *_ = buffer.dispatch(x, handle=handle)
        buffer.combine(rows, handle)
        for hooked in (False, True):
            received, _, of, event, hook = buffer.low_latency_dispatch(small, small_ids, MAX_TOKENS, EXPERTS, return_recv_hook=hooked)
            end_of(event, hook)
            y = dequantised(received).bfloat16()
            *_, event, hook = buffer.low_latency_combine(y, small_ids, small_weights, of, return_recv_hook=hooked)
            end_of(event, hook)

    for _ in range(3):
        calls()
    torch.cuda.synchronize()
    buffer.runtime.barrier()
    torch.cuda._sleep(LONG)
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.cuda.current_stream().query(), "a call waited for the GPU"


def test_no_waits():
    on_two(_no_waits)


# ---- CUDA graphs ----


def _graph_low_latency(buffer, how, way):
    x, ids, weights = tensors(inputs_of(buffer.group_size, repeats=False)[buffer.rank])
    base = x.clone()
    asked = {"async_finish": way == "async", "return_recv_hook": way == "hook"}

    def step():
        received, count, handle, event, hook = buffer.low_latency_dispatch(x, ids, MAX_TOKENS, EXPERTS, **how, **asked)
        end_of(event, hook)
        y = dequantised(received).nan_to_num(0, 0, 0).bfloat16()
        plain, event, hook = buffer.low_latency_combine(y, ids, weights, handle, **asked)
        end_of(event, hook)
        buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
        copied, event, hook = buffer.low_latency_combine(y, ids, weights, handle, zero_copy=True, **asked)
        end_of(event, hook)
        return plain, copied

    for _ in range(2):
        step()
    graph, results = captured(buffer, step)
    for factor in (1, 2, 3):
        x.copy_(base * factor)
        graph.replay()
        torch.cuda.synchronize()
        for each in results:
            assert calc_diff(each, weighted(x, ids, weights)) < (9e-4 if how["use_fp8"] else 1e-5)
    again, _ = step()  # eagerly, after replays
    assert same(again, results[0])
    buffer.runtime.barrier()
    del graph


HOW = {"bf16": {"use_fp8": False}, "fp8": {"use_fp8": True}, "powers": {"use_fp8": True, "round_scale": True},
       "ue8m0": {"use_fp8": True, "round_scale": True, "use_ue8m0": True}}


@pytest.mark.parametrize("way", ["plain", "hook", "async"])
@pytest.mark.parametrize("how", HOW)
def test_graph_low_latency(how, way):
    on_two(_graph_low_latency, HOW[how], way)


def _graph_normal(buffer, asynchronous):
    """Layout, dispatch with num_worst_tokens, cached dispatch and combine. Rows and routing differ between replays."""
    _, x, ids, weights = inputs(buffer)
    experts = LARGE["num_experts"]

    def keywords():
        return {"previous_event": buffer.capture() if asynchronous else None, "async_finish": asynchronous,
                "allocate_on_comm_stream": asynchronous}

    def step():
        how = keywords()
        per_rank, _, per_expert, where, event = buffer.get_dispatch_layout(ids, experts, **how)
        end_of(event)
        rows, its_ids, its_weights, _, handle, event = buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=per_rank, is_token_in_rank=where,
            num_tokens_per_expert=per_expert, num_worst_tokens=worst(buffer), **keywords())
        end_of(event)
        out, sums, event = buffer.combine(rows, handle, topk_weights=its_weights, **keywords())
        end_of(event)
        again, *_, event = buffer.dispatch(out, handle=handle, **keywords())
        end_of(event)
        return rows, its_ids, out, sums, again, where, handle

    for _ in range(2):
        step()
    graph, (rows, its_ids, out, sums, again, where, handle) = captured(buffer, step)
    for seed in (5, 6, 7):
        everybody, *new = inputs(buffer, seed)
        for static, value in zip((x, ids, weights), new):
            static.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        want = received_of(everybody, experts, buffer.rank)
        number = len(want[0])
        assert same(rows[:number], want[0]) and same(its_ids[:number], want[1]) and (its_ids[number:] == -1).all()
        assert same(where, ranks_of(ids.cpu(), experts, buffer.group_size))
        assert calc_diff(out, summed(x, ids, buffer.group_size)) < 5e-6
        assert calc_diff(sums, torch.where(ids >= 0, weights, 0)) < 1e-9
        sent = [summed(*each[:2], buffer.group_size).bfloat16() for each in everybody]
        others = received_of([(given, *each[1:]) for given, each in zip(sent, everybody)], experts, buffer.rank)[0]
        assert calc_diff(again[:number], others) < 5e-6
    buffer.runtime.barrier()
    del graph, handle


@pytest.mark.parametrize("asynchronous", [False, True])
def test_graph_normal(asynchronous):
    on_two(_graph_normal, asynchronous)


def _graph_cached(buffer, asynchronous):
    """The handle of an eager dispatch of exact size is used in a graph, as in the backward pass of training."""
    everybody, x, ids, weights = inputs(buffer)
    want = received_of(everybody, LARGE["num_experts"], buffer.rank)[0]
    *_, handle, _ = dispatch_all(buffer, x, ids, weights, LARGE["num_experts"])
    base = x.clone()

    def step():
        rows, *_, event = buffer.dispatch(x, handle=handle, async_finish=asynchronous)
        end_of(event)
        out, _, event = buffer.combine(rows, handle, async_finish=asynchronous)
        end_of(event)
        return rows, out

    step()
    graph, (rows, out) = captured(buffer, step)
    for factor in (1, 2, 3):
        x.copy_(base * factor)
        graph.replay()
        torch.cuda.synchronize()
        assert same(rows, want * factor) and calc_diff(out, summed(x, ids, buffer.group_size)) < 5e-6
    eager, _ = step()
    assert same(eager, rows)
    buffer.runtime.barrier()
    del graph


@pytest.mark.parametrize("asynchronous", [False, True])
def test_graph_cached(asynchronous):
    on_two(_graph_cached, asynchronous)


# ---- Location of tensors ----


def _backends(group):
    world = group.size()
    everybody = seeded(world, TOKENS, **LARGE)
    x, ids, weights = everybody[group.rank()]
    assert os.environ["SWITCHYARD_DEEP_EP_BACKEND"] == "cuda"
    for named, variable, expected in ((None, None, "cuda"), ("cpu", None, "cpu"), ("cpu", "cuda", "cpu"), (None, "cpu", "cpu")):
        os.environ.pop("SWITCHYARD_DEEP_EP_BACKEND")
        if variable:
            os.environ["SWITCHYARD_DEEP_EP_BACKEND"] = variable
        try:
            buffer = make_buffer(group, backend=named)
        finally:
            os.environ["SWITCHYARD_DEEP_EP_BACKEND"] = "cuda"
        assert buffer.runtime.backend == expected
        given = [each.cuda() if expected == "cuda" else each for each in (x, ids, weights)]
        elsewhere = [each.cuda() if expected == "cpu" else each for each in (x, ids, weights)]
        for call in (lambda: buffer.get_dispatch_layout(elsewhere[1], LARGE["num_experts"]),
                     lambda: buffer.low_latency_dispatch(elsewhere[0], elsewhere[1], MAX_TOKENS, EXPERTS)):
            with pytest.raises(sy.InvalidArgument, match="this Buffer is for tensors on " + expected):
                call()
        rows, *_ = dispatch_all(buffer, *given, LARGE["num_experts"])
        assert rows.device.type == expected and same(rows, received_of(everybody, LARGE["num_experts"], group.rank())[0])
        scratch = buffer.get_local_buffer_tensor(torch.int8)
        assert scratch.device.type == expected
        torch.distributed.barrier(group)
        buffer.destroy()


def test_backends():
    over_groups("cuda", 2, _backends)


def _nccl(rank, world, path):
    """The setup of most programs: an NCCL group, and no configured location of tensors."""
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    os.environ.pop("SWITCHYARD_DEEP_EP_BACKEND", None)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    buffer = make_buffer(dist.group.WORLD)
    assert buffer.runtime.backend == "cuda"
    everybody, x, ids, weights = inputs(buffer)
    rows, *_, handle, _ = dispatch_all(buffer, x, ids, weights, LARGE["num_experts"])
    assert same(rows, received_of(everybody, LARGE["num_experts"], rank)[0])
    out, *_ = buffer.combine(rows, handle)
    assert calc_diff(out, summed(x, ids, world)) < 5e-6
    torch.cuda.synchronize()
    dist.barrier()
    buffer.destroy()
    dist.destroy_process_group()


def test_process_groups_of_nccl(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each rank")
    assert run_processes("spawn", _nccl, 2, str(tmp_path / "store")) == [0, 0]


def test_events():
    """Events are CUDA events, recorded on the current stream."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        handle = deep_ep.EventHandle()
    assert not handle._event.query()
    with deep_ep.EventOverlap(handle):
        pass
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert handle._event.query() and torch.cuda.current_stream().query()
