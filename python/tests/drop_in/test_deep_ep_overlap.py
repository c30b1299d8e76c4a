# SPDX-License-Identifier: Apache-2.0
"""Arguments of SGLang's DeepEP in low-latency mode: a combine that overlaps the product of its rows, and NVFP4."""
import threading
import time

import pytest

import switchyard as sy

torch = pytest.importorskip("torch")

from deep_ep_ranks import EXPERTS, MAX_TOKENS, calc_diff, inputs_of, over_ranks, tensors, weighted  # noqa: E402
from switchyard.deep_ep import _low_latency  # noqa: E402

BLOCK, THRESHOLD = 4, 3


def _dispatched(buffer):
    """Returns weights, ids, the expected sums, the rows, their counts and the handle of one dispatch."""
    inputs = inputs_of(buffer.group_size, repeats=False)
    x, ids, weights = tensors(inputs[buffer.rank])
    received, count, handle, _, _ = buffer.low_latency_dispatch(x, ids, MAX_TOKENS, EXPERTS, use_fp8=False)
    return weights, ids, weighted(x, ids, weights), received, count, handle


def _blocks(count):
    return [(expert, block) for expert, rows in enumerate(count.tolist()) for block in range(-(-rows // BLOCK))]


def _signalled(buffer, hooked, missing=None):
    """Combines while another thread writes the rows, last block first. Before the last increment of its counter, a block is NaN."""
    weights, ids, want, received, count, handle = _dispatched(buffer)
    here, rows, _ = received.shape
    per_expert = -(-rows // BLOCK)
    signal, y = torch.zeros(here * per_expert, dtype=torch.int32), torch.full_like(received, float("nan"))

    def product():
        for expert, block in reversed(_blocks(count)):
            at = slice(block * BLOCK, (block + 1) * BLOCK)
            for arrival in range(THRESHOLD):
                time.sleep(0.002)
                if arrival == THRESHOLD - 1:
                    y[expert, at] = received[expert, at]
                    if (expert, block) == missing:
                        return
                signal[expert * per_expert + block] += 1

    thread = threading.Thread(target=product)
    thread.start()
    try:
        out, _, hook = buffer.low_latency_combine(
            x=y, topk_idx=ids, topk_weights=weights, handle=handle, async_finish=False, return_recv_hook=hooked, overlap=True,
            packed_recv_count=count, comp_signal=signal, block_m=BLOCK, threshold=THRESHOLD, num_sms=3)
        if hooked:
            hook()
    finally:
        thread.join()
    assert len(_blocks(count)) > here, "some expert has several blocks"
    assert out.isfinite().all() and calc_diff(out, want) < 1e-5


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_no_row_is_read_before_its_signal(world, hooked):
    over_ranks("cpu", world, _signalled, hooked)


def _late(buffer):
    before, _low_latency.SIGNAL_SECONDS = _low_latency.SIGNAL_SECONDS, 3  # the other blocks complete within it
    try:
        with pytest.raises(sy.PeerTimeout, match=r"comp_signal of block 0 of local expert \d+ is 2 after 3 s: threshold = 3"):
            _signalled(buffer, False, missing=_blocks(_dispatched(buffer)[4])[0])
    finally:
        _low_latency.SIGNAL_SECONDS = before
    _signalled(buffer, False)  # the Buffer stays usable


def test_a_block_that_never_completes():
    over_ranks("cpu", 2, _late)


def _without_overlap(buffer):
    """Without overlap, SGLang passes the same arguments, and x is complete."""
    weights, ids, want, received, count, handle = _dispatched(buffer)
    keywords = {"overlap": False, "packed_recv_count": count, "comp_signal": None, "block_m": 64, "threshold": 0, "num_sms": 3}
    out, _, hook = buffer.low_latency_combine(received.nan_to_num(0, 0, 0), ids, weights, handle, return_recv_hook=True, **keywords)
    hook()
    assert calc_diff(out, want) < 1e-5


def _refused(buffer):
    weights, ids, _, received, count, handle = _dispatched(buffer)
    given, need = (received, ids, weights, handle), received.shape[0] * -(-received.shape[1] // BLOCK)
    signal = torch.zeros(need, dtype=torch.int32)

    def combine(match, kind=sy.InvalidArgument, **keywords):
        with pytest.raises(kind, match=match):
            options = {"overlap": True, "comp_signal": signal, "block_m": BLOCK, "threshold": 1, **keywords}
            buffer.low_latency_combine(*given, **options)

    combine("overlap=True needs comp_signal", comp_signal=None)
    combine(f"must be contiguous int32 with at least {need} elements", comp_signal=signal[:-1])
    combine("comp_signal is torch.int64", comp_signal=signal.long())
    combine("threshold = 0 must be at least 1", threshold=0)
    combine("block_m = 0", block_m=0)
    combine("comp_signal counts per block of rows", sy.Unsupported, src_signals=signal)
    for keywords in ({"use_nvfp4": True}, {"x_global_scale": torch.ones(1)}):
        with pytest.raises(sy.Unsupported, match="NVFP4 rows are not available; rows are sent as bf16"):
            buffer.low_latency_dispatch(received[0, :2], ids[:2], MAX_TOKENS, EXPERTS, use_fp8=False, **keywords)
    _without_overlap(buffer)  # nothing was sent


@pytest.mark.parametrize("scenario", [_without_overlap, _refused])
def test_overlap_arguments(scenario):
    over_ranks("cpu", 2, scenario)


def test_signals_on_a_gpu_are_refused():
    """With stand-ins for tensors on a GPU, of which only the place matters here."""
    class Placed:
        is_cuda, dtype, shape = True, torch.int32, (2, 8)

        def is_contiguous(self):
            return True

        def numel(self):
            return 16

    received = type("Received", (), {"x": Placed()})
    with pytest.raises(sy.Unsupported, match="available on the CPU only; on GPUs, combine after the product, with overlap=False"):
        _low_latency.Signals(Placed(), 4, 1).check(received)
