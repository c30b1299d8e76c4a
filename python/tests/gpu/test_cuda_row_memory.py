# SPDX-License-Identifier: Apache-2.0
"""Torch tensors in symmetric memory: rows are delivered to it and read from it, bitwise equal to those in other memory, and
torch's allocator manages it. Needs a supported GPU and a library with CUDA."""
import gc

import numpy as np
import pytest

import oracle
import switchyard as sy

torch = pytest.importorskip("torch")

from gpu_ranks import over_gpus  # noqa: E402  (needs torch)

EXPERTS, TOPK, HIDDEN, TOKENS, WORLD = 7, 3, 64, 33, 2
SHAPE = {"num_experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": TOKENS, "dtype": "f32"}
MAX_TOKENS = WORLD * TOKENS
#: Torch allocates segments of 2 MiB for small tensors.
SEGMENT = 2 << 20


@pytest.fixture(autouse=True)
def gpus():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")


def heap_of(segments):
    return sy.Exchange.heap_bytes(WORLD, backend="cuda", **SHAPE) + segments * SEGMENT + (1 << 20)


def inputs_of(group, seed):
    inputs = oracle.make_inputs(WORLD, seed=seed, tokens=[29, 17], num_experts=EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=TOKENS)
    given = inputs[group.rank]
    return inputs, torch.from_numpy(given.x).cuda(), torch.from_numpy(given.ids).cuda(), torch.from_numpy(given.weights).cuda()


def rows_in(memory, count):
    with memory.use():
        return torch.full((count, HIDDEN), float("nan"), device="cuda")


def exchange_in(group, exchange, out, seed):
    """Runs a dispatch into `out` and a combine from it, checks exact results, and returns the number of bytes that each
    copied."""
    inputs, x, ids, weights = inputs_of(group, seed)
    rows, handle = exchange.dispatch(x, ids, weights, out=out)
    want = oracle.rank_major(inputs, EXPERTS, group.rank).x
    assert rows.data_ptr() == out.data_ptr() and np.array_equal(rows[:len(want)].cpu().numpy(), want)
    copied = exchange.last_call().copied_bytes
    back = exchange.combine(rows, handle, apply_weights=False)
    sums = oracle.combine_rank_major(inputs, EXPERTS, group.rank, lambda r: oracle.rank_major(inputs, EXPERTS, r).x)
    assert np.array_equal(back.cpu().numpy(), sums)
    return copied, exchange.last_call().copied_bytes


def _no_copies(group):
    exchange = sy.Exchange(group, **SHAPE)
    memory = sy.RowMemory(group, SEGMENT)
    there = rows_in(memory, MAX_TOKENS)
    elsewhere = torch.empty((MAX_TOKENS, HIDDEN), device="cuda")
    for seed in range(3):
        assert exchange_in(group, exchange, there, seed) == (0, 0)
        assert min(exchange_in(group, exchange, elsewhere, seed)) > 0
    # Torch owns the segment. Tensors beyond its size are in other memory and are correct as well.
    large = rows_in(memory, SEGMENT // (4 * HIDDEN))
    assert min(exchange_in(group, exchange, large, 7)) > 0
    assert exchange_in(group, exchange, there, 8) == (0, 0)


def test_rows_that_lie_there_are_not_copied():
    over_gpus(WORLD, _no_copies, heap_of(1))


LARGE = 32 << 20


def _sizes_in_turn(group):
    """Tensors of growing sizes, one after the other: from one segment allocated for all of them, and from one for each size."""
    exchange = sy.Exchange(group, **SHAPE)
    shared, apart = sy.RowMemory(group, 2 * LARGE, segment=LARGE), sy.RowMemory(group, 2 * LARGE)
    found = {}
    for memory in (shared, apart):
        found[memory] = []
        for size in (20 << 20, 24 << 20, 30 << 20):
            rows = rows_in(memory, size // (4 * HIDDEN))
            found[memory].append(exchange_in(group, exchange, rows, 3) == (0, 0))
            del rows
    assert found == {shared: [True, True, True], apart: [True, True, False]}
    # The stream has allocated both segments by now: a tensor in one leaves as much room as the other has.
    held = rows_in(shared, (20 << 20) // (4 * HIDDEN))
    large = rows_in(shared, (30 << 20) // (4 * HIDDEN))
    assert exchange_in(group, exchange, held, 4) == exchange_in(group, exchange, large, 5) == (0, 0)


def test_segments_serve_tensors_of_many_sizes():
    over_gpus(WORLD, _sizes_in_turn, heap_of(64))


def _streams_in_turn(group):
    """A second stream allocates the other segment; further streams take only the ordinary memory that their tensors need."""
    exchange = sy.Exchange(group, **SHAPE)
    memory = sy.RowMemory(group, 2 * LARGE, segment=LARGE)
    count = SEGMENT // (2 * HIDDEN)  # torch uses other segments for tensors of less than 1 MiB
    rows = rows_in(memory, count)
    assert exchange_in(group, exchange, rows, 1) == (0, 0)
    reserved = [torch.cuda.memory_reserved()]
    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            there = rows_in(memory, count)
            assert (exchange_in(group, exchange, there, 2) == (0, 0)) == (len(reserved) == 1)
            reserved.append(torch.cuda.memory_reserved())
            del there
    taken = [after - before for before, after in zip(reserved, reserved[1:])]
    assert taken[0] >= LARGE > max(taken[1:])


def test_segments_are_of_streams():
    over_gpus(WORLD, _streams_in_turn, heap_of(32))


def _torch_looks_after_it(group):
    exchange = sy.Exchange(group, **SHAPE)
    memory = sy.RowMemory(group, SEGMENT)
    first = rows_in(memory, MAX_TOKENS)
    at = first.data_ptr()
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(50_000_000)
        kept = first.clone()
    first.record_stream(other)
    del first
    second = rows_in(memory, MAX_TOKENS)  # the first is still read
    assert second.data_ptr() != at
    other.synchronize()
    assert torch.isnan(kept).all()
    del second
    assert exchange_in(group, exchange, rows_in(memory, MAX_TOKENS), 1) == (0, 0)


def test_streams_that_use_it_are_waited_for():
    over_gpus(WORLD, _torch_looks_after_it, heap_of(1))


def _outlives(outer):
    group = outer._once_more(SEGMENT + (1 << 20), {"backend": "cuda", "device": torch.cuda.current_device()})
    memory = sy.RowMemory(group, SEGMENT)
    rows = rows_in(memory, 16)
    rows.fill_(group.rank + 1)
    group.barrier()
    memory.close()
    del memory
    group.close()
    gc.collect()
    assert (rows == group.rank + 1).all()
    del rows
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def test_tensors_outlive_the_group():
    over_gpus(WORLD, _outlives, 1 << 20)
