# SPDX-License-Identifier: Apache-2.0
"""Teams: ranks as processes that stay from test to test, because torch and a GPU take seconds to start. A test gives them a scenario, a
function of a module with arguments that can be pickled, as it would give one to `run_processes`. Tests of what happens at an import, at
a fork, at the end of a process or with the variables of a launcher have new processes instead (processes.py)."""
import atexit
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

import pytest

import switchyard as sy

#: How long the other ranks have when one has failed. They hear of it, or have deadlines of their own.
AFTER_A_FAILURE = 40


# ---- In a process of a team ----


def _serve(rank, world, connection, stacks):
    """Makes what it is told until there is no more or the session is gone, and says what went wrong. Then it ends at once, so that the
    other ranks hear of it and no later scenario meets what this one left."""
    faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)
    parent = multiprocessing.parent_process().pid
    gc.freeze()  # what a fork has of the session is none of its own
    while True:
        while not connection.poll(1):
            if os.getppid() != parent:  # a pipe whose other end a sibling has too does not say so
                os._exit(1)
        try:
            told = connection.recv_bytes()
        except EOFError:
            return
        if not told:
            return
        try:
            _play(told, rank, world)
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def _play(told, rank, world):
    """One scenario, from clean to clean."""
    variables = dict(os.environ)
    scenario, arguments = pickle.loads(told)
    try:
        scenario(rank, world, *arguments)
    except SystemExit as end:
        if end.code:  # without a code it is how a scenario ends early
            raise
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    os.environ.update(variables)
    _clean()


def _clean():
    """Nothing of a scenario runs or holds memory behind it."""
    torch = sys.modules.get("torch")
    gpu = torch is not None and torch.cuda.is_initialized()
    if gpu:
        torch.cuda.synchronize()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    left = [each for each in gc.get_objects() if type(each) is sy.Group and not each.closed]
    assert not left, f"the scenario leaves groups open: {left}"
    gc.freeze()  # what stays is modules, in which each collection would spend tenths of a second, also those of torch at a capture


# ---- In the session ----


class Team:
    """`world` processes, started by `method`. One failure is the end of the team."""

    def __init__(self, method, world):
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context(method)
        self._ends, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, theirs, self._stacks(rank)), name=f"rank {rank} of {world}")
            process.start()
            theirs.close()
            self._ends.append(ours)
            self.processes.append(process)

    def _stacks(self, rank):
        return os.path.join(self._folder.name, f"stacks of {rank}")

    def play(self, scenario, arguments, seconds):
        """What went wrong, by rank. Of ranks that are not done in `seconds` it is where they are."""
        told = pickle.dumps((scenario, arguments))
        ended = {rank: self._end_of(rank) for rank, process in enumerate(self.processes) if not process.is_alive()}
        if ended:
            return ended  # between two scenarios
        for end in self._ends:
            try:
                end.send_bytes(told)
            except OSError:
                pass  # the process has ended, which is found below
        start, found, waiting = time.monotonic(), {}, dict(enumerate(self._ends))
        deadline = start + seconds
        while waiting:
            ready = wait(list(waiting.values()), max(0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, end in waiting.items() if end in ready]:
                wrong = self._answer(rank, waiting.pop(rank))
                if wrong is not None:
                    found[rank] = wrong
                    deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE)
        for rank in waiting:
            found[rank] = f"no answer in {time.monotonic() - start:.0f} seconds. It is here:\n{self._where(rank)}"
        return found

    def _answer(self, rank, end):
        try:
            return end.recv()
        except (EOFError, OSError):
            return self._end_of(rank)

    def _end_of(self, rank):
        self.processes[rank].join(10)
        return f"the process has ended with exit code {self.processes[rank].exitcode}"

    def _where(self, rank):
        """Stacks of a process that does not answer."""
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        stacks, before = Path(self._stacks(rank)), None
        for _ in range(50):
            time.sleep(0.1)
            text = stacks.read_text()
            if text and text == before:
                break
            before = text
        return text

    def close(self, seconds=10):
        """Ends the processes. Those that are not gone in `seconds` are killed."""
        for end in self._ends:
            try:
                end.send_bytes(b"")
            except OSError:
                pass
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for end in self._ends:
            end.close()
        self._folder.cleanup()


_teams = {}


def run_on_team(method, world, scenario, *arguments, seconds=150):
    """Calls ``scenario(rank, world, *arguments)`` on `world` ranks, processes started by `method`, and fails the test with what went wrong
    on each. What the scenario changes of the environment's variables is undone; groups that it made must be closed when it returns."""
    key = (method, world)
    if key not in _teams:
        _teams[key] = Team(method, world)
    team, found = _teams.pop(key), None
    try:
        found = team.play(scenario, arguments, seconds)
    finally:
        if found == {}:
            _teams[key] = team
        else:
            team.close(0)
    if found:
        pytest.fail("\n".join(f"rank {rank}: {wrong}" for rank, wrong in sorted(found.items(), key=_is_heard)), pytrace=False)


def _is_heard(item):
    """Whether a rank only failed because another one had: those come last."""
    return "PeerFailed" in item[1].rstrip().rpartition("\n")[2]


@atexit.register
def close_teams():
    """conftest.py calls it at the end of a session."""
    while _teams:
        _teams.popitem()[1].close()
