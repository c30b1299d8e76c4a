# SPDX-License-Identifier: Apache-2.0
"""Processes of a benchmark's ranks."""
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

#: Number of ranks, one per GPU.
RANKS = 2
ROOT = Path(__file__).resolve().parent.parent


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


def about(given):
    """Returns the conditions of the measurement."""
    import torch

    sys.path.insert(0, str(ROOT / "python"))
    import switchyard as sy

    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return {"device": torch.cuda.get_device_name(), "ranks": RANKS, "torch": torch.__version__, "library": sy.library_version(),
            "commit": os.environ.get("SWITCHYARD_COMMIT") or git.stdout.strip(), "date": time.strftime("%Y-%m-%d"),
            "config": {name: value for name, value in vars(given).items() if name != "json"}}


def parts_of(given, parts):
    """Returns the parts that given.only, a list separated by commas, selects. Ends the program if it names another part."""
    chosen = given.only.split(",")
    if set(chosen) - set(parts):
        raise SystemExit(f"{Path(sys.argv[0]).stem}: --only {given.only}: choose from {', '.join(parts)}")
    return chosen


def play_all(run, parts, given):
    """Calls play() for each part, and writes all entries and about() to given.json, if any, after each part: failures of later
    parts lose no figures."""
    entries = []
    for part in parts:
        play(run, part, given, entries)
        if given.json:
            with open(given.json, "w", encoding="utf-8") as file:
                json.dump({**about(given), "entries": entries}, file, indent=1)
                file.write("\n")
