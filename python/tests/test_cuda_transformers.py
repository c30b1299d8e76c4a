# SPDX-License-Identifier: Apache-2.0
"""Models of transformers whose experts are computed by the library on GPUs. Ranks are processes that go round the GPUs. Needs a GPU that
the library supports, and libraries with CUDA."""
import pytest

import switchyard as sy
from processes import a_store, run_processes
from switchyard import _ffi

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import EXPERTS, MODELS, WORDS, change_experts, distance, in_bf16, move_experts  # noqa: E402

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
    """As python/tests/test_transformers.py has it on the CPU: weights change in place and move, gradients are recorded and are not."""
    whole, model, ids, errors = in_bf16(name, SCALE).cuda(), in_bf16(name, SCALE).cuda(), tokens_of(group.rank), []
    names, mine = sy.parallelize_moe(model, group, max_tokens=BATCH * LENGTH, experts=experts), group.experts_of(EXPERTS)
    shares = [model.get_submodule(each).forward.__self__ for each in names]
    assert [share._way for share in shares] == [way] * len(shares)
    own = [share._experts for share in shares]
    for share in shares:
        share._experts = None  # a pass that came to the module would fail
    errors.append(distance(model, whole, ids))
    change_experts(model, whole, names, mine, 1.5)
    errors.append(distance(model, whole, ids))
    move_experts([model, whole], names, 0.5)
    errors.append(distance(model, whole, ids))
    for share, each in zip(shares, own):
        share._experts = each
    model(input_ids=ids).logits.square().mean().backward()
    assert all(model.get_submodule(each).down_proj.grad.abs().sum() > 0 for each in names)
    errors.append(distance(model, whole, ids))
    assert max(errors) <= 1e-2, errors


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
