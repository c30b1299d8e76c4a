# SPDX-License-Identifier: Apache-2.0
"""Decode steps with a Mixture-of-Experts layer. On GPUs, a step is a CUDA graph; on the CPU, it makes the same calls directly:

    torchrun --nproc-per-node 2 examples/08_serving.py          # default: cuda if torch has it; or append cpu or cuda

A step computes the router, the layer and the norm for the rank's tokens: one token from each sequence served by the rank. The
layer is computed in two ways: with low-latency dispatch, torch products and combine; and, if the library switchyard_layer is
available, with `MoeLayer`. The last step of each version is compared with the output of all experts computed in torch. Needs
the package (docs/python.md); if GPUs are used, they must be Hopper.
"""
import os
import sys
import time
from typing import Callable, Tuple

import torch

import switchyard as sy

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS = 256, 128, 16, 4, 32
SHAPE = {"hidden": HIDDEN, "num_experts": EXPERTS, "topk": TOPK, "max_tokens": TOKENS, "dtype": torch.bfloat16}
WHOLE = {**SHAPE, "intermediate": INTERMEDIATE}
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Step:
    """One step. It uses memory at fixed addresses, as graphs require."""

    def __init__(self, layer: Layer, x: torch.Tensor, router: torch.Tensor) -> None:
        self.layer, self.router = layer, router
        self.x, self.before = x.clone(), x.clone()

    def __call__(self) -> None:
        self.before.copy_(self.x)
        weights, ids = (self.x @ self.router.T).float().softmax(-1).topk(TOPK)
        self.weights, self.ids, x = weights, ids, self.x.float()
        self.out = self.layer(self.x, ids, weights)
        self.x.copy_(torch.nn.functional.rms_norm(x + self.out.float(), (HIDDEN,)))


def by_low_latency(group: sy.Group, w13: torch.Tensor, w2: torch.Tensor) -> Layer:
    """Also computes the rows beyond the received ones, but these are never read."""
    exchange = sy.LowLatency(group, scales=None, **SHAPE)
    rows = []  # expert outputs, allocated once

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        received = exchange.dispatch(x, ids, weights)
        if not rows:
            rows.append(exchange.make_rows(received))
        gate, up = torch.bmm(received.x, w13.transpose(1, 2)).chunk(2, dim=-1)
        rows[0].copy_(torch.bmm(torch.nn.functional.silu(gate) * up, w2.transpose(1, 2)))
        return exchange.combine(rows[0], received)

    return layer


def reference(step: Step, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Expected result of the layer in the last step, computed from the weights of all experts in float32."""
    out = torch.zeros_like(step.before, dtype=torch.float32)
    for e in range(EXPERTS):
        tokens, positions = torch.where(step.ids == e)
        gate, up = (step.before[tokens].float() @ w13[e].float().T).chunk(2, dim=-1)
        made = (torch.nn.functional.silu(gate) * up) @ w2[e].float().T
        out.index_add_(0, tokens, made * step.weights[tokens, positions, None])
    return out


def serve(group: sy.Group, step: Step, steps: int) -> float:
    """Time of `steps` steps in seconds. The first steps are not timed, because they create resources for later ones."""
    on_gpu, run = step.x.is_cuda, step.__call__
    for _ in range(2):
        step()
    if on_gpu:
        torch.cuda.current_stream().synchronize()
        group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            step()
        step.graph, run = graph, graph.replay
    group.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        run()
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    group.barrier()
    return time.perf_counter() - start


def make_weights(device: str) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The router and all experts, identical on all ranks."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(device, torch.bfloat16)

    return random(EXPERTS, HIDDEN), random(EXPERTS, 2 * INTERMEDIATE, HIDDEN), random(EXPERTS, HIDDEN, INTERMEDIATE)


def layers_of(group: sy.Group, w13: torch.Tensor, w2: torch.Tensor, with_layer: bool) -> "dict[str, Layer]":
    mine = group.experts_of(EXPERTS)
    share = w13[mine.start:mine.stop], w2[mine.start:mine.stop]
    found = {"low latency": by_low_latency(group, *share)}
    if with_layer:
        found["layer"] = sy.MoeLayer(group, *share, **WHOLE)
    return found


def main() -> None:
    backend = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
    world = int(os.environ["WORLD_SIZE"])
    if backend == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_stream(torch.cuda.Stream())
    torch.set_num_threads(1)
    heap, with_layer = sy.LowLatency.heap_bytes(world, scales=None, **SHAPE), True
    try:
        heap += sy.MoeLayer.heap_bytes(world, backend=backend, **WHOLE)
    except sy.LibraryNotFound:
        with_layer = False
    router, w13, w2 = make_weights(backend)
    with torch.no_grad(), sy.Group.from_environment(heap, backend=backend) as group:
        x = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(1 + group.rank)).to(backend, torch.bfloat16)
        steps = 1000 if backend == "cuda" else 20
        for name, layer in layers_of(group, w13, w2, with_layer).items():
            step = Step(layer, x, router)
            seconds, want = serve(group, step, steps), reference(step, w13, w2)
            error = ((step.out.float() - want).norm() / want.norm()).item()
            assert error < 2e-2, error
            if group.rank == 0:
                print(f"{name}: {steps * TOKENS * world / seconds:.0f} tokens/s on {world} ranks, {backend}, error {error:.1e}")
            group.barrier()
            del step  # its graph must be destroyed before the objects that it uses


if __name__ == "__main__":
    main()
