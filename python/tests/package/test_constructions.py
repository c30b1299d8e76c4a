# SPDX-License-Identifier: Apache-2.0
"""Constructions that one rank cannot begin or complete: its peers raise its error, including its rank, and all ranks can
continue."""
import time

import numpy as np
import pytest

import oracle
import switchyard as sy
from switchyard._abi import ffi as _ffi
from switchyard.group import Construction, constructs

EXCHANGE = {"hidden": 16, "num_experts": 4, "topk": 2, "max_tokens": 8}
LAYER = {**EXCHANGE, "intermediate": 8}
BAD = 1  # the failing rank


def outcomes_of(ranks, world, first, then, **options):
    """Runs `first` on all ranks, then `then` on the same groups. Returns the exception of `first` on each rank, or None."""

    def rank(group):
        raised = None
        try:
            first(group)
        except Exception as error:
            raised = error
        then(group)
        group.barrier()
        return raised

    return ranks(rank, world, **options)


def weights(group):
    here = len(group.experts_of(LAYER["num_experts"]))
    return (oracle.to_bf16(np.zeros((here, 2 * LAYER["intermediate"], LAYER["hidden"]))),
            oracle.to_bf16(np.zeros((here, LAYER["hidden"], LAYER["intermediate"]))))


def make_layer(group, form="automatic", **changes):
    w13, w2 = weights(group)
    if changes.pop("cut", False):
        w13 = w13[:, 1:]
    return sy.MoeLayer(group, w13, w2, form=form, **{**LAYER, **changes})


def needs_layer():
    try:
        _ffi.layer_library()
    except sy.LibraryNotFound as error:
        pytest.skip(str(error))


OBJECTS = {"Exchange": (sy.Exchange, {"dtype": "f65"}, "dtype"),
           "LowLatency": (sy.LowLatency, {"dtype": "f65"}, "dtype"),
           "LedgerCombine": (sy.LedgerCombine, {"dtype": "f65"}, "dtype")}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("mistake", ["argument", "keyword"])
def test_a_mistake_on_one_rank_is_raised_on_all(ranks, name, mistake):
    make, wrong, text = OBJECTS[name]
    wrong = wrong if mistake == "argument" else {"no_such_keyword": 1}
    errors = outcomes_of(ranks, 3, lambda group: make(group, **{**EXCHANGE, **(wrong if group.rank == BAD else {})}),
                         lambda group: make(group, **EXCHANGE))
    assert isinstance(errors[BAD], sy.InvalidArgument if mistake == "argument" else TypeError)
    for rank, error in enumerate(errors):
        if rank != BAD:
            assert isinstance(error, sy.InvalidArgument)
            assert f"rank {BAD}: " in str(error) and (text if mistake == "argument" else "no_such_keyword") in str(error)


@pytest.mark.parametrize("form", ["separate", "fused"])
def test_a_wrong_shape_on_one_rank_is_raised_on_all(ranks, form):
    needs_layer()
    errors = outcomes_of(ranks, 2, lambda group: make_layer(group, form, cut=group.rank == BAD), lambda group: make_layer(group, form))
    assert isinstance(errors[BAD], sy.InvalidArgument) and "w13" in str(errors[BAD])
    assert isinstance(errors[0], sy.InvalidArgument) and str(errors[0]) == f"MoeLayer, rank {BAD}: {errors[BAD]}"


@pytest.mark.parametrize("form", ["separate", "fused"])
def test_a_layer_waits_for_ranks_that_load_weights(ranks, form):
    needs_layer()

    def rank(group):
        if group.rank == 1:
            time.sleep(1.5)
        make_layer(group, form)

    ranks(rank, 2, timeout=0.3)


def test_sleep_and_wake_wait_for_ranks_that_load_weights(ranks):
    def rank(group):
        if group.rank == 1:
            time.sleep(1)
        group.sleep()
        if group.rank == 0:
            time.sleep(1)
        group.wake()

    ranks(rank, 2, timeout=0.3)


def test_an_exception_between_the_steps_of_a_construction(ranks):
    """In nested steps, the error is reported once, to the ranks in the next step."""

    @constructs
    def make_two(group):
        first = sy.Exchange(group, **EXCHANGE)
        if group.rank == BAD:
            raise OSError("no such file: weights.bin")
        return first, sy.LowLatency(group, **EXCHANGE)

    errors = outcomes_of(ranks, 3, make_two, lambda group: sy.Exchange(group, **EXCHANGE))
    assert isinstance(errors[BAD], OSError)
    for rank in (0, 2):
        assert isinstance(errors[rank], sy.SystemFailure)
        assert f"rank {BAD}: OSError: no such file: weights.bin" in str(errors[rank])


def test_an_exception_behind_the_last_step_of_the_peers(ranks):
    def make(group):
        with Construction(group, "model", settles=True):
            made = sy.Exchange(group, **EXCHANGE)
            if group.rank == BAD:
                raise KeyError("router")
            return made

    errors = outcomes_of(ranks, 2, make, lambda group: sy.Exchange(group, **EXCHANGE))
    assert isinstance(errors[BAD], KeyError)
    assert str(errors[0]) == f"model, rank {BAD}: KeyError: 'router'"


def test_an_error_that_all_ranks_raise_is_not_reported_again(ranks):
    """A caught error does not hide the next error either."""

    @constructs
    def make(group):
        with pytest.raises(sy.HeapExhausted):
            sy.Exchange(group, **{**EXCHANGE, "max_tokens": 1 << 20})
        sy.Exchange(group, **EXCHANGE)
        if group.rank == BAD:
            raise ValueError("behind it")
        sy.Exchange(group, **EXCHANGE)

    errors = outcomes_of(ranks, 2, make, lambda group: sy.Exchange(group, **EXCHANGE))
    assert isinstance(errors[BAD], ValueError) and f"rank {BAD}: ValueError: behind it" in str(errors[0])


def test_an_interpreter_that_ends_waits_for_nobody(ranks):
    """The peers of the failing rank are not in a construction."""

    def rank(group):
        if group.rank == BAD:
            with pytest.raises(KeyboardInterrupt), Construction(group, "model"):
                raise KeyboardInterrupt
            return None
        with pytest.raises(sy.PeerFailed) as failed:
            while True:
                group.barrier()
        return failed.value.rank

    assert ranks(rank, 2) == [BAD, None]
