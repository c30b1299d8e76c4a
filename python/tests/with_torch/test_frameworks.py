# SPDX-License-Identifier: Apache-2.0
"""Models with divided experts in training frameworks: each code block of docs/how_to/training.md runs on two ranks with gloo
and is compared with the same block without division. Refusals raise an error with a message before the first step."""
import copy
import os
import re

import pytest

import switchyard as sy
from clone import ROOT
from team import run_on_team

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from plain_moe import EXPERTS, TOKENS, Model, loss_of, off, tokens_of  # noqa: E402

DIVIDING = re.compile(r"^(sy\.parallelize_moe\(|    if .*\n        sy\.set_replicas\().*\n", re.M)


def blocks(page="training"):
    """Returns the code blocks of a how-to by heading."""
    page = ROOT / f"docs/how_to/{page}.md"
    if not page.is_file():
        pytest.skip("the tests are not in a clone")
    found = {}
    for part in re.split(r"^###? ", page.read_text(encoding="utf-8"), flags=re.M)[1:]:
        found[part.partition("\n")[0].split(",")[0]] = re.findall(r"```python\n(.*?)```", part, re.S)
    return found


class Ranks:
    """The process group of a scenario and a group of its ranks. Both end with the scenario."""

    def __init__(self, rank, world, folder):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29501",
                          ACCELERATE_USE_CPU="1")
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)

    def __enter__(self):
        self.group = sy.Group.from_process_group(heap_bytes=64 << 20, timeout=60)
        return self.group

    def __exit__(self, kind, *_):
        if kind is None:
            self.group.barrier()
        self.group.close()
        dist.destroy_process_group()
        try:
            from accelerate.state import AcceleratorState
            AcceleratorState._reset_state(reset_partial_state=True)
        except ImportError:
            pass


def whole_state(model):
    """Returns the weights of the undivided model for any kind of parameters."""
    return {name.removeprefix("module."): value for name, value in sy.full_state_dict(model).items()}


def compare(got, want, within=1e-4):
    assert got.keys() == want.keys()
    worst = {name: off(got[name], want[name]) for name in want if want[name].norm() > 0}
    assert max(worst.values()) < within, worst


def play_block(rank, world, folder, block):
    """Runs the block with and without division, starting from the same model and data."""
    with Ranks(rank, world, folder) as group:
        ends, start = [], whole_state(Model())
        for text in (block, DIVIDING.sub("", block)):
            names = {"sy": sy, "torch": torch, "group": group, "T": TOKENS, "E": EXPERTS, "model": Model(), "data": range(20), "folder": folder,
                     "loss_of": lambda model, step: loss_of(model, rank, step)}
            exec(compile(text, "training.md", "exec"), names)
            ends.append(whole_state(names["model"]))
            if "accelerator" in names:
                names["accelerator"].free_memory()
        compare(*ends)
        assert any(off(ends[0][name], start[name]) > 1e-2 for name in start)


@pytest.mark.parametrize("name", ["DistributedDataParallel", "accelerate", "FSDP2"])
def test_blocks(name, tmp_path):
    if name == "accelerate":
        pytest.importorskip("accelerate")
    block, = blocks()[name]
    assert DIVIDING.search(block)
    run_on_team("spawn", 2, play_block, str(tmp_path), block, seconds=240)


def test_the_block_with_replicas(tmp_path):
    block, = blocks("replicate_experts")["Train with replicas"]
    assert len(DIVIDING.findall(block)) == 2
    run_on_team("spawn", 2, play_block, str(tmp_path), block, seconds=240)


def play_trainer(rank, world, folder, block):
    import transformers

    from models import WORDS, qwen3

    transformers.utils.logging.set_verbosity_error()
    with Ranks(rank, world, folder) as group:
        torch.manual_seed(0)
        ends, made = [], qwen3()
        dataset = [{"input_ids": ids, "labels": ids} for ids in torch.randint(1, WORDS, (80, 6), generator=torch.Generator().manual_seed(1))]
        for number, text in enumerate((block, DIVIDING.sub("", block))):
            names = {"sy": sy, "torch": torch, "group": group, "T": 12, "model": copy.deepcopy(made), "dataset": dataset,
                     "folder": f"{folder}/{number}"}
            exec(compile(text, "training.md", "exec"), names)
            ends.append(whole_state(names["model"]))
        compare(*ends, within=1e-3)
        assert max(off(ends[0][name], value) for name, value in made.state_dict().items()) > 1e-2
        loaded = type(made).from_pretrained(f"{folder}/0")  # all ranks together saved the undivided model
        compare(loaded.state_dict(), ends[0], within=1e-6)


