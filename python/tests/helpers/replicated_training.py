# SPDX-License-Identifier: Apache-2.0
"""Models that are trained with replicas of experts, and maps of the replicas."""
import numpy as np
import pytest
import torch
from plain_moe import EXPERTS

import switchyard as sy

STEPS = 3
#: Maps by number of ranks. Owners: 0-2 and 3-5 on two ranks; 0-1, 2-3, 4 and 5 on four; on eight, two ranks own nothing. On up
#: to four ranks, expert 0 is on every rank, twice on the second one. Experts 3 (on two ranks) and 4 (on four) have no slot at their
#: owners.
MAPS = {2: [[5, 0, 1, 2, 3], [4, 5, 0, 0, -1]], 4: [[0, 1, 4, -1], [2, 0, 3, 0], [0, 5, 1, -1], [5, 0, 1, -1]],
        8: [[0, -1], [1, 0], [2, -1], [3, 0], [4, -1], [5, 1], [0, 5], [1, 0]]}
REPLICATED = {2: {0, 5}, 4: {0, 1, 5}}


def map_of(world, rows=None):
    table = np.array(MAPS[world] if rows is None else rows, np.int32)
    return sy.ExpertMap(table.reshape(-1), num_experts=EXPERTS, world=world)


def family(name):
    pytest.importorskip("transformers")
    import models

    torch.manual_seed(0)
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
