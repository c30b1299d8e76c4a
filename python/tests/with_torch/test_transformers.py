# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with random configurations, compared with the same models before conversion."""
import copy
import subprocess
import sys

import pytest

import switchyard as sy
from clone import EXAMPLES, script
from switchyard._abi import ffi as _ffi

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from host_products import HostProducts, use_host_products  # noqa: E402
from models import (EXPERTS, MODELS, WORDS, change_experts, check_products, deepseek, distance, in_bf16, logits_of, mixtral, move_experts,  # noqa: E402
                    qwen3)

LENGTH, BATCH = 5, 2


def tokens_of(rank):
    """Different texts. One rank has a shorter text."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, WORDS, (BATCH, LENGTH if rank != 1 else 3), generator=generator)


def loss_of(model, ids):
    return model(input_ids=ids).logits.square().mean()


@pytest.mark.parametrize("world", [1, 2, 4, 8])  # with 8 ranks, two have no experts
@pytest.mark.parametrize("make, layers", [(mixtral, 2), (qwen3, 2), (deepseek, 1)], ids=lambda value: getattr(value, "__name__", ""))
def test_logits_and_gradients(make, layers, world):
    """Outputs are compared for every rank's tokens; experts' gradients are those of all ranks' tokens together."""
    torch.manual_seed(0)
    whole = make().float().eval()
    heap = sy.moe_heap_bytes(whole, world, max_tokens=BATCH * LENGTH)
    models = [copy.deepcopy(whole) for _ in range(world)]

    def rank(group):
        model = models[group.rank]
        names = sy.parallelize_moe(model, group, max_tokens=BATCH * LENGTH)
        assert len(names) == layers
        mine = group.experts_of(EXPERTS)
        assert all(module.down_proj.shape[0] == len(mine) for name, module in model.named_modules() if name in names)
        with torch.no_grad():
            logits = model(input_ids=tokens_of(group.rank)).logits
        loss_of(model, tokens_of(group.rank)).backward()
        return names, mine, logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    results = sy.run_ranks(rank, world, heap_bytes=heap, timeout=60)
    totals = {}
    for r, (names, mine, logits, grads) in enumerate(results):
        with torch.no_grad():
            want = whole(input_ids=tokens_of(r)).logits
        assert (logits - want).norm() / want.norm() < 1e-5
        whole.zero_grad()
        loss_of(whole, tokens_of(r)).backward()
        for name, parameter in whole.named_parameters():
            if name.rpartition(".")[0] in names:
                totals[name] = totals.get(name, 0) + (0 if parameter.grad is None else parameter.grad)
            elif parameter.grad is not None:
                torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-3, atol=1e-6)
    for _, mine, _, grads in results:
        for name, total in totals.items():
            if len(mine):
                torch.testing.assert_close(grads[name], total[mine.start:mine.stop], rtol=1e-3, atol=1e-6)


def test_bf16():
    torch.manual_seed(0)
    whole = mixtral().bfloat16().eval()
    models = [copy.deepcopy(whole) for _ in range(2)]

    def rank(group):
        sy.parallelize_moe(models[group.rank], group, max_tokens=BATCH * LENGTH)
        with torch.no_grad():
            return models[group.rank](input_ids=tokens_of(group.rank)).logits

    for r, logits in enumerate(sy.run_ranks(rank, 2, timeout=60)):
        with torch.no_grad():
            want = whole(input_ids=tokens_of(r)).logits.float()
        assert (logits.float() - want).norm() / want.norm() < 1e-2


def _needs_the_layer():
    try:
        _ffi.layer_library()
    except sy.LibraryNotFound as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("world", [2, 4, 8])  # with 8 ranks, two have no experts
@pytest.mark.parametrize("name", list(MODELS))
def test_layers(name, world):
    """experts="layer" in passes without gradients, computed only by the layer; weights that changed in place or moved; passes
    with gradients."""
    _needs_the_layer()
    made = in_bf16(name)
    heap = sy.moe_heap_bytes(made, world, max_tokens=BATCH * LENGTH, experts="layer")
    assert heap > sy.moe_heap_bytes(made, world, max_tokens=BATCH * LENGTH)
    wholes, models = ([copy.deepcopy(made) for _ in range(world)] for _ in range(2))

    def rank(group):
        model, whole, ids = models[group.rank], wholes[group.rank], tokens_of(group.rank)
        names = sy.parallelize_moe(model, group, max_tokens=BATCH * LENGTH, experts="layer")
        check_products(group, model, whole, ids, names)

    sy.run_ranks(rank, world, heap_bytes=heap, timeout=60)


def test_the_calls_of_grouped_products(monkeypatch):
    """Results of "grouped" products. The products are created anew only after weights have moved."""
    use_host_products(monkeypatch)
    whole = in_bf16("qwen3")
    model, ids = copy.deepcopy(whole), tokens_of(0)

    def rank(group):
        names = sy.parallelize_moe(model, group, max_tokens=BATCH * LENGTH)
        own = [model.get_submodule(each).forward.__self__ for each in names]
        for share in own:
            share._by_module = None  # a pass through the module would fail
        errors = [distance(model, whole, ids), distance(model, whole, ids)]
        assert HostProducts.made == 2 * len(names)
        change_experts(model, whole, names, group.experts_of(EXPERTS), 1.5)
        errors.append(distance(model, whole, ids))
        assert HostProducts.made == 2 * len(names)
        move_experts([model, whole], names, 0.5)
        errors.append(distance(model, whole, ids))
        assert HostProducts.made == 4 * len(names) and max(errors) <= 1e-2, errors

    sy.run_ranks(rank, 1, timeout=60)


