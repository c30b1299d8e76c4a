# SPDX-License-Identifier: Apache-2.0
"""Memory that Python drops or closes while enqueued work still uses it, for each object and mode: it must not be reused before
that work has ended. The caller's stream is kept busy, so all later work is still pending when memory is dropped and allocated
again. Needs a supported GPU and a library with CUDA."""
import ctypes
import gc
import os
import threading
from pathlib import Path

import pytest

import switchyard as sy

torch = pytest.importorskip("torch")

from gpu_ranks import over_gpus  # noqa: E402  (needs torch)

HIDDEN, EXPERTS, TOPK, TOKENS = 1024, 8, 2, 256
SHAPE = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS, "dtype": "bf16"}
#: GPU clock cycles: about half a second, during which the host enqueues everything else. sanitize.sh multiplies it, because
#: the host is slow under a tool.
BUSY = 800_000_000 * int(os.environ.get("SWITCHYARD_TEST_BUSY", 1))


@pytest.fixture(autouse=True)
def gpus():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")


class Busy:
    """Keeps the current stream busy. `check` fails if the stream became idle before the host had enqueued everything."""

    def __init__(self):
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY)
        self._passed = torch.cuda.Event()
        self._passed.record()

    def check(self):
        assert not self._passed.query(), "the stream was idle too early: this run shows nothing"


def routed(seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(TOKENS)]).int().cuda()
    return torch.full((TOKENS, HIDDEN), 3.0, device="cuda").bfloat16(), ids


def low_latency_heap(world):
    return sy.LowLatency.heap_bytes(world, **SHAPE) + (4 << 20)


def drop_on_another_thread(things):
    """Drops the last references on a thread that has no current stream."""
    thread = threading.Thread(target=lambda: (things.clear(), gc.collect()))
    thread.start()
    thread.join()


def received_rows(received):
    """Enqueues copies of the valid rows."""
    return received.x.clone(), received.rows.clone()


def check_received(copy, counts, value):
    for rows, count in zip(copy, counts.tolist()):
        assert torch.equal(rows[:count], torch.full_like(rows[:count], value))


def _low_latency_output(group, thread):
    ll = sy.LowLatency(group, **SHAPE)
    x, ids = routed()
    ll.dispatch(x, ids)
    spare = ll.make_output(x)
    del spare
    held = [ll.dispatch(x, ids, output=ll.make_output(x))]
    group.barrier()
    busy = Busy()
    ll.dispatch(x, ids, output=held[0])
    copy, counts = received_rows(held[0])
    if thread:
        drop_on_another_thread(held)
    else:
        held.clear()
    taken = [ll.make_output(x) for _ in range(4)]
    busy.check()
    torch.cuda.synchronize()
    check_received(copy, counts, 3.0)
    del taken


