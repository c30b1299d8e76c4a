#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# LMDeploy 0.18.0, expert load balancer: if the number of nodes does not divide the number of expert groups (4 by default), the experts
# are not placed by load: they remain in order, and all replicas are on the last GPUs.
#
# Expected: experts and replicas are packed onto GPUs by load for every number of nodes, as with one node.
# Seen: 58 layers of 256 experts with random loads, 32 redundant slots, 32 GPUs, averages over layers: the busiest GPU has 1.01 times the
# mean load with one node, 1.07 times with 4 nodes and 1.33 times with 8 nodes (LMDEPLOY_EPLB_RANKS_PER_NODE=4); without a balancer, with
# 8 experts per GPU, 1.39 times. With 8 nodes, slot i of the first 256 holds expert i in each layer, and the last 32 slots, on GPUs 28
# to 31, hold the replicas: the loads determine only which experts have replicas.
# Workarounds: with LMDEPLOY_EPLB_NUM_GROUPS=8, which is divisible by 8 nodes, experts are packed by load (1.14 times); so they are
# with LMDEPLOY_EPLB_RANKS_PER_NODE=32 (one node).
# Needs Python 3.11 with venv, network access and 7 GB of disk, no GPU; nothing is installed outside a temporary folder. Fails if the
# behavior changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
{ venv/bin/pip -q install --no-compile torch==2.15.0 numpy==2.4.6 &&
  venv/bin/pip -q install --no-compile --no-deps --target package lmdeploy==0.18.0; } ||
  { echo "cannot install torch and lmdeploy"; exit 2; }
cat >check.py <<'PYTHON'
import importlib.util
import json
import random
import sys
import types

import torch

# Importing the package would import much more than the balancer and its settings, so both files are loaded by path.
sys.modules["lmdeploy"] = sys.modules["lmdeploy.pytorch"] = types.ModuleType("lmdeploy")
for name, path in ("lmdeploy.pytorch.envs", "envs.py"), ("eplb", "nn/eplb.py"):
    spec = importlib.util.spec_from_file_location(name, f"package/lmdeploy/pytorch/{path}")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
eplb, envs = sys.modules["eplb"], sys.modules["lmdeploy.pytorch.envs"]

layers, experts, gpus = 58, 256, 32
chance = random.Random(0)
loads = [[chance.randrange(1000, 20000) for _ in range(experts)] for _ in range(layers)]
with open(envs.eplb_experts_statistic_file, "w", encoding="utf-8") as file:
    json.dump(loads, file)
placed = eplb.EPLBMetadata.init(ep_size=gpus, num_routed_experts=experts, num_hidden_layers=layers)
loads = torch.tensor(loads, dtype=torch.float64)
slots = placed.physical_to_logical_map
replicas = torch.stack([torch.bincount(row, minlength=experts) for row in slots])
of_gpu = (loads / replicas).gather(1, slots).view(layers, gpus, -1).sum(2)
in_order = loads.view(layers, gpus, -1).sum(2)
busiest, plain = ((each.amax(1) / each.mean(1)).mean() for each in (of_gpu, in_order))
print(f"nodes {gpus // envs.eplb_ranks_per_node}, groups {envs.eplb_num_groups}: busiest GPU {busiest:.2f} times the mean load "
      f"(no balancer: {plain:.2f}), layers with experts in order: {int((slots[:, :experts] == torch.arange(experts)).all(1).sum())}")
PYTHON
export LMDEPLOY_EPLB_EXPERTS_STATISTIC_FILE=loads.json
for settings in "32 4" "8 4" "4 4" "4 8"; do
  read -r ranks groups <<<"$settings"
  LMDEPLOY_EPLB_RANKS_PER_NODE=$ranks LMDEPLOY_EPLB_NUM_GROUPS=$groups venv/bin/python check.py || exit 2
done >seen
cat >expected <<'TEXT'
nodes 1, groups 4: busiest GPU 1.01 times the mean load (no balancer: 1.39), layers with experts in order: 0
nodes 4, groups 4: busiest GPU 1.07 times the mean load (no balancer: 1.39), layers with experts in order: 0
nodes 8, groups 4: busiest GPU 1.33 times the mean load (no balancer: 1.39), layers with experts in order: 58
nodes 8, groups 8: busiest GPU 1.14 times the mean load (no balancer: 1.39), layers with experts in order: 0
TEXT
cat seen
if ! cmp -s seen expected; then echo "the behavior has changed"; exit 1; fi
