# SPDX-License-Identifier: Apache-2.0
"""Training with replicas of experts on 2 GPUs, compared with the undivided model. Ranks are processes."""
import pytest

import switchyard as sy

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpu_ranks import over_gpus  # noqa: E402
from plain_moe import EXPERTS, off  # noqa: E402
from replicated_training import MAPS, family, map_of, text_of, train  # noqa: E402

WORLD, MAX_TOKENS = 2, 24


@pytest.fixture(autouse=True)
def gpus():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")


def home_map():
    return sy.ExpertMap.home(num_experts=EXPERTS, world=WORLD, slots_per_rank=len(MAPS[WORLD][0]))


def _training(group, name, device="cuda"):
    """Weights, norms and outputs after steps with two maps, the first of which is planned from counts."""
    whole, model, want, norms = family(name).to(device), family(name).to(device), [], []
    train(whole, [each for key, each in whole.named_parameters() if ".experts." in key],
          lambda step: [text_of(r, step).to(device) for r in range(WORLD)], want)
    names = sy.parallelize_moe(model, group, max_tokens=MAX_TOKENS, replicas=home_map())

    def between(step):
        if step == 0:
            assert any(each != home_map() for each in sy.set_replicas(model).values())
        else:
            assert sy.set_replicas(model, {names[0]: map_of(WORLD)})[names[0]] == map_of(WORLD)

    train(model, sy.expert_parameters(model), lambda step: [text_of(group.rank, step).to(device)], norms, between)
    assert norms == pytest.approx(want, rel=1e-3)
    ids = text_of(group.rank, 99).to(device)
    with torch.no_grad():
        assert off(model(input_ids=ids).logits, whole(input_ids=ids).logits) < 1e-3
    state = sy.full_state_dict(model)
    assert max(off(state[key].cpu(), value.cpu()) for key, value in whole.state_dict().items() if ".experts." in key) < 1e-3


@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_training_of_models(name):
    heap = sy.moe_heap_bytes(family(name), WORLD, max_tokens=MAX_TOKENS, backend="cuda", replicas=home_map())
    over_gpus(WORLD, _training, heap, name)
