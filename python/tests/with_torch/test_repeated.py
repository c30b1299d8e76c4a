# SPDX-License-Identifier: Apache-2.0
"""Repeated calls take a fast path. It computes the same results as the full path. A call that differs from the previous one, or
is invalid, takes the full path."""
import random
import types

import numpy as np
import pytest

import oracle
import switchyard as sy

torch = pytest.importorskip("torch")

from switchyard._abi import ffi as _ffi, repeated as _repeated  # noqa: E402  (need torch)

SHAPE = {"num_experts": 7, "topk": 3, "hidden": 16, "max_tokens": 9}
KINDS = (_repeated.Dispatch, _repeated.Combine, _repeated.NormalCombine, _repeated.NormalDispatch)


@pytest.fixture
def taken(monkeypatch):
    """Number of calls of each kind that took the fast path."""
    counts = dict.fromkeys(KINDS, 0)

    def count(kind):
        original = kind.__call__

        def call(self, *arguments, **keywords):
            result = original(self, *arguments, **keywords)
            counts[kind] += result is not None and result is not False
            return result

        monkeypatch.setattr(kind, "__call__", call)

    for kind in KINDS:
        count(kind)
    return counts


def inputs_of(seed, tokens):
    given = oracle.make_inputs(1, seed=seed, tokens=[tokens], **SHAPE)[0]
    return torch.from_numpy(given.x), torch.from_numpy(given.ids), torch.from_numpy(given.weights), given


def sums_of(given, factor):
    """Returns the per-route combine, without weights, of rows multiplied by `factor`."""
    valid = ((given.ids >= 0) & (given.ids < SHAPE["num_experts"])).sum(1, keepdims=True)
    return given.x * np.float32(factor) * valid.astype(np.float32)


def _variants(seed):
    """One-token calls in most valid forms: types of ids, strides, a subclass, with and without weights."""
    rng = random.Random(seed)
    for number in range(60):
        x, ids, weights, given = inputs_of(number, rng.choice([5, 5, 5, 9, 0]))
        x, given = x.round(), given._replace(x=given.x.round())
        if rng.random() < 0.3:
            ids = ids.int()
        if rng.random() < 0.1:
            x = torch.nn.Parameter(x, requires_grad=False)
        yield x, ids, weights if rng.random() < 0.3 else None, given


def test_low_latency(ranks, taken):
    def rank(group):
        ll = sy.LowLatency(group, dtype="f32", **SHAPE)
        x, ids, _, _ = inputs_of(0, 5)
        y = ll.make_rows(ll.dispatch(x, ids))
        outputs = [None, ll.make_output(x)]
        for number, (x, ids, weights, given) in enumerate(_variants(1)):
            received = ll.dispatch(x, ids, weights, output=outputs[number % 2])
            assert received.num_tokens == len(x)
            y.copy_(received.x.nan_to_num(0, 0, 0)).mul_(2)
            later = torch.from_numpy(given.weights)
            valid = torch.from_numpy((given.ids >= 0) & (given.ids < SHAPE["num_experts"]))
            plain = torch.from_numpy(sums_of(given, 2))
            assert torch.allclose(ll.combine(y, received), plain if weights is None else _weighted(given, valid, later))
            for order in ("per_rank", "per_route", "per_rank"):
                assert torch.allclose(ll.combine(y, received, order=order), plain if weights is None else _weighted(given, valid, later))
            assert torch.allclose(ll.combine(y, received, topk_weights=later), _weighted(given, valid, later))
            out = torch.full((len(x), SHAPE["hidden"]), -1.0)
            assert ll.combine(y, received, out=out) is out
            assert torch.equal(out, plain if weights is None else ll.combine(y, received))
            wide = torch.full((len(x) + 2, SHAPE["hidden"]), -1.0)  # part of a larger tensor, next to other rows
            version, part = wide._version, wide[1:-1]
            assert ll.combine(y, received, topk_weights=later, out=part) is part
            assert torch.equal(part, ll.combine(y, received, topk_weights=later)) and wide._version > version
            assert (wide[0] == -1).all() and (wide[-1] == -1).all()

    def _weighted(given, valid, weights):
        return torch.from_numpy(given.x) * 2 * torch.where(valid, weights, 0).sum(1, keepdim=True)

    ranks(rank, 1)
    assert taken[_repeated.Dispatch] > 10 and taken[_repeated.Combine] > 450


