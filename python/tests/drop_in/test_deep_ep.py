# SPDX-License-Identifier: Apache-2.0
"""The drop-in for DeepEP: every method is compared with the oracle, over process groups whose ranks are processes. Runs on the
CPU, also with the code path of GPUs, and on GPUs if there are any."""
import importlib
import importlib.util
import inspect

import pytest

import oracle
import switchyard as sy

torch = pytest.importorskip("torch")

from deep_ep_ranks import (EXPERTS, HIDDEN, LARGE, MAX_TOKENS, PLACES, TOKENS, TOPK, calc_diff, check_low_latency, dispatch_all,  # noqa: E402
                           inputs_of, laid_out, on, over_groups, over_ranks, ranks_of, received_of, same, seeded, summed, tensors,
                           weighted)
from switchyard import deep_ep  # noqa: E402
from switchyard.deep_ep._normal import Rings  # noqa: E402

places = pytest.mark.parametrize("where", PLACES)
low_latency_places = pytest.mark.parametrize("where", [each for each in PLACES if each != "copies"])  # copies: normal mode only


def check_rows(received, want):
    assert same(received.float(), torch.from_numpy(want.x))


# ---- Normal mode ----


def _normal(buffer):
    inputs, rank, world = inputs_of(buffer.group_size), buffer.rank, buffer.group_size
    x, ids, weights = tensors(inputs[rank])
    layout = laid_out(buffer, ids)
    touched = [[any(e in oracle.experts_of(EXPERTS, world, r) for e in row) for r in range(world)] for row in inputs[rank].ids]
    where = torch.tensor(touched, dtype=torch.bool).reshape(-1, world)
    assert same(layout["is_token_in_rank"], where) and layout["num_tokens_per_rank"].dtype == torch.int32
    assert same(layout["num_tokens_per_rank"], where.sum(0).int())
    assert layout["num_tokens_per_expert"].tolist() == [int((inputs[rank].ids == e).sum()) for e in range(EXPERTS)]

    want = oracle.rank_major(inputs, EXPERTS, rank)
    received, its_ids, its_weights, counts, handle, event = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, expert_alignment=4, config=deep_ep.Config(24, 8, 256), **layout)
    assert event.event is None and received.dtype == torch.bfloat16
    check_rows(received, want)
    assert its_ids.dtype == torch.int64 and same(its_ids, torch.from_numpy(want.ids).long())
    assert same(its_weights, torch.from_numpy(want.weights))
    exact = [int((want.ids == e).sum()) for e in range(EXPERTS // world)]
    assert counts == [-(-each // 4) * 4 for each in exact]

    prefix, channels, receiving, sources, in_rank, head = handle
    assert len(handle) == 6 and same(handle[4], where) and channels.shape == receiving.shape == (world, 12)
    assert same(sources, torch.from_numpy(want.tokens)) and head.shape == where.shape
    for source in range(world):
        begin = 0 if source == 0 else handle[0][source - 1][rank].item()
        assert want.sources[begin:prefix[source][rank].item()] == [source] * want.sources.count(source)

    out, sums, _ = buffer.combine(received.clone(), handle, topk_weights=its_weights)
    reference = summed(inputs, rank)
    assert calc_diff(out, reference) < 5e-6
    assert calc_diff(sums, torch.where(ids >= 0, weights, 0)) < 1e-9
    bias = torch.ones_like(x)
    both, none, _ = buffer.combine(received, handle, bias=(bias, bias))
    assert none is None and calc_diff(both, reference + 2) < 5e-6

    again, *nothing, _ = buffer.dispatch(x * 2, handle=handle)
    assert nothing == [None] * 4 and same(again, received * 2)


def _without_topk(buffer):
    inputs, rank = inputs_of(buffer.group_size), buffer.rank
    x, ids, _ = tensors(inputs[rank])
    received, its_ids, its_weights, counts, handle, _ = buffer.dispatch(x=x, **laid_out(buffer, ids))
    want = oracle.rank_major(inputs, EXPERTS, rank)
    check_rows(received, want)
    assert its_ids is None and its_weights is None
    assert counts == [int((want.ids == e).sum()) for e in range(EXPERTS // buffer.group_size)]
    out, none, _ = buffer.combine(received, handle)
    assert none is None and out.shape == x.shape


def _worst(buffer):
    inputs, rank = inputs_of(buffer.group_size), buffer.rank
    x, ids, weights = tensors(inputs[rank])
    worst = buffer.group_size * TOKENS
    received, its_ids, _, counts, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_worst_tokens=worst,
                                                              **laid_out(buffer, ids))
    want = oracle.rank_major(inputs, EXPERTS, rank)
    assert received.shape == (worst, HIDDEN) and counts == []
    assert same(received[:len(want.x)].float(), torch.from_numpy(want.x))
    assert same(its_ids[:len(want.x)], torch.from_numpy(want.ids).long()) and (its_ids[len(want.x):] == -1).all()
    out, _, _ = buffer.combine(received, handle)
    assert out.shape == x.shape
    received, *nothing, _, _ = buffer.dispatch(x.half(), num_worst_tokens=worst, **laid_out(buffer, ids))
    assert nothing == [None, None, []] and received.dtype == torch.float16
    assert same(received[:len(want.x)].float(), torch.from_numpy(want.x).half().float())


def _fp8(buffer, packed):
    """Rows and scales are transferred bit for bit, from scales in any memory order."""
    inputs, rank = inputs_of(buffer.group_size), buffer.rank
    _, ids, weights = tensors(inputs[rank])
    everybody = []
    for r, given in enumerate(inputs):
        q = on(given.x).to(torch.float8_e4m3fn)
        generator = torch.Generator().manual_seed(r)
        if packed:
            s = torch.randint(0, 2**31, (len(q), HIDDEN // 512), generator=generator).int()
        else:
            s = torch.rand((len(q), HIDDEN // 128), generator=generator)
        everybody.append((q, on(s.t().contiguous()).t()))
    (q, scales), _, _, _, handle, _ = buffer.dispatch(everybody[rank], topk_idx=ids, topk_weights=weights, **laid_out(buffer, ids))
    want = oracle.rank_major(inputs, EXPERTS, rank)
    assert scales.is_contiguous() and scales.dtype == everybody[rank][1].dtype
    for row, (source, token) in enumerate(zip(want.sources, want.tokens)):
        assert same(q[row].view(torch.uint8), everybody[source][0][token].view(torch.uint8))
        assert same(scales[row], everybody[source][1][token])
    (again, scales_again), *_ = buffer.dispatch(everybody[rank], handle=handle)
    assert same(again.view(torch.uint8), q.view(torch.uint8)) and same(scales_again, scales)


def _events(buffer):
    inputs, rank = inputs_of(buffer.group_size), buffer.rank
    x, ids, weights = tensors(inputs[rank])
    for previous in (None, buffer.capture(), deep_ep.EventOverlap(deep_ep.EventHandle())):
        for asynchronous in (False, True):
            for on_comm in (False, True):
                keywords = {"previous_event": previous, "async_finish": asynchronous, "allocate_on_comm_stream": on_comm}
                if on_comm and not (previous and asynchronous):
                    with pytest.raises(AssertionError):
                        buffer.dispatch(x, **laid_out(buffer, ids), **keywords)
                    continue
                layout = laid_out(buffer, ids, **keywords)
                *_, handle, event = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **layout, **keywords)
                again, *_, cached = buffer.dispatch(x, handle=handle, **keywords)
                *_, combined = buffer.combine(again, handle, **keywords)
                for each in (event, cached, combined):
                    assert (each.event is not None) == asynchronous
                    with each:
                        pass
                    if asynchronous:
                        each.current_stream_wait()


@pytest.mark.parametrize("world", [1, 2, 4])
@places
def test_normal(where, world):
    if where == "cuda" and world > max(2, torch.cuda.device_count()):
        pytest.skip("four ranks would share GPUs, which takes long and shows no more than two")
    over_ranks(where, world, _normal)


@pytest.mark.parametrize("scenario, arguments", [(_without_topk, ()), (_worst, ()), (_fp8, (False,)), (_fp8, (True,)), (_events, ())],
                         ids=["without_topk", "worst", "fp8", "fp8_packed", "events"])
@places
def test_normal_options(where, scenario, arguments):
    over_ranks(where, 2, scenario, *arguments)


# ---- Any number of tokens, rows and handles ----



def check_exchange(buffer, everybody, keep, num_worst_tokens=0):
    """Checks a dispatch and a combine of the ranks' inputs, element by element. Appends to `keep` the objects that a training
    step would keep alive."""
    rank, experts, world = buffer.rank, LARGE["num_experts"], buffer.group_size
    x, ids, weights = map(on, everybody[rank])
    rows, its_ids, its_weights, counts, handle, _ = dispatch_all(buffer, x, ids, weights, experts, num_worst_tokens=num_worst_tokens)
    want = received_of(everybody, experts, rank)
    number = len(want[0])
    assert rows.shape[0] == (num_worst_tokens or number)
    assert same(rows[:number], want[0]) and same(its_ids[:number], want[1]) and same(its_weights[:number], want[2])
    assert counts == ([] if num_worst_tokens else [int((want[1] == e).sum()) for e in range(experts // world)])
    keep.append((rows, want[0], handle, x, ids))
    check_combine(buffer, keep[-1])


def check_combine(buffer, kept):
    rows, want, handle, x, ids = kept
    assert same(rows[:len(want)], want)
    out, _, _ = buffer.combine(rows, handle)
    ranks = on(ranks_of(ids.cpu(), LARGE["num_experts"], buffer.group_size)).sum(1, keepdim=True)
    assert calc_diff(out, x.float() * ranks) < 5e-6


def _growth(buffer):
    """Each call has more tokens than the previous ones: earlier rows and handles stay valid."""
    keep = []
    for step, tokens in enumerate([(3, 0), (700, 90), (20, 1500), (2500, 2500), (1, 1)]):
        check_exchange(buffer, seeded(buffer.group_size, tokens, seed=step, **LARGE), keep, num_worst_tokens=6000 if step == 3 else 0)
    for kept in keep:
        check_combine(buffer, kept)


def _too_many(buffer):
    """More tokens on one rank than allowed: all ranks receive the error and continue."""
    buffer._normal.made._most_tokens = 50
    for tokens in ((10, 51), (60, 0)):
        x, ids, weights = map(on, seeded(buffer.group_size, tokens, **LARGE)[buffer.rank])
        with pytest.raises(sy.InvalidArgument, match="at most 50 are taken"):
            dispatch_all(buffer, x, ids, weights, LARGE["num_experts"])
    check_exchange(buffer, seeded(buffer.group_size, (50, 3), **LARGE), [])


@pytest.mark.parametrize("where", PLACES[1:])
def test_too_many(where):
    over_ranks(where, 2, _too_many)


def _many_layers(buffer):
    """Rows and handles of many layers are alive at the same time, as in training, and are used in reverse order. One rank drops
    some of them."""
    keep = []
    everybody = seeded(buffer.group_size, (40, 25), **LARGE)
    for layer in range(150):
        check_exchange(buffer, [(x * (layer % 7 + 1), ids, weights) for x, ids, weights in everybody], keep)
        if layer % 3 == 0:
            keep.pop() if buffer.rank == 0 else keep.append(keep.pop())
    if buffer.rank == 1:
        keep = [kept for layer, kept in enumerate(keep) if layer % 3]
    for kept in reversed(keep):
        check_combine(buffer, kept)


def _many_handles_of_worst_size(buffer):
    """A checkpointed model of 200 layers keeps 200 handles of dispatches whose size is specified by the caller. One rank drops
    some of them."""
    shape, tokens = {"hidden": 128, "num_experts": 16, "topk": 4}, 1500
    everybody = seeded(buffer.group_size, (tokens,) * buffer.group_size, **shape)
    x, ids, weights = map(on, everybody[buffer.rank])
    want, handles = received_of(everybody, shape["num_experts"], buffer.rank)[0], {}
    for layer in range(200):
        handles[layer] = dispatch_all(buffer, x, ids, weights, shape["num_experts"], num_worst_tokens=tokens * buffer.group_size)[4]
        if layer % 10 == 0 and buffer.rank == 0:
            del handles[layer]
    made = buffer._normal.made
    if not isinstance(made, Rings):  # a pool must have room for all handles
        assert all(each.used <= each.room for each in made._made.values())
    for layer in range(199, 0, -11):
        if layer % 10:
            again, *_ = buffer.dispatch(x + 1, handle=handles[layer])
            assert same(again[:len(want)], want + 1)


def _model_shape(buffer):
    """Rows of realistic width, with routing in both forms and bias."""
    shape = {"hidden": 7168, "num_experts": 64, "topk": 8}
    everybody = seeded(buffer.group_size, (300, 257), **shape)
    x, ids, weights = map(on, everybody[buffer.rank])
    want = received_of(everybody, 64, buffer.rank)
    for worst in (0, 300 * buffer.group_size):
        rows, its_ids, its_weights, _, handle, _ = dispatch_all(buffer, x, ids, weights, 64, num_worst_tokens=worst)
        number = len(want[0])
        assert same(rows[:number], want[0]) and same(its_ids[:number], want[1]) and same(its_weights[:number], want[2])
        assert (its_ids[number:] == -1).all()
        again, *_ = buffer.dispatch(x + 1, handle=handle)
        assert same(again[:number], want[0] + 1)
        out, sums, _ = buffer.combine(rows * 2, handle, topk_weights=its_weights, bias=x)
        ranks = on(ranks_of(ids.cpu(), 64, buffer.group_size)).sum(1, keepdim=True)
        assert calc_diff(out, x.float() * (2 * ranks + 1)) < 5e-6
        assert calc_diff(sums, torch.where(ids >= 0, weights, 0)) < 1e-9


@pytest.mark.parametrize("scenario", [_growth, _many_layers, _many_handles_of_worst_size, _model_shape],
                         ids=["growth", "many_layers", "many_handles_of_worst_size", "model_shape"])
@places
def test_any_number(where, scenario):
    over_ranks(where, 2, scenario)


# ---- Low latency ----


def _low_latency(buffer, use_fp8, round_scale, use_ue8m0):
    inputs, rank = inputs_of(buffer.group_size, repeats=False), buffer.rank
    x, ids, weights = tensors(inputs[rank])
    here = EXPERTS // buffer.group_size
    for hooked in (False, True):
        stats, cost = on(torch.zeros(here, dtype=torch.int32)), on(torch.zeros(buffer.group_size, dtype=torch.int64))
        received, count, handle, event, hook = buffer.low_latency_dispatch(
            x, ids, MAX_TOKENS, EXPERTS, use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0,
            cumulative_local_expert_recv_stats=stats, dispatch_wait_recv_cost_stats=cost, async_finish=not hooked,
            return_recv_hook=hooked)
        if hooked:
            hook()
            hook()  # only the first call counts
        else:
            assert hook is None
            event.current_stream_wait()
        values = check_low_latency(received, count, handle, inputs, rank)
        assert same(stats, count)
        if isinstance(received, tuple) and round_scale and not use_ue8m0:
            here_scales = torch.cat([received[1][e, :count[e]] for e in range(here)])
            assert same(torch.frexp(here_scales)[0], torch.full_like(here_scales, 0.5))  # powers of two
        y = values.nan_to_num(0, 0, 0).bfloat16()
        for zero_copy in (False, True):
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = y
            out = torch.empty_like(x)
            got, event, hook = buffer.low_latency_combine(y, ids, weights, handle, zero_copy=zero_copy, async_finish=not hooked,
                                                             return_recv_hook=hooked, out=out)
            hook() if hooked else event.current_stream_wait()
            assert got is out and calc_diff(out, weighted(x, ids, weights)) < (9e-4 if use_fp8 else 1e-5)


def _combine_buffers(buffer):
    """Rows of one handle stay valid while those of the next handle are written, because DeepEP's buffers alternate."""
    inputs, rank = inputs_of(buffer.group_size, repeats=False), buffer.rank
    x, ids, weights = tensors(inputs[rank])
    handles, rows = [], []
    for factor in (1, 2):
        received, count, handle, _, _ = buffer.low_latency_dispatch(x * factor, ids, MAX_TOKENS, EXPERTS, use_fp8=False)
        handles.append(handle)
        rows.append(buffer.get_next_low_latency_combine_buffer(handle))
        rows[-1][:, :, :] = received.nan_to_num(0, 0, 0)
    assert rows[0].data_ptr() != rows[1].data_ptr()
    for factor, handle in zip((1, 2), handles):
        out, _, _ = buffer.low_latency_combine(rows[0], ids, weights, handle, zero_copy=True)
        assert calc_diff(out, weighted(x * factor, ids, weights)) < 1e-5


@pytest.mark.parametrize("world", [1, 2])
@low_latency_places
def test_low_latency_combine_buffers(where, world):
    over_ranks(where, world, _combine_buffers)


@pytest.mark.parametrize("use_fp8, round_scale, use_ue8m0", [(False, False, False), (True, False, False), (True, True, False),
                                                             (True, True, True)])
@pytest.mark.parametrize("world", [1, 2])
@low_latency_places
def test_low_latency(where, world, use_fp8, round_scale, use_ue8m0):
    over_ranks(where, world, _low_latency, use_fp8, round_scale, use_ue8m0)


def _overlapping_hooks(buffer):
    """A second call before the first call's hook: the first call is received then, and its hook has no further effect."""
    inputs, rank = inputs_of(buffer.group_size, repeats=False), buffer.rank
    x, ids, weights = tensors(inputs[rank])
    stats = on(torch.zeros(EXPERTS // buffer.group_size, dtype=torch.int32))
    first = buffer.low_latency_dispatch(x, ids, MAX_TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True, cumulative_local_expert_recv_stats=stats)
    second = buffer.low_latency_dispatch(x, ids, MAX_TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True, cumulative_local_expert_recv_stats=stats)
    for received, count, handle, _, hook in (first, second):
        hook()
        check_low_latency(received, count, handle, inputs, rank)
    assert same(stats, 2 * first[1])


def _two_results(buffer):
    """Two dispatches whose results are used together, in either order, with zero-copy rows for each."""
    x, ids, weights = tensors(inputs_of(buffer.group_size, repeats=False)[buffer.rank])
    for hooked in (False, True):
        pair = []
        for factor in (1, 2):
            received, count, handle, _, hook = buffer.low_latency_dispatch(x * factor, ids, MAX_TOKENS, EXPERTS, use_fp8=False,
                                                                           return_recv_hook=hooked)
            if hook is not None:
                hook()
            pair.append((factor, received, handle))
        for factor, received, handle in reversed(pair):
            out, *_ = buffer.low_latency_combine(received.nan_to_num(0, 0, 0), ids, weights, handle)
            assert calc_diff(out, factor * weighted(x, ids, weights)) < 1e-5


def _model_low_latency(group, use_fp8):
    """Rows of realistic width, with a different T on each rank."""
    shape, max_tokens, rank, world = {"hidden": 7168, "num_experts": 16, "topk": 8}, 128, group.rank(), group.size()
    everybody = seeded(world, (128, 77), **shape)
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(max_tokens, 7168, world, 16)
    buffer = deep_ep.Buffer(group, 0, hint, low_latency_mode=True, explicitly_destroy=True)
    x, ids, weights = map(on, everybody[rank])
    received, count, handle, _, _ = buffer.low_latency_dispatch(x, ids, max_tokens, 16, use_fp8=use_fp8)
    q, scales = received if use_fp8 else (received, None)
    values = q.float() if scales is None else q.float() * scales.repeat_interleave(128, 2)
    for expert in range(16 // world):
        sent = [(its_ids == rank * (16 // world) + expert).any(1).nonzero()[:, 0] for _, its_ids, _ in everybody]
        assert count[expert].item() == sum(map(len, sent)) and same(handle[0][expert, :count[expert]], torch.cat(sent).int())
        want = torch.cat([given[tokens] for (given, _, _), tokens in zip(everybody, sent)]).float()
        torch.testing.assert_close(values[expert, :len(want)].cpu(), want, rtol=1 / 16 if use_fp8 else 0, atol=0.02 if use_fp8 else 0)
    out, *_ = buffer.low_latency_combine(values.nan_to_num(0, 0, 0).bfloat16(), ids, weights, handle)
    assert calc_diff(out, weighted(x, ids, weights)) < (9e-4 if use_fp8 else 1e-5)
    torch.distributed.barrier(group)
    buffer.destroy()


@pytest.mark.parametrize("use_fp8", [False, True])
@low_latency_places
def test_model_low_latency(where, use_fp8):
    over_groups(where, 2, _model_low_latency, use_fp8)


@low_latency_places
def test_two_results(where):
    over_ranks(where, 2, _two_results)


@low_latency_places
def test_overlapping_hooks(where):
    over_ranks(where, 2, _overlapping_hooks)


# ---- Fixed values, and refusals ----


def _refusals(buffer):
    inputs, rank = inputs_of(buffer.group_size), buffer.rank
    x, ids, weights = tensors(inputs[rank])
    layout = laid_out(buffer, ids)
    *_, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **layout)
    with pytest.raises(sy.InvalidArgument, match="must be what a dispatch"):
        buffer.combine(x, tuple(handle))
    with pytest.raises(sy.InvalidArgument, match="those of the handle"):
        buffer.dispatch(x, handle=handle, topk_idx=ids)
    with pytest.raises(sy.InvalidArgument, match="get_dispatch_layout"):
        buffer.dispatch(x, topk_idx=ids)
    for experts in (0, -1, 1 << 31, (1 << 32) + EXPERTS):
        with pytest.raises(sy.InvalidArgument, match="num_experts"):
            buffer.get_dispatch_layout(ids, experts)
    with pytest.raises(sy.InvalidArgument, match="num_max_dispatch_tokens_per_rank = 2"):
        buffer.low_latency_dispatch(on(torch.zeros(3, HIDDEN)).bfloat16(), on(torch.zeros(3, TOPK)).long(), 2, EXPERTS)
    with pytest.raises(sy.InvalidArgument, match="use_ue8m0 needs round_scale"):
        buffer.low_latency_dispatch(x, ids, MAX_TOKENS, EXPERTS, use_ue8m0=True)
    with pytest.raises(sy.Unsupported, match="one host"):
        buffer.internode_dispatch(x)
    with pytest.raises(sy.Unsupported, match="cannot be left out"):
        buffer.low_latency_update_mask_buffer(0, True)
    buffer.low_latency_update_mask_buffer(0, False)
    status = on(torch.ones(buffer.group_size, dtype=torch.int32))
    buffer.low_latency_query_mask_buffer(status)
    buffer.low_latency_clean_mask_buffer()
    assert not status.any()
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    assert buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size([3, 4])).shape == (3, 4)
    buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, EXPERTS)
    received, *_ = buffer.dispatch(x, handle=handle)  # the buffer is still usable


@places
def test_refusals(where):
    over_ranks(where, 2, _refusals)


def test_names_and_static_methods():
    names = list(inspect.signature(deep_ep.Buffer.__init__).parameters)
    assert names[1:5] == ["group", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode"]
    for name in ("allow_mnnvl", "use_fabric", "explicitly_destroy", "enable_shrink", "comm", "num_qps_per_rank",
                 "allow_nvlink_for_low_latency_mode"):
        assert name in names
    with pytest.raises(AssertionError, match="must be even"):
        deep_ep.Buffer.set_num_sms(7)
    deep_ep.Buffer.set_num_sms(24)
    assert deep_ep.Buffer.num_sms == 24 and deep_ep.Buffer.get_dispatch_config(8).num_sms == 24
    deep_ep.Buffer.set_num_sms(20)
    with pytest.raises(AssertionError, match="unsupported number of ranks: 3"):
        deep_ep.Buffer.get_combine_config(3)
    config = deep_ep.Config(num_sms=20, num_max_nvl_chunked_send_tokens=6, num_max_nvl_chunked_recv_tokens=256,
                            num_max_rdma_chunked_send_tokens=6, num_max_rdma_chunked_recv_tokens=128)
    assert config.get_nvl_buffer_size_hint(HIDDEN * 2, 8) > 0 and config.get_rdma_buffer_size_hint(HIDDEN * 2, 8) == 0
    assert deep_ep.Buffer.is_sm90_compiled() and deep_ep.topk_idx_t == torch.int64
    with pytest.raises(sy.InvalidArgument, match="either group or comm"):
        deep_ep.Buffer(None)


def test_install():
    assert importlib.util.find_spec("deep_ep") is None
    deep_ep.install()
    deep_ep.install()
    try:
        assert importlib.util.find_spec("deep_ep") is not None
        found = importlib.import_module("deep_ep")
        from deep_ep.utils import EventHandle, EventOverlap  # imported as in Megatron

        assert found is deep_ep and found.__spec__.name == "switchyard.deep_ep"
        assert EventHandle is deep_ep.EventHandle and EventOverlap is deep_ep.EventOverlap
        for name in ("ElasticBuffer", "HybridEPBuffer"):
            assert not hasattr(found, name)
            with pytest.raises(ImportError):
                exec(f"from deep_ep import {name}")
        with pytest.raises(ImportError):
            importlib.import_module("deep_ep.nothing")
    finally:
        deep_ep.uninstall()
    with pytest.raises(ImportError):
        importlib.import_module("deep_ep")


def test_multiprocessors_that_nobody_has_chosen(monkeypatch):
    """If no number is requested, it is the library's choice; an explicit number is used even if it equals DeepEP's default."""
    from switchyard.deep_ep._config import UNCHOSEN

    buffer = object.__new__(deep_ep.Buffer)
    buffer._most_sms = 16
    monkeypatch.setattr(deep_ep.Buffer, "num_sms", UNCHOSEN)
    default_config = deep_ep.Buffer.get_combine_config(8)
    assert (default_config.num_sms, deep_ep.Config().num_sms, deep_ep.Buffer.num_sms) == (20, 20, 20)
    assert [buffer._sms(config) for config in (None, default_config, deep_ep.Config(), deep_ep.Config(20), deep_ep.Config(8))] == [0, 0, 0, 16, 8]
    deep_ep.Buffer.set_num_sms(20)
    assert [buffer._sms(config) for config in (None, deep_ep.Buffer.get_dispatch_config(8))] == [16, 16]
