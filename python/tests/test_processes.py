# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: forked, spawned, and with the variables of launchers."""
import os
import secrets
import subprocess
import sys

import numpy as np
import pytest

import oracle
import switchyard as sy
from processes import a_store, run_processes

SHAPE = {"experts": 5, "topk": 2, "hidden": 16, "max_tokens": 6}
OPTIONS = {"heap_bytes": 16 << 20, "timeout": 30, "rendezvous_timeout": 30}


def exchange_once(group):
    """One dispatch and combine, checked; returns a number that all ranks know."""
    inputs = oracle.make_inputs(group.size, seed=1, **SHAPE)
    exchange = sy.Exchange(group, dtype="f32", **SHAPE)
    rows, handle = exchange.dispatch(*inputs[group.rank])
    assert np.array_equal(rows, oracle.rank_major(inputs, 5, group.rank).x)
    want = oracle.combine_rank_major(inputs, 5, group.rank, lambda r: oracle.rank_major(inputs, 5, r).x)
    assert np.array_equal(exchange.combine(rows, handle), want)
    everybody = group.all_gather(bytes([group.rank, 7]))
    assert everybody == [bytes([r, 7]) for r in range(group.size)]
    assert len(group.wait_statistics()) == group.size and group.heap[0] <= group.heap[1]
    group.barrier()


def _connected(rank, world, store):
    with sy.Group.connect(rank, world, store, "token", **OPTIONS) as group:
        assert (group.rank, group.size, group.backend) == (rank, world, "cpu")
        exchange_once(group)


def _from_environment(rank, world, variables):
    os.environ.update({name: value.format(rank=rank, world=world) for name, value in variables.items()})
    with sy.Group.from_environment(**OPTIONS) as group:
        assert (group.rank, group.size) == (rank, world)
        exchange_once(group)


def run(method, target, world, *arguments):
    assert run_processes(method, target, world, *arguments) == [0] * world


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_connect(method):
    run(method, _connected, 3, a_store())


def test_fork_of_a_process_that_has_a_group():
    with sy.Group.threads(1, 16 << 20)[0] as group:
        exchange_once(group)
        run("fork", _connected, 2, a_store())
        exchange_once(group)


OWN = {"SWITCHYARD_RANK": "{rank}", "SWITCHYARD_WORLD_SIZE": "{world}"}
TORCHRUN = {"RANK": "{rank}", "WORLD_SIZE": "{world}", "LOCAL_RANK": "{rank}", "LOCAL_WORLD_SIZE": "{world}",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "{world}", "OMPI_COMM_WORLD_LOCAL_SIZE": "{world}"}


@pytest.mark.parametrize("launcher", ["own", "torchrun", "open_mpi"])
def test_environment(launcher):
    secret = secrets.token_hex(8)
    variables = {
        "own": {**OWN, "SWITCHYARD_STORE": a_store(), "SWITCHYARD_JOB_TOKEN": secret},
        "torchrun": {**TORCHRUN, "TORCHELASTIC_RUN_ID": secret},
        "open_mpi": {**OPEN_MPI, "PMIX_NAMESPACE": secret},
    }[launcher]
    run("fork", _from_environment, 2, variables)


def test_nothing_in_the_environment(environment):
    code = "import switchyard as sy\ntry: sy.Group.from_environment()\nexcept sy.InvalidArgument as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert "SWITCHYARD_RANK" in done.stdout


class Communicator:
    """What Group.from_mpi4py needs of an mpi4py communicator, over threads."""

    def __init__(self, rank, everybody, barrier):
        self.rank, self.everybody, self.barrier = rank, everybody, barrier

    def Get_rank(self):
        return self.rank

    def allgather(self, mine):
        self.everybody[self.rank] = mine
        self.barrier.wait()
        return list(self.everybody)


def _with_communicator(change=None):
    import threading

    world, everybody, barrier = 2, [None, None], threading.Barrier(2)
    results = [None, None]

    def rank(r):
        communicator = Communicator(r, everybody, barrier)
        if change is not None:
            gather = communicator.allgather
            communicator.allgather = lambda mine: gather(change(r, mine))
        try:
            with sy.Group.from_mpi4py(communicator, **OPTIONS) as group:
                exchange_once(group)
                results[r] = group.rank
        except sy.SwitchyardError as error:
            results[r] = error

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_communicators_of_mpi4py():
    assert _with_communicator() == [0, 1]


def test_ranks_on_other_hosts_are_said():
    def change(rank, mine):
        return (("elsewhere", "x"), *mine[1:]) if rank == 1 else mine

    for error in _with_communicator(change):
        assert isinstance(error, sy.Unsupported) and "rank 1 is on elsewhere" in str(error)


def test_torch_is_not_imported_for_numpy(environment):
    code = ("import sys, numpy, switchyard as sy\n"
            "sy.run_ranks(lambda g: sy.Exchange(g, hidden=16, experts=2, topk=1, max_tokens=2, dtype='f32').dispatch("
            "numpy.zeros((2, 16), 'f'), numpy.zeros((2, 1), int)), 2, heap_bytes=1 << 24)\n"
            "assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)