def test_combine(ranks, taken):
    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", **SHAPE)
        for x, ids, weights, given in _variants(2):
            rows, handle = exchange.dispatch(x.detach(), ids, weights)
            valid = torch.from_numpy(((given.ids >= 0) & (given.ids < SHAPE["num_experts"])).any(1, keepdims=True).astype(np.float32))
            want = torch.from_numpy(given.x) * valid
            bias = torch.ones_like(want)
            _ = handle.topk_weights  # accessed, so combine does not apply them
            for _ in range(2):
                assert torch.equal(exchange.combine(rows, handle), want)
            assert torch.equal(exchange.combine(rows, handle, bias=bias), want + 1)
            assert torch.equal(exchange.combine(rows, handle), want)
            if weights is not None:
                again, summed = exchange.combine(rows, handle, topk_weights=handle.topk_weights)
                assert torch.equal(again, want) and summed.shape == ids.shape
                assert torch.equal(exchange.combine(rows, handle), want)
            wide = torch.zeros(len(rows) + 2, SHAPE["hidden"])
            wide[:len(rows)] = rows
            assert torch.equal(exchange.combine(wide, handle), want)  # more rows than the handle has

    ranks(rank, 1)
    assert taken[_repeated.NormalCombine] > 200


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_dispatch_to_memory_of_the_caller(ranks, taken, layout):
    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", layout=layout, **SHAPE)
        for x, ids, weights, given in _variants(3):
            x = x.detach()
            rows, handle = exchange.dispatch(x, ids, weights)
            want, count = 2 * rows, len(rows)
            for more in (0, 2, 0):
                out = torch.full((count + more, SHAPE["hidden"]), torch.nan)
                got, same = exchange.dispatch(2 * x, handle=handle, out=out)
                assert same is handle and got.shape == want.shape and torch.equal(got, want) and out[count:].isnan().all()
                assert count == 0 or got.data_ptr() == out.data_ptr()
            if count:
                weighted = layout == "expert_major"
                assert torch.equal(exchange.combine(got, handle, apply_weights=weighted), 2 * exchange.combine(rows, handle, apply_weights=weighted))
            assert torch.equal(exchange.dispatch(2 * x, handle=handle)[0], want)
            as_fp8, _ = exchange.dispatch(x, handle=handle, quantize="f32")
            assert as_fp8[0].dtype == torch.float8_e4m3fn

    ranks(rank, 1)
    assert taken[_repeated.NormalDispatch] > 100


@pytest.mark.parametrize("wrong, text", [
    (lambda x, out: {"out": out.double()}, "out is torch.float64"),
    (lambda x, out: {"out": out[:, :8].contiguous()}, r"out has the shape \[\d+, 8\]"),
    (lambda x, out: {"out": out.t().contiguous().t()}, "out is not dense"),
    (lambda x, out: {"out": out[:1]}, r"out has 1 row"),
    (lambda x, out: {"out": out.to("meta")}, "must be in host memory"),
    (lambda x, out: {"out": (out, out)}, "out: fp8 rows, and only these"),
    (lambda x, out: {"x": x[:3]}, "x.* 3"),
    (lambda x, out: {"x": x.half()}, "out is torch.float32: must be f16"),
])
def test_what_is_wrong_in_a_dispatch_is_found(ranks, wrong, text):
    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", **SHAPE)
        x, ids, _, _ = inputs_of(5, 5)
        rows, handle = exchange.dispatch(x, ids)
        out = torch.empty_like(rows)
        for _ in range(3):
            exchange.dispatch(x, handle=handle, out=out)
        given = {"x": x, "out": out, **wrong(x, out)}
        with pytest.raises(sy.InvalidArgument, match=text):
            exchange.dispatch(given["x"], handle=handle, out=given["out"])

    ranks(rank, 1)


def test_gradients_take_the_long_way(ranks, taken):
    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", **SHAPE)
        x, ids, _, given = inputs_of(3, 5)
        rows, handle = exchange.dispatch(x, ids)
        for _ in range(3):
            exchange.combine(rows, handle)
        wanted = rows.clone().requires_grad_()
        out = exchange.combine(wanted, handle)
        out.sum().backward()
        assert out.requires_grad and wanted.grad is not None

    ranks(rank, 1)
    assert taken[_repeated.NormalCombine] >= 2