def test_an_optimizer_step_is_seen():
    """The layer gives the same result as the module's own forward with the weights after the step."""
    _needs_the_layer()
    models = [in_bf16("mixtral") for _ in range(2)]

    def rank(group):
        model, ids = models[group.rank], tokens_of(group.rank)
        names = sy.parallelize_moe(model, group, max_tokens=BATCH * LENGTH, experts="layer")
        with torch.no_grad():
            before, _ = logits_of(model, ids)
        experts = [parameter for name in names for parameter in model.get_submodule(name).parameters()]
        loss_of(model, ids).backward()
        torch.optim.SGD(experts, lr=0.1 / max(each.grad.abs().max().item() for each in experts)).step()
        recorded, chosen = logits_of(model, ids)
        with torch.no_grad():
            after, _ = logits_of(model, ids, chosen)
        recorded = recorded.detach()
        return [((after - each).norm() / each.norm()).item() for each in (recorded, before)]

    for wrong, changed in sy.run_ranks(rank, 2, timeout=60):
        assert wrong <= 1e-2 < changed, (wrong, changed)


def _of_gelu():
    return mixtral(hidden_act="gelu")


def _limited():
    """Mixtral's parameters and activation, with a limit added."""
    model = mixtral()
    for module in list(model.modules()):
        if type(module).__name__ == "MixtralExperts":
            module.__class__ = type("LimitedExperts", (type(module),), {"forward": _limited_forward})
    return model


def _limited_forward(self, hidden_states, top_k_index, top_k_weights):
    out = torch.zeros_like(hidden_states)
    for e in range(self.num_experts):
        tokens, positions = torch.where(top_k_index == e)
        gate, up = (hidden_states[tokens] @ self.gate_up_proj[e].T).chunk(2, dim=-1)
        made = (torch.nn.functional.silu(gate.clamp(max=7)) * up.clamp(-7, 7)) @ self.down_proj[e].T
        out.index_add_(0, tokens, made * top_k_weights[tokens, positions, None])
    return out


@pytest.mark.parametrize("make, kind, text", [(mixtral, torch.float32, "allowed: torch.bfloat16"),
                                              (_of_gelu, torch.bfloat16, "MixtralExperts does not compute SwiGLU"),
                                              (_limited, torch.bfloat16, "LimitedExperts does not compute SwiGLU")])
def test_what_a_layer_refuses(make, kind, text):
    model = make().to(kind)
    with pytest.raises(sy.InvalidArgument, match=text):
        sy.moe_heap_bytes(model, 1, max_tokens=4, experts="layer")

    def rank(group):
        with pytest.raises(sy.InvalidArgument, match=text):
            sy.parallelize_moe(model, group, max_tokens=4, experts="layer")
        with pytest.raises(sy.InvalidArgument, match="allowed there: automatic, module, layer"):
            sy.parallelize_moe(model, group, max_tokens=4, experts="grouped")
        with pytest.raises(sy.InvalidArgument, match="experts = 'all': must be 'automatic', 'module', 'grouped' or 'layer'"):
            sy.parallelize_moe(model, group, max_tokens=4, experts="all")
        assert len(sy.parallelize_moe(model, group, max_tokens=4)) == 2  # automatic uses the module

    sy.run_ranks(rank, 1)


def test_the_example_of_recording(environment, tmp_path):
    """The program itself reads its recording back."""
    program, to = EXAMPLES / "07_record_routing.py", tmp_path / "routing.safetensors"
    if not program.is_file():
        pytest.skip("the tests are not in a clone")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program), str(to)]
    done = subprocess.run(command, check=True, timeout=180, env=environment, capture_output=True, text=True)
    assert "192 tokens of each of 2 ranks in 2 layers" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == [to.name]


def test_recorded_choices_are_those_of_the_model():
    """softmax_topk among equal logits, which are frequent in bf16, equals torch.topk of the float32 softmax."""
    recording = script("record_routing")
    logits = torch.randn(500, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, ids = torch.softmax(logits, -1, dtype=torch.float32).topk(8, dim=-1)
    got_ids, got_weights = recording.softmax_topk(8)((logits,))
    assert torch.equal(got_ids, ids) and torch.allclose(got_weights, weights / weights.sum(-1, keepdim=True))
    recorder = recording.RoutingRecorder(num_experts=128)
    recorder.hook(0, extract=recording.softmax_topk(8, renormalize=False))(None, None, logits)
    assert (recorder.tensors()["layer0.rank0.topk_weights"] == weights.numpy()).all()
    by_numpy, _ = recording.softmax_topk(8)(logits.float().numpy())
    assert (by_numpy[:, 0] >= 0).all() and (by_numpy != ids.numpy()).any()  # the order among equal logits differs


def test_what_has_no_experts():
    class Config:
        num_experts_per_tok = 2

    model = torch.nn.Linear(4, 4)

    def rank(group):
        with pytest.raises(sy.InvalidArgument, match="Linear has no experts"):
            sy.parallelize_moe(model, group, max_tokens=4)
        model.config = Config()
        with pytest.raises(sy.InvalidArgument, match="Linear has no experts"):
            sy.parallelize_moe(model, group, max_tokens=4)

    sy.run_ranks(rank, 1)
