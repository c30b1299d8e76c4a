#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Megatron Core 0.16.1, group-limited routing: if a token may use more groups than experts (moe_router_group_topk above
# moe_router_topk), the groups are chosen without regard to the scores, and some groups can remain without tokens.
#
# Expected: groups are chosen by routing scores, as documented, so a looser limit never loses better experts. A limit of at least
# moe_router_topk groups excludes none of a token's best experts: the result equals that of routing without a limit.
# Seen: 64 experts in 8 groups, 2 experts per token, random scores. With limits of 2 and 8 groups, routing equals that without a limit.
# With limits of 3 to 7, it does not: with 4, half of the tokens lose their best expert and four groups get no tokens at all. With one
# rank per group, half of the ranks are idle. TransformerConfig accepts the values and no warning is given.
# A group's score is the sum of the scores of its best moe_router_topk // moe_router_group_topk experts, here of none, so all groups
# score 0. The results are from the CPU; other devices may choose other groups among those with equal scores.
# Needs Python 3.11 with venv, network access and 7 GB of disk, no GPU; nothing is installed outside a temporary folder. Fails if the
# behavior changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
{ venv/bin/pip -q install --no-compile torch==2.15.0 numpy==2.4.6 packaging &&
  venv/bin/pip -q install --no-compile --no-deps --target package megatron-core==0.16.1; } ||
  { echo "cannot install torch and megatron-core"; exit 2; }
cat >check.py <<'PYTHON'
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.transformer_config import TransformerConfig

torch.manual_seed(0)
tokens, experts, groups, topk = 4096, 64, 8, 2
logits = torch.randn(tokens, experts)


def routed(limit):
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, num_moe_experts=experts, moe_router_topk=topk,
        moe_router_pre_softmax=True, moe_router_num_groups=groups if limit else None, moe_router_group_topk=limit)
    return topk_routing_with_score_function(
        logits, config.moe_router_topk, use_pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups, group_topk=config.moe_router_group_topk)[1]


unlimited = routed(None)
for limit in range(1, groups + 1):
    chosen = routed(limit)
    best = chosen.gather(1, logits.argmax(1, keepdim=True)).sum().item()
    idle = (chosen.view(tokens, groups, -1).sum((0, 2)) == 0).sum().item()
    print(f"at most {limit} groups: {100 * best / tokens:.0f} % of tokens keep their best expert, {idle} groups without tokens, "
          f"{'equal' if torch.equal(chosen, unlimited) else 'unequal'} to no limit")
PYTHON
PYTHONPATH=package venv/bin/python -W ignore check.py >seen 2>errors || { cat errors; exit 2; }
cat >expected <<'TEXT'
at most 1 groups: 81 % of tokens keep their best expert, 0 groups without tokens, unequal to no limit
at most 2 groups: 100 % of tokens keep their best expert, 0 groups without tokens, equal to no limit
at most 3 groups: 38 % of tokens keep their best expert, 5 groups without tokens, unequal to no limit
at most 4 groups: 50 % of tokens keep their best expert, 4 groups without tokens, unequal to no limit
at most 5 groups: 63 % of tokens keep their best expert, 3 groups without tokens, unequal to no limit
at most 6 groups: 75 % of tokens keep their best expert, 2 groups without tokens, unequal to no limit
at most 7 groups: 88 % of tokens keep their best expert, 1 groups without tokens, unequal to no limit
at most 8 groups: 100 % of tokens keep their best expert, 0 groups without tokens, equal to no limit
TEXT
cat seen
if ! cmp -s seen expected; then echo "the behavior has changed"; exit 1; fi
