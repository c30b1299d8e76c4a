#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times moves of replicated experts' weights in the background, on 2 GPUs (docs/how_to/replicate_experts.md).

    PYTHONPATH=python python3 bench/slot_weights.py --json slot_weights.json

balance     a call of SlotSelector.balance that fetches weights, and the layer: weights are copied in the foreground or during
            dispatch; "no fetch" repeats the call with the resulting map, "no replicas" uses none
background  calls of a layer alone, after the start of a SlotWeights.move, and after a move_weights

Routings: rank_skew sends 1.8 times the mean to the experts of rank 0; hot sends 2 of 8 routes to four experts of rank 0. Times are
host times from a barrier to the end of the work on both GPUs, medians of the slowest rank; the variants alternate. Results are
compared bitwise with those without replicas.
"""
import argparse
import statistics
import sys
import time

from rank_processes import RANKS, ROOT, parts_of, play_all

PARTS = ("balance", "background")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"which of {', '.join(PARTS)}, with a comma between them")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a rank (4096)")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--spare-slots", type=int, default=4, help="of each rank (4)")
    parser.add_argument("--repetitions", type=int, default=15, help="of each time (15)")
    parser.add_argument("--seconds", type=float, default=60, help="deadline of each part (60)")
    parser.add_argument("--json", metavar="FILE", help="where the figures, and what they were taken on, are written")
    return parser.parse_args()


class Bench:
    def __init__(self, rank, store, given, end):
        import torch
        import torch.distributed as dist

        import switchyard as sy

        self.sy, self.torch, self.dist, self.rank, self.given, self.end = sy, torch, dist, rank, given, end
        torch.cuda.set_device(rank)
        self.device = torch.device("cuda", rank)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
        self.slots = given.experts // RANKS + given.spare_slots
        self.home = sy.ExpertMap.home(num_experts=given.experts, world=RANKS, slots_per_rank=self.slots)

    def send(self, part, name, microseconds, **more):
        if self.rank == 0:
            self.end.send({"kind": "figure", "part": part, "name": name, "us": round(microseconds, 2), **more})

    def group(self, heap):
        return self.sy.Group.from_process_group(self.dist.group.WORLD, heap, backend="cuda", device=self.rank, timeout=30, rendezvous_timeout=60)

    def inputs(self, tokens, routing):
        """Returns x, ids that are distinct within each token, and weights."""
        torch, given = self.torch, self.given
        random = torch.Generator().manual_seed(self.rank)
        keys = torch.rand((tokens, given.experts), generator=random)
        if routing == "rank_skew":
            busy = (torch.rand((tokens, given.topk), generator=random) < 0.9).sum(1, keepdim=True)
            order = torch.cat([keys[:, :64].argsort(1), 64 + keys[:, 64:].argsort(1)], 1)
            column = torch.arange(given.topk).expand(tokens, -1)
            ids = order.gather(1, torch.where(column < busy, column, 64 + column - busy))
        else:
            keys[:, :4] = keys[:, :4] / 2 - 1 if routing == "hot" else keys[:, :4]
            keys[:, 2:4] += 2 * (torch.rand((tokens, 1), generator=random) < 0.5) if routing == "hot" else 0
            keys[:, :2] += 2 * (keys[:, 2:3] < 0) if routing == "hot" else 0
            ids = keys.argsort(1)[:, :given.topk]
        x = torch.randn((tokens, given.hidden), generator=random).bfloat16()
        weights = torch.rand(ids.shape, generator=random) + 0.5
        return x.to(self.device), ids.int().contiguous().to(self.device), weights.to(self.device)

    def weights(self, intermediate):
        """Returns the weights of this rank's slots: those of the home map, different for each expert."""
        torch, made = self.torch, []
        for rows, columns in ((2 * intermediate, self.given.hidden), (self.given.hidden, intermediate)):
            array = torch.zeros((self.slots, rows, columns), dtype=torch.bfloat16, device=self.device)
            base = torch.randn((rows, columns), device=self.device, generator=torch.Generator(self.device).manual_seed(1)) * columns**-0.5
            for slot in range(self.given.experts // RANKS):
                array[slot] = (base * (1 + (self.rank * 64 + slot) / 128)).roll(slot, 0)
            made.append(array)
        return made

    def layer_config(self, tokens, intermediate, **options):
        given = self.given
        return dict(hidden=given.hidden, intermediate=intermediate, num_experts=self.home.num_slots, topk=given.topk, max_tokens=tokens,
                    **options)

    # ---- Parts ----

    def timed(self, call):
        """Returns the host time of `call` and of its work."""
        self.torch.cuda.synchronize()
        self.dist.barrier()
        begin = time.perf_counter()
        call()
        self.torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e6

    def slowest(self, taken):
        everybody = [None] * RANKS
        self.dist.all_gather_object(everybody, taken)
        return statistics.median(map(max, zip(*everybody)))

    def layers(self, part):
        """Yields a layer in each form, with its group and weights."""
        given, sy = self.given, self.sy
        w13, w2 = self.weights(given.intermediate)
        for form in ("separate", "fused"):
            config = self.layer_config(given.tokens, given.intermediate, form=form, exchange="normal", order="per_route", captured=False)
            group = self.group(sy.MoeLayer.heap_bytes(RANKS, backend="cuda", **config) + (256 << 20))
            with sy.MoeLayer(group, w13, w2, **config) as layer:
                yield form, group, layer, w13, w2
            self.dist.barrier()

    def balance(self):
        torch, sy, given = self.torch, self.sy, self.given
        free = dict(tile=1, link_bytes_per_s=1e15, seconds_per_move=0.0)
        for form, group, layer, w13, w2 in self.layers("balance"):
            moving = sy.SlotWeights(group, w13, w2)
            for routing in ("rank_skew", "hot"):
                x, ids, weights = self.inputs(given.tokens, routing)
                out, kept = torch.empty_like(x), {}
                selector = sy.SlotSelector(group, self.home)

                def variant(how):
                    if how == "no replicas":
                        layer(x, selector.select(ids), weights, out=out)
                    elif how == "background":
                        slots, kept[how] = selector.balance(ids, moving, **free)
                        layer(x, slots, weights, out=out, weights_ready=moving)
                    else:  # "foreground", and "no fetch" with the map that it left
                        slots, kept[how] = selector.balance(ids, w13, w2, **free)
                        layer(x, slots, weights, out=out)

                taken, same, want = {}, {}, None
                for repetition in range(given.repetitions + 3):
                    for how in ("no replicas", "background", "foreground", "no fetch"):
                        if how != "no fetch":
                            selector.set_map(self.home)
                        if how in ("background", "foreground"):
                            w13[given.experts // RANKS:].zero_(), w2[given.experts // RANKS:].zero_()
                        took = self.timed(lambda: variant(how))
                        want = out.clone() if want is None else want
                        same[how] = same.get(how, True) and torch.equal(out, want)
                        if repetition >= 3:
                            taken.setdefault(how, []).append(took)
                for how, each in taken.items():
                    report = kept.get(how)
                    self.send("balance", f"{form}, {routing}: {how}", self.slowest(each), same_bits=same[how],
                              **({} if report is None else dict(fetched=report.fetched, received=report.received_bytes,
                                                                busiest_before=report.max_before, busiest=report.max_after)))
            moving.close()

    def background(self):
        torch, sy, given, calls = self.torch, self.sy, self.given, 6
        for form, group, layer, w13, w2 in self.layers("background"):
            moving = sy.SlotWeights(group, w13, w2)
            x, ids, weights = self.inputs(given.tokens, "uniform")
            out, selector = torch.empty_like(x), sy.SlotSelector(group, self.home)
            after = self.home.expert_of_slot
            for rank in range(RANKS):  # each rank gets four experts of the other
                first = (rank + 1) * self.slots - given.spare_slots
                after[first:first + given.spare_slots] = [(1 - rank) * given.experts // RANKS + i for i in range(given.spare_slots)]
            after = sy.ExpertMap(after, num_experts=given.experts, world=RANKS)
            other, hosts = torch.cuda.Stream(), []

            def forwards():
                for _ in range(calls):
                    layer(x, selector.select(ids), weights, out=out)

            def in_background():
                begin = time.perf_counter()
                with torch.cuda.stream(other):  # nothing on it to wait for
                    moving.move(self.home, after)
                hosts.append((time.perf_counter() - begin) * 1e6)
                forwards()

            def in_foreground():
                sy.move_weights(group, self.home, after, w13, w2)
                forwards()

            variants = {"calls alone": forwards, "move in the background": in_background, "move in the foreground": in_foreground}
            taken, same, want = {}, True, None
            for repetition in range(given.repetitions + 3):
                for name, variant in variants.items():
                    w13[given.experts // RANKS:].zero_(), w2[given.experts // RANKS:].zero_()
                    took = self.timed(variant)
                    want = out.clone() if want is None else want
                    same = same and torch.equal(out, want)
                    if repetition >= 3:
                        taken.setdefault(name, []).append(took)
            self.send("background", f"{form}: host time of move()", self.slowest(hosts[3:]))
            for name, each in taken.items():
                self.send("background", f"{form}: {calls} calls, {name}", self.slowest(each), same_bits=same)
            moving.close()


def run(rank, part, store, given, end):
    sys.path.insert(0, str(ROOT / "python"))
    bench = Bench(rank, store, given, end)
    with bench.torch.no_grad():
        getattr(bench, part)()
    bench.torch.cuda.synchronize()
    bench.dist.barrier()


def main():
    given = arguments()
    parts = parts_of(given, PARTS)
    play_all(run, parts, given)


if __name__ == "__main__":
    main()
