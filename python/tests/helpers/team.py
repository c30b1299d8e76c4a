# SPDX-License-Identifier: Apache-2.0
"""Teams: ranks as processes that are kept from test to test, because torch and a GPU take seconds to start. A test sends them a
scenario (a function of a module, with picklable arguments) as it would pass one to `run_processes`. Tests of imports, forks,
process exit or the variables of a launcher use new processes instead (processes.py)."""
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

#: Seconds for the other ranks to end after one has failed. They are notified, or have their own deadlines.
AFTER_A_FAILURE = 40


# ---- In a process of a team ----


def _serve(rank, world, connection, stacks):
    """Runs the received scenarios until none are left or the session has ended, and reports failures. After a failure the
    process ends at once, so the other ranks are notified and later scenarios find no leftovers."""
    faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)
    parent = multiprocessing.parent_process().pid
    gc.freeze()  # objects inherited by a fork belong to the session
    while True:
        while not connection.poll(1):
            if os.getppid() != parent:  # needed if a sibling also holds the other end of the pipe: then the pipe does not close
                os._exit(1)
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        if not message:
            return
        try:
            _play(message, rank, world)
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def _play(message, rank, world):
    """Runs one scenario, starting and ending in a clean state."""
    variables = dict(os.environ)
    scenario, arguments = pickle.loads(message)
    try:
        scenario(rank, world, *arguments)
    except SystemExit as end:
        if end.code:  # an exit without a code means that the scenario ends early on purpose
            raise
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    os.environ.update(variables)
    _clean()


def _clean():
    """Ensures that no work of a scenario is still running and no memory is held."""
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
    gc.freeze()  # the remaining modules would add tenths of a second to each collection, including those of torch at a capture


# ---- In the session ----


class Team:
    """`world` processes, started by `method`. One failure ends the team."""

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
        """Returns the failures by rank, with stacks for ranks that do not finish within `seconds`."""
        message = pickle.dumps((scenario, arguments))
        ended = {rank: self._end_of(rank) for rank, process in enumerate(self.processes) if not process.is_alive()}
        if ended:
            return ended  # between two scenarios
        for end in self._ends:
            try:
                end.send_bytes(message)
            except OSError:
                pass  # the process has ended, which is detected below
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
        """Returns the stacks of an unresponsive process."""
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
        """Ends the processes. Kills those that have not ended within `seconds`."""
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


def run_on_team(method, world, scenario, *arguments, seconds=150, name=None):
    """Calls ``scenario(rank, world, *arguments)`` on `world` ranks (processes started by `method`) and fails the test with the
    failure of each rank. Changes to environment variables are undone. Groups created by the scenario must be closed when it
    returns. Scenarios that leave state in the processes, such as a process group of torch, use a team with a separate name."""
    key = (method, world) if name is None else (method, world, name)
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
    """Whether a rank failed only because another one did. Such failures are listed last."""
    return "PeerFailed" in item[1].rstrip().rpartition("\n")[2]


@atexit.register
def close_teams():
    """Called by conftest.py at the end of a session."""
    while _teams:
        _teams.popitem()[1].close()