WRONG = {
    "shape": (lambda x, ids: (x[:, :8].contiguous(), ids), r"x has the shape \[5, 8\]"),
    "strides": (lambda x, ids: (x.t().contiguous().t(), ids), "not dense"),
    "type": (lambda x, ids: (x.int(), ids), "x is torch.int32"),
    "type that others have": (lambda x, ids: (x.double(), ids), "x is torch.float64"),
    "type of the ids": (lambda x, ids: (x, ids.float()), "topk_ids is torch.float32"),
    "number of ids": (lambda x, ids: (x, ids[:3]), r"topk_ids has the shape \[3, 3\]"),
    "place": (lambda x, ids: (x.to("meta"), ids), "must be in host memory"),
    "place of the ids": (lambda x, ids: (x, ids.to("meta")), "must be in host memory"),
    "no tensor": (lambda x, ids: (None, ids), "must be a numpy array or a torch tensor"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(ranks, what):
    """Mistakes after successful calls."""
    change, text = WRONG[what]

    def rank(group):
        ll = sy.LowLatency(group, dtype="f32", **SHAPE)
        x, ids, _, _ = inputs_of(4, 5)
        for _ in range(3):
            ll.dispatch(x, ids)
        with pytest.raises(sy.InvalidArgument, match=text):
            ll.dispatch(*change(x, ids))

    ranks(rank, 1)


@pytest.mark.parametrize("wrong, text", [
    (lambda y, weights: {"y": y.double()}, "y is torch.float64"),
    (lambda y, weights: {"y": y[:1]}, "y has the shape"),
    (lambda y, weights: {"topk_weights": weights.double()}, "topk_weights is torch.float64"),
    (lambda y, weights: {"topk_weights": weights[:2]}, r"topk_weights has the shape \[2, 3\]"),
    (lambda y, weights: {"topk_weights": weights.t().contiguous().t()}, "topk_weights is not dense"),
    (lambda y, weights: {"out": torch.empty(5, 16).double()}, "out is torch.float64"),
    (lambda y, weights: {"out": torch.empty(4, 16)}, r"out has the shape \[4, 16\]"),
    (lambda y, weights: {"out": torch.empty(16, 5).t()}, "out is not dense"),
    (lambda y, weights: {"out": torch.empty(5, 16, device="meta")}, "must be in host memory"),
    (lambda y, weights: {"out": y.view(-1, 16)[:5]}, "out shares memory with y"),
    (lambda y, weights: {"out": y.view(-1, 16)[-5:]}, "out shares memory with y"),
    (lambda y, weights: next({"out": all[8:88].view(5, 16), "topk_weights": all[:15].view(5, 3)} for all in [torch.ones(100)]),
     "out shares memory with topk_weights"),
])
def test_what_is_wrong_in_a_combine_is_found(ranks, wrong, text):
    def rank(group):
        ll = sy.LowLatency(group, dtype="f32", **SHAPE)
        x, ids, weights, _ = inputs_of(5, 5)
        received = ll.dispatch(x, ids)
        y = ll.make_rows(received)
        for _ in range(3):
            ll.combine(y, received, topk_weights=weights)
            ll.combine(y, received, topk_weights=weights, out=torch.empty(5, 16))
        given = {"y": y, "topk_weights": weights, **wrong(y, weights)}
        with pytest.raises(sy.InvalidArgument, match=text):
            ll.combine(given.pop("y"), received, **given)

    ranks(rank, 1)


def test_closed(ranks):
    def rank(group):
        ll, exchange = sy.LowLatency(group, dtype="f32", **SHAPE), sy.Exchange(group, dtype="f32", **SHAPE)
        x, ids, _, _ = inputs_of(6, 5)
        rows, handle = exchange.dispatch(x, ids)
        received, out = ll.dispatch(x, ids), torch.empty_like(rows)
        y = ll.make_rows(received)
        calls = (lambda: exchange.dispatch(x, handle=handle, out=out), lambda: exchange.combine(rows, handle), lambda: ll.dispatch(x, ids),
                 lambda: ll.combine(y, received))
        for call in calls + calls:
            call()
        exchange.close(), ll.close()
        for call in calls:
            with pytest.raises(sy.InvalidArgument, match="is closed"):
                call()

    ranks(rank, 1)


def test_errors_of_the_library(ranks):
    """Errors of the library are raised as in other calls."""

    def rank(group):
        small = dict(SHAPE, max_tokens=5)
        ll = sy.LowLatency(group, dtype="f32", **small)
        x, ids, _, _ = inputs_of(7, 5)
        first, second = ll.make_output(x), ll.make_output(x)
        y = ll.make_rows(first)
        for _ in range(2):
            ll.combine(y, ll.dispatch(x, ids, output=first))
        with pytest.raises(sy.InvalidArgument, match="no dispatch has filled it"):
            ll.combine(y, second)

    ranks(rank, 1)


# ---- Location of tensors on GPUs, tested without one ----


class Tensor:
    """The subset of a GPU tensor that these calls use."""

    is_cuda, is_cpu, requires_grad = True, False, False

    def __init__(self, device, shape, dtype="bf16"):
        self.device, self.shape, self.dtype = device, shape, dtype

    def get_device(self):
        return self.device

    def is_contiguous(self):
        return True

    def data_ptr(self):
        return 4096 + id(self) * 64 if self.shape[0] else 0  # no two tensors overlap


@pytest.fixture
def recorded(monkeypatch):
    """Library calls as (known_memory, stream). Rejects tensors that are not on GPU 1 whenever it has to query their
    location."""
    calls = []
    options_at = {"sy_low_latency_dispatch": 4, "sy_low_latency_combine": 4, "sy_exchange_combine": 4, "sy_exchange_dispatch_cached": 3,
                  "sy_moe_layer_forward": 5}
    here = types.SimpleNamespace(right=True, stream=100, records=True)

    def bare(name):
        def call(*arguments):
            options = arguments[options_at[name]]._obj
            calls.append((options.known_memory, options.stream))
            return 0 if options.known_memory or here.right else 1

        return call

    def check(code):
        if code:
            raise sy.InvalidArgument("lies on another GPU")

    fake_torch = types.SimpleNamespace(Tensor=Tensor, raw_stream=lambda device: here.stream + device, dtypes={0: "bf16", 2: "f32", 10: "i32", 11: "i64"},
                                       codes={"bf16": 0, "i64": 11},
                                       rows=lambda number, columns, like: Tensor(like.device, (number, columns), like.dtype),
                                       increment_version=lambda tensor: None, records=lambda: here.records)
    monkeypatch.setattr(_repeated, "bare", bare)
    monkeypatch.setattr(_repeated, "check", check)
    monkeypatch.setattr(_repeated, "arrays_of_torch", lambda: fake_torch)
    return calls, here


def an_exchange():
    group = types.SimpleNamespace(_lock=_ffi.CallLock())
    return types.SimpleNamespace(_owned=types.SimpleNamespace(pointer=1), pointer=1, group=group, _backend=1, hidden=8, topk=2, _row_type=0)


def ways():
    """For each kind, a function that makes a call of `tokens` tokens with its rows on GPU `x` and its other tensors on GPU
    `others`."""
    handle = types.SimpleNamespace(_at=1, _rows_allocated=3, _tokens=3)
    received = types.SimpleNamespace(_at=1, num_tokens=3)

    def dispatch(it, x, others, tokens):
        rows, ids = Tensor(x, (tokens, 8)), Tensor(others, (tokens, 2), "i64")
        it.learn(rows, ids)
        return it(rows, ids, Tensor(others, (tokens, 2), "f32"), types.SimpleNamespace(_at=1, x=None))

    def combine(it, x, others, tokens):
        y = Tensor(x, (tokens, 4, 8))
        it.learn(y)
        return it(y, received, Tensor(others, (3, 2), "f32"))

    def normal(it, x, others, tokens):
        handle._tokens = tokens
        it.learn(Tensor(x, (tokens, 8)))
        return it(Tensor(x, (tokens, 8)), handle, 0)

    def layer(it, x, others, tokens):
        rows, ids = Tensor(x, (tokens, 8)), Tensor(x, (tokens, 2), "i64")
        return it(rows, ids, Tensor(x, (tokens, 2), "f32"), Tensor(x, (tokens, 8)))

    return {_repeated.Dispatch: dispatch, _repeated.Combine: combine, _repeated.NormalCombine: normal, _repeated.NormalDispatch: normal,
            _repeated.Layer: layer}


@pytest.mark.parametrize("kind", [*KINDS, _repeated.Layer])
def test_known_memory(kind, recorded):
    """known_memory is set for tensors on the GPU on which the library has itself located memory, and for no others."""
    calls, here = recorded
    call, it = ways()[kind], kind(an_exchange())
    call(it, 1, 1, 0)  # no memory, so nothing is learned from this call
    here.right = False
    with pytest.raises(sy.InvalidArgument):
        call(it, 0, 0, 3)  # nothing is learned from a failing call either
    here.right = True
    call(it, 1, 1, 3)
    assert calls == [(0, 101), (0, 100), (0, 101)]
    calls.clear()
    call(it, 1, 1, 3)
    call(it, 0, 0, 3)
    call(it, 1, 1, 3)
    assert calls == [(1, 101), (0, 100), (1, 101)]
    if kind in (_repeated.Dispatch, _repeated.Combine):
        calls.clear()
        call(it, 1, 0, 3)
        call(it, 0, 1, 3)
        assert calls == [(0, 101), (0, 100)]
    if kind is _repeated.NormalDispatch:
        calls.clear()
        x, handle = Tensor(1, (3, 8)), types.SimpleNamespace(_at=1, _rows_allocated=3, _tokens=3)
        assert it(x, handle, 0, None, Tensor(0, (3, 8))) is None and calls == []  # the full path rejects it
        assert it(x, handle, 0, None, Tensor(1, (3, 8))) is not None and calls == [(1, 101)]


def test_a_layer_on_gpus(recorded):
    """Each call uses the current stream of its GPU. Tensors on other devices, and gradients, are left to the full path."""
    calls, here = recorded
    it, rows, ids, weights = _repeated.Layer(an_exchange()), (3, 8), (3, 2), (3, 2)
    given = [Tensor(1, rows), Tensor(1, ids, "i64"), Tensor(1, weights, "f32"), Tensor(1, rows)]
    for here.stream in (100, 200, 200, 0):
        assert it(*given) is given[3]
    made = it(*given[:3], None)
    assert (made.device, made.shape, made.dtype) == (1, rows, "bf16")
    assert calls == [(0, 101), (1, 201), (1, 201), (1, 1), (1, 1)]
    calls.clear()
    for index, tensor in enumerate(given):
        elsewhere, on_host, differentiated = (Tensor(0 if each == 0 else 1, tensor.shape, tensor.dtype) for each in range(3))
        on_host.is_cuda, differentiated.requires_grad = False, index != 1  # ids are integers
        for other in (elsewhere, on_host, *([differentiated] if index != 1 else [])):
            assert it(*given[:index], other, *given[index + 1:]) is None, index
    assert not calls
    here.records = False
    given[0].requires_grad = given[3].requires_grad = True
    assert it(*given) is given[3] and len(calls) == 1


def test_numbers_of_tokens_of_a_layer(recorded):
    """The library is given the number of tokens and the type of ids of each call, also after a call that is left to the full path or
    is interrupted."""
    it, seen = _repeated.Layer(an_exchange()), []
    function = it._function
    it._function = lambda *given: seen.append((given[2]._obj.num_tokens, given[2]._obj.is_int64)) or function(*given)

    def call(tokens, code, routes=None):
        return it(Tensor(0, (tokens, 8)), Tensor(0, (tokens if routes is None else routes, 2), code), None, Tensor(0, (tokens, 8)))

    for tokens, code in ((3, "i64"), (3, "i64"), (3, "i32"), (5, "i32"), (0, "i32"), (3, "i64")):
        for interrupted in (False, True):
            assert call(tokens, code) is not None and seen.pop() == (tokens, int(code == "i64"))
            if interrupted:
                with pytest.raises(TypeError):
                    it._sized((None, 8), "i32")
            else:
                assert call(tokens + 1, code, tokens) is None and call(7, "bf16") is None and not seen
        assert call(tokens, code) is not None and seen.pop() == (tokens, int(code == "i64"))
