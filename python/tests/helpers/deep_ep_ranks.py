# SPDX-License-Identifier: Apache-2.0
"""Ranks for tests of the drop-in, as processes of a team, and their inputs."""
import functools
import os
import secrets
import tempfile

import numpy as np
import pytest

import oracle
from team import run_on_team

torch = pytest.importorskip("torch")

from switchyard import deep_ep  # noqa: E402  (needs torch)
from switchyard.deep_ep import _copies  # noqa: E402

EXPERTS, TOPK, HIDDEN, TOKENS = 8, 3, 512, 12
MAX_TOKENS = 16
NVL = 8 << 20
LARGE = {"hidden": 1024, "num_experts": 16, "topk": 4}

#: Location of a rank's tensors: "cpu"; "copies": CPU with the code path of GPUs; "cuda".
place = "cpu"
_without_gpu = None if torch.cuda.is_available() else "no GPU"

def memory():
    """Returns the device of this rank's tensors: "cpu" or "cuda"."""
    return "cuda" if place == "cuda" else "cpu"


PLACES = ["cpu", "copies", pytest.param("cuda", marks=pytest.mark.skipif(_without_gpu is not None, reason=str(_without_gpu)))]


class Buffer(deep_ep.Buffer):
    """A Buffer of CPU ranks whose normal mode uses the code path of GPUs."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self._normal.made = _copies.Generations(self.runtime, self.num_nvl_bytes, {"backend": "cpu"})


def make_buffer(group, **keywords):
    """Creates a buffer for both modes, with the shapes below."""
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, HIDDEN, group.size(), EXPERTS)
    given = {"low_latency_mode": True, "num_qps_per_rank": 1, "explicitly_destroy": True, **keywords}
    buffer = deep_ep.Buffer(group, NVL, hint, **given)
    buffer.runtime.set_timeout(30)
    return buffer


# ---- Processes ----

#: In a process of a team: its process group, and a group with only this rank. Both are kept, as in a real program.
_groups = []


@functools.lru_cache(None)
def _folder():
    """The folder in which torch's process groups meet."""
    return tempfile.TemporaryDirectory()


def _groups_of(rank, world, path):
    if not _groups:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
        _groups[:] = torch.distributed.group.WORLD, [torch.distributed.new_group([r]) for r in range(world)][rank]
    return _groups


def _rank(rank, world, path, where, ranks, scenario, arguments):
    """Runs one rank, as a member of all ranks or alone."""
    global place
    place, own = where, deep_ep.Buffer
    os.environ["SWITCHYARD_DEEP_EP_BACKEND"] = "cuda" if where == "cuda" else "cpu"
    if where == "copies":
        deep_ep.Buffer = Buffer
    if where == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.empty(1, device="cuda")
    everybody, alone = _groups_of(rank, world, path)
    scenario(everybody if ranks == world else alone, *arguments)
    if where == "cuda":
        torch.cuda.synchronize()
    torch.distributed.barrier()
    deep_ep.Buffer = own


def over_groups(where, world, scenario, *arguments):
    """Calls ``scenario(process group, *arguments)`` on `world` ranks, and fails with the exception of a rank. With one rank,
    each of two processes is a separate group. Processes are spawned, because torch.autograd does not support forks of a process
    that has used it."""
    path = os.path.join(_folder().name, secrets.token_hex(8))
    run_on_team("spawn", max(world, 2), _rank, path, where, world, scenario, arguments, name="deep_ep")


def _with_buffer(group, scenario, arguments):
    buffer = make_buffer(group)
    scenario(buffer, *arguments)
    torch.distributed.barrier(group)
    buffer.destroy()


def over_ranks(where, world, scenario, *arguments):
    """Calls ``scenario(buffer, *arguments)`` on `world` ranks."""
    over_groups(where, world, _with_buffer, scenario, arguments)


# ---- Inputs ----


def on(array):
    """Returns a tensor in the memory that holds the rank's tensors."""
    given = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    return given.to(memory())


def inputs_of(world, seed=1, repeats=True):
    """Inputs of all ranks: x rounded to bf16, ids that are -1 or name an expert."""
    made = []
    for given in oracle.make_inputs(world, seed=seed, num_experts=EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=TOKENS,
                                    tokens=[9, 0, 12, 4][:world]):
        ids = np.where(given.ids < EXPERTS, given.ids, -1)
        if not repeats:
            ids = np.array([[e if e not in row[:k] else -1 for k, e in enumerate(row)] for row in ids], np.int64).reshape(ids.shape)
        made.append(oracle.Input(torch.from_numpy(given.x).bfloat16().float().numpy(), ids, given.weights))
    return made


def tensors(given):
    return on(given.x).bfloat16(), on(given.ids), on(given.weights)


