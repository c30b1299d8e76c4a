# SPDX-License-Identifier: Apache-2.0
"""Arguments that violate their contract: the text names the argument, its value and the allowed values; peers raise the error
too."""
import sys

import numpy as np
import pytest

import switchyard as sy

CONFIG = {"hidden": 16, "num_experts": 4, "topk": 2, "max_tokens": 8, "dtype": "f32"}


def good(tokens=3):
    return [np.zeros((tokens, 16), np.float32), np.zeros((tokens, 2), np.int64), np.zeros((tokens, 2), np.float32)]


def strided():
    return np.zeros((3, 32), np.float32)[:, ::2]


@pytest.mark.parametrize("position, value, words", [
    (0, np.zeros((3, 8), np.float32), ["x has the shape [3, 8]", "[T, 16]"]),
    (0, np.zeros(16, np.float32), ["x has the shape [16]", "[T, 16]"]),
    (0, np.zeros((3, 16), np.float64), ["x is float64", "bf16, f16, f32 or fp8_e4m3"]),
    (0, strided(), ["x is not dense", "ascontiguousarray"]),
    (0, [[0.0] * 16] * 3, ["x is list", "numpy array or a torch tensor"]),
    (0, np.zeros((3, 16), np.uint8), ["fp8 rows", "(x, scales)"]),
    (1, np.zeros((2, 2), np.int64), ["topk_ids has the shape [2, 2]", "[3, 2]"]),
    (1, np.zeros((3, 5), np.int64), ["topk_ids has the shape [3, 5]", "[3, 2]"]),
    (1, np.zeros((3, 2), np.float32), ["topk_ids is float32", "i32 or i64"]),
    (1, None, ["either topk_ids", "or a handle"]),
    (2, np.zeros((3, 2), np.float64), ["topk_weights is float64", "f32"]),
    (2, np.zeros((3, 1), np.float32), ["topk_weights has the shape [3, 1]", "[3, 2]"]),
])
def test_dispatch(ranks, position, value, words):
    arguments = good()
    arguments[position] = value

    def rank(group):
        exchange = sy.Exchange(group, **CONFIG)
        if group.rank == 0:
            with pytest.raises(sy.InvalidArgument) as caught:
                exchange.dispatch(*arguments)
            assert all(word in str(caught.value) for word in words), str(caught.value)
            assert isinstance(caught.value, ValueError) and caught.value.code == sy.Code.INVALID_ARGUMENT
        else:
            with pytest.raises(sy.PeerFailed) as failure:
                exchange.dispatch(*good())
            assert failure.value.rank == 0 and failure.value.reason == sy.Code.INVALID_ARGUMENT

    ranks(rank, 2)


@pytest.mark.parametrize("change, words", [
    ({"quantize": "fp4"}, ["quantize = 'fp4'", "'ue8m0'"]),
    ({"size": "big"}, ["size = 'big'", "'worst_case'"]),
    ({"size": "capacity"}, ["capacity = None"]),
    ({"size": "exact", "capacity": 3}, ["capacity = 3", "'capacity'"]),
    ({"overflow": "drop"}, ["overflow = 'drop'", "'drop_and_report'"]),
    ({"padding": 0}, ["padding = 0", "'zero'"]),
])
def test_options_of_dispatch(ranks, change, words):
    def rank(group):
        with pytest.raises(sy.InvalidArgument) as caught:
            sy.Exchange(group, **CONFIG).dispatch(*good(), **change)
        assert all(word in str(caught.value) for word in words), str(caught.value)

    ranks(rank, 1)


