# SPDX-License-Identifier: Apache-2.0
"""Ranks on GPUs: processes of a team, distributed over the GPUs. They are not threads, because a CUDA call that waits for a
whole GPU may wait for the kernel of another rank of the same process."""
import pytest

import switchyard as sy
from processes import a_store
from team import run_on_team

torch = pytest.importorskip("torch")


def _rank(rank, world, store, heap_bytes, scenario, arguments):
    """Runs one rank, with its own group and stream."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.empty(1, device="cuda")
    with sy.Group.connect(rank, world, store, "token", heap_bytes, backend="cuda", timeout=60, rendezvous_timeout=120) as group:
        with torch.cuda.stream(torch.cuda.Stream()):
            scenario(group, *arguments)
            torch.cuda.current_stream().synchronize()
        group.barrier()


def over_gpus(world, scenario, heap_bytes, *arguments):
    """Calls ``scenario(group, *arguments)`` on `world` ranks, and fails with the exception of a rank."""
    run_on_team("spawn", world, _rank, a_store(), heap_bytes, scenario, arguments, seconds=300)
