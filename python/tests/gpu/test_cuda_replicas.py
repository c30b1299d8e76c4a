# SPDX-License-Identifier: Apache-2.0
"""Training and inference with replicas of experts on 2 GPUs, compared with the undivided model. Ranks are processes. with_torch/
test_replicas.py and with_torch/test_replica_ways.py run the same scenarios on the CPU."""
import pytest

import switchyard as sy
from switchyard._abi import ffi as _ffi

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpu_ranks import over_gpus  # noqa: E402
from replicated_training import MAX_TOKENS, check_training, check_ways, family, home_map  # noqa: E402

WORLD, SCALE = 2, 4


@pytest.fixture(autouse=True)
def gpus():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")


@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_training_of_models(name):
    heap = sy.moe_heap_bytes(family(name), WORLD, max_tokens=MAX_TOKENS, backend="cuda", replicas=home_map(WORLD))
    over_gpus(WORLD, check_training, heap, name, "cuda", 1e-3)


@pytest.mark.parametrize("experts, way", [("automatic", "grouped"), ("grouped", "grouped"), ("layer", "layer")])
@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_products_of_the_library(name, experts, way):
    from models import in_bf16

    try:
        _ffi.layer_library()
    except sy.LibraryNotFound as error:
        pytest.skip(str(error))
    heap = sy.moe_heap_bytes(in_bf16(name, SCALE), WORLD, max_tokens=MAX_TOKENS, backend="cuda", experts=experts, replicas=home_map(WORLD))
    over_gpus(WORLD, check_ways, heap, name, experts, way, "cuda", SCALE)
