#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# PyTorch 2.15.0, backend gloo: torch.distributed.all_to_all_single into a tensor that is not contiguous returns without an error and
# writes elements to wrong positions, even outside the output.
#
# Expected: the output equals that of the same call into a contiguous tensor, or the call fails. The documentation requires no layout.
# Seen: two ranks, one row from each. The call writes the received elements one after the other from the first element of the output
# on, as if it were contiguous. In a transposed output, elements are permuted; in a slice of columns, the second row remains unwritten
# and its data overwrites the columns beside the first. Explicit split sizes make no difference.
# The call rejects an input that is not contiguous ("Tensors must be contiguous"). all_gather_into_tensor and reduce_scatter_tensor
# write correct results into the same outputs. Workaround: receive into a contiguous tensor and copy it.
# Needs Python 3 with venv, network access and 7 GB of disk, no GPU; nothing is installed outside a temporary folder. Fails if the
# behavior changes.
set -euo pipefail
export GLOO_SOCKET_IFNAME=lo
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip -q install --no-compile torch==2.15.0 numpy==2.4.6 || { echo "cannot install torch"; exit 2; }
cat >check.py <<'PYTHON'
import pathlib

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def outputs():
    yield "contiguous", torch.full((2, 4), -1)
    yield "transposed", torch.full((4, 2), -1).t()
    yield "columns", torch.full((2, 8), -1)[:, :4]


def rank_of_two(rank):
    dist.init_process_group("gloo", init_method=f"file://{pathlib.Path.cwd()}/rendezvous", rank=rank, world_size=2)
    # Row j of rank i is for rank j, so rank 0 expects [0 1 2 3] and [100 101 102 103].
    rows = torch.arange(8).view(2, 4) + 100 * rank
    calls = {
        "all_to_all_single": lambda output: dist.all_to_all_single(output, rows),
        "with split sizes": lambda output: dist.all_to_all_single(output, rows, [1, 1], [1, 1]),
        "all_gather_into_tensor": lambda output: dist.all_gather_into_tensor(output, rows[:1]),
        "reduce_scatter_tensor": lambda output: dist.reduce_scatter_tensor(output, torch.arange(16).view(4, 4) + rank),
    }
    for name, call in calls.items():
        want = None
        for layout, output in outputs():
            call(output)
            want = output if want is None else want
            verdict = "right" if torch.equal(output, want) else f"wrong {output.tolist()}"
            if layout == "columns" and (output.as_strided((2, 8), (8, 1))[:, 4:] != -1).any():
                verdict += f", and beside it {output.as_strided((2, 8), (8, 1))[:, 4:].tolist()}"
            if rank == 0:
                print(f"{name}, {layout} output: {verdict}")
    try:
        dist.all_to_all_single(torch.empty(2, 4, dtype=rows.dtype), rows.t().contiguous().t())
        verdict = "accepted"
    except ValueError as error:
        verdict = f"ValueError {error}"
    if rank == 0:
        print(f"all_to_all_single, transposed input: {verdict}")
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(rank_of_two, nprocs=2)
PYTHON
timeout 120 venv/bin/python -W ignore check.py >seen 2>errors || { cat errors; exit 2; }
cat >expected <<'TEXT'
all_to_all_single, contiguous output: right
all_to_all_single, transposed output: wrong [[0, 2, 100, 102], [1, 3, 101, 103]]
all_to_all_single, columns output: wrong [[0, 1, 2, 3], [-1, -1, -1, -1]], and beside it [[100, 101, 102, 103], [-1, -1, -1, -1]]
with split sizes, contiguous output: right
with split sizes, transposed output: wrong [[0, 2, 100, 102], [1, 3, 101, 103]]
with split sizes, columns output: wrong [[0, 1, 2, 3], [-1, -1, -1, -1]], and beside it [[100, 101, 102, 103], [-1, -1, -1, -1]]
all_gather_into_tensor, contiguous output: right
all_gather_into_tensor, transposed output: right
all_gather_into_tensor, columns output: right
reduce_scatter_tensor, contiguous output: right
reduce_scatter_tensor, transposed output: right
reduce_scatter_tensor, columns output: right
all_to_all_single, transposed input: ValueError Tensors must be contiguous
TEXT
cat seen
if ! cmp -s seen expected; then echo "the behavior has changed"; exit 1; fi
