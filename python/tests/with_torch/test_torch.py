# SPDX-License-Identifier: Apache-2.0
"""Torch tensors on the CPU, and torch process groups."""
import subprocess
import sys

import numpy as np
import pytest

import oracle
import switchyard as sy
from clone import EXAMPLES
from processes import a_store, run_processes

torch = pytest.importorskip("torch")

SHAPE = {"num_experts": 7, "topk": 3, "hidden": 16, "max_tokens": 9}


def tensors(given, dtype=None):
    x, ids, weights = given
    x = torch.from_numpy(x)
    return (x if dtype is None else x.to(dtype)), torch.from_numpy(ids), None if weights is None else torch.from_numpy(weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_every_type(ranks, dtype):
    inputs = oracle.make_inputs(2, seed=1, **SHAPE)
    rounded = [given._replace(x=torch.from_numpy(given.x).to(dtype).float().numpy()) for given in inputs]

    def rank(group):
        exchange = sy.Exchange(group, dtype=dtype, **SHAPE)
        x, ids, weights = tensors(inputs[group.rank], dtype)
        rows, handle = exchange.dispatch(x, ids, weights)
        want = oracle.rank_major(rounded, 7, group.rank)
        assert isinstance(rows, torch.Tensor) and rows.dtype == dtype
        assert torch.equal(rows.float(), torch.from_numpy(want.x))
        assert handle.topk_ids.dtype == torch.int32 and torch.equal(handle.topk_ids, torch.from_numpy(want.ids))
        assert torch.equal(handle.topk_weights, torch.from_numpy(want.weights))
        out, summed = exchange.combine(rows, handle, topk_weights=handle.topk_weights)
        assert out.dtype == dtype and out.shape == x.shape and summed.shape == ids.shape
        buffer = exchange.allocate_rows(handle, dtype)
        buffer.copy_(rows)
        assert torch.equal(exchange.combine(buffer, handle), out)

    ranks(rank, 2)


def test_expert_major_and_offsets(ranks):
    inputs = oracle.make_inputs(2, seed=2, **SHAPE)

    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", layout="expert_major", expert_alignment=4, **SHAPE)
        rows, handle = exchange.dispatch(*tensors(inputs[group.rank]))
        want = oracle.expert_major(inputs, 7, group.rank, 4)
        assert torch.equal(rows, torch.from_numpy(want.x)) and torch.equal(handle.row_source, torch.from_numpy(want.source))
        assert handle.offsets.dtype == torch.int32
        assert handle.offsets.tolist() == np.cumsum(want.aligned).tolist()

    ranks(rank, 2)


def test_quantised(ranks):
    inputs = oracle.make_inputs(2, seed=3, **{**SHAPE, "hidden": 256})

    def rank(group):
        exchange = sy.Exchange(group, dtype="bf16", **{**SHAPE, "hidden": 256})
        x, ids, _ = tensors(inputs[group.rank], torch.bfloat16)
        (q, scales), handle = exchange.dispatch(x, ids, quantize="f32")
        assert q.dtype == torch.float8_e4m3fn and scales.shape == (len(q), 2)
        want = oracle.rank_major([g._replace(x=torch.from_numpy(g.x).bfloat16().float().numpy()) for g in inputs], 7, group.rank).x
        values = q.float() * scales.repeat_interleave(128, 1)
        torch.testing.assert_close(values, torch.from_numpy(want), rtol=1 / 16, atol=0.01)
        (again, its), _ = exchange.dispatch((x.to(torch.float8_e4m3fn), torch.ones(len(x), 2)), handle=handle)
        assert again.dtype == torch.float8_e4m3fn and (its == 1).all()

    ranks(rank, 2)


def test_tensors_keep_the_rows(ranks):
    def rank(group):
        exchange = sy.Exchange(group, dtype="bf16", **SHAPE)
        x = torch.arange(48.0).reshape(3, 16).bfloat16()
        rows, handle = exchange.dispatch(x, torch.tensor([[0, -1, -1]] * 3), torch.ones(3, 3))
        part, weights = rows[1:], handle.topk_weights
        del rows, handle
        exchange.close()
        del exchange
        assert torch.equal(part, x[1:]) and weights.sum() == 3

    ranks(rank, 1)


def test_low_latency(ranks):
    def rank(group):
        exchange = sy.LowLatency(group, **SHAPE)
        x, ids = torch.randn(4, 16).bfloat16(), torch.tensor([[0, 1, 2]] * 4)
        received = exchange.dispatch(x, ids, torch.ones(4, 3))
        assert received.x.dtype == torch.bfloat16 and received.rows.tolist() == [4, 4, 4, 0, 0, 0, 0]
        assert torch.equal(received.x[1, :4], x)
        rows = exchange.make_rows(received)
        rows.copy_(received.x)
        out = exchange.combine(rows, received)
        assert torch.equal(out, (x.float() * 3).bfloat16())

    ranks(rank, 1)


@pytest.mark.parametrize("make, words", [
    (lambda: torch.zeros(3, 16, dtype=torch.float64), "x is torch.float64"),
    (lambda: torch.zeros(16, 3).t(), "not dense.*contiguous"),
    (lambda: torch.zeros(3, 16, device="meta"), "x is on meta: must be in host memory"),
])
def test_mistakes(ranks, make, words):
    def rank(group):
        with pytest.raises(sy.InvalidArgument, match=words):
            sy.Exchange(group, dtype="f32", **SHAPE).dispatch(make(), torch.zeros(3, 3, dtype=torch.int64))

    ranks(rank, 1)


def _exchange_once(group):
    inputs = oracle.make_inputs(group.size, seed=1, **SHAPE)
    exchange = sy.Exchange(group, dtype="f32", **SHAPE)
    rows, _ = exchange.dispatch(*tensors(inputs[group.rank]))
    assert torch.equal(rows, torch.from_numpy(oracle.rank_major(inputs, 7, group.rank).x))


def _member(rank, world, path):
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    options = {"heap_bytes": 16 << 20, "timeout": 30, "rendezvous_timeout": 30}
    with sy.Group.from_process_group(**options) as group:
        assert (group.rank, group.size, group.backend) == (rank, world, "cpu")
        _exchange_once(group)
    # A group of some of the ranks, in a different order.
    some = dist.new_group([1, 2])
    if rank in (1, 2):
        with sy.Group.from_process_group(some, **options) as group:
            assert (group.rank, group.size) == (rank - 1, 2)
            _exchange_once(group)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_process_groups(method, tmp_path):
    assert run_processes(method, _member, 3, str(tmp_path / "store")) == [0, 0, 0]


class Experts(torch.nn.Module):
    """As in models of transformers: all experts in three-dimensional parameters."""

    def __init__(self, experts, hidden):
        super().__init__()
        self.num_experts = experts
        self.down_proj = torch.nn.Parameter(torch.randn(experts, hidden, hidden) / hidden ** 0.5)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            tokens, k = torch.where(top_k_index == e)
            part = torch.tanh(hidden_states[tokens] @ self.down_proj[e].t()) * top_k_weights[tokens, k, None]
            out = out.index_add(0, tokens, part)
        return out


def _member_on_hosts(rank, world, path):
    """On two machines, as far as Python can tell, and on two named hosts."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    sy.group._kernel = lambda: f"machine {rank // 2}"
    sy.group._address = lambda: "127.0.0.1"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)
    torch.manual_seed(0)  # every rank can compute the tokens and experts of all ranks
    whole, tokens = Experts(5, 16), 6
    xs, ids = torch.randn(world, tokens, 16), torch.stack([torch.randperm(5)[:2] for _ in range(world * tokens)]).view(world, tokens, 2)
    weights = torch.rand(world, tokens, 2)
    heap = sy.moe_heap_bytes(whole, world, max_tokens=tokens, topk=2, hosts=2)
    with sy.Group.from_process_group(heap_bytes=heap, host="a,a,b,b", timeout=30, rendezvous_timeout=30) as group:
        assert (group.rank, group.size, group.hosts, group.host) == (rank, world, 2, rank // 2)
        # Rows, compared with those of torch's own collective.
        everybody = [torch.empty(tokens, 16) for _ in range(world)]
        dist.all_gather(everybody, xs[rank])
        with sy.Exchange(group, hidden=16, num_experts=world, topk=1, max_tokens=tokens, dtype="f32") as exchange:
            rows, handle = exchange.dispatch(xs[rank], (torch.arange(tokens)[:, None] + rank) % world)
            want = torch.cat([x[(torch.arange(tokens) + source) % world == rank] for source, x in enumerate(everybody)])
            assert torch.equal(rows, want)
            assert torch.equal(exchange.combine(rows, handle), xs[rank])
        # A layer, forward and backward, compared with torch on one rank.
        mine = Experts(5, 16)
        mine.load_state_dict(whole.state_dict())
        model = torch.nn.ModuleList([mine])
        assert sy.parallelize_moe(model, group, max_tokens=tokens, topk=2) == ["0"]
        out = mine(xs[rank], ids[rank], weights[rank])
        # torch.testing would import sympy in each process.
        assert torch.allclose(out, whole(xs[rank], ids[rank], weights[rank]), rtol=1e-5, atol=1e-5)
        out.square().sum().backward()
        sum(whole(*each).square().sum() for each in zip(xs, ids, weights)).backward()
        experts = group.experts_of(5)
        assert torch.allclose(mine.down_proj.grad, whole.down_proj.grad[experts.start:experts.stop], rtol=1e-4, atol=1e-4)
        group.barrier()
    dist.destroy_process_group()


def test_process_groups_of_several_machines(tmp_path, monkeypatch):
    monkeypatch.delenv("SWITCHYARD_STORE", raising=False)
    assert run_processes("spawn", _member_on_hosts, 4, str(tmp_path / "store")) == [0] * 4


def test_torchrun(tmp_path, environment):
    """Two ranks started by torchrun, with its environment variables and without a process group."""
    program = tmp_path / "rank.py"
    program.write_text("import numpy as np, switchyard as sy\n"
                       "with sy.Group.from_environment(1 << 24, rendezvous_timeout=30) as group:\n"
                       "    assert group.size == 2\n"
                       "    exchange = sy.Exchange(group, hidden=16, num_experts=2, topk=1, max_tokens=2, dtype='f32')\n"
                       "    rows, _ = exchange.dispatch(np.full((1, 16), group.rank, 'f'), np.array([[1 - group.rank]]))\n"
                       "    assert (rows == 1 - group.rank).all() and len(rows) == 1\n"
                       "    group.barrier()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    subprocess.run(command, check=True, timeout=120, env=environment)


def test_the_example_of_training(environment):
    """The loss falls (checked by the program itself) on a number of ranks that does not divide the number of experts."""
    program = EXAMPLES / "06_training.py"
    if not program.is_file():
        pytest.skip("the tests are not in a clone")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(program)]
    done = subprocess.run(command, check=True, timeout=180, env=environment, capture_output=True, text=True)
    assert "on 3 ranks" in done.stdout


def test_the_example_of_serving(environment):
    """The program itself checks its last step. On the CPU its steps are not graphs."""
    program = EXAMPLES / "08_serving.py"
    if not program.is_file():
        pytest.skip("the tests are not in a clone")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(program), "cpu"]
    done = subprocess.run(command, check=True, timeout=180, env=environment, capture_output=True, text=True)
    assert "low latency: " in done.stdout and "tokens/s on 3 ranks" in done.stdout


def test_errors_cross_torch_multiprocessing():
    import torch.multiprocessing as mp

    with pytest.raises(mp.ProcessRaisedException, match="PeerTimeout|rank 1|RendezvousError"):
        mp.spawn(_fails, args=(), nprocs=1)


def _fails(rank):
    sy.Group.connect(0, 2, a_store(), "t", rendezvous_timeout=0.2)
