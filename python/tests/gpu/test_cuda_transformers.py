# SPDX-License-Identifier: Apache-2.0
"""Models of transformers whose experts are computed by the library on GPUs. Ranks are processes that go round the GPUs. Needs a GPU that
the library supports, and libraries with CUDA."""
import pytest

import switchyard as sy
from processes import a_store, run_processes
from switchyard import _ffi

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import MODELS, WORDS, check_products, in_bf16  # noqa: E402

WORLD, BATCH, LENGTH, SCALE = 2, 2, 16, 4


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
    """As with_torch/test_transformers.py has it on the CPU: weights change in place and move, gradients are recorded and are not."""
    whole, model, ids = in_bf16(name, SCALE).cuda(), in_bf16(name, SCALE).cuda(), tokens_of(group.rank)
    names = sy.parallelize_moe(model, group, max_tokens=BATCH * LENGTH, experts=experts)
    assert [model.get_submodule(each).forward.__self__._way for each in names] == [way] * len(names)
    check_products(group, model, whole, ids, names)


def _process(rank, world, store, heap_bytes, arguments):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.empty(1, device="cuda")
    with sy.Group.connect(rank, world, store, "token", heap_bytes, backend="cuda", timeout=60, rendezvous_timeout=120) as group:
        with torch.cuda.stream(torch.cuda.Stream()):
            _scenario(group, *arguments)
            torch.cuda.current_stream().synchronize()
        group.barrier()


@pytest.mark.parametrize("experts, way", [("automatic", "grouped"), ("grouped", "grouped"), ("layer", "layer")])
@pytest.mark.parametrize("name", list(MODELS))
def test_models(name, experts, way):
    heap = sy.moe_heap_bytes(in_bf16(name, SCALE), WORLD, max_tokens=BATCH * LENGTH, backend="cuda", experts=experts)
    arguments = (name, experts, way)
    assert run_processes("spawn", _process, WORLD, a_store(), heap, arguments, seconds=300) == [0] * WORLD
