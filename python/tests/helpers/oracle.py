# SPDX-License-Identifier: Apache-2.0
"""Expected results of dispatch and combine, computed in plain loops over all ranks' inputs. Shares no code with the package."""
from typing import List, NamedTuple, Optional

import numpy as np


class Input(NamedTuple):
    """Tokens of one rank."""

    x: np.ndarray  # [T, H]
    ids: np.ndarray  # [T, K]
    weights: Optional[np.ndarray]  # float32 [T, K]


def experts_of(num_experts, world, rank):
    """Returns the experts of a rank; the first `experts % world` ranks hold one more."""
    first, rest = divmod(num_experts, world)
    begin = rank * first + min(rank, rest)
    return range(begin, begin + first + (rank < rest))


def to_bf16(values):
    """Returns the bf16 bits of finite float32 values, rounded to nearest even."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def make_inputs(world, *, num_experts, topk, hidden, max_tokens, seed=0, weights=True, tokens=None, bad_ids=True, ids_type=np.int64):
    """Returns random inputs of all ranks: different numbers of tokens, some ids of no expert, and a token that repeats an
    expert."""
    inputs = []
    for rank in range(world):
        rng = np.random.default_rng(1000 * seed + rank)
        count = int(rng.integers(0, max_tokens + 1)) if tokens is None else tokens[rank]
        ids = rng.integers(-1 if bad_ids else 0, num_experts, (count, topk)).astype(ids_type)
        x = rng.standard_normal((count, hidden)).astype(np.float32)
        w = rng.random((count, topk)).astype(np.float32) if weights else None
        inputs.append(Input(x, ids, w))
    return inputs


class RankMajor(NamedTuple):
    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    tokens: np.ndarray
    sources: List[int]


def rank_major(inputs: List[Input], num_experts, rank) -> RankMajor:
    mine = experts_of(num_experts, len(inputs), rank)
    rows, ids, weights, tokens, sources = [], [], [], [], []
    for source, given in enumerate(inputs):
        for t in range(len(given.ids)):
            here = [e in mine for e in given.ids[t]]
            if not any(here):
                continue
            rows.append(given.x[t])
            ids.append([e - mine.start if h else -1 for e, h in zip(given.ids[t], here)])
            weights.append([w if h else 0 for w, h in zip(given.weights[t], here)] if given.weights is not None else [0] * len(here))
            tokens.append(t)
            sources.append(source)
    hidden, topk = inputs[0].x.shape[1], inputs[0].ids.shape[1]
    return RankMajor(np.array(rows, inputs[0].x.dtype).reshape(-1, hidden), np.array(ids, np.int32).reshape(-1, topk),
                     np.array(weights, np.float32).reshape(-1, topk), np.array(tokens, np.int32), sources)


class ExpertMajor(NamedTuple):
    x: np.ndarray
    source: np.ndarray  # rank << 48 | k << 32 | token, -1 for padding
    weights: np.ndarray
    counts: np.ndarray  # kept routes per local expert
    aligned: np.ndarray
    dropped: List[np.ndarray]  # [T, K] for each source: the routes that this rank dropped


def expert_major(inputs: List[Input], num_experts, rank, expert_alignment=1, capacity=None) -> ExpertMajor:
    hidden = inputs[0].x.shape[1]
    rows, source, weights, counts = [], [], [], []
    dropped = [np.zeros(given.ids.shape, np.uint8) for given in inputs]
    for expert in experts_of(num_experts, len(inputs), rank):
        kept = 0
        for s, given in enumerate(inputs):
            for t, k in zip(*np.nonzero(given.ids == expert)):
                if capacity is not None and len(rows) >= capacity:
                    dropped[s][t, k] = 1
                    continue
                rows.append(given.x[t])
                source.append(s << 48 | int(k) << 32 | int(t))
                weights.append(given.weights[t, k] if given.weights is not None else 0)
                kept += 1
        counts.append(kept)
        while len(rows) % expert_alignment:
            rows.append(np.zeros(hidden, inputs[0].x.dtype))
            source.append(-1)
            weights.append(0)
    counts = np.array(counts, np.int64)
    return ExpertMajor(np.array(rows, inputs[0].x.dtype).reshape(-1, hidden), np.array(source, np.int64),
                       np.array(weights, np.float32), counts, -(-counts // expert_alignment) * expert_alignment, dropped)


def combine_rank_major(inputs, num_experts, rank, y_of):
    """Returns float32 [T, H]: sums of y_of(rank)[row] over ranks in ascending order."""
    out = np.zeros(inputs[rank].x.shape, np.float32)
    for other in range(len(inputs)):
        there, y = rank_major(inputs, num_experts, other), y_of(other)
        for row, (source, token) in enumerate(zip(there.sources, there.tokens)):
            if source == rank:
                out[token] += y[row]
    return out


def combine_expert_major(inputs, num_experts, rank, y_of, order, weighted, expert_alignment=1, capacity=None):
    """Returns float32 [T, H] of weighted rows, summed in ascending k within a rank and then over ranks (per_rank), or in
    ascending k over all ranks (per_route)."""
    world, given = len(inputs), inputs[rank]
    found = {}
    for other in range(world):
        there, y = expert_major(inputs, num_experts, other, expert_alignment, capacity), y_of(other)
        for row, source in enumerate(there.source):
            if source >= 0 and source >> 48 == rank:
                found[int(source & 0xFFFFFFFF), int(source >> 32 & 0xFFFF)] = (other, y[row])
    out = np.zeros(given.x.shape, np.float32)
    for t in range(len(out)):
        partial = np.zeros((world, out.shape[1]), np.float32)
        touched = set()
        for k in range(given.ids.shape[1]):
            if (t, k) not in found:
                continue
            other, row = found[t, k]
            term = row * given.weights[t, k] if weighted else row
            if order == "per_route":
                out[t] += term
            else:
                partial[other] += term
                touched.add(other)
        for other in sorted(touched):
            out[t] += partial[other]
    return out
