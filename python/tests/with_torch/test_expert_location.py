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


def of_file(call, content, name="a.pt"):
    """Returns a case that calls `call` with a file of this content."""
    def run(path):
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            torch.save(content, path / name)
        return call(path / name)
    return run


def records(*counts):
    return {"records": list(counts), "last_physical_to_logical_map": torch.tensor([[0, 1, 0]])}


def physical(*counts):
    return {"global_physical_count": torch.tensor([counts])}


def placing(counts=((1, 2),), world=2, slots_per_rank=2, **keywords):
    return lambda path: location.place(counts, world=world, slots_per_rank=slots_per_rank, **keywords)


def loading(counts, placement=((0, 1),), world=1):
    return lambda path: location.rank_loads(placement, counts, world=world)


ROUTES = "must be (whole )?numbers of routes, at least 0 and less than 2"


@pytest.mark.parametrize("match, call", [
    (rf"^counts \[1, 2\]: {ROUTES}", placing([[1e19, 2e19]])),
    (rf"^counts \[1, 2\]: {ROUTES}", placing(np.array([[1 << 63, 1]], np.uint64))),
    (rf"^counts: {ROUTES}", placing([[1, 2], [3]])),
    (r"^world = 0: must be in \[1,", placing(world=0)),
    (r"^world = -1: must be in \[1,", placing(world=-1, slots_per_rank=-2)),
    (r"^world = '2' \(str\): must be an integer", placing(world="2")),
    (r"^slots_per_rank = 2.0 \(float\): must be an integer", placing(slots_per_rank=2.0)),
    (r"^before \[1, 4\]: must be experts, at least 0", placing(before=[0, 1, -1, -1])),
    ("^before: layer 0 must have each expert", placing(before=[0, 0, 0, 0])),
    (r"^counts \[1, 2\]: must be \[2, 2\]", loading([[1, 1]], [[0, 1], [0, 1]])),
    (r"^counts \[2, 2\]: must be \[1, 2\]", loading([[1, 1], [1, 1]])),
    (rf"^counts \[1, 2\]: {ROUTES}", loading([[-1, 1]])),
    (rf"^counts \[1, 2\]: {ROUTES}", loading([[np.nan, 1]])),
    ("^world = 0: must be in", loading([[1, 1]], world=0)),
    ("^world = 0: must be in", lambda path: location.to_expert_maps([[0, 1]], world=0)),
    ("^num_experts = '2' .*must be an integer", lambda path: location.to_expert_maps([[0, 1]], world=1, num_experts="2")),
    ("^maps: must be ExpertMaps", lambda path: location.from_expert_maps([1, 2])),
    ("^maps: must be ExpertMaps", lambda path: location.from_expert_maps(each for each in ())),
    ("^path = 3 .*must be a str or a path", lambda path: location.load(3)),
    ("^path = 3 .*must be a str or a path", lambda path: location.save(3, [[0, 1]])),
    ("^paths = .*must be a str or a path", lambda path: location.load_counts(["a.pt"])),
    ("a.json: must be JSON in UTF-8", of_file(location.load, b"{nope", "a.json")),
    ("a.json: must be JSON in UTF-8", of_file(location.load_counts, b"\xff\xfe\x00\x80", "a.json")),
    ("a.pt: must be a file of torch.save", of_file(location.load, b"hello world")),
    ("a.json: physical_to_logical_map: must be experts",
     of_file(location.load, b'{"physical_to_logical_map": [[0, 1], [0]]}', "a.json")),
    (r"a.pt: physical_to_logical_map \[1, 2\]: must be experts", of_file(location.load, {"physical_to_logical_map": [[0, -1]]})),
    (rf"a.json: counts \[1, 2\]: {ROUTES}", of_file(location.load_counts, b'{"logical_count": [[NaN, 1]]}', "a.json")),
    (rf"a.json: counts: {ROUTES}", of_file(location.load_counts, b"[[1, 2], [3]]", "a.json")),
    *((rf"a.pt: counts \[1, 2\]: {ROUTES}", of_file(location.load_counts, torch.tensor([[each, 1.0]])))
      for each in (np.inf, float(1 << 63), 0.5)),
    (rf"a.pt: counts \[0, 5\], .*: {ROUTES}", of_file(location.load_counts, torch.zeros(0, 5))),
    ("a.pt: the sum of counts must be less than 2", of_file(location.load_counts, torch.full((3, 1, 2), 1 << 62))),
    ("^paths: the sum of counts must be less than 2",
     of_file(lambda path: location.load_counts(path, path), torch.full((1, 2), 1 << 62))),
    ("a.pt: each record must have a global_physical_count", of_file(location.load_counts, records(3))),
    (rf"a.pt: global_physical_count \[1, 3\]: {ROUTES}", of_file(location.load_counts, records(physical(-1, 2, 3)))),
    (rf"a.pt: global_physical_count \[1, 3\]: {ROUTES}", of_file(location.load_counts, records(physical(0.5, 2, 3)))),
    ("a.pt: the sum of counts", of_file(location.load_counts, records(physical(1 << 62, 2, 3), physical(1 << 62, 2, 3)))),
    ("a.pt: the sum of counts", of_file(location.load_counts, records(physical(1 << 62, 2, 1 << 62)))),
])
def test_malformed(match, call, tmp_path):
    with pytest.raises(sy.InvalidArgument, match=match):
        call(tmp_path)


@pytest.mark.parametrize("right, call", [
    ([[122880, 122880]], of_file(location.load_counts, torch.full((30, 1, 2), 4096.0).half())),
    ([[3 * (1 << 24) + 6] * 2], of_file(location.load_counts, torch.full((3, 1, 2), 2.0 ** 24 + 2))),
    ([[1, 2]], of_file(location.load_counts, torch.tensor([[1, 2]], dtype=torch.bfloat16))),
    ([[1, 2]], of_file(location.load_counts, torch.nn.Parameter(torch.tensor([[1.0, 2.0]])))),
    ([[4, 2]], of_file(location.load_counts, records({"global_physical_count": [[1, 2, 3]]}))),
    ([[0, 1, 1, 0]], placing(torch.tensor([[3, 1]], dtype=torch.bfloat16).requires_grad_(), before=[[0, 1, 1, 0]])),
    ([[0, 0, 2, 4, 3, 5, 0, 1]], placing([[.4, .3, .2, .05, .03, .02]], slots_per_rank=4)),
    ([[0, 1, 0, 1]], lambda path: location.from_expert_maps(each for each in location.to_expert_maps([[0, 1, 0, 1]], world=2))),
])
def test_number_types(right, call, tmp_path):
    assert call(tmp_path).tolist() == right
