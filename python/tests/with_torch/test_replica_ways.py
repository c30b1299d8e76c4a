# SPDX-License-Identifier: Apache-2.0
"""Replicas of experts with experts="grouped" and "layer": passes without gradients use products or a layer for the slots, passes
with gradients the module. helpers/host_products.py computes grouped products."""
import copy
import gc
import weakref

import pytest

import switchyard as sy
from switchyard._abi import ffi as _ffi

torch = pytest.importorskip("torch")

from host_products import HostProducts, use_host_products  # noqa: E402
from plain_moe import EXPERTS, HIDDEN, INNER, TOPK, Experts, Model, off, seeded  # noqa: E402
from replicated_training import MAPS, MAX_TOKENS, check_ways, home_map, map_of  # noqa: E402

TOKENS = 24


@pytest.fixture(params=["grouped", "layer"])
def way(request, monkeypatch):
    """Returns the name of a form of experts, after making it available on the CPU."""
    try:
        _ffi.layer_library()
    except sy.LibraryNotFound as error:
        pytest.skip(str(error))
    if request.param == "grouped":
        use_host_products(monkeypatch)
    return request.param


def argument(way):
    return "automatic" if way == "grouped" else way  # the fixture replaces the selection


class Exact(torch.nn.Module):
    """Experts with integer weights and, in each row of the down projections, one nonzero value: all sums are exact, so results do not
    depend on their order."""

    def __init__(self):
        super().__init__()
        with seeded():
            self.experts = Experts(dtype=torch.bfloat16)
            with torch.no_grad():
                self.experts.gate_up_proj.mul_(6).round_()
                self.experts.down_proj.copy_(torch.stack([torch.eye(INNER)[torch.randperm(INNER)] * 2.0 ** (e - 3) for e in range(EXPERTS)]))


