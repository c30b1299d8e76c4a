# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of a single test."""
import multiprocessing
import secrets


def a_store():
    """Returns a unique rendezvous address."""
    return f"unix:@switchyard-test-{secrets.token_hex(8)}"


def run_processes(method, target, world, *arguments, seconds=120):
    """Runs `target(rank, world, *arguments)` in a process per rank and returns the exit codes. Processes that do not end in
    time are killed (-9)."""
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=target, args=(rank, world, *arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]