def test_trainer(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    run_on_team("spawn", 2, play_trainer, str(tmp_path), blocks()["Trainer"][0], seconds=240)


def play_save(rank, world, folder, block):
    with Ranks(rank, world, folder) as group:
        names = {"sy": sy, "torch": torch, "group": group, "T": TOKENS, "model": Model(), "data": range(3), "folder": f"{folder}/checkpoint",
                 "loss_of": lambda model, step: loss_of(model, rank, step)}
        exec(compile(block, "training.md", "exec"), names)
        weights = whole_state(names["model"])
        if rank == 0:
            torch.save(weights, f"{folder}/weights.pt")


def play_load(rank, world, folder, saving, loading):
    """After the checkpoint is loaded, the weights are those saved, and momentum continues like that of a single optimizer for
    all experts."""
    with Ranks(rank, world, folder) as group:
        names = {"sy": sy, "torch": torch, "group": group, "T": TOKENS, "model": Model(), "folder": f"{folder}/checkpoint"}
        torch.nn.init.zeros_(names["model"].experts.down_proj)
        imports = "".join(line + "\n" for line in saving.splitlines() if "import" in line)
        exec(compile(imports + loading, "training.md", "exec"), names)
        compare(whole_state(names["model"]), torch.load(f"{folder}/weights.pt"), within=1e-6)
        parameter = names["model"].experts.down_proj
        momentum = names["optimizer"].state[parameter]["momentum_buffer"]
        assert type(momentum) is torch.Tensor and momentum.shape == parameter.shape
        torch.save(list(momentum), f"{folder}/momentum_{world}_{rank}.pt")


def test_checkpoints_of_torch_distributed(tmp_path):
    """Saved by two ranks and loaded by two, three and one: weights and momenta are the same."""
    saving, loading = blocks()["torch.distributed.checkpoint"]
    run_on_team("spawn", 2, play_save, str(tmp_path), saving, seconds=240)
    found = []
    for world in (2, 3, 1):
        (tmp_path / "store").unlink(missing_ok=True)
        run_on_team("spawn", world, play_load, str(tmp_path), saving, loading, seconds=240)
        found.append(torch.stack(sum((torch.load(tmp_path / f"momentum_{world}_{r}.pt") for r in range(world)), [])))
    assert all(torch.equal(each, found[0]) for each in found) and found[0].abs().max() > 0


def play_whole(rank, world, folder, block):
    with Ranks(rank, world, folder) as group:
        names = {"sy": sy, "torch": torch, "group": group, "T": TOKENS, "model": Model(), "folder": folder}
        exec(compile(block, "training.md", "exec"), names)
        compare(torch.load(f"{folder}/model.pt"), Model().state_dict(), within=1e-9)
        assert off(names["model"](tokens_of(rank)), Model()(tokens_of(rank))) < 1e-5
        if 6 % world:
            with pytest.raises(sy.InvalidArgument, match="6 experts on 4 ranks are shares of different sizes.*full_state_dict"):
                names["model"].state_dict()


@pytest.mark.parametrize("world", [2, 4])  # six experts are not divisible by four ranks
def test_state_dicts_of_the_whole_model(world, tmp_path):
    block, = blocks()["save_pretrained"]
    run_on_team("spawn", world, play_whole, str(tmp_path), block, seconds=240)


# ---- Refusals ----


def play_refusals(rank, world, folder):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def divided(gradients="mean"):
        model = Model()
        sy.parallelize_moe(model, group, max_tokens=TOKENS, gradients=gradients)
        return model

    with Ranks(rank, world, folder) as group:
        model = divided()
        before = model.experts.down_proj.clone()
        wrapped = DistributedDataParallel(model)
        assert torch.equal(model.experts.down_proj, before)  # they are not the weights of rank 0
        with pytest.raises(sy.InvalidArgument, match="model is a DistributedDataParallel: divide the model first"):
            sy.parallelize_moe(wrapped, group, max_tokens=TOKENS)
        with pytest.raises(sy.InvalidArgument, match=r"DistributedDataParallel averages.*gradients='mean'"):
            DistributedDataParallel(divided("sum"))(tokens_of(rank))
        outer = torch.nn.Sequential(divided())
        with pytest.raises(sy.InvalidArgument, match="has the experts 0.experts.* for a replica.*keep_out_of_ddp"):
            DistributedDataParallel(outer)(tokens_of(rank))
        outer = torch.nn.Sequential(divided())
        sy.keep_out_of_ddp(outer)
        DistributedDataParallel(outer)(tokens_of(rank))
        model = divided()
        fully_shard(model)
        with pytest.raises(sy.InvalidArgument, match="fully_shard shards the experts of experts.*ignored_params=set"):
            model(tokens_of(rank))
        model = divided("sum")
        fully_shard(model, ignored_params=set(sy.expert_parameters(model)))
        with pytest.raises(sy.InvalidArgument, match="fully_shard averages.*gradients='mean'"):
            model(tokens_of(rank))
        with pytest.raises(sy.InvalidArgument, match="gradients = 'average': must be 'sum' or 'mean'"):
            sy.parallelize_moe(Model(), group, max_tokens=TOKENS, gradients="average")


def test_wrappers_that_are_not_for_shares(tmp_path):
    run_on_team("spawn", 2, play_refusals, str(tmp_path), seconds=240)


def test_norms_and_scalers_see_all_ranks(ranks):
    """clip_grad_norm_ of every order, with and without foreach, and GradScaler with an infinity on one rank."""
    def rank(group):
        model, whole = Model(), Model()
        sy.parallelize_moe(model, group, max_tokens=TOKENS)
        for each in (model, whole):
            (sum(loss_of(whole, r) for r in range(2)) if each is whole else loss_of(model, group.rank)).backward()
        for order in (2.0, 1.0, 3.0, float("inf"), 0.0):
            names = ("gate_up_proj", "down_proj")
            got = torch.nn.utils.clip_grad_norm_([getattr(model.experts, name) for name in names], 1e9, norm_type=order)
            want = torch.nn.utils.clip_grad_norm_([getattr(whole.experts, name) for name in names], 1e9, norm_type=order)
            assert torch.allclose(torch.as_tensor(float(got)), torch.as_tensor(float(want)), rtol=1e-4), order
        norms = torch._foreach_norm([model.experts.down_proj.grad, model.first.weight.grad], 2)
        assert abs(float(norms[0]) / float(whole.experts.down_proj.grad.norm()) - 1) < 1e-4
        copied = copy.deepcopy(model.experts.down_proj.grad)
        assert torch.equal(copied, model.experts.down_proj.grad) and abs(float(copied.norm()) / float(norms[0]) - 1) < 1e-6
        if group.rank == 1:
            model.experts.down_proj.grad[0, 0, 0] = float("inf")
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_([model.experts.down_proj.grad], found, torch.ones(1))
        assert float(found) == 1
        group.barrier()

    ranks(rank, 2)


def test_an_optimizer_made_before_the_division_trains_the_share(ranks):
    def rank(group):
        model, whole = Model(), Model()
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, whole)]
        sy.parallelize_moe(model, group, max_tokens=TOKENS)
        for step in range(3):
            for each, optimizer in zip((model, whole), optimizers):
                optimizer.zero_grad()
                (sum(loss_of(whole, r, step) for r in range(2)) if each is whole else loss_of(model, group.rank, step)).backward()
                for parameter in model.first.parameters() if each is model else ():
                    parts = [torch.frombuffer(bytearray(part), dtype=torch.float32) for part in group.all_gather(parameter.grad.numpy().tobytes())]
                    parameter.grad = sum(parts).reshape(parameter.shape)
                optimizer.step()
        mine = group.experts_of(6)
        for name in ("gate_up_proj", "down_proj"):
            assert off(getattr(model.experts, name), getattr(whole.experts, name)[mine.start:mine.stop]) < 1e-4

    ranks(rank, 2)


def test_dividing_twice(ranks):
    def rank(group):
        model = Model()
        sy.parallelize_moe(model, group, max_tokens=TOKENS)
        before = model.experts.down_proj.clone()
        with pytest.raises(sy.InvalidArgument, match="the experts of experts are divided already"):
            sy.parallelize_moe(model, group, max_tokens=TOKENS)
        with pytest.raises(sy.InvalidArgument, match="divided already"):
            sy.moe_heap_bytes(model, 2, max_tokens=TOKENS)
        assert torch.equal(before, model.experts.down_proj)
        assert off(model(tokens_of(group.rank)), Model()(tokens_of(group.rank))) < 1e-5

    ranks(rank, 2)
