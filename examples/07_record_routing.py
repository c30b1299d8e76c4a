# SPDX-License-Identifier: Apache-2.0
"""Records the routing of a transformers model on several ranks, on the CPU, for use with the tool:

    torchrun --nproc-per-node 2 examples/07_record_routing.py routing.safetensors
    switchyard bench --routing routing.safetensors

The model is a small Mixtral with random weights. Its experts are divided among the ranks, and each rank reads its own texts.
Hooks on the routers record the experts chosen for the rank's tokens (docs/routing.md). Rank 0 merges the ranks' files and reads
the result back. Needs the package (docs/python.md) and transformers.
"""
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import switchyard as sy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import record_routing  # noqa: E402

EXPERTS, TOPK, LAYERS, BATCH, LENGTH, TEXTS = 8, 2, 2, 4, 16, 3


def make_model() -> torch.nn.Module:
    """Equal on all ranks."""
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        num_local_experts=EXPERTS, num_experts_per_tok=TOPK, num_hidden_layers=LAYERS, vocab_size=64, hidden_size=32,
        intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH)).eval()


def record(group: sy.Group, model: torch.nn.Module) -> record_routing.RoutingRecorder:
    """Records the choices that this rank's routers make for its texts."""
    recorder = record_routing.RoutingRecorder(num_experts=EXPERTS, metadata={"model": "Mixtral of random weights"})
    recorder.rank = group.rank
    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(recorder.hook(number))
    texts = torch.Generator().manual_seed(1 + group.rank)
    with torch.no_grad():
        for _ in range(TEXTS):
            model(input_ids=torch.randint(0, 64, (BATCH, LENGTH), generator=texts))
    return recorder


def check(path: str, world: int) -> None:
    """Checks that every layer and rank is present with as many tokens as its texts contain, and that all ids name existing
    experts."""
    tensors, about = record_routing.load_safetensors(path)
    assert record_routing.experts_of(path, about) == EXPERTS, about
    for layer in range(LAYERS):
        for rank in range(world):
            ids, weights = (tensors.pop(f"layer{layer}.rank{rank}.topk_{name}") for name in ("ids", "weights"))
            assert ids.shape == weights.shape == (TEXTS * BATCH * LENGTH, TOPK), ids.shape
            assert ids.min() >= 0 and ids.max() < EXPERTS and (ids[:, 0] != ids[:, 1]).all()
            assert abs(weights.sum(1) - 1).max() < 1e-5
    assert not tensors, sorted(tensors)


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "routing.safetensors"
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model, tokens = make_model(), BATCH * LENGTH
    with sy.Group.from_process_group(heap_bytes=sy.moe_heap_bytes(model, dist.get_world_size(), max_tokens=tokens)) as group:
        sy.parallelize_moe(model, group, max_tokens=tokens)
        part = f"{path}.rank{{}}.safetensors"
        record(group, model).save(part.format(group.rank))
        group.barrier()
        if group.rank == 0:
            parts = [part.format(rank) for rank in range(group.size)]
            record_routing.merge(path, parts)
            for each in parts:
                os.remove(each)
            check(path, group.size)
            record_routing.info(path)
            print(f"{path}: {TEXTS * tokens} tokens of each of {group.size} ranks in {LAYERS} layers")
        group.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