@pytest.mark.parametrize("thread", [False, True], ids=["here", "another_thread"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_low_latency_output_is_dropped(world, thread):
    over_gpus(world, _low_latency_output, low_latency_heap(world), thread)


def _low_latency_rows(group, close):
    ll = sy.LowLatency(group, **SHAPE)
    x, ids = routed()
    received = ll.dispatch(x, ids)
    want = ll.combine(received.x, received)
    rows = ll.make_rows(received)
    group.barrier()
    busy = Busy()
    rows.copy_(received.x)
    got = ll.combine(rows, received)
    del rows
    taken = [ll.make_rows(received) for _ in range(4)]
    if close:
        ll.close()
    busy.check()
    torch.cuda.synchronize()
    assert torch.equal(got, want)
    del taken
    group.barrier()
    if close:  # the heap memory of the closed object is reused
        with sy.LowLatency(group, **SHAPE) as again:
            received = again.dispatch(x, ids)
            assert torch.equal(again.combine(received.x, received), want)


@pytest.mark.parametrize("close", [False, True], ids=["object_stays", "object_closed"])
@pytest.mark.parametrize("world", [1, 2])
def test_low_latency_rows_are_dropped(world, close):
    over_gpus(world, _low_latency_rows, low_latency_heap(world), close)


def _recorded_stream(group):
    ll = sy.LowLatency(group, **SHAPE)
    x, ids = routed()
    side = torch.cuda.Stream()
    received = ll.dispatch(x, ids, output=ll.make_output(x))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        busy = Busy()
        copy, counts = received_rows(received)
        busy.check()
    group.record_stream(received.x, side)
    with pytest.raises(sy.InvalidArgument, match="memory"):
        group.record_stream(x, side)
    del received
    taken = [ll.make_output(x) for _ in range(4)]
    torch.cuda.synchronize()
    check_received(copy, counts, 3.0)
    del taken


def test_record_stream():
    over_gpus(1, _recorded_stream, low_latency_heap(1))


def replays_give(graph, got, want, times):
    for _ in range(times):
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)


def _in_a_graph(group, drop_inside):
    """Memory of a captured call stays valid as long as its graph, even if it is dropped during the capture."""
    ll = sy.LowLatency(group, **SHAPE)
    x, ids = routed()
    for _ in range(2):
        received = ll.dispatch(x, ids, output=ll.make_output(x))
        want = ll.combine(received.x, received)
    held = [ll.make_output(x)]
    torch.cuda.synchronize()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        ll.dispatch(x, ids, output=held[0])
        got = ll.combine(held[0].x, held[0])
        if drop_inside:
            held.clear()
            gc.collect()
    held.clear()
    taken = [ll.make_output(x) for _ in range(4)]
    for each in taken:
        each.x.fill_(7.0)
    torch.cuda.synchronize()
    group.barrier()
    replays_give(graph, got, want, times=3)
    ll.close()  # the graph still holds its memory
    group.barrier()
    replays_give(graph, got, want, times=1)
    group.barrier()
    del graph


@pytest.mark.parametrize("drop_inside", [False, True], ids=["after_capture", "during_capture"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_graph_keeps_memory(world, drop_inside):
    over_gpus(world, _in_a_graph, low_latency_heap(world), drop_inside)


def _made_in_a_capture(group, mode):
    """Outputs and rows may be allocated, and memory that is no longer used freed, while a stream of the thread is captured."""
    ll = sy.LowLatency(group, **SHAPE)
    x, ids = routed()
    for _ in range(2):
        received = ll.dispatch(x, ids)
        want = ll.combine(received.x, received)
    spare = [ll.make_output(x) for _ in range(3)] + [ll.make_rows(received) for _ in range(3)]
    torch.cuda.synchronize()
    group.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        spare.clear()
        received = ll.dispatch(x, ids, output=ll.make_output(x))
        rows = [ll.make_rows(received) for _ in range(4)]
        rows[-1].copy_(received.x)
        got = ll.combine(rows[-1], received)
    group.barrier()
    replays_give(graph, got, want, times=2)
    group.barrier()
    del graph


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_memory_is_made_in_a_capture(mode):
    over_gpus(2, _made_in_a_capture, low_latency_heap(2), mode)


def _closed_exchange(group):
    """The heap memory of a closed exchange is reused only after the calls of all ranks have ended."""
    shape = {**SHAPE, "layout": "rank_major"}
    first = sy.Exchange(group, **shape)
    x, ids = routed(group.rank)
    rows, handle = first.dispatch(x, ids)
    want = first.combine(rows, handle)
    del rows, handle
    group.barrier()
    busy = Busy()
    rows, handle = first.dispatch(x, ids)
    got = first.combine(rows, handle)
    del rows, handle
    first.close()
    busy.check()  # neither the drop nor the close has waited
    second = sy.Exchange(group, **shape)
    rows, handle = second.dispatch(x, ids)
    again = second.combine(rows, handle)
    torch.cuda.synchronize()
    assert torch.equal(got, want) and torch.equal(again, want)


@pytest.mark.parametrize("world", [1, 2])
def test_an_exchange_is_closed(world):
    heap = sy.Exchange.heap_bytes(world, backend="cuda", layout="rank_major", **SHAPE) + (4 << 20)
    over_gpus(world, _closed_exchange, heap)  # the heap has room for only one


def _row_memory(group):
    size = 32 << 20
    memory = sy.RowMemory(group, size, segment=size)
    with memory.use():
        rows = torch.empty(size, dtype=torch.uint8, device="cuda")
    copy = rows.fill_(0).clone()  # under a tool, allocations and first launches of kernels wait for the GPU
    torch.cuda.synchronize()
    busy = Busy()
    rows.fill_(1)
    copy.copy_(rows)
    del rows
    memory.close()
    busy.check()
    del memory
    gc.collect()
    torch.cuda.empty_cache()
    again = sy.RowMemory(group, size, segment=size)  # the heap has room for one
    with again.use():
        taken = torch.empty(size, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        taken.fill_(2)
    torch.cuda.synchronize()
    assert bool((copy == 1).all())
    assert bool((taken == 2).all())


@pytest.mark.parametrize("world", [1, 2])
def test_row_memory_is_closed(world):
    over_gpus(world, _row_memory, (32 << 20) + (4 << 20))


# ---- Expert compute ----


def runtime():
    """Returns the CUDA runtime, for allocating like an independent owner."""
    beside_torch = (str(path) for path in (Path(torch.__file__).parent.parent / "nvidia").rglob("libcudart.so*"))
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so", *beside_torch):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError("there is no libcudart.so")


class Neighbours:
    """Blocks of the device's pool that another owner allocates while memory is freed; `changed` counts overwritten blocks."""

    SIZE, COUNT, BYTE = 512, 256, 0x5A

    def __init__(self):
        self._runtime, self._stream, self._blocks = runtime(), torch.cuda.Stream(), []
        on = ctypes.c_void_p(self._stream.cuda_stream)
        for _ in range(self.COUNT):
            block = ctypes.c_void_p()
            assert self._runtime.cudaMallocAsync(ctypes.byref(block), ctypes.c_size_t(self.SIZE), on) == 0
            assert self._runtime.cudaMemsetAsync(block, self.BYTE, ctypes.c_size_t(self.SIZE), on) == 0
            self._blocks.append(block)
        self._stream.synchronize()

    def changed(self):
        changed, host = 0, (ctypes.c_ubyte * self.SIZE)()
        for block in self._blocks:
            assert self._runtime.cudaMemcpy(host, block, ctypes.c_size_t(self.SIZE), 2) == 0
            changed += bytes(host) != bytes([self.BYTE]) * self.SIZE
            self._runtime.cudaFreeAsync(block, ctypes.c_void_p(self._stream.cuda_stream))
        return changed


def weights_of(intermediate):
    w13 = torch.randn(EXPERTS, 2 * intermediate, HIDDEN, device="cuda").bfloat16() / 32
    return w13, torch.randn(EXPERTS, HIDDEN, intermediate, device="cuda").bfloat16() / 32


def _grouped_gemm(group):
    runtime()
    exchange = sy.Exchange(group, layout="expert_major", **SHAPE)
    x, ids = routed()
    w13, _ = weights_of(512)
    rows, handle = exchange.dispatch(x, ids)
    count = handle.rows
    want = sy.GroupedGemm(w13)(rows, handle)[:count].clone()
    out = torch.zeros(rows.shape[0], w13.shape[1], device="cuda", dtype=torch.bfloat16)
    busy = Busy()
    sy.GroupedGemm(w13)(rows, handle, out=out)  # the object is destroyed at the end of this line
    others = Neighbours()
    busy.check()
    torch.cuda.synchronize()
    assert others.changed() == 0 and torch.equal(out[:count], want)


def test_a_grouped_gemm_is_dropped():
    over_gpus(1, _grouped_gemm, sy.Exchange.heap_bytes(1, backend="cuda", layout="expert_major", **SHAPE) + (4 << 20))


LAYERS = [{"form": "separate", "exchange": "normal", "captured": False}, {"form": "separate", "exchange": "low_latency"}, {"form": "fused"}]


def layer_config(kind):
    return {**SHAPE, "intermediate": 512, **kind}


def _layer(group, kind):
    runtime()
    x, ids = routed()
    first = sy.MoeLayer(group, *weights_of(512), **layer_config(kind))
    w13, w2 = weights_of(512)
    other = first.with_weights(w13, w2)
    want = other(x, ids)
    out = torch.zeros_like(want)
    busy = Busy()
    other(x, ids, out=out)
    del other
    others = Neighbours()
    busy.check()
    torch.cuda.synchronize()
    assert others.changed() == 0 and torch.equal(out, want)
    busy = Busy()
    first.with_weights(w13, w2)(x, ids, out=out.zero_())
    first.close()
    del first
    busy.check()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


@pytest.mark.parametrize("kind", LAYERS, ids=["separate", "low_latency", "fused"])
def test_a_layer_is_dropped(kind):
    over_gpus(1, _layer, sy.MoeLayer.heap_bytes(1, backend="cuda", **layer_config(kind)) + (4 << 20), kind)


def _outputs_of_layers(group):
    """A layer does not keep its outputs alive."""
    x, ids = routed()
    layer = sy.MoeLayer(group, *weights_of(512), **layer_config(LAYERS[0]))
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        layer(x, ids)
    assert torch.cuda.memory_allocated() - before < TOKENS * HIDDEN * 2


def test_a_layer_keeps_no_output():
    over_gpus(1, _outputs_of_layers, sy.MoeLayer.heap_bytes(1, backend="cuda", **layer_config(LAYERS[0])) + (4 << 20))


FP8 = {**SHAPE, "intermediate": 512, "dtype": "fp8_e4m3", "form": "fused"}


def _late_scales(group, constructor):
    """Scales that the caller's stream computes immediately before the layer reads them."""
    inter = FP8["intermediate"]
    w13 = (torch.randn(EXPERTS, 2 * inter, HIDDEN, device="cuda") / 4).to(torch.float8_e4m3fn)
    w2 = (torch.randn(EXPERTS, HIDDEN, inter, device="cuda") / 4).to(torch.float8_e4m3fn)
    scales = [torch.full((EXPERTS, 2 * inter // 128, HIDDEN // 128), 0.125, device="cuda"),
              torch.full((EXPERTS, HIDDEN // 128, inter // 128), 0.125, device="cuda")]
    x, ids = routed()
    torch.cuda.synchronize()
    first = sy.MoeLayer(group, w13, w2, w13_scales=scales[0], w2_scales=scales[1], **FP8)
    want = first(x, ids)
    late = [torch.zeros_like(each) for each in scales]
    busy = Busy()
    for to, each in zip(late, scales):
        to.copy_(each)
    given = {"w13_scales": late[0], "w2_scales": late[1]}
    other = sy.MoeLayer(group, w13, w2, **given, **FP8) if constructor else first.with_weights(w13, w2, **given)
    if not constructor:
        busy.check()
    on = torch.cuda.Stream()  # calls on any stream are ordered after the scales
    with torch.cuda.stream(on):
        got = other(x, ids)
    torch.cuda.synchronize()
    assert torch.equal(got, want)


@pytest.mark.parametrize("constructor", [False, True], ids=["with_weights", "constructor"])
def test_scales_are_read_in_the_callers_order(constructor):
    over_gpus(1, _late_scales, 2 * sy.MoeLayer.heap_bytes(1, backend="cuda", **FP8) + (4 << 20), constructor)