def same(a, b):
    return torch.equal(a.cpu(), b.cpu())


def calc_diff(a, b):
    a, b = a.cpu().double(), b.cpu().double()
    return 0.0 if a.numel() == 0 else float(1 - 2 * (a * b).sum() / (a * a + b * b).sum().clamp_min(1e-300))


def summed(inputs, rank):
    """Returns the combined rows of a dispatch."""
    return torch.from_numpy(oracle.combine_rank_major(inputs, EXPERTS, rank, lambda r: oracle.rank_major(inputs, EXPERTS, r).x))


def weighted(x, ids, weights):
    """Returns the low-latency combine of the tokens: float32 [T, H]."""
    return x.float() * torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)


def laid_out(buffer, ids, **keywords):
    per_rank, per_rdma, per_expert, where, event = buffer.get_dispatch_layout(ids, EXPERTS, **keywords)
    assert per_rdma is None
    return {"num_tokens_per_rank": per_rank, "is_token_in_rank": where, "num_tokens_per_expert": per_expert}


def check_low_latency(received, count, handle, inputs, rank):
    """Compares the rows of each expert, by source, with the oracle; returns float32 [L, R, H]."""
    world = len(inputs)
    values = dequantised(received)
    source_of, ranges, max_tokens, hidden, num_experts = handle
    assert (max_tokens, hidden, num_experts) == (MAX_TOKENS, HIDDEN, EXPERTS) and source_of.dtype == torch.int32
    there, begin = oracle.expert_major(inputs, EXPERTS, rank), 0
    for expert, number in enumerate(there.counts):
        sources = there.source[begin:begin + number]
        assert count[expert].item() == number
        for source in range(world):
            first, rows = (ranges[expert][source] >> 32).item(), (ranges[expert][source] & 0xFFFFFFFF).item()
            tokens = sources[sources >> 48 == source] & 0xFFFFFFFF
            assert source_of[expert][first:first + rows].tolist() == tokens.tolist()
            want = torch.from_numpy(inputs[source].x)[tokens]
            torch.testing.assert_close(values[expert, first:first + rows].cpu(), want, rtol=1 / 16 if isinstance(received, tuple) else 0,
                                       atol=0.01 if isinstance(received, tuple) else 0)
        begin += number
    return values


def dequantised(received):
    if not isinstance(received, tuple):
        return received.float()
    q, scales = received
    assert q.dtype == torch.float8_e4m3fn
    if scales.dtype == torch.int32:
        assert scales.shape == (*q.shape[:2], HIDDEN // 512) and scales.stride(1) == 1
        scales = (torch.stack([scales[:, :, 0] >> 8 * g & 0xFF for g in range(4)], -1) << 23).view(torch.float32)
    else:
        assert scales.shape == (*q.shape[:2], HIDDEN // 128) and scales.stride(1) == 1 and scales.dtype == torch.float32
    return q.float() * scales.repeat_interleave(128, 2)


# ---- Larger inputs, by torch: the inputs of all ranks are derived from a seed ----


def seeded(world, tokens, hidden, num_experts, topk, seed=0):
    """(x, ids, weights) of every rank, on the CPU; ids differ within a token, a tenth of them are -1."""
    made = []
    for rank in range(world):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        x = torch.randn((tokens[rank], hidden), generator=generator).bfloat16()
        ids = torch.rand((tokens[rank], num_experts), generator=generator).topk(topk, 1).indices
        ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.1, -1, ids)
        made.append((x, ids, torch.rand(ids.shape, generator=generator)))
    return made


def received_of(everybody, num_experts, rank):
    """Returns the rows, local ids and weights that rank `rank` receives."""
    each = num_experts // len(everybody)
    rows, ids, weights = [], [], []
    for x, its_ids, its_weights in everybody:
        here = (its_ids >= rank * each) & (its_ids < (rank + 1) * each)
        sent = here.any(1)
        rows.append(x[sent])
        ids.append(torch.where(here, its_ids - rank * each, -1)[sent])
        weights.append(torch.where(here, its_weights, 0)[sent])
    return torch.cat(rows), torch.cat(ids), torch.cat(weights)


def ranks_of(ids, num_experts, world):
    """bool [T, W]: the ranks to which a token is sent."""
    each = num_experts // world
    return torch.stack([((ids >= r * each) & (ids < (r + 1) * each)).any(1) for r in range(world)], 1)


def dispatch_all(buffer, x, ids, weights, num_experts, **keywords):
    """Calls get_dispatch_layout and dispatch."""
    per_rank, _, per_expert, where, _ = buffer.get_dispatch_layout(ids, num_experts)
    return buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=per_rank, is_token_in_rank=where,
                           num_tokens_per_expert=per_expert, **keywords)
