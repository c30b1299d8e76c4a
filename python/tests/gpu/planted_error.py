#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two ranks, one of which stores four bytes behind a tensor on its GPU. sanitize.sh trusts a clean result only if
compute-sanitizer reports this error. The exit status is 0 regardless of the store's result."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))

import torch  # noqa: E402

import switchyard as sy  # noqa: E402

SHAPE = {"hidden": 128, "num_experts": 4, "topk": 1, "max_tokens": 64, "dtype": "f32"}
SOURCE = 'extern "C" __global__ void store_behind(int* words) { words[threadIdx.x + 1] = 1; }'


def _rank(group):
    with sy.LowLatency(group, **SHAPE) as exchange:
        ids = torch.arange(64, dtype=torch.int32, device="cuda").remainder(4).reshape(64, 1)
        exchange.dispatch(torch.ones(64, 128, device="cuda"), ids)
        if group.rank == 1:
            words = torch.zeros(64, dtype=torch.int32, device="cuda")
            torch.cuda._compile_kernel(SOURCE, "store_behind")((1, 1, 1), (64, 1, 1), (words,))
        torch.cuda.synchronize()


if __name__ == "__main__":
    from gpu_ranks import over_gpus

    try:
        over_gpus(2, _rank, sy.LowLatency.heap_bytes(2, **SHAPE))
    except BaseException as error:  # the tool ends the kernel
        print(type(error).__name__)
