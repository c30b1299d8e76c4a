# SPDX-License-Identifier: Apache-2.0
"""Rates of moves, equal on all ranks, the decisions of balance that follow from them, and the stream of calls without arrays."""
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import switchyard as sy

E, W, C, K = 6, 2, 5, 2


def gathered(group, value):
    return np.frombuffer(b"".join(group.all_gather(np.float64(value).tobytes())), np.float64)


def test_measured_rates_are_equal_on_all_ranks(ranks):
    def body(group):
        rates = sy.measure_step_rates(group, seconds_per_row=1e-6 * (1 + group.rank), staging_bytes=1 << 20)
        for value in rates:
            assert np.isfinite(value) and value > 0 and set(gathered(group, value)) == {value}
        assert rates.seconds_per_row == 1e-6 * W

    ranks(body, W)


@pytest.mark.parametrize("pays", [True, False])
def test_ranks_decide_alike(ranks, pays):
    """Rank 1 alone measures a slow link; whether weights move depends on the rates of the slowest rank."""

    def body(group):
        slow = group.rank == 1 and not pays
        rates = sy.agree_on_step_rates(group, link_bytes_per_s=1.0 if slow else 1e15, seconds_per_row=1e-6, seconds_per_move=1e-12)
        home = sy.ExpertMap.home(num_experts=E, world=W, slots_per_rank=C)
        selector, weights = sy.SlotSelector(group, home), np.zeros((C, 16), np.float32)
        ids = np.zeros((40, K), np.int32)
        ids[:, 1] = 1
        _, report = selector.balance(ids, weights, tile=1, **rates._asdict())
        assert (report.fetched > 0) == pays and set(gathered(group, report.fetched)) == {report.fetched}

    ranks(body, W)


def test_rates_that_do_not_fit(ranks):
    def body(group):
        with pytest.raises(sy.InvalidArgument, match="link_bytes_per_s"):
            sy.agree_on_step_rates(group, link_bytes_per_s=-1.0 if group.rank == 1 else 1.0)
        with pytest.raises(sy.InvalidArgument, match="staging_bytes"):
            sy.measure_step_rates(group, staging_bytes=8)

    ranks(body, W)


@pytest.mark.parametrize("device, expected", [(-1, [100, 101, 100]), (1, [101, 101, 101])])
def test_calls_without_arrays_use_the_stream_of_the_groups_gpu(monkeypatch, device, expected):
    """The group's GPU determines the stream, even if torch's current GPU is another."""
    groups = sy.Group.threads(3)
    assert [group._current_stream() for group in groups] == [None] * 3  # CPU
    torch = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 2, current_stream=lambda at=0: SimpleNamespace(cuda_stream=100 + at)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    for group in groups:
        monkeypatch.setattr(group, "_backend", sy._abi.names.CUDA)
        monkeypatch.setattr(group, "_device", device)
    assert [group._current_stream() for group in groups] == expected
    monkeypatch.undo()
    for group in groups:
        group.close()
