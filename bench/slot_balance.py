#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Balance of calls whose ids SlotSelector replaces: the rows of the busiest rank over the mean, in calls drawn after those from
which the map was planned. Skewed popularity (Zipf, in random order of experts), K different experts per token. No times are
measured, so the result does not depend on the machine.

Usage: slot_balance.py [FILE]   (writes JSON to FILE, by default to standard output)
"""
import json
import subprocess
import sys

import numpy as np

import switchyard as sy

E, K, CALLS, PAST = 128, 8, 20, 64


def draw(rng, popularity, tokens):
    """Ids of `tokens` tokens, [T, K]: the K largest of the log-popularities plus Gumbel noise, a draw without replacement."""
    noise = rng.gumbel(size=(tokens, E)) + np.log(popularity)
    return np.argpartition(-noise, K, axis=1)[:, :K].astype(np.int32)


def case(zipf, world, tokens, spare):
    rng = np.random.default_rng([int(zipf * 10), world, tokens, spare])
    popularity = np.arange(1, E + 1.0) ** -zipf
    rng.shuffle(popularity)
    home = sy.ExpertMap.home(num_experts=E, world=world, slots_per_rank=E // world + spare)
    past = np.bincount(draw(rng, popularity, PAST * 256).ravel(), minlength=E).astype(np.int64)
    planned = home.plan(past)
    expected = np.tile(past, (world, 1))
    calls = [[draw(rng, popularity, tokens) for _ in range(world)] for _ in range(CALLS)]

    def rank(group):
        selector = sy.SlotSelector(group, planned, expected)
        return [np.bincount(selector.select(call[group.rank]).ravel() // home.slots_per_rank, minlength=world) for call in calls]

    rows = np.array(sy.run_ranks(rank, world, heap_bytes=1 << 20)).sum(0)  # [calls, ranks]
    without = np.array([np.bincount(np.concatenate([ids.ravel() for ids in call]) * world // E, minlength=world) for call in calls])
    exact = np.array([planned.divide(np.bincount(np.concatenate([ids.ravel() for ids in call]), minlength=E).astype(np.int64)).of_rank
                      for call in calls])

    def ratio(loads):
        return round(float((loads.max(1) / loads.mean(1)).mean()), 3)

    return {"zipf": zipf, "ranks": world, "tokens": tokens, "spare_slots": spare, "without": ratio(without), "selected": ratio(rows),
            "lowest_possible": ratio(exact)}


def main():
    found = [case(zipf, world, tokens, spare) for zipf in (0.6, 1.2) for world, spare in ((2, 4), (8, 2), (32, 2)) for tokens in (8, 128, 4096)]
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    text = json.dumps({"what": "mean over 20 calls of the rows of the busiest rank over the mean", "experts": E, "topk": K, "commit": commit,
                       "numpy": np.__version__, "runs": found}, indent=1)
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            file.write(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
