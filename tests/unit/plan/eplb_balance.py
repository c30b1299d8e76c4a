#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes eplb_balance.txt: the balance of EPLB (the global mode of SGLang 0.5.23) for the loads of expert_map_test.cpp.

    python3 -m pip install torch safetensors numpy && python3 eplb_balance.py RECORDING > eplb_balance.txt

Downloads SGLang's wheel without dependencies and runs only its planner module. Each line contains a case, the ratio of the
maximum rank load to the mean if the routes of an expert are divided evenly among its replicas, and the experts of the 320 slots
with two hexadecimal digits each.
"""
import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import torch
from safetensors import safe_open

EXPERTS, WORLD, SLOTS = 256, 32, 320
MASK = (1 << 64) - 1


def mixed(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def loads_of(seed):
    """The same loads as loads_of() in expert_map_test.cpp."""
    draws = [mixed(mixed(seed) ^ e) for e in range(EXPERTS)]
    place = {e: i for i, e in enumerate(sorted(range(EXPERTS), key=lambda e: (draws[e], e)))}
    formulas = [lambda e: 1000 + draws[e] % 1000, lambda e: 1 + (draws[e] % 100) ** 2, lambda e: 1 + (draws[e] % 100) ** 4 // 1000,
                lambda e: 10**6 // (1 + place[e]), lambda e: 10**8 // (1 + place[e]) ** 2]
    return [formulas[seed % 5](e) for e in range(EXPERTS)]


def recorded(path):
    with safe_open(path, "pt") as file:
        ids = torch.cat([file.get_tensor(name).long().flatten() for name in file.keys() if name.endswith("topk_ids")])
    return torch.bincount(ids, minlength=EXPERTS).tolist()


def planner(folder):
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, "sglang==0.5.23"], check=True)
    wheel = next(pathlib.Path(folder).glob("*.whl"))
    source = pathlib.Path(folder) / "planner.py"
    source.write_bytes(zipfile.ZipFile(wheel).read("sglang/srt/eplb/eplb_algorithms/deepseek.py"))
    spec = importlib.util.spec_from_file_location("planner", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.rebalance_experts


def main():
    cases = [(str(seed), loads_of(seed)) for seed in range(200)] + [("recorded", recorded(sys.argv[1]))]
    with tempfile.TemporaryDirectory() as folder:
        plan = planner(folder)
        for name, loads in cases:
            slots, _, count = plan(torch.tensor([loads], dtype=torch.float32), SLOTS, 1, 1, WORLD, False)
            slots, count = slots[0].tolist(), count[0].tolist()
            each = SLOTS // WORLD
            ranks = [sum(loads[e] / count[e] for e in slots[r * each:(r + 1) * each]) for r in range(WORLD)]
            print(f"{name} {max(ranks) / (sum(loads) / WORLD):.9f} {bytes(slots).hex()}")


if __name__ == "__main__":
    main()
