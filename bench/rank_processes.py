# SPDX-License-Identifier: Apache-2.0
"""Processes of a benchmark's ranks."""
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait

#: Number of ranks, one per GPU.
RANKS = 2


def _rank(run, rank, part, store, given, end):
    """Body of a process: sends an exception of `run` as an entry."""
    try:
        run(rank, part, store, given, end)
    except BaseException as error:
        traceback.print_exc()
        end.send({"kind": "error", "part": part, "name": "part", "rank": rank, "error": f"{type(error).__name__}: {error}"[:600]})
    end.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no teardown of groups whose peers may have failed


def play(run, part, given, entries):
    """Runs one part in spawned processes and appends its entries. run(rank, part, store, given, end), a function of a module, sends
    entries through `end`; `store` is the rendezvous file. given.seconds: deadline."""
    context, deadline = multiprocessing.get_context("spawn"), time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        store = os.path.join(folder, "store")
        ranks = [context.Process(target=_rank, args=(run, rank, part, store, given, pipes[rank][1])) for rank in range(RANKS)]
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
