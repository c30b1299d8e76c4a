# SPDX-License-Identifier: Apache-2.0
"""A process that imports vLLM once, with stand-ins for its compiled modules, and forks the ranks of each scenario. The process of
the tests imports no vLLM, so other tests do not find the stand-ins."""
import atexit
import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from multiprocessing.connection import wait

from clients import source_of

#: Seconds until ranks without an answer are killed.
DEADLINE = 150
#: Modules with scenarios.
SCENARIOS = ("vllm_ranks", "vllm_checks", "vllm_graphs")
_hosts = {}


def import_vllm(device, path):
    """Makes vLLM importable in this process, with stand-ins, and imports SCENARIOS. path: additional folders of ``sys.path``."""
    os.environ.update(VLLM_TARGET_DEVICE="empty", VLLM_LOGGING_LEVEL="INFO", OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1")
    sys.path[:0] = [each for each in path if each not in sys.path]
    import torch
    from vllm_stand_ins import use_stand_ins

    torch.set_num_threads(1)
    use_stand_ins(device)
    for name in SCENARIOS:
        importlib.import_module(name)


def _log_of(arguments, rank):
    """Returns the file of a rank's stderr. arguments: those of its scenario."""
    return f"{arguments[0]}.stderr{rank}"


def _rank(rank, world, device, path, scenario, arguments, end):
    """Runs `scenario(rank, world, *arguments)`, a function of SCENARIOS or "module:function", in a separate process
    and sends (result, traceback). After a success, waits for a message, because the end of this process would be a failure for
    ranks that are still in their last call, which may need this rank's GPU and memory."""
    with open(_log_of(arguments, rank), "wb") as log:
        os.dup2(log.fileno(), 2)  # shown if the process ends without an answer
    # Prints the stacks of all threads in std::terminate, which torch calls, for example, if the machine's limit of threads stops
    # ProcessGroupGloo between its two worker threads: "terminate called without an active exception", exit code -6.
    faulthandler.enable()
    try:
        if SCENARIOS[0] not in sys.modules:
            import_vllm(device, path)
        modules = [sys.modules[each] for each in SCENARIOS]
        modules[0].use_device(device, rank)
        module, _, name = scenario.rpartition(":")
        modules = [importlib.import_module(module)] if module else modules
        found = next(getattr(each, name) for each in modules if hasattr(each, name))
        end.send((found(rank, world, *arguments), None))
        end.poll(DEADLINE)
    except BaseException:
        end.send((None, traceback.format_exc()))
    finally:
        end.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # no teardown of process groups whose peers have failed


def _method_for(device):
    """Returns "fork" if forks of this process can use the device, else "spawn"."""
    if device == "cpu":
        return "fork"
    import torch

    probe = multiprocessing.get_context("fork").Process(target=torch.cuda.init)
    probe.start()
    probe.join(60)
    return "fork" if probe.exitcode == 0 else "spawn"


def _serve(end, device, path):
    import_vllm(device, path)
    context = multiprocessing.get_context(_method_for(device))
    while True:
        try:
            scenario, world, arguments = end.recv()
        except EOFError:
            return
        with tempfile.TemporaryDirectory() as folder:
            end.send(_play(context, world, (device, path, scenario, (os.path.join(folder, "store"), *arguments))))


def _play(context, world, given):
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe()  # one by one: a fork must not hold the end of another rank, which would hide that rank's death
        processes.append(context.Process(target=_rank, args=(rank, world, *given, theirs)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    answers = {}
    while len(answers) < world:
        waiting = {ours: rank for rank, ours in enumerate(pipes) if rank not in answers}
        ready = wait(list(waiting), DEADLINE)
        for ours in ready:
            try:
                answers[waiting[ours]] = ours.recv()
            except (EOFError, ConnectionResetError):
                processes[waiting[ours]].join(5)
                answers[waiting[ours]] = (None, f"no answer, exit code {processes[waiting[ours]].exitcode}")
        if not ready:
            answers.update({rank: (None, f"no answer in {DEADLINE} s") for rank in waiting.values()})
    for rank, (_, error) in answers.items():
        if error and error.startswith("no answer"):
            with open(_log_of(given[-1], rank), encoding="utf-8", errors="replace") as log:
                answers[rank] = (None, f"{error}; its last output:\n{log.read()[-4000:]}")
    for process, ours in zip(processes, pipes):
        with contextlib.suppress(OSError):
            ours.send(None)  # all ranks have answered
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
    return [answers[rank] for rank in range(world)]


class _Host:
    def __init__(self, device):
        source_of("vllm")
        context = multiprocessing.get_context("spawn")
        self.end, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, device, list(sys.path)))
        self.process.start()
        theirs.close()

    def close(self):
        self.end.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


def in_vllm(scenario, world, *arguments, without=(), device="cpu"):
    """Runs `scenario(rank, world, store, *arguments)`, a function of SCENARIOS, in `world` processes with vLLM, and returns the
    results by rank. `store` is a file for the rendezvous. device: "cpu" or "cuda", which distributes the ranks over the GPUs. Fails
    with the tracebacks of all ranks that raise, except those in `without`, which terminate intentionally."""
    host = _hosts.get(device)
    if host is None or not host.process.is_alive():
        host = _hosts[device] = _Host(device)
        atexit.register(host.close)
    host.end.send((scenario, world, arguments))
    answers = host.end.recv()
    failures = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(answers) if error and rank not in without]
    assert not failures, "\n".join(failures)
    return [result for result, _ in answers]
