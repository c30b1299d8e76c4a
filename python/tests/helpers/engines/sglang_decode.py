# SPDX-License-Identifier: Apache-2.0
"""Decode of one rank through SGLang's dispatcher with the plug-in, on the CPU or a GPU, with experts whose sums reveal the order and
the weights of combine."""
import torch

import sglang_ranks
from sglang_passes import installed
from sglang_ranks import EXPERTS, dispatcher_of, prefill, topk_output

HIDDEN = 128
#: Each token has two experts on rank 0 and one on the last rank. All rows are 1. bf16 has no 257, so rank 0's sum is rounded to 256.
IDS, WEIGHTS = [0, 1, EXPERTS - 1], [256.0, 1.0, 1.0]
PER_RANK, PER_ROUTE = 256.0, 258.0
TOKENS = (5, 0, 3, 1)


def decoder(world, rows="bf16", halves=1):
    """Returns a dispatcher for one batch or two half-batches."""
    from sglang.srt.runtime_context import get_flags

    installed()
    with get_flags().moe.override(tbo_enabled=halves == 2):
        return dispatcher_of(world, HIDDEN, rows=rows)


def batch_of(tokens):
    """Returns x, ids and weights."""
    return [each.to(sglang_ranks.place) for each in (torch.ones(tokens, HIDDEN, dtype=torch.bfloat16),
                                                     torch.tensor([IDS] * tokens, dtype=torch.int32).view(tokens, 3),
                                                     torch.tensor([WEIGHTS] * tokens).view(tokens, 3))]


def ones(output, weights=None):
    """Returns SGLang's input of a combine: rows of 1, with the weights of the dispatch or others."""
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPLLCombineInput

    rows = torch.ones(output.hidden_states.shape, dtype=torch.bfloat16, device=output.hidden_states.device)
    return DeepEPLLCombineInput(rows, output.topk_ids, output.topk_weights if weights is None else weights)


def _same(weights):
    return weights


#: By name: the change of the weights between dispatch and combine, and the sum of each token.
CHANGES = {"same": (_same, PER_RANK), "in place": (lambda weights: weights.mul_(3), PER_RANK),
           "copy": (torch.clone, PER_ROUTE), "other": (lambda weights: weights * 2, 2 * PER_ROUTE)}


def check_order(rank, world, rows, halves=1):
    """Whole calls, or the calls of two half-batches in flight together, with all changes of the weights, repeatedly."""
    made, tokens = decoder(world, rows, halves), TOKENS[rank]
    for change, (apply, want) in [*CHANGES.items(), *CHANGES.items(), ("same", CHANGES["same"])]:
        batches = [batch_of(tokens) for _ in range(halves)]
        with prefill(False):
            if halves == 1:
                (x, ids, weights), = batches
                output = made.dispatch(hidden_states=x, topk_output=topk_output(ids, weights))
                assert output.topk_weights is weights and (output.hidden_states_scale is not None) == (rows == "fp8")
                outs = [made.combine(combine_input=ones(output, apply(weights)))]
            else:
                for half, (x, ids, weights) in enumerate(batches):
                    made.dispatch_a(hidden_states=x, topk_output=topk_output(ids, weights), tbo_subbatch_index=half)
                for half, (_, _, weights) in enumerate(batches):
                    output = made.dispatch_b(tbo_subbatch_index=half)
                    made.combine_a(combine_input=ones(output, apply(weights)), tbo_subbatch_index=half)
                outs = [made.combine_b(tbo_subbatch_index=half) for half in range(2)]
        for out in outs:
            assert torch.equal(out.cpu(), torch.full((tokens, HIDDEN), want, dtype=torch.bfloat16)), (change, out)


def check_graph(rank, world, rows):
    """GPUs: two layers captured in a graph, replayed with other ids and weights."""
    layers, (x, ids, weights) = [decoder(world, rows) for _ in range(2)], batch_of(4 + rank)

    def step():
        with prefill(False):
            return [each.combine(combine_input=ones(each.dispatch(hidden_states=x, topk_output=topk_output(ids, weights))))
                    for each in layers]

    step(), step()
    torch.cuda.synchronize()
    torch.distributed.barrier(sglang_ranks._groups[world])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = step()
    for scale, first in ((1, 0), (2, 0), (4, -1), (1, 0)):
        _, its_ids, its_weights = batch_of(len(x))
        its_ids[:, 0] = first
        ids.copy_(its_ids), weights.copy_(scale * its_weights)
        graph.replay()
        want = scale * (PER_RANK if first == 0 else 2.0)
        for out in outs:
            assert torch.equal(out.cpu(), torch.full(out.shape, want, dtype=torch.bfloat16)), (scale, first, out)
    torch.cuda.synchronize()
    torch.distributed.barrier(sglang_ranks._groups[world])
    del graph
