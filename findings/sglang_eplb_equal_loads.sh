#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SGLang 0.5.23, expert load balancer deepseek_vec: if two experts share a large maximum load, all redundant slots can go to
# another expert.
#
# Expected: each redundant slot replicates the expert with the largest load per replica, as with the algorithm deepseek, whatever the
# scale of the loads.
# Seen: loads of 100 for six experts and 5000 for two, eight redundant slots: deepseek_vec gives all eight to expert 0 (load 100), so the
# maximum load of a replica remains 5000; deepseek gives four to each busy expert (1000). With 4000, or with 5000 and 5001, they agree.
# In 1000 layers of 64 experts with random integer loads and 64 redundant slots, the maximum is more than 1.05 times that of deepseek in
# 17 layers (at most 1.92 times), and one expert has up to 52 replicas (deepseek: 3).
# The algorithm requires distinct scores, so it adds 0.0001 times the expert's number to each load. Rounding of large loads to float32
# removes this difference. If the two largest scores are equal, replicating either one alone leaves the same maximum. All candidates
# then compare equal, and the algorithm takes the first one in this step and in all later ones.
# The algorithm is not the default. Needs Python 3.11 with venv, network access and 7 GB of disk, no GPU; nothing is installed outside a
# temporary folder. Fails if the behavior changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
{ venv/bin/pip -q install --no-compile torch==2.15.0 numpy==2.4.6 &&
  venv/bin/pip -q install --no-compile --no-deps --target package sglang==0.5.23; } ||
  { echo "cannot install torch and sglang"; exit 2; }
cat >check.py <<'PYTHON'
import importlib.util
import random

import torch


def algorithm(name):
    # Importing the package would import much more than these files, which need only torch, so they are loaded by path.
    spec = importlib.util.spec_from_file_location(name, f"package/sglang/srt/eplb/eplb_algorithms/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


vec, reference = algorithm("deepseek_vec"), algorithm("deepseek")


def replicas(loads, slots, gpus):
    loads = torch.tensor(loads, dtype=torch.int32)
    counts = (
        vec.rebalance_experts(loads[None], slots, slots // gpus, 1, 1, enable_hierarchical=False)[2],
        reference.rebalance_experts(loads, slots, 1, 1, gpus, enable_hierarchical=False)[2],
    )
    return [(count, (loads / count).amax(1)) for count in counts]


for busy in (4000, 4000), (5000, 5000), (5000, 5001):
    (ours, load), (other, other_load) = replicas([[100] * 6 + list(busy)], 16, 8)
    print(f"busy experts {busy}: replicas {ours[0].tolist()}, busiest {load.item():g}; "
          f"deepseek {other[0].tolist()}, {other_load.item():g}")
chance = random.Random(0)
(ours, load), (other, other_load) = replicas([[chance.randrange(20000, 60000) for _ in range(64)] for _ in range(1000)], 128, 32)
print(f"random loads: busiest replica above 1.05 times that of deepseek in {int((load > 1.05 * other_load).sum())} of 1000 layers, "
      f"at most {(load / other_load).max().item():.2f} times; most replicas {ours.max().item()}, deepseek {other.max().item()}")
PYTHON
venv/bin/python check.py >seen || exit 2
cat >expected <<'TEXT'
busy experts (4000, 4000): replicas [1, 1, 1, 1, 1, 1, 5, 5], busiest 800; deepseek [1, 1, 1, 1, 1, 1, 5, 5], 800
busy experts (5000, 5000): replicas [9, 1, 1, 1, 1, 1, 1, 1], busiest 5000; deepseek [1, 1, 1, 1, 1, 1, 5, 5], 1000
busy experts (5000, 5001): replicas [1, 1, 1, 1, 1, 1, 5, 5], busiest 1000.2; deepseek [1, 1, 1, 1, 1, 1, 5, 5], 1000.2
random loads: busiest replica above 1.05 times that of deepseek in 17 of 1000 layers, at most 1.92 times; most replicas 52, deepseek 3
TEXT
cat seen
if ! cmp -s seen expected; then echo "the behavior has changed"; exit 1; fi
