# SPDX-License-Identifier: Apache-2.0
"""``parallelize_moe`` fails on one rank between its collective steps: all ranks raise that error, and the group stays
usable."""
import pytest

import switchyard as sy

torch = pytest.importorskip("torch")

EXPERTS, TOPK, WIDTH, BAD = 4, 2, 8, 1


class Experts(torch.nn.Module):
    def __init__(self, hidden, dimensions=3):
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(EXPERTS, 2 * WIDTH, hidden))
        self.down_proj = torch.nn.Parameter(torch.zeros((EXPERTS, hidden, WIDTH)[:dimensions]))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states * 0


@pytest.mark.parametrize("hidden", [16, 32], ids=["the peers are done", "the peers construct"])
def test_a_wrong_shape_on_one_rank(ranks, hidden):
    def rank(group):
        def divide(dimensions):
            model = torch.nn.Sequential(Experts(16), Experts(hidden, dimensions))
            return sy.parallelize_moe(model, group, max_tokens=4, topk=TOPK)

        with pytest.raises(sy.InvalidArgument) as failed:
            divide(2 if group.rank == BAD else 3)
        assert divide(3) == ["0", "1"]
        return str(failed.value)

    texts = ranks(rank, 3)
    assert "down_proj" in texts[BAD]
    for r in (0, 2):
        assert f"rank {BAD}: " in texts[r] and texts[r].endswith(texts[BAD])


def test_any_exception_on_one_rank(ranks):
    class Broken(Experts):
        def named_parameters(self, *arguments, **keywords):
            self.asked = getattr(self, "asked", 0) + 1
            if self.asked > 1:  # the module was found and is about to be divided
                raise RuntimeError("the shard is damaged")
            return super().named_parameters(*arguments, **keywords)

    def rank(group):
        model = torch.nn.Sequential(Experts(16), Broken(16) if group.rank == BAD else Experts(16))
        with pytest.raises(RuntimeError) as failed:
            sy.parallelize_moe(model, group, max_tokens=4, topk=TOPK)
        group.barrier()
        return type(failed.value), str(failed.value)

    results = ranks(rank, 2)
    assert results[BAD] == (RuntimeError, "the shard is damaged")
    assert results[0] == (sy.SystemFailure, f"parallelize_moe, rank {BAD}: RuntimeError: the shard is damaged")