@pytest.mark.parametrize("change, words", [
    ({"y": np.zeros((1, 16), np.float32)}, ["y has 1 row:", "3 rows"]),
    ({"y": np.zeros((3, 16), np.uint8)}, ["y is uint8", "f32"]),
    ({"out": np.zeros((2, 16), np.float32)}, ["out has the shape [2, 16]", "[3, 16]"]),
    ({"out": np.zeros((3, 16), np.float16)}, ["out is float16", "f32"]),
    ({"bias": np.zeros((3, 8), np.float32)}, ["bias has the shape [3, 8]", "[3, 16]"]),
    ({"bias": [np.zeros((3, 16), np.float32)] * 3}, ["bias: 3 arrays", "at most 2"]),
    ({"order": "sorted"}, ["order = 'sorted'", "'per_route'"]),
    ({"topk_weights": np.zeros((1, 2), np.float32)}, ["topk_weights has 1 rows", "delivered 3"]),
])
def test_combine(ranks, change, words):
    def rank(group):
        exchange = sy.Exchange(group, **CONFIG)
        rows, handle = exchange.dispatch(*good())
        arguments = {"y": rows, "handle": handle, "apply_weights": False, **change}
        with pytest.raises(sy.InvalidArgument) as caught:
            exchange.combine(**arguments)
        assert all(word in str(caught.value) for word in words), str(caught.value)

    ranks(rank, 1)


@pytest.mark.parametrize("change, words", [
    ({"layout": "token_major"}, ["layout = 'token_major'", "'expert_major'"]),
    ({"dtype": "f64"}, ["dtype = 'f64'", "'bf16'"]),
    ({"hidden": 3}, ["hidden = 3", "multiple of 16"]),
    ({"topk": 33}, ["topk", "32"]),
])
def test_config(ranks, change, words):
    def rank(group):
        with pytest.raises(sy.InvalidArgument) as caught:
            sy.Exchange(group, **{**CONFIG, **change})
        assert all(word in str(caught.value) for word in words), str(caught.value)
        sy.Exchange(group, **CONFIG)  # the group is still usable

    ranks(rank, 2)


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", np.float16, np.dtype(np.float32), "half"])
def test_names_of_types(ranks, dtype):
    ranks(lambda group: sy.Exchange(group, **{**CONFIG, "dtype": dtype}), 1)


@pytest.mark.skipif(sys.version_info < (3, 10), reason="older Pythons name another function")
def test_keywords():
    for make, name in ((sy.Exchange, "Exchange"), (sy.LowLatency, "LowLatency")):
        with pytest.raises(TypeError, match=rf"{name}\.heap_bytes\(\) got an unexpected keyword argument 'hiden'. Did you mean 'hidden'"):
            make.heap_bytes(2, hiden=16, num_experts=4, topk=2, max_tokens=8)
        with pytest.raises(TypeError, match=rf"{name}\(\) missing 1 required keyword-only argument: 'hidden'"):
            make.heap_bytes(2, num_experts=4, topk=2, max_tokens=8)


def test_group_options():
    with pytest.raises(sy.InvalidArgument, match="backend = 'gpu'.*'cuda'"):
        sy.Group.threads(1, backend="gpu")
    with pytest.raises(sy.InvalidArgument, match="timeout = 0"):
        sy.Group.threads(1, timeout=0)
    with pytest.raises(sy.InvalidArgument, match="network = 'rdma'.*'mpi'"):
        sy.Group.threads(1, network="rdma")
    with pytest.raises(sy.InvalidArgument, match="silence = 0"):
        sy.Group.threads(1, silence=0)
    with pytest.raises(sy.InvalidArgument, match="world = 0"):
        sy.Group.threads(0)
    with pytest.raises(sy.InvalidArgument, match="offsets"):
        sy.run_ranks(lambda group: sy.Exchange(group, **CONFIG).dispatch(*good())[1].offsets, 1)


def test_a_gpu_is_not_here():
    """Without GPUs, or without a library for GPUs, the error says so."""
    try:
        groups = sy.Group.threads(1, backend="cuda")
    except sy.SwitchyardError as error:
        assert error.code in (sy.Code.UNSUPPORTED, sy.Code.SYSTEM) and str(error)
    else:
        exchange = sy.Exchange(groups[0], **CONFIG)
        with pytest.raises(sy.InvalidArgument, match="must be on a GPU"):
            exchange.dispatch(*good())
