# SPDX-License-Identifier: Apache-2.0
"""Processes of a benchmark's ranks."""
import json
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import wait

#: Number of ranks, one per GPU.
RANKS = 2


def play(run, part, given, entries):
    """Runs one part in spawned processes and appends its entries. run(rank, part, store, given, end) sends entries through `end` and
    terminates its process; `store` is the rendezvous file. given.seconds: deadline."""
    context, deadline = multiprocessing.get_context("spawn"), time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        store = os.path.join(folder, "store")
        ranks = [context.Process(target=run, args=(rank, part, store, given, pipes[rank][1])) for rank in range(RANKS)]
        for process, (_, theirs) in zip(ranks, pipes):
            process.start()
            theirs.close()
        open_ends = {ours for ours, _ in pipes}
        while open_ends and time.monotonic() < deadline:
            for ours in wait(list(open_ends), max(0, deadline - time.monotonic())):
                try:
                    entries.append(ours.recv())
                    print(json.dumps(entries[-1]), flush=True)
                except EOFError:
                    open_ends.discard(ours)
        for rank, process in enumerate(ranks):
            process.join(max(0, deadline - time.monotonic()))
            if process.exitcode != 0:
                error = f"no end in {given.seconds} s" if process.exitcode is None else f"exit code {process.exitcode}"
                entries.append({"kind": "error", "part": part, "name": "part", "rank": rank, "error": error})
                process.kill()
