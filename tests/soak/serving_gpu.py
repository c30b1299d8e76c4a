#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A serving worker in Python on GPUs that runs for seconds or minutes: one process per rank, whose main thread makes calls,
captures and replays graphs and creates and destroys objects, while a second thread drops results and collects garbage at random
times. Every result is compared, on the GPU: calls are enqueued without waiting, so that memory is dropped while work on it is
pending.

The ranks draw identical actions from (seed, step) and individual inputs from (seed, step, rank). Rows and weights are small
integers, so sums are exact in any order. Ends with a count of the actions, or with the first difference.
"""
import argparse
import collections
import gc
import multiprocessing
import queue
import random
import secrets
import sys
import threading
import time
import traceback

import torch
from serving import collect

import switchyard as sy

HEAP = 1 << 30
MAX_KEPT = 8  # number of results that a rank keeps
MAX_OBJECTS = 5  # number of objects that a rank holds at a time
STEPS_PER_CHECK = 50  # the host reads the number of differences every 50 steps


class Differences:
    """Counts elements that differ from their expected values, on the GPU and per kind of result."""

    def __init__(self):
        self.counts = collections.defaultdict(lambda: torch.zeros((), dtype=torch.int64, device="cuda"))

    def add(self, kind, got, expected):
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise AssertionError(f"{kind}: {tuple(got.shape)} {got.dtype} instead of {tuple(expected.shape)} {expected.dtype}")
        self.counts[kind] += (got != expected).sum()

    def check(self, step):
        """Waits for the GPU."""
        found = {kind: int(count) for kind, count in self.counts.items() if int(count)}
        if found:
            raise AssertionError(f"elements that differ by step {step}: {found}")


class Kept:
    """An array in memory owned by the library, and a copy of the content that it must hold until it is dropped, where `valid`."""

    def __init__(self, kind, array, owner=None, valid=None):
        self.kind, self.array, self.expected, self.owner, self.valid = kind, array, array.clone(), owner, valid
        self.cycle = self  # only the garbage collector destroys this object

    def check(self, group, differences):
        """Enqueues the comparison on the current stream."""
        stream = torch.cuda.current_stream()
        got, expected = self.array, self.expected
        if self.valid is not None:
            got, expected = torch.where(self.valid, got, 0), torch.where(self.valid, expected, 0)
            self.valid.record_stream(stream)
        differences.add(f"kept, {self.kind}", got, expected)
        self.expected.record_stream(stream)
        self.array.record_stream(stream)
        try:
            group.record_stream(self.array, stream)
        except sy.InvalidArgument:  # memory of torch
            pass


def draw_inputs(rng, config, tokens=None):
    """Small integers: rows in [-8, 8], weights in [1, 3], distinct experts per token; every tenth route is dropped."""
    generator = torch.Generator("cuda").manual_seed(rng.getrandbits(60))
    tokens = rng.randint(0, config["max_tokens"]) if tokens is None else tokens
    dtype = torch.bfloat16 if config["dtype"] == "bf16" else torch.float32
    x = torch.randint(-8, 9, (tokens, config["hidden"]), generator=generator, device="cuda").to(dtype)
    shape = (tokens, config["topk"])
    ids = torch.rand(tokens, config["num_experts"], generator=generator, device="cuda").argsort(1)[:, : config["topk"]].int()
    ids = torch.where(torch.rand(shape, generator=generator, device="cuda") < 0.1, -1, ids).contiguous()
    return x, ids, torch.randint(1, 4, shape, generator=generator, device="cuda").float()


def kept_weights(ids, weights):
    return torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)


class Replays:
    """A captured call: replays it with other inputs and compares each result, then leaves graph and memory to the collector."""

    def __init__(self, group, inputs, call):
        torch.cuda.current_stream().synchronize()
        group.barrier()
        self.inputs, self.graph = inputs, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self.out = call(*inputs)
        group.barrier()

    def run(self, differences, kind, inputs, expected):
        for static, value in zip(self.inputs, inputs):
            static.copy_(value)
        self.graph.replay()
        differences.add(kind, self.out, expected(*inputs))


class ExchangeCase:
    def __init__(self, group, rng):
        self.config = {"hidden": 32 * rng.randint(1, 16), "num_experts": rng.randint(max(3, group.size), 12), "topk": rng.randint(1, 3), "max_tokens": 64,
                       "dtype": "f32", "layout": rng.choice(("rank_major", "expert_major")), "pool_bytes": 24 << 20}
        self.group, self.object = group, sy.Exchange(group, **self.config)
        self.major = self.config["layout"] == "expert_major"
        owners = [rank for rank in range(group.size) for _ in group.experts_of(self.config["num_experts"], rank)]
        self.owner = torch.tensor(owners + [-1], device="cuda")

    def factor(self, ids, weights):
        if self.major:
            return kept_weights(ids, weights)
        ranks = torch.arange(self.group.size, device="cuda")
        return (self.owner[ids.long()].unsqueeze(2) == ranks).any(1).sum(1, keepdim=True).float()

    def expected(self, x, ids, weights):
        return 3 * x * self.factor(ids, weights)

    def whole(self, x, ids, weights, size):
        rows, handle = self.object.dispatch(x, ids, weights if self.major else None, size=size)
        y = self.object.allocate_rows(handle)
        torch.mul(rows[: len(y)], 3, out=y)
        return rows, handle, self.object.combine(y, handle)

    def call(self, shared, own, differences):
        inputs = draw_inputs(own, self.config)
        size = shared.choice(("automatic", "exact", "worst_case"))
        rows, handle, out = self.whole(*inputs, size)
        differences.add("exchange", out, self.expected(*inputs))
        if shared.random() < 0.5:  # the same routing as before
            again, _ = self.object.dispatch(inputs[0] + 1, handle=handle)
            differences.add("cached dispatch", self.object.combine(again, handle), (inputs[0] + 1) * self.factor(*inputs[1:]))
        kept = [Kept("combined", out)]
        if size == "exact":
            kept.append(Kept("dispatched", rows, handle))
        return kept

    def replay(self, shared, own, differences):
        static = draw_inputs(own, self.config, own.randint(0, self.config["max_tokens"]))
        graph = Replays(self.group, static, lambda *inputs: self.whole(*inputs, "worst_case")[2])
        for _ in range(shared.randint(1, 5)):
            graph.run(differences, "exchange, graph", draw_inputs(own, self.config, len(static[0])), self.expected)
        graph.cycle = graph


class LowLatencyCase:
    def __init__(self, group, rng):
        self.config = {"hidden": 128 * rng.randint(1, 8), "num_experts": rng.randint(max(3, group.size), 12), "topk": rng.randint(1, 3), "max_tokens": 32,
                       "dtype": rng.choice(("f32", "bf16")), "sending": rng.choice(("per_rank", "per_route"))}
        self.group, self.object = group, sy.LowLatency(group, **self.config)

    def expected(self, x, ids, weights):
        return 2 * x * kept_weights(ids, weights).to(x.dtype)

    def whole(self, x, ids, weights, output=None):
        received = self.object.dispatch(x, ids, weights, output=output)
        y = self.object.make_rows(received)
        torch.mul(received.x, 2, out=y)
        return received, self.object.combine(y, received)

    def call(self, shared, own, differences):
        inputs = draw_inputs(own, self.config)
        if shared.random() < 0.3:
            differences.add("all to all", self.object.all_to_all(*inputs), self.expected(*inputs) / 2)
        keeps = own.random() < 0.3  # dispatches without an output of the caller overwrite the rows of the previous dispatch
        received, out = self.whole(*inputs, self.object.make_output(inputs[0]) if keeps else None)
        differences.add("low latency", out, self.expected(*inputs))
        kept = [Kept("low latency", out)]
        if keeps:
            places = torch.arange(received.x.shape[1], device="cuda")
            kept.append(Kept("received", received.x, received, (places < received.rows.unsqueeze(1)).unsqueeze(2)))
        return kept

    def replay(self, shared, own, differences):
        static = draw_inputs(own, self.config, own.randint(0, self.config["max_tokens"]))
        graph = Replays(self.group, static, lambda *inputs: self.whole(*inputs)[1])
        for _ in range(shared.randint(1, 5)):
            graph.run(differences, "low latency, graph", draw_inputs(own, self.config, len(static[0])), self.expected)
        graph.cycle = graph


class LayerCase:
    """A layer whose output must have the same bits in every form: each is compared with a separate layer over the same
    weights, and that one with float64."""

    def __init__(self, group, rng):
        self.config = {"hidden": 256, "intermediate": 256, "num_experts": group.size * rng.randint(1, 4), "topk": 2, "max_tokens": 32}
        self.form = rng.choice(({"exchange": "normal"}, {"exchange": "low_latency"}, {"form": "fused"}))
        generator = torch.Generator("cuda").manual_seed(rng.getrandbits(60))
        experts, hidden, inner = self.config["num_experts"], self.config["hidden"], self.config["intermediate"]
        self.w13 = (torch.randn(experts, 2 * inner, hidden, generator=generator, device="cuda") / 16).bfloat16()
        self.w2 = (torch.randn(experts, hidden, inner, generator=generator, device="cuda") / 16).bfloat16()
        mine = group.experts_of(experts)
        self.group = group
        self.object = sy.MoeLayer(group, self.w13[mine.start : mine.stop].clone(), self.w2[mine.start : mine.stop].clone(),
                                  **self.config, **self.form)
        self.config["dtype"] = "bf16"

    def expected(self, x, ids, weights):
        sums = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
        for e in range(self.config["num_experts"]):
            gate, up = (x.double() @ self.w13[e].double().T).chunk(2, 1)
            share = torch.where(ids == e, weights, 0).sum(1, keepdim=True).double()
            sums += share * ((torch.nn.functional.silu(gate) * up) @ self.w2[e].double().T)
        return sums

    def compare(self, differences, kind, out, sums):
        limit = 3e-2 * (1 + sums.abs()) + 3e-2 * sums.abs().amax(1, keepdim=True)
        differences.add(kind, (out.double() - sums).abs() <= limit, torch.ones_like(sums, dtype=torch.bool))

    def call(self, shared, own, differences):
        inputs = draw_inputs(own, self.config)
        inputs = (inputs[0] / 8, *inputs[1:])
        layer = self.object
        if shared.random() < 0.3:  # another layer over the same memory, dropped while its kernels run
            mine = self.group.experts_of(self.config["num_experts"])
            layer = layer.with_weights(self.w13[mine.start : mine.stop].clone(), self.w2[mine.start : mine.stop].clone())
        out = layer(*inputs)
        del layer
        self.compare(differences, f"layer {self.form}", out, self.expected(*inputs))
        return [Kept("layer", out)]

    def replay(self, shared, own, differences):
        static = draw_inputs(own, self.config, own.randint(0, self.config["max_tokens"]))
        graph = Replays(self.group, static, lambda *inputs: self.object(*inputs))
        for _ in range(shared.randint(1, 5)):
            inputs = draw_inputs(own, self.config, len(static[0]))
            for each, value in zip(static, (inputs[0] / 8, *inputs[1:])):
                each.copy_(value)
            graph.graph.replay()
            self.compare(differences, f"layer, graph {self.form}", graph.out, self.expected(inputs[0] / 8, *inputs[1:]))
        graph.cycle = graph


class Dropper:
    """A thread that checks and drops results and collects garbage at random times, on a stream of its own."""

    def __init__(self, group, seed, differences):
        self.group, self.kept, self.lock = group, collections.deque(), threading.Lock()
        self.ends, self.error, self.dropped = threading.Event(), None, 0
        self.rng, self.differences = random.Random(seed), differences
        self.pause = threading.Lock()  # held while a graph is captured: torch refuses checks on the GPU meanwhile
        self.device = torch.cuda.current_device()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def add(self, kept):
        if self.error:
            raise self.error
        with self.lock:
            made = torch.cuda.Event()
            made.record()
            self.kept.extend((each, made) for each in kept)

    def run(self):
        try:
            torch.cuda.set_device(self.device)
            with torch.cuda.stream(torch.cuda.Stream()):
                while not self.ends.is_set() or self.kept:
                    with self.pause:
                        self.step()
                    time.sleep(self.rng.random() * 0.002)
        except BaseException as error:
            self.error = error

    def step(self):
        with self.lock:
            if self.rng.random() < 0.1:
                self.rng.shuffle(self.kept)
            taken = None
            if self.kept and (self.ends.is_set() or len(self.kept) > MAX_KEPT or self.rng.random() < 0.3):
                taken, made = self.kept.popleft()
                made.wait()
        if taken is not None:
            taken.check(self.group, self.differences)
            self.dropped += 1
            del taken
        if self.dropped % 100 == 99:  # memory that only the collector frees does not accumulate
            gc.enable(), gc.unfreeze(), gc.collect()
        else:
            collect(self.rng)

    def end(self):
        self.ends.set()
        self.thread.join()
        if self.error:
            raise self.error


class Rank:
    """One rank, and its actions in each step."""

    def __init__(self, group, seed, counts):
        self.group, self.seed, self.counts, self.objects = group, seed, counts, []
        self.differences = Differences()
        self.of_dropper = Differences()
        self.dropper = Dropper(group, f"{seed} {group.rank}", self.of_dropper)

    def run(self, seconds):
        end = time.monotonic() + seconds
        try:
            for step in range(sys.maxsize):
                if step % STEPS_PER_CHECK == 0:
                    self.differences.check(step)
                    if self.is_last(time.monotonic() >= end):
                        break
                self.step(random.Random(f"{self.seed} {step}"), random.Random(f"{self.seed} {step} {self.group.rank}"))
        finally:
            self.dropper.end()
        torch.cuda.synchronize()  # the dropper's stream
        self.of_dropper.check(step)
        self.counts["steps"], self.counts["dropped"] = step, self.dropper.dropped

    def is_last(self, over):
        """Rank 0 decides by its clock."""
        with sy.Exchange(self.group, hidden=16, num_experts=self.group.size, topk=self.group.size, max_tokens=1, dtype="f32") as last:
            ids = torch.arange(self.group.size, dtype=torch.int32, device="cuda").reshape(1, -1)[: 1 if self.group.rank == 0 else 0]
            rows, _ = last.dispatch(torch.full((len(ids), 16), float(over), device="cuda"), ids.contiguous(), size="exact")
            return bool(rows[0, 0].item())

    def step(self, shared, own):
        if len(self.objects) < MAX_OBJECTS and (not self.objects or shared.random() < 0.15):
            self.objects.append(shared.choice((ExchangeCase, LowLatencyCase, LayerCase))(self.group, shared))
            self.counts["objects"] += 1
        case = shared.choice(self.objects)
        if shared.random() < 0.1:
            case.call(shared, own, self.differences)
            with self.dropper.pause:
                case.replay(shared, own, self.differences)
            self.counts[f"{type(case).__name__}, graphs"] += 1
        else:
            kept = case.call(shared, own, self.differences)
            if own.random() < 0.5:
                self.dropper.add(kept)
            self.counts[type(case).__name__] += 1
        del case
        if shared.random() < 0.1:  # all ranks end an object in the same step: close, drop, or leave it to the collector
            ended = self.objects.pop(shared.randrange(len(self.objects)))
            if own.random() < 0.5:
                ended.object.close()
            elif own.random() < 0.5:
                ended.cycle = ended


def run_rank(rank, args, store, results):
    counts = collections.Counter()
    try:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.zeros(1, device="cuda")
        with sy.Group.connect(rank, args.ranks, store, "token", HEAP, backend="cuda", timeout=60, rendezvous_timeout=120) as group:
            with torch.cuda.stream(torch.cuda.Stream()):
                Rank(group, args.seed, counts).run(args.seconds)
        results.put((rank, dict(counts), None))
    except BaseException as error:
        results.put((rank, dict(counts), "".join(traceback.format_exception(error))))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2, help="processes, distributed over the GPUs")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    store = f"unix:@switchyard-soak-{secrets.token_hex(8)}"
    results = spawn.Queue()
    ranks = [spawn.Process(target=run_rank, args=(rank, args, store, results)) for rank in range(args.ranks)]
    for each in ranks:
        each.start()
    ends = []
    while len(ends) < args.ranks and (not results.empty() or any(each.is_alive() for each in ranks)):
        try:
            ends.append(results.get(timeout=1))
        except queue.Empty:
            continue
    for each in ranks:
        each.join()
    total = sum((collections.Counter(counts) for _, counts, _ in ends), collections.Counter())
    print(f"seed {args.seed}, {args.ranks} ranks on {torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {args.seconds:g} s: "
          + ", ".join(f"{name} {total[name]}" for name in sorted(total)))
    failures = [f"rank {rank}: {failure}" for rank, _, failure in ends if failure]
    if len(ends) < args.ranks or any(each.exitcode for each in ranks):
        failures.append(f"exit codes {[each.exitcode for each in ranks]}")
    for failure in failures:
        print("FAIL", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
