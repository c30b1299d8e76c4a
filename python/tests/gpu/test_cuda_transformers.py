# SPDX-License-Identifier: Apache-2.0
"""Models of transformers whose experts run in the library on GPUs. Ranks are processes distributed over the GPUs. Needs a
supported GPU and libraries with CUDA."""
import pytest

import switchyard as sy
from switchyard._abi import ffi as _ffi

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpu_ranks import over_gpus  # noqa: E402
from models import MODELS, WORDS, check_products, in_bf16  # noqa: E402

BATCH, LENGTH, SCALE = 2, 16, 4


@pytest.fixture(autouse=True)
def gpus():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    try:
        _ffi.layer_library()
    except sy.LibraryNotFound as error:
        pytest.skip(str(error))


def tokens_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, WORDS, (BATCH, LENGTH - 5 * rank), generator=generator).cuda()


def _scenario(group, name, experts, way):
    """Same as with_torch/test_transformers.py on the CPU: weights change in place and move, with and without recorded
    gradients."""
    whole, model, ids = in_bf16(name, SCALE).cuda(), in_bf16(name, SCALE).cuda(), tokens_of(group.rank)
    names = sy.parallelize_moe(model, group, max_tokens=BATCH * LENGTH, experts=experts)
    assert [model.get_submodule(each).forward.__self__._way for each in names] == [way] * len(names)
    check_products(group, model, whole, ids, names)


@pytest.mark.parametrize("experts, way", [("automatic", "grouped"), ("grouped", "grouped"), ("layer", "layer")])
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("world", [2, 4])
def test_models(world, name, experts, way):
    if world > 2 and torch.cuda.device_count() < world:
        pytest.skip(f"{world} ranks would share GPUs, which takes long and shows no more than two")
    heap = sy.moe_heap_bytes(in_bf16(name, SCALE), world, max_tokens=BATCH * LENGTH, backend="cuda", experts=experts)
    over_gpus(world, _scenario, heap, name, experts, way)
