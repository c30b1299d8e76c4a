#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A serving worker in Python that runs for seconds or minutes: two groups in one process, each with its own calls, objects that
are created and destroyed, results that are kept for a while, and garbage collection at random times on every thread. Every
result is compared.

The ranks of a group draw identical actions from (seed, group, step) and individual inputs from (seed, group, step, rank). Rows
and weights are small integers in float32, so sums are exact in any order. Ends with a count of the actions, or with the first
difference.
"""
import argparse
import collections
import gc
import random
import sys
import threading
import time

import numpy as np

import switchyard as sy

HEAP = 256 << 20
MAX_KEPT = 6  # number of results that a rank keeps
MAX_OBJECTS = 5  # number of objects that a rank holds at a time


class Kept:
    """An array in memory owned by the library, and a copy of the content that it must hold until it is dropped."""

    def __init__(self, name, array, owner=None):
        self.name = name
        self.array, self.expected, self.owner = array, np.array(array), owner
        self.cycle = self  # only the garbage collector destroys this object

    def check(self):
        if not np.array_equal(self.array, self.expected):
            raise AssertionError(f"{self.name}: rows that are kept have changed: {self.expected[:2, :4]} {self.array[:2, :4]} {self.array.shape}")


def draw_inputs(rng, config):
    tokens = int(rng.integers(0, config["max_tokens"] + 1))
    ids = np.stack([rng.permutation(config["num_experts"])[: config["topk"]] for _ in range(tokens)]) if tokens else np.zeros((0, config["topk"]))
    ids = np.where(rng.random(ids.shape) < 0.1, -1, ids).astype(np.int32)  # dropped routes
    x = rng.integers(-8, 9, (tokens, config["hidden"])).astype(np.float32)
    return x, ids, rng.integers(1, 4, ids.shape).astype(np.float32)


def visited_ranks(group, ids, experts):
    """The number of ranks to which each token is sent."""
    owner = np.concatenate([np.full(len(group.experts_of(experts, rank)), rank) for rank in range(group.size)] + [[-1]])
    return np.array([len(set(owner[row]) - {-1}) for row in ids], np.float32).reshape(-1, 1)


class ExchangeCase:
    def __init__(self, group, rng):
        self.config = {"hidden": 16 * rng.randint(1, 16), "num_experts": rng.randint(group.size, 12), "topk": rng.randint(1, 3), "max_tokens": 32,
                       "dtype": "f32", "layout": rng.choice(("rank_major", "expert_major")), "pool_bytes": 4 << 20}
        self.group, self.object = group, sy.Exchange(group, **self.config)
        self.handle = None

    def call(self, shared, own):
        x, ids, weights = draw_inputs(own, self.config)
        major = self.config["layout"] == "expert_major"
        rows, handle = self.object.dispatch(x, ids, weights if major else None)
        kept = Kept("dispatched", rows, handle)
        y = self.object.allocate_rows(handle) if shared.random() < 0.5 else np.empty_like(rows)
        y[...] = rows * np.float32(3)
        out = self.object.combine(y, handle)
        factor = np.where(ids >= 0, weights, 0).sum(1, keepdims=True) if major else visited_ranks(self.group, ids, self.config["num_experts"])
        compare("exchange", out, 3 * x * factor)
        if shared.random() < 0.5:  # the same routing as before
            again, _ = self.object.dispatch(x + 1, handle=handle)
            compare("cached dispatch", self.object.combine(again, handle), (x + 1) * factor)
        return [kept, Kept("combined", out)]


class LowLatencyCase:
    def __init__(self, group, rng):
        self.config = {"hidden": 16 * rng.randint(1, 16), "num_experts": rng.randint(group.size, 12), "topk": rng.randint(1, 3), "max_tokens": 16,
                       "dtype": "f32", "sending": rng.choice(("per_rank", "per_route"))}
        self.group, self.object = group, sy.LowLatency(group, **self.config)

    def call(self, shared, own):
        x, ids, weights = draw_inputs(own, self.config)
        expected = 2 * x * np.where(ids >= 0, weights, 0).sum(1, keepdims=True)
        if shared.random() < 0.3:
            compare("all to all", self.object.all_to_all(x, ids, weights), expected / 2)
        keeps = own.random() < 0.3  # dispatches without an output of the caller overwrite the rows of the previous dispatch
        received = self.object.dispatch(x, ids, weights, output=self.object.make_output() if keeps else None)
        y = self.object.make_rows(received)
        kept = []
        for expert, count in enumerate(received.rows):
            y[expert, :count] = received.x[expert, :count] * np.float32(2)
            if keeps:
                kept.append(Kept("received", received.x[expert, :count], received))
        compare("low latency", self.object.combine(y, received), expected)
        return kept


class LayerCase:
    """A layer in which all experts return zeros except one, which is checked against float64."""

    def __init__(self, group, rng):
        self.config = {"hidden": 32, "intermediate": 16, "num_experts": rng.randint(group.size, 8), "topk": 2, "max_tokens": 8,
                       "exchange": rng.choice(("normal", "low_latency"))}
        data = np.random.default_rng(rng.getrandbits(32))
        experts, hidden, inner = self.config["num_experts"], self.config["hidden"], self.config["intermediate"]
        self.w13, self.w2 = to_bf16(data.standard_normal((experts, 2 * inner, hidden)) / 6), to_bf16(data.standard_normal((experts, hidden, inner)) / 4)
        mine = group.experts_of(experts)
        self.group, self.object = group, sy.MoeLayer(group, self.w13[mine.start:mine.stop], self.w2[mine.start:mine.stop], **self.config)

    def call(self, shared, own):
        x, ids, weights = draw_inputs(own, self.config)
        out = from_bf16(self.object(to_bf16(x), ids, weights))
        first, second, expected = from_bf16(self.w13).astype(np.float64), from_bf16(self.w2).astype(np.float64), np.zeros(x.shape)
        for t, row in enumerate(ids):
            for k, e in enumerate(row):
                if e >= 0:
                    gate, up = np.split(first[e] @ x[t], 2)
                    expected[t] += weights[t, k] * (second[e] @ (gate / (1 + np.exp(-gate)) * up))
        if not np.allclose(out, expected, rtol=3e-2, atol=3e-2 * (1 + np.abs(expected).max(initial=0))):
            raise AssertionError("layer: rows differ from float64")
        return []


def to_bf16(values):
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def compare(name, got, expected):
    if not np.array_equal(np.asarray(got), expected):
        raise AssertionError(f"{name}: {int((np.asarray(got) != expected).sum())} of {expected.size} elements differ")


def collect(rng):
    """Runs garbage collection as a serving engine does, or does nothing."""
    what = rng.random()
    if what < 0.3:
        gc.collect(rng.randrange(3))
    elif what < 0.4:
        gc.freeze()
    elif what < 0.5:
        gc.unfreeze()
    elif what < 0.6:
        (gc.disable if gc.isenabled() else gc.enable)()


class Rank:
    """One rank of a group, and its actions in each step."""

    def __init__(self, group, seed, lane, cases, counts):
        self.group, self.seed, self.lane, self.cases, self.counts = group, seed, lane, cases, counts
        self.objects, self.kept = [], collections.deque()
        self.last = sy.Exchange(group, hidden=16, num_experts=group.size, topk=group.size, max_tokens=1, dtype="f32")

    def is_last(self, end):
        """Rank 0 decides by its clock; its token distributes the decision to all ranks."""
        ids = np.arange(self.group.size, dtype=np.int32).reshape(1, -1)[: 1 if self.group.rank == 0 else 0]
        rows, _ = self.last.dispatch(np.full((len(ids), 16), time.monotonic() >= end, np.float32), ids)
        return bool(rows[0, 0])

    def run(self, end):
        for step in range(sys.maxsize):
            if self.is_last(end):
                return
            shared = random.Random(f"{self.seed} {self.lane} {step}")
            private = random.Random(f"{self.seed} {self.lane} {step} {self.group.rank}")
            self.step(shared, private, np.random.default_rng([self.seed, self.lane, step, self.group.rank]))

    def step(self, shared, private, own):
        if len(self.objects) < MAX_OBJECTS and (not self.objects or shared.random() < 0.15):
            self.objects.append(shared.choice(self.cases)(self.group, shared))
            self.counts["objects"] += 1
        case = shared.choice(self.objects)
        kept = case.call(shared, own)
        self.counts[type(case).__name__] += 1
        if private.random() < 0.5:
            self.kept.extend(kept)
        if shared.random() < 0.1:  # all ranks end an object in the same step: close, drop, or leave it to the collector
            ended = self.objects.pop(shared.randrange(len(self.objects)))
            if private.random() < 0.5:
                ended.object.close()
            elif private.random() < 0.5:
                ended.cycle = ended
        if private.random() < 0.1:
            private.shuffle(self.kept)
        while self.kept and (len(self.kept) > MAX_KEPT or private.random() < 0.3):
            self.kept.popleft().check()
            self.counts["kept"] += 1
        collect(private)


def run_lane(seed, lane, ranks, end, cases, counts, failures):
    groups = sy.Group.threads(ranks, HEAP, timeout=60)

    def body(group):
        try:
            with group:
                rank = Rank(group, seed, lane, cases, counts[group.rank])
                rank.run(end)
                for kept in rank.kept:
                    kept.check()
        except BaseException as error:  # leaving `with` by an exception has already aborted the group
            failures.append(f"group {lane}, rank {group.rank}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=body, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=3, help="of each of the two groups")
    parser.add_argument("--no-layer", action="store_true", help="leave out whole layers, which need the library switchyard_layer")
    args = parser.parse_args()
    cases = [ExchangeCase, LowLatencyCase] + ([] if args.no_layer else [LayerCase])
    counts = [[collections.Counter() for _ in range(args.ranks)] for _ in range(2)]
    failures, end = [], time.monotonic() + args.seconds
    lanes = [threading.Thread(target=run_lane, args=(args.seed, lane, args.ranks, end, cases, counts[lane], failures)) for lane in range(2)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    total = sum((each for lane in counts for each in lane), collections.Counter())
    print(f"seed {args.seed}, 2 groups of {args.ranks} ranks, {args.seconds:g} s: " + ", ".join(f"{name} {total[name]}" for name in sorted(total)))
    for failure in failures:
        print("FAIL", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