def routes_of(rank, step=0, count=TOKENS):
    """Integer tokens. Half of the first choices are expert 0."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randint(-2, 3, (count, HIDDEN), generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(count)]) if count else torch.empty((0, TOPK)).long()
    ids[::2, 0] = torch.where(ids[::2, 1] == 0, ids[::2, 0], 0)
    return x, ids, torch.tensor([0.5, 2.0]).expand(count, TOPK)


def infer(model, *routes):
    with torch.no_grad():
        return model.experts(*routes)


def divided(group, way, expert_map, kind=Exact):
    model = kind()
    sy.parallelize_moe(model, group, max_tokens=TOKENS, topk=TOPK, experts=argument(way), replicas=expert_map)
    return model, model.experts.forward.__self__


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_bits_without_gradients(ranks, way, world):
    """With each map in turn, also if one rank has no tokens, outputs are bitwise identical to those without replicas and close to those
    of the undivided module. Passes do not use the module, skip the id -1, and count routes."""
    whole = Exact()

    def rank(group):
        model, share = divided(group, way, home_map(world))
        plain, _ = divided(group, way, None)
        share._experts = None  # a pass through the module would fail
        for step, given in enumerate((None, map_of(world), home_map(world), map_of(world))):
            x, ids, weights = routes_of(group.rank, step, 0 if step % 3 == group.rank else TOKENS)
            some = ids.clone()
            some[1::3, 1] = -1
            for given_ids in (ids, some):
                got = infer(model, x, given_ids, weights)
                assert torch.equal(got, infer(plain, x, given_ids, weights))
                assert len(x) == 0 or off(got.float(), infer(whole, x, ids, torch.where(given_ids < 0, 0.0, weights)).float()) < 1e-2
            if step == 0:
                replicas, counted = share.replicas, []
                replicas.set_map = lambda a, routes, original=replicas.set_map: (counted.append(routes.sum()), original(a, routes))
            sy.set_replicas(model, given)
        assert min(counted) >= TOPK * TOKENS * (world - 2) and sum(counted) > 0

    ranks(rank, world)


@pytest.mark.parametrize("world", [2, 4])
def test_weights_that_change(ranks, way, world):
    """Changes on one rank, in place and by moved memory, are detected; unchanged weights are not copied again. A pass with gradients
    releases the products of replicas. A copy of the model has separate replicas."""
    def rank(group):
        model, share = divided(group, way, map_of(world))
        copied, whole, routes = copy.deepcopy(model), Exact(), routes_of(group.rank)
        fetched = []
        share.replicas.fetch = lambda weights, original=share.replicas.fetch: (fetched.append(1), original(weights))[1]

        def check(count, one=model):
            for _ in range(2):
                assert off(infer(one, *routes).float(), infer(whole, *routes).float()) < 1e-2
            assert len(fetched) == count

        check(1)
        with torch.no_grad():
            whole.experts.down_proj[0] *= 2
            if group.rank == 0:
                model.experts.down_proj[0] *= 2
        check(2)
        for each, theirs in zip(model.experts.parameters(), whole.experts.parameters()):
            each.data = each.data * 2
            theirs.data *= 2
        check(3)
        if group.rank == world - 1:
            assert share._held.products is not None or way == "layer" or not share.replicas.layout.replicas
        model.experts(*routes).sum().backward()
        assert share._held.products is None and len(fetched) == 4
        assert all(each.grad is not None for each in model.experts.parameters())
        check(5)
        for each, theirs in zip(model.experts.parameters(), whole.experts.parameters()):
            each.data.mul_(0.5)  # not detectable, but follows a pass with gradients
            theirs.data *= 0.5
        model.experts(*routes).sum().backward()
        check(7)
        sy.set_replicas(model, home_map(world))
        check(8)
        whole.load_state_dict(Exact().state_dict())
        check(9, copied)

    ranks(rank, world)


def test_modes_of_passes(ranks, way):
    """In a compiled model, the experts run uncompiled. A copy of the model runs first in inference mode and then in other modes, with
    weights that change in between."""
    def rank(group):
        model, share = divided(group, way, map_of(2))
        copied, whole, routes = copy.deepcopy(model), Exact(), routes_of(group.rank)
        compiled = torch.compile(model.experts, backend="eager", dynamic=False)
        share._experts = None  # a pass through the module would fail
        with torch.no_grad():
            assert off(compiled(*routes).float(), infer(whole, *routes).float()) < 1e-2
        for factor, mode in enumerate((torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.no_grad), 1):
            with torch.no_grad():
                copied.experts.down_proj.mul_(factor)
                whole.experts.down_proj.mul_(factor)
            with mode():
                assert off(copied.experts(*routes).float(), whole.experts(*routes).float()) < 1e-2

    ranks(rank, 2)


@pytest.mark.parametrize("world", [2, 3])
def test_training_does_not_depend_on_the_form(ranks, way, world):
    """Training with passes without gradients between steps yields the same bits as with experts="module"."""
    class Small(Model):
        def __init__(self):
            super().__init__(dtype=torch.bfloat16)
            self.first.bfloat16()

    def rank(group):
        ends = []
        for form in (way, "module"):
            model, _ = divided(group, form, home_map(world), Small)
            if form == "module":
                model.experts.forward.__self__._way = "module"
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            for step in range(3):
                x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(10 * step + group.rank)).bfloat16()
                if form != "module" or step == 0:  # the same counts
                    with torch.no_grad():
                        model(x)
                optimizer.zero_grad()
                model(x).float().square().sum().backward()
                optimizer.step()
                sy.set_replicas(model, map_of(world))
            ends.append(list(model.parameters()))
        return all(map(torch.equal, *ends))

    assert all(ranks(rank, world))


def test_gradients_on_one_rank_only(ranks, way):
    """All ranks raise Mismatch: they would compute their experts in different forms."""
    def rank(group):
        model, _ = divided(group, way, map_of(2))
        model.experts.requires_grad_(False)
        x, ids, weights = routes_of(group.rank)
        want = infer(model, x, ids, weights)
        with pytest.raises(sy.Mismatch, match=f"experts: either all ranks or none must record gradients; rank [01] computes .*'{way}'"):
            model.experts(x.requires_grad_(group.rank == 0), ids, weights)
        assert torch.equal(infer(model, x.detach(), ids, weights), want)

    ranks(rank, 2)


def test_memory_of_a_layer(ranks):
    """The heap that moe_heap_bytes returns suffices and is larger with replicas. The layer has one copy of each slot's weights."""
    sizes = [sy.moe_heap_bytes(Exact(), 2, max_tokens=TOKENS, topk=TOPK, experts="layer", replicas=each) for each in (None, map_of(2))]
    assert sizes[0] < sizes[1]

    def rank(group):
        model, share = divided(group, "layer", map_of(2))
        held = share._held
        infer(model, *routes_of(group.rank))
        assert [list(each.shape) for each in held._slots] == [[5, 2 * INNER, HIDDEN], [5, HIDDEN, INNER]] and held.tensors == []
        places = [each.data_ptr() for each in held._slots]
        sy.set_replicas(model, home_map(2))
        infer(model, *routes_of(group.rank))
        assert places == [each.data_ptr() for each in held._slots]

    ranks(rank, 2, heap_bytes=sizes[1])


