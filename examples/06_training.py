# SPDX-License-Identifier: Apache-2.0
"""Trains a Mixture-of-Experts layer over several ranks with PyTorch, on the CPU:

    torchrun --nproc-per-node 4 examples/06_training.py

Every rank has its own tokens, a copy of the router, and a share of the experts. Dispatch and combine are differentiable, so
gradients of the loss flow to the experts, the router's weights and the tokens. Needs the package, which ./dev wheel builds and
pip install dist/*.whl installs (docs/python.md).
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F

import switchyard as sy

HIDDEN, EXPERTS, TOPK, TOKENS, STEPS = 32, 8, 2, 64, 40


class Moe(torch.nn.Module):
    """out[t] = x[t] + sum over the token's experts of probability * expert(x[t])"""

    def __init__(self, group: sy.Group) -> None:
        super().__init__()
        self.exchange = sy.Exchange(group, hidden=HIDDEN, num_experts=EXPERTS, topk=TOPK, max_tokens=TOKENS, layout="expert_major",
                                    dtype=torch.float32, routing_gradients=True)
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in group.experts_of(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(TOPK)
        rows, handle = self.exchange.dispatch(x, ids, weights)
        parts = rows.tensor_split(handle.offsets.tolist()[:-1])  # the rows of each expert, from all ranks
        y = torch.cat([torch.tanh(expert(part)) for expert, part in zip(self.experts, parts)])
        return x + self.exchange.combine(y, handle, order="per_route")


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    with sy.Group.from_process_group(heap_bytes=64 << 20) as group:
        torch.manual_seed(0)  # the target and the router are equal on all ranks
        teacher, model = torch.nn.Linear(HIDDEN, HIDDEN), Moe(group)
        torch.manual_seed(1 + rank)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(STEPS):
            x = torch.randn(TOKENS, HIDDEN)
            loss = F.mse_loss(model(x), x + torch.tanh(teacher(x)).detach())
            optimizer.zero_grad()
            loss.backward()
            dist.all_reduce(model.router.weight.grad)  # each expert has one owner, but every rank has a copy of the router
            model.router.weight.grad /= world
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / world)
        if rank == 0:
            print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps on {world} ranks")
        assert losses[-1] < 0.5 * losses[0], losses
        group.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
