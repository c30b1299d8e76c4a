# SPDX-License-Identifier: Apache-2.0
"""Models that are trained with replicas of experts, and maps of the replicas."""
import copy

import numpy as np
import pytest
import torch
from plain_moe import EXPERTS, off, seeded

import switchyard as sy

MAX_TOKENS = 24
STEPS = 3
#: Maps by number of ranks. Owners: 0-2 and 3-5 on two ranks; 0-1, 2-3, 4 and 5 on four; on eight, two ranks own nothing. On up
#: to four ranks, expert 0 is on every rank, twice on the second one. Experts 3 (on two ranks) and 4 (on four) have no slot at their
#: owners.
MAPS = {2: [[5, 0, 1, 2, 3], [4, 5, 0, 0, -1]], 4: [[0, 1, 4, -1], [2, 0, 3, 0], [0, 5, 1, -1], [5, 0, 1, -1]],
        8: [[0, -1], [1, 0], [2, -1], [3, 0], [4, -1], [5, 1], [0, 5], [1, 0]]}
MAPS[1], MAPS[3] = [[0, 1, 2, 3, 4, 5, 0, -1]], [[0, 1, 4, 3], [2, 0, 0, 5], [5, 4, 0, 1]]
REPLICATED = {2: {0, 5}, 4: {0, 1, 5}}


def map_of(world, rows=None):
    table = np.array(MAPS[world] if rows is None else rows, np.int32)
    return sy.ExpertMap(table.reshape(-1), num_experts=EXPERTS, world=world)


def family(name):
    pytest.importorskip("transformers")
    import models

    with seeded():
        model = models.MODELS[name]().float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                parameter.mul_(3)
    return model


def text_of(rank, step):
    """Token ids on the CPU."""
    return torch.randint(0, 3, (2, 12), generator=torch.Generator().manual_seed(7 * step + rank))  # few words: skewed routing


def train(model, experts, texts, norms, between=lambda step: None):
    """Trains the experts with accumulated gradients, clipping and momentum."""
    optimizer = torch.optim.SGD(experts, lr=0.5, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for half in range(2):
            sum(model(input_ids=ids).logits.square().mean() for ids in texts(2 * step + half)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(experts, 0.1)))
        optimizer.step()
        between(step)


def home_map(world):
    return sy.ExpertMap.home(num_experts=EXPERTS, world=world, slots_per_rank=len(MAPS[world][0]))


def check_training(group, name, device="cpu", within=1e-4):
    """Weights, norms and outputs after steps with two maps are those of the undivided model. The first map is planned from counts,
    and the state dicts contain no replicas. Returns the state dict of the whole model."""
    world, want, norms = group.size, [], []
    whole, model = family(name).to(device), family(name).to(device)
    start, before = {key: value.clone() for key, value in whole.state_dict().items()}, dict(model.named_parameters())
    train(whole, [each for key, each in whole.named_parameters() if ".experts." in key],
          lambda step: [text_of(r, step).to(device) for r in range(world)], want)
    names = sy.parallelize_moe(model, group, max_tokens=MAX_TOKENS, replicas=home_map(world))

    def between(step):
        if step == 0:
            planned = sy.set_replicas(model)
            assert list(planned) == names and any(each != home_map(world) for each in planned.values())
        else:
            assert sy.set_replicas(model, {names[0]: map_of(world)})[names[0]] == map_of(world)

    train(model, sy.expert_parameters(model), lambda step: [text_of(group.rank, step).to(device)], norms, between)
    assert norms == pytest.approx(want, rel=within)
    assert list(model.state_dict()) == list(start) and all(before[key] is each for key, each in model.named_parameters())
    ids = text_of(group.rank, 99).to(device)
    with torch.no_grad():
        assert off(model(input_ids=ids).logits, whole(input_ids=ids).logits) < within
    state = sy.full_state_dict(model)
    assert list(state) == list(start)
    experts = [key for key in start if ".experts." in key]
    assert max(off(state[key].cpu(), whole.state_dict()[key].cpu()) for key in experts) < within
    assert min(off(state[key].cpu(), start[key].cpu()) for key in experts) > within


def check_ways(group, name, experts, way, device="cpu", scale=1):
    """Passes without gradients use the library's products or layer with replicas, for given and planned maps: after changes of weights
    in place, after moves of their memory, and after passes with gradients, which use the module and release the products."""
    import models

    world = group.size
    with seeded():
        whole = models.in_bf16(name, scale).to(device)
    model = copy.deepcopy(whole)
    generator = torch.Generator().manual_seed(group.rank)
    ids = torch.randint(0, models.WORDS, (2, 12 - 5 * (group.rank % 2)), generator=generator).to(device)
    names = sy.parallelize_moe(model, group, max_tokens=MAX_TOKENS, experts=experts, replicas=home_map(world))
    shares = [model.get_submodule(each).forward.__self__ for each in names]
    assert [each._way for each in shares] == [way] * len(names)
    for given in (None, map_of(world), home_map(world), map_of(world)):
        models.check_products(group, model, whole, ids, names)
        model.zero_grad()
        assert list(sy.set_replicas(model, given)) == names
    models.check_products(group, model, whole, ids, names)
    model(input_ids=ids).logits.square().mean().backward()
    assert all(each._held.products is None for each in shares)
