# SPDX-License-Identifier: Apache-2.0
"""Usage mistakes in the creation of groups and objects, in their use after close, in a forked child, or without torch. Same
form as test_mistakes.py."""
import subprocess
import sys

import pytest

from test_mistakes import check, judge

GROUPS = [
    ("sy.run_ranks(4, len)", "InvalidType", "function"),
    ("sy.run_ranks(None, 2)", "InvalidType", "function"),
    ("sy.run_ranks(len, '2')", "InvalidType", "world"),
    ("sy.run_ranks(len, 2.0)", "InvalidType", "world"),
    ("sy.run_ranks(len, 0)", "InvalidArgument", "world"),
    ("sy.run_ranks(len, 1000)", "InvalidArgument", "world"),
    ("sy.run_ranks(len, 2, heap_bytes='1GB')", "InvalidType", "heap_bytes"),
    ("sy.run_ranks(len, 2, heap_bytes=1e9)", "InvalidType", "heap_bytes"),
    ("sy.run_ranks(len, 2, heap_bytes=-1)", "InvalidArgument", "heap_bytes"),
    ("sy.run_ranks(len, 2, heap_bytes=16)", "InvalidArgument", "heap_bytes"),
    ("sy.run_ranks(len, 2, heap_bytes=1 << 70)", "InvalidArgument", "heap_bytes"),
    ("sy.run_ranks(len, 2, timeuot=3)", "TypeError", "run_ranks() got an unexpected keyword argument 'timeuot'. Did you mean 'timeout"),
    ("sy.Group.threads(1, heap=3)", "TypeError", "Did you mean 'heap_bytes"),
    ("sy.run_ranks(lambda group: group.nothing, 2)", "AttributeError", "ranks 0 and 1 of 2"),
    ("sy.Group.threads('2')", "InvalidType", "world"),
    ("sy.Group.threads(65)", "InvalidArgument", "world"),
    ("sy.Group.threads(1, timeout='30')", "InvalidType", "timeout"),
    ("sy.Group.threads(1, timeout=float('nan'))", "InvalidArgument", "timeout"),
    ("sy.Group.threads(1, timeout=0)", "InvalidArgument", "timeout"),
    ("sy.Group.threads(1, rendezvous_timeout=None)", "InvalidType", "rendezvous_timeout"),
    ("sy.Group.threads(1, rendezvous_timeout=-1)", "InvalidArgument", "rendezvous_timeout"),
    ("sy.Group.threads(1, backend='gpu')", "InvalidArgument", "backend = 'gpu': must be 'cpu' or 'cuda"),
    ("sy.Group.threads(1, backend=0)", "InvalidArgument", "backend"),
    ("sy.Group.threads(1, device='cuda:0')", "InvalidType", "device"),
    ("sy.Group.threads(1, workers=0)", "InvalidArgument", "workers"),
    ("sy.Group.threads(1, workers='4')", "InvalidType", "workers"),
    ("sy.Group.threads(1, num_sms=-1)", "InvalidArgument", "num_sms"),
    ("sy.Group.threads(1, host=b'a')", "InvalidType", "host"),
    ("sy.Group.threads(1, network='rdma')", "InvalidArgument", "network"),
    ("sy.Group.threads(1, silence=0)", "InvalidArgument", "silence"),
    ("sy.Group.from_environment(backand='cpu')", "TypeError", "Group.from_environment() got an unexpected keyword argument 'backand'. Did you mean 'backend"),
    ("sy.Group.from_process_group(timeouts=3)", "TypeError", "Did you mean 'timeout"),
    ("sy.GroupedGemm(None, epilog='silu')", "TypeError", "Did you mean 'epilogue"),
    ("sy.parallelize_moe(None, group, max_token=3)", "TypeError", "Did you mean 'max_tokens"),
    ("sy.moe_heap_bytes(None, 2, max_token=3)", "TypeError", "Did you mean 'max_tokens"),
    ("sy.Group.connect(2, 2, 'unix:@a')", "InvalidArgument", "rank"),
    ("sy.Group.connect('0', 2, 'unix:@a')", "InvalidType", "rank"),
    ("sy.Group.connect(0, 0, 'unix:@a')", "InvalidArgument", "world"),
    ("sy.Group.connect(0, 2, 'somewhere', 'a')", "InvalidArgument", "store"),
    ("sy.Group.connect(0, 1, None)", "InvalidType", "store"),
    ("sy.Group.connect(0, 1, 'unix:@a\\0b')", "InvalidArgument", "store"),
    ("sy.Group.connect(0, 1, 'unix:@a', 5)", "InvalidType", "token"),
    ("sy.Group.from_mpi4py(3)", "InvalidType", "communicator"),
    ("group.host_of(5)", "InvalidArgument", "rank"),
    ("group.host_of('a')", "InvalidType", "rank"),
    ("group.experts_of('4')", "InvalidType", "num_experts"),
    ("group.experts_of(0)", "InvalidArgument", "num_experts"),
    ("group.all_gather('text')", "InvalidType", "mine"),
    ("group.set_timeout('1')", "InvalidType", "seconds"),
    ("group.abort(0)", "InvalidArgument", "reason"),
    ("group.abort('now')", "InvalidType", "reason"),
    ("__import__('pickle').dumps(group)", "TypeError", "Group"),
    ("sy.first_expert(4, 2, 3)", "InvalidArgument", "rank"),
    ("sy.first_expert(4.0, 2, 1)", "InvalidType", "num_experts"),
]
OBJECTS = [
    ("sy.Exchange(4, **SHAPE)", "InvalidType", "group"),
    ("sy.Exchange(sy.Group, **SHAPE)", "InvalidType", "group"),
    ("sy.Exchange(**SHAPE)", "TypeError", "group"),
    ("sy.Exchange(group, **{**SHAPE, 'max_tokens': 16.0})", "InvalidType", "max_tokens"),
    ("sy.Exchange(group, **{**SHAPE, 'hidden': '128'})", "InvalidType", "hidden"),
    ("sy.Exchange(group, **{**SHAPE, 'hidden': 3})", "InvalidArgument", "Exchange, rank 0: hidden = 3: a row has 6 bytes in bf16"),
    ("sy.Exchange(group, **{**SHAPE, 'hidden': 1 << 64})", "InvalidArgument", "hidden"),
    ("sy.Exchange(group, **{**SHAPE, 'num_experts': None})", "InvalidType", "num_experts"),
    ("sy.Exchange(group, **{**SHAPE, 'num_experts': 0})", "InvalidArgument", "num_experts"),
    ("sy.Exchange(group, **{**SHAPE, 'num_experts': (1 << 32) + 4})", "InvalidArgument", "num_experts"),
    ("sy.Exchange(group, **{**SHAPE, 'topk': 33})", "InvalidArgument", "topk"),
    ("sy.Exchange(group, **{**SHAPE, 'topk': True})", "InvalidType", "topk"),
    ("sy.Exchange(group, hidden=128, num_experts=4, topk=2)", "TypeError", "max_tokens"),
    ("sy.Exchange(group, dtype='f64', **SHAPE)", "InvalidArgument", "dtype = 'f64': must be 'bf16', 'f16', 'f32' or 'fp8_e4m3"),
    ("sy.Exchange(group, hidden=128, num_experts=4, top_k=2, max_tokens=8)", "TypeError", "Exchange() got an unexpected keyword argument 'top_k'. Did you mean 'topk"),
    ("sy.Exchange(group, layout='token_major', **SHAPE)", "InvalidArgument", "layout"),
    ("sy.Exchange(group, staging='rings', **SHAPE)", "InvalidArgument", "staging"),
    ("sy.Exchange(group, expert_alignment=0, layout='expert_major', **SHAPE)", "InvalidArgument", "expert_alignment"),
    ("sy.Exchange(group, pool_bytes='1M', **SHAPE)", "InvalidType", "pool_bytes"),
    ("sy.Exchange(group, staging='ring', ring_slots=-1, **SHAPE)", "InvalidArgument", "ring_slots"),
    ("sy.Exchange(group, pool_bytes=1 << 40, **SHAPE)", "HeapExhausted", "raise heap_bytes of the group to Exchange.heap_bytes"),
    ("sy.Exchange(group, routing_gradients='yes', **SHAPE)", "InvalidType", "routing_gradients"),
    ("sy.Exchange.heap_bytes(group, **SHAPE)", "InvalidType", "world"),
    ("sy.Exchange.heap_bytes(0, **SHAPE)", "InvalidArgument", "world"),
    ("sy.Exchange.heap_bytes(2, backend='tpu', **SHAPE)", "InvalidArgument", "backend"),
    ("sy.Exchange.memory_required('2', **SHAPE)", "InvalidType", "world"),
    ("sy.LowLatency(ex, **SHAPE)", "InvalidType", "group"),
    ("sy.LowLatency(group, scales='f16', **SHAPE)", "InvalidArgument", "scales"),
    ("sy.LowLatency(group, scales='f32', scale_group=48, **SHAPE)", "InvalidArgument", "scale_group"),
    ("sy.LowLatency(group, sending='per_token', **SHAPE)", "InvalidArgument", "sending"),
    ("sy.LowLatency(group, pieces='2', **SHAPE)", "InvalidType", "pieces"),
    ("sy.LowLatency(group, **{**SHAPE, 'max_tokens': 70000})", "InvalidArgument", "max_tokens"),
    ("sy.LowLatency.heap_bytes('2', **SHAPE)", "InvalidType", "world"),
    ("sy.LedgerCombine(None, **SHAPE)", "InvalidType", "group"),
    ("sy.LedgerCombine(group, max_rows=-1, **SHAPE)", "InvalidArgument", "max_rows"),
    ("sy.LedgerCombine(group, max_ledgers=2.5, **SHAPE)", "InvalidType", "max_ledgers"),
    ("sy.LedgerCombine(group, dtype='fp8', **SHAPE)", "InvalidArgument", "dtype = 'fp8_e4m3': must be 'bf16', 'f16' or 'f32"),
    ("sy.MoeLayer(ex, W13, W2, **LAYER)", "InvalidType", "group"),
    ("sy.MoeLayer(group, W2, W13, **LAYER)", "InvalidArgument", "w13"),
    ("sy.MoeLayer(group, W13, W2[:1], **LAYER)", "InvalidArgument", "w2"),
    ("sy.MoeLayer(group, W13.astype('f4'), W2, **LAYER)", "InvalidArgument", "w13"),
    ("sy.MoeLayer(group, W13, W2, w13_scales=S8, **LAYER)", "InvalidArgument", "w13_scales"),
    ("sy.MoeLayer(group, W13, W2, form='mega', **LAYER)", "InvalidArgument", "form"),
    ("sy.MoeLayer(group, W13, W2, captured=1, **LAYER)", "InvalidType", "captured"),
    ("sy.MoeLayer(group, W13, W2, scaling='per_row', **LAYER)", "InvalidArgument", "scaling"),
    ("sy.MoeLayer(group, W13, W2, scaling=1, **LAYER)", "InvalidArgument", "scaling"),
    ("sy.MoeLayer(group, W13, W2, scaling='per_channel', **LAYER)", "Unsupported", "scaling"),
    ("sy.MoeLayer(group, W13, W2, intermediate_scaling='block', **LAYER)", "InvalidArgument", "intermediate_scaling"),
    ("sy.MoeLayer(group, W13, W2, intermediate_scaling='fixed', **LAYER)", "InvalidArgument", "intermediate_scaling"),
    ("sy.MoeLayer(group, W13, W2, intermediate_scale=0.5, **LAYER)", "InvalidType", "intermediate_scale"),
    ("sy.MoeLayer(group, W13, W2, intermediate_scale=W, **LAYER)", "InvalidArgument", "intermediate_scale"),
    ("sy.MoeLayer(group, W13, W2, intermediate_scale=ONE, **LAYER)", "InvalidArgument", "intermediate_scale = a scale: must be None"),
    ("layer.with_weights(W13, W2, intermediate_scale=ONE)", "InvalidArgument", "intermediate_scale is given"),
    ("sy.MoeLayer.heap_bytes(2.0, **LAYER)", "InvalidType", "world"),
    ("sy.RowMemory(group, 1 << 20)", "Unsupported", "CPU"),
    ("sy.RowMemory(group, '1M')", "InvalidType", "size"),
    ("sy.Trace('file')", "InvalidType", "group"),
    ("sy.Trace(group, events_per_track=0)", "InvalidArgument", "events_per_track"),
    ("sy.Trace(group, events_per_track='many')", "InvalidType", "events_per_track"),
    ("trace.span(3).__enter__()", "InvalidType", "name"),
    ("trace.span('a', arg='b').__enter__()", "InvalidType", "arg"),
    ("trace.merge('text')", "InvalidType", "content"),
    ("trace.merge(b'text')", "InvalidArgument", "merge"),
    ("trace.write_json(3)", "InvalidType", "path"),
    ("trace.write_json('/nowhere/at/all.json')", "FileError", "nowhere/at/all.json"),
    ("trace.json(flows=None)", "InvalidType", "flows"),
    ("sy.tuned_values(0, 'normal', ranks=2, hidden=128, max_tokens=8)", "InvalidType", "device"),
    ("sy.tuned_values('cpu', 'fast', ranks=2, hidden=128, max_tokens=8)", "InvalidArgument", "mode"),
    ("sy.tuned_values('cpu', 'normal', ranks='2', hidden=128, max_tokens=8)", "InvalidType", "ranks"),
    ("sy.tuned_values('cpu', 'normal', ranks=2, hidden=128, max_tokens=8, path=3)", "InvalidType", "path"),
    ("sy.parallelize_moe('model', group, max_tokens=8)", "InvalidType", "model"),
    ("sy.moe_heap_bytes(3, 2, max_tokens=8)", "InvalidType", "model"),
]
ENDED = [
    ("closed(ex, group).dispatch(X, IDS)", "InvalidArgument", "its group is closed"),
    ("closed(lambda: ex.combine(rows, handle), (pair, group)[1])()", "InvalidArgument", "its group is closed"),
    ("closed(ll, group).dispatch(X, IDS)", "InvalidArgument", "its group is closed"),
    ("closed(ledger, (tables, group)[1]).prepare(tables)", "InvalidArgument", "its group is closed"),
    ("closed(layer, group)(X16, IDS)", "InvalidArgument", "its group is closed"),
    ("closed(ex, group).last_call()", "InvalidArgument", "its group is closed"),
    ("closed(group, group).barrier()", "InvalidArgument", "the group is closed"),
    ("closed(trace, group).start()", "InvalidArgument", "the group is closed"),
    ("sy.Trace(closed(group, group))", "InvalidArgument", "the group is closed"),
    ("sy.Exchange(closed(group, group), **SHAPE)", "InvalidArgument", "the group is closed"),
    ("[ex.close(), ex.dispatch(X, IDS)]", "InvalidArgument", "the exchange is closed"),
    ("[(ex, forked(lambda: ex.dispatch(X, IDS)))]", "InvalidArgument", "forked"),
    ("[(pair, forked(lambda: ex.combine(rows, handle)))]", "InvalidArgument", "forked"),
    ("[(pair, forked(lambda: handle.counts()))]", "InvalidArgument", "forked"),
    ("[(pair, forked(lambda: ex.allocate_rows(handle)))]", "InvalidArgument", "forked"),
    ("[(group, forked(lambda: group.barrier()))]", "InvalidArgument", "forked"),
    ("[(group, forked(lambda: sy.Exchange(group, **SHAPE)))]", "InvalidArgument", "forked"),
    ("[(received, forked(lambda: ll.dispatch(X, IDS)))]", "InvalidArgument", "forked"),
    ("[(received, forked(lambda: ll.combine(Y, received)))]", "InvalidArgument", "forked"),
    ("[(layer, forked(lambda: layer(X16, IDS)))]", "InvalidArgument", "forked"),
    ("[(prepared, em_y, forked(lambda: ledger.combine(em_y, prepared)))]", "InvalidArgument", "forked"),
    ("[(trace, forked(lambda: trace.json()))]", "InvalidArgument", "forked"),
    ("[(group, forked(lambda: group.wait_statistics()))]", "InvalidArgument", "forked"),
]


@pytest.fixture(scope="module", autouse=True)
def _judge():
    yield
    judge.close()


@pytest.mark.parametrize("expression, exception, word", GROUPS, ids=[each[0] for each in GROUPS])
def test_groups(expression, exception, word):
    check(expression, exception, word)


@pytest.mark.parametrize("expression, exception, word", OBJECTS, ids=[each[0] for each in OBJECTS])
def test_objects(expression, exception, word):
    check(expression, exception, word)


@pytest.mark.parametrize("expression, exception, word", ENDED, ids=[each[0] for each in ENDED])
def test_after_the_end(expression, exception, word):
    check(expression, exception, word)


@pytest.mark.parametrize("statement", [
    "import switchyard.deep_ep", "sy.keep_plans()", "sy.Group.from_process_group()",
    "import switchyard.plugins as p; os.environ[p.VARIABLE] = '1'; p.deep_ep(); import deep_ep"])
def test_without_torch(statement, environment):
    program = f"import os, sys\nsys.modules['torch'] = None\nimport switchyard as sy\n{statement}\n"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "ImportError: " in done.stderr.splitlines()[-1] and "needs torch" in done.stderr.splitlines()[-1], done.stderr
