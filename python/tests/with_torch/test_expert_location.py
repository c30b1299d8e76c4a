# SPDX-License-Identifier: Apache-2.0
"""Placements of experts for engines: the planner for even division, conversions and files."""
import numpy as np
import pytest

import switchyard as sy
from clone import ROOT
from switchyard.engines import expert_location as location

torch = pytest.importorskip("torch")


def counts_of(experts, exponent, seed, layers=1):
    rng = np.random.default_rng(seed)
    popularity = np.stack([rng.permutation(1 / np.arange(1, experts + 1) ** exponent) for _ in range(layers)])
    return np.stack([rng.multinomial(400000, each / each.sum()) for each in popularity])


def moved(before, after, world):
    """Returns the number of experts that ranks hold in `after` only."""
    return sum(len(set(b) - set(a)) for was, now in zip(before, after)
               for a, b in zip(was.reshape(world, -1).tolist(), now.reshape(world, -1).tolist()))


def busiest(placement, counts, world):
    return (location.rank_loads(placement, counts, world=world).max(1) * world / counts.sum(1)).max()


@pytest.mark.parametrize("experts, world, spare", [(256, 32, 2), (128, 8, 2), (60, 4, 3), (8, 2, 2)])
@pytest.mark.parametrize("exponent", [0, 0.6, 1.2])
def test_balance_with_few_moves(experts, world, spare, exponent):
    slots = experts // world + spare
    counts = counts_of(experts, exponent, 1)
    first = location.place(counts, world=world, slots_per_rank=slots)
    assert busiest(first, counts, world) <= 1.0201 and (location.place(counts, world=world, slots_per_rank=slots) == first).all()
    assert (location.place(counts, world=world, slots_per_rank=slots, before=first) == first).all()
    later = counts * np.random.default_rng(2).integers(90, 111, counts.shape)
    second = location.place(later, world=world, slots_per_rank=slots, before=first)
    assert busiest(second, later, world) <= 1.0201 and moved(first, second, world) <= world * slots // 5


def test_wide_counts():
    counts = counts_of(64, 1.0, 3, layers=2)
    placed = location.place(counts, world=4, slots_per_rank=18)
    assert busiest(location.place(counts * (1 << 40), world=4, slots_per_rank=18), counts, 4) < 1.03 and placed.shape == (2, 72)
    assert location.place(np.zeros((1, 8)), world=2, slots_per_rank=5).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1]]


def test_maps():
    counts = counts_of(16, 1.2, 4, layers=2)
    maps = [sy.ExpertMap.home(num_experts=16, world=4, slots_per_rank=6).plan(each) for each in counts]
    assert any((each.expert_of_slot < 0).any() for each in maps)
    placed = location.from_expert_maps(maps, counts)
    for each, slots in zip(maps, placed):
        kept = each.expert_of_slot >= 0
        assert (slots[kept] == each.expert_of_slot[kept]).all() and (slots >= 0).all()
    back = location.to_expert_maps(torch.from_numpy(placed), world=4)
    assert [each.expert_of_slot.tolist() for each in back] == placed.tolist() and {each.num_experts for each in back} == {16}
    assert (location.from_expert_maps(back) == placed).all()


def test_files(tmp_path):
    placed = np.array([[0, 1, 2, 0], [2, 1, 1, 0]])
    for name in ("a.json", "a.pt"):
        location.save(tmp_path / name, placed)
        assert (location.load(tmp_path / name) == placed).all()
    counts = torch.arange(12).reshape(2, 2, 3)
    for name, content in (("stat.pt", {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}),
                          ("steps.pt", counts), ("eplb.pt", counts.sum(0))):
        torch.save(content, tmp_path / name)
        assert location.load_counts(tmp_path / name).tolist() == counts.sum(0).tolist()
    (tmp_path / "counts.json").write_text('{"logical_count": [[1, 2, 3], [4, 5, 6]]}')
    assert location.load_counts(tmp_path / "counts.json", tmp_path / "eplb.pt").tolist() == [[7, 10, 13], [16, 19, 22]]


def test_mistakes(tmp_path):
    def refused(match, call, *arguments, **keywords):
        with pytest.raises(sy.InvalidArgument, match=match):
            call(*arguments, **keywords)

    refused("7 slots for 8 experts", location.place, np.ones(8), world=1, slots_per_rank=7)
    refused(r"counts \[1, 2\]: must be numbers of routes", location.place, [[1, -1]], world=1, slots_per_rank=2)
    refused(r"before \[1, 4\]: must be \[1, 2\]", location.place, [1, 1], world=1, slots_per_rank=2, before=[0, 1, 0, 1])
    refused("layer 0 must have each expert of 0 to 2", location.to_expert_maps, [[0, 2, 0, 2]], world=2)
    refused("with a multiple of 3 slots", location.to_expert_maps, [[0, 1]], world=3)
    refused("must end in .json or .pt", location.save, tmp_path / "a.npy", [[0, 1]])
    torch.save({"model": ROOT}, tmp_path / "objects.pt")
    torch.save({"physical_count": torch.ones(2, 3)}, tmp_path / "other.pt")
    torch.save({"records": [{"rank": 0}], "last_physical_to_logical_map": torch.tensor([[0, 1]])}, tmp_path / "records.pt")
    torch.save(torch.ones(2, 3), tmp_path / "one.pt")
    torch.save(torch.ones(2, 4), tmp_path / "two.pt")
    refused("objects.pt: must be a file of torch.save with tensors and plain values", location.load_counts, tmp_path / "objects.pt")
    refused("other.pt: must have counts of routes.*not the entries physical_count", location.load_counts, tmp_path / "other.pt")
    refused("other.pt: must have the entry", location.load, tmp_path / "other.pt")
    refused("records.pt: each record must have a global_physical_count", location.load_counts, tmp_path / "records.pt")
    refused("all with counts of the same size", location.load_counts, tmp_path / "one.pt", tmp_path / "two.pt")