@pytest.mark.parametrize("replicas", [False, True])
def test_layers_end_with_copies_of_the_model(ranks, replicas):
    """Only the layer that was made last remains, so that later ones share its memory."""
    def rank(group):
        model, _ = divided(group, "layer", map_of(1) if replicas else None)
        routes, weights = routes_of(group.rank), []
        want = infer(model, *routes)
        for _ in range(5):
            copied = copy.deepcopy(model)
            assert torch.equal(infer(copied, *routes), want)
            share = copied.experts.forward.__self__
            weights.append(weakref.ref((share._held._slots[1] if replicas else copied.experts.down_proj).untyped_storage()))
            del copied, share
            gc.collect()
        assert [each() is None for each in weights] == [True] * 4 + [False]
        assert torch.equal(infer(model, *routes), want)

    ranks(rank, 1)  # gc.collect has no effect while another thread is in it


def test_weights_that_a_layer_rejects(ranks):
    """Each pass raises the error until the weights are valid again; none uses the previous weights."""
    def rank(group):
        model, _ = divided(group, "layer", None)
        routes, whole = routes_of(group.rank), Exact()
        infer(model, *routes)
        valid = model.experts.down_proj.data * 2
        model.experts.down_proj.data = valid.transpose(1, 2).contiguous().transpose(1, 2)
        for _ in range(3):
            with pytest.raises(sy.InvalidArgument, match="w2 is not dense"):
                infer(model, *routes)
        model.experts.down_proj.data = valid
        whole.experts.down_proj.data *= 2
        assert off(infer(model, *routes).float(), infer(whole, *routes).float()) < 1e-2

    ranks(rank, 2)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_models(way, name, world):
    pytest.importorskip("transformers")
    from models import in_bf16

    heap = sy.moe_heap_bytes(in_bf16(name), world, max_tokens=MAX_TOKENS, experts=argument(way), replicas=home_map(world))
    assert len(MAPS[world]) == world
    sy.run_ranks(check_ways, world, name, argument(way), way, heap_bytes=heap, timeout=60)


def test_products_are_made_again_only_after_weights_move(ranks, monkeypatch):
    """Changes in place do not create the products of owned weights again; moved memory does. Without replicas, there are no
    products of replicas."""
    use_host_products(monkeypatch)

    def rank(group):
        model, share = divided(group, "grouped", map_of(1, [[0, 1, 2, 3, 4, 5, -1]]))
        routes = routes_of(0)
        infer(model, *routes)
        with torch.no_grad():
            model.experts.down_proj.mul_(2)
        infer(model, *routes)
        assert HostProducts.made == 2 and share._held.products is None
        assert off(infer(model, *routes).float(), 2 * infer(Exact(), *routes).float()) < 1e-2
        model.experts.down_proj.data = model.experts.down_proj.data.clone()
        infer(model, *routes)
        assert HostProducts.made == 4

    ranks(rank, 1)
