# SPDX-License-Identifier: Apache-2.0
"""Trace of a combine that waits for a late rank, on the GPUs of several simulated hosts. Needs two GPUs. Each rank is a new
process, because NCCL reads the host name only once per process."""
import os
import time

import pytest

import oracle
import switchyard as sy
from processes import a_store, run_processes

torch = pytest.importorskip("torch")

WORLD, LATE, DELAY_MS = 4, 1, 200
SHAPE = {"num_experts": 8, "topk": 3, "hidden": 64, "max_tokens": 33}


def _late_rank(rank, world, store, heap_bytes):
    os.environ.update(NCCL_HOSTID=f"host-{rank // 2}", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % 2)
    given = oracle.make_inputs(world, seed=3, tokens=[29, 17, 33, 5], **SHAPE)[rank]
    x, ids, weights = (torch.from_numpy(each).cuda() for each in (given.x, given.ids, given.weights))
    with sy.Group.connect(rank, world, store, "token", heap_bytes, backend="cuda", host="a,a,b,b", timeout=60,
                          rendezvous_timeout=120) as group:
        exchange = sy.Exchange(group, dtype="f32", **SHAPE)
        rows, handle = exchange.dispatch(x, ids, weights)
        first = exchange.combine(rows, handle, apply_weights=False)
        torch.cuda.synchronize()
        trace = sy.Trace(group, events_per_track=256)
        group.barrier()
        with trace:
            if rank == LATE:
                time.sleep(DELAY_MS / 1e3)
            second = exchange.combine(rows, handle, apply_weights=False)
            torch.cuda.synchronize()
            group.barrier()
        trace.gather()
        assert torch.equal(first, second)
        longest = {}
        for phase in trace.summary():
            if phase.category == "wait":
                longest[phase.rank] = max(longest.get(phase.rank, 0), phase.max_ms)
        for r in range(world):
            assert r == LATE or longest.get(r, 0) > DELAY_MS / 2, (r, longest, trace.summary())
        group.barrier()


def test_a_span_covers_the_wait_for_a_late_rank():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    heap = 2 * sy.Exchange.heap_bytes(WORLD, backend="cuda", dtype="f32", **SHAPE) + (64 << 20)
    assert run_processes("spawn", _late_rank, WORLD, a_store(), heap, seconds=300) == [0] * WORLD
