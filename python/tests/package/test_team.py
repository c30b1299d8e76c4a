# SPDX-License-Identifier: Apache-2.0
"""Ranks that are kept from test to test: a failing scenario is reported, and the next scenario finds no leftovers of it."""
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import switchyard as sy
import team
from processes import a_store
from team import run_on_team

WORLD = 2
CONFIG = {"num_experts": 4, "topk": 1, "hidden": 16, "max_tokens": 4, "dtype": "f32"}


methods = pytest.mark.parametrize("method", ["fork", "spawn"])


def processes_of(method):
    return [process.pid for process in team._teams[method, WORLD].processes]


def gone(pid):
    """Whether a process has ended, even if its exit code has not been read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pids):
    deadline = time.monotonic() + 60
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.05)


def _connected(rank, world, store, story=None):
    """Makes a call on all ranks and checks its result."""
    with sy.Group.connect(rank, world, store, "token", 16 << 20, timeout=30, rendezvous_timeout=60) as group:
        exchange = sy.Exchange(group, **CONFIG)
        rows, _ = exchange.dispatch(np.full((1, 16), rank, "f"), np.array([[2 * (1 - rank)]]))
        assert (rows == 1 - rank).all() and rows.shape == (1, 16)
        if story is not None:
            story(exchange)
        group.barrier()


def passes(method):
    run_on_team(method, WORLD, _connected, a_store())


@methods
def test_processes_stay(method):
    passes(method)
    first = processes_of(method)
    passes(method)
    assert processes_of(method) == first and os.getpid() not in first and not any(map(gone, first))


def _rank_1_raises(exchange):
    if exchange.group.rank == 1:
        raise KeyError("only here")
    exchange.dispatch(np.zeros((1, 16), "f"), np.array([[0]]))


def _rank_1_exits(exchange):
    if exchange.group.rank == 1:
        os._exit(7)
    _rank_1_raises(exchange)


def _rank_1_says_that_it_failed(exchange):
    if exchange.group.rank == 1:
        raise SystemExit(3)


@pytest.mark.parametrize("story, says", [
    (_rank_1_raises, r"rank 1: Traceback.*in _rank_1_raises\n.*KeyError: 'only here'\n.*rank 0: Traceback.*PeerFailed"),
    (_rank_1_exits, r"rank 1: the process has ended with exit code 7\n.*rank 0: Traceback.*PeerFailed"),
    (_rank_1_says_that_it_failed, r"rank 1: Traceback.*SystemExit: 3\n"),
], ids=["raises", "exits", "says"])
@methods
def test_a_failure_is_of_its_test_alone(method, story, says):
    passes(method)
    before = processes_of(method)
    with pytest.raises(pytest.fail.Exception, match=f"(?s){says}"):
        run_on_team(method, WORLD, _connected, a_store(), story)
    assert all(map(gone, before))
    passes(method)
    assert not set(processes_of(method)) & set(before)


def _rank_1_hangs(rank, world):
    if rank == 1:
        time.sleep(600)


def test_a_rank_that_does_not_end_is_told_where_it_is():
    for seconds in (2, 20):
        passes("fork")
        before = processes_of("fork")
        with pytest.raises(pytest.fail.Exception) as failure:
            run_on_team("fork", WORLD, _rank_1_hangs, seconds=seconds)
        assert all(map(gone, before))
        if not str(failure.value).startswith("rank 0: no answer"):  # on a loaded machine, rank 0 may also need more time
            break
    assert re.match(r"(?s)rank 1: no answer in .*in _rank_1_hangs\n", str(failure.value))
    passes("fork")


def test_a_death_between_scenarios_is_told():
    passes("fork")
    pid = processes_of("fork")[1]
    os.kill(pid, signal.SIGKILL)
    wait_until_gone([pid])
    with pytest.raises(pytest.fail.Exception, match="rank 1: the process has ended with exit code -9"):
        passes("fork")
    passes("fork")


def _ends_early(exchange):
    raise SystemExit(0)


def test_a_scenario_may_end_early():
    passes("fork")
    before = processes_of("fork")
    run_on_team("fork", WORLD, _connected, a_store(), _ends_early)
    passes("fork")
    assert processes_of("fork") == before


def _sets_variables(rank, world):
    assert "SWITCHYARD_TEST_NEW" not in os.environ and os.environ["SWITCHYARD_TEST_OLD"] == "old"
    os.environ["SWITCHYARD_TEST_NEW"] = "new"
    os.environ["SWITCHYARD_TEST_OLD"] = "new"
    del os.environ["SWITCHYARD_TEST_GONE"]


def test_variables_are_restored(monkeypatch):
    for name in ("OLD", "GONE"):
        monkeypatch.setenv(f"SWITCHYARD_TEST_{name}", "old")
    team.close_teams()  # existing teams have different environment variables
    for _ in range(2):
        run_on_team("fork", WORLD, _sets_variables)


_kept = []


def _leaves_a_group(rank, world):
    _kept.append(sy.Group.threads(1, 1 << 22)[0])


def test_a_group_that_stays_open_is_a_failure():
    with pytest.raises(pytest.fail.Exception, match="leaves groups open: .*rank 0 of 1"):
        run_on_team("fork", WORLD, _leaves_a_group)
    passes("fork")


def test_groups_of_the_session_are_not_the_scenarios():
    team.close_teams()
    with sy.Group.threads(1, 1 << 22)[0]:
        passes("fork")


def _leaves_a_cycle(rank, world, store):
    group = sy.Group.connect(rank, world, store, "token", 16 << 20, timeout=30, rendezvous_timeout=60)
    group.barrier()
    cycle = [group]
    cycle.append(cycle)


def test_what_nobody_has_is_collected():
    passes("fork")
    before = processes_of("fork")
    run_on_team("fork", WORLD, _leaves_a_cycle, a_store())
    passes("fork")
    assert processes_of("fork") == before


PROGRAM = """
import operator, os, signal, team
team.run_on_team({method!r}, 2, operator.add)
team.run_on_team({method!r}, 1, operator.add)
print(*(process.pid for each in team._teams.values() for process in each.processes), flush=True)
{end}
"""


@pytest.mark.parametrize("end, code", [("", 0), ("os.kill(os.getpid(), signal.SIGKILL)", -9)])
@methods
def test_no_process_is_left(method, environment, end, code):
    program = PROGRAM.format(method=method, end=end)
    done = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == code
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 3
    wait_until_gone(pids)
