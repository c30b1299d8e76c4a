# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: forked, spawned, and with the environment variables of launchers."""
import os
import secrets
import subprocess
import sys
import time

import numpy as np
import pytest

import oracle
import switchyard as sy
from processes import a_store, run_processes

SHAPE = {"num_experts": 5, "topk": 2, "hidden": 16, "max_tokens": 6}
OPTIONS = {"heap_bytes": 16 << 20, "timeout": 30, "rendezvous_timeout": 30}


def exchange_once(group):
    """Runs and checks one dispatch and combine; returns a number that every rank can compute."""
    inputs = oracle.make_inputs(group.size, seed=1, **SHAPE)
    exchange = sy.Exchange(group, dtype="f32", **SHAPE)
    rows, handle = exchange.dispatch(*inputs[group.rank])
    assert np.array_equal(rows, oracle.rank_major(inputs, 5, group.rank).x)
    want = oracle.combine_rank_major(inputs, 5, group.rank, lambda r: oracle.rank_major(inputs, 5, r).x)
    assert np.array_equal(exchange.combine(rows, handle, apply_weights=False), want)
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
    """The subset of an mpi4py communicator that Group.from_mpi4py uses, implemented with threads."""

    def __init__(self, rank, everybody, barrier):
        self.rank, self.everybody, self.barrier = rank, everybody, barrier

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return len(self.everybody)

    def allgather(self, mine):
        self.everybody[self.rank] = mine
        self.barrier.wait()
        gathered = list(self.everybody)
        self.barrier.wait()
        return gathered


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


def _of_two_machines(rank, mine):
    """Makes rank 1 report a different machine."""
    return ("elsewhere", "x") if rank == 1 and len(mine) > 1 else mine


def test_ranks_of_several_machines_meet_over_tcp(monkeypatch):
    stores = []
    connect = sy.Group.connect.__func__

    def connect_and_note(cls, rank, world, store, *rest, **options):
        stores.append(store)
        return connect(cls, rank, world, store, *rest, **options)

    monkeypatch.setattr(sy.Group, "connect", classmethod(connect_and_note))
    monkeypatch.setenv("SWITCHYARD_HOST", "a,b")  # although both hosts are one machine
    monkeypatch.delenv("SWITCHYARD_STORE", raising=False)
    monkeypatch.setattr(sy.group, "_address", lambda: "127.0.0.1")
    assert _with_communicator(_of_two_machines) == [0, 1]
    assert stores[0] == stores[1] and stores[0].startswith("tcp://127.0.0.1:2")
    store = stores[0].replace("127.0.0.1", "localhost")  # its port is free again
    monkeypatch.setenv("SWITCHYARD_STORE", store)
    assert _with_communicator(_of_two_machines) == [0, 1]
    assert stores[2:] == [store] * 2


def test_a_machine_that_nobody_reaches_is_said(monkeypatch):
    monkeypatch.delenv("SWITCHYARD_STORE", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(sy.group, "_address", lambda: "")
    for error in _with_communicator(_of_two_machines):
        assert isinstance(error, sy.Unsupported) and "rank 1 is on elsewhere" in str(error) and "SWITCHYARD_STORE" in str(error)


def test_without_such_an_address_the_store_is_at_the_name_that_all_know(monkeypatch):
    monkeypatch.delenv("SWITCHYARD_STORE", raising=False)
    monkeypatch.setattr(sy.group, "_address", lambda: "")
    monkeypatch.setattr(sy.group.socket, "gethostname", lambda: "node1")
    for name, store in (("Node1.example.org", "tcp://Node1.example.org:2"), ("node1", "tcp://node1:2"), ("node2", ""), ("", "")):
        monkeypatch.setenv("MASTER_ADDR", name)
        found = sy.group._network_store()
        assert found.startswith(store) and bool(found) == bool(store)
    monkeypatch.setattr(sy.group.socket, "gethostname", lambda: "localhost")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert sy.group._network_store() == ""


def test_the_address_is_no_address_of_this_machine_alone(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert not sy.group._address().startswith("127.") and sy.group._address() != "::1"


# ---- Several hosts, by name ----


def hosts_of(group):
    return group.hosts, [group.host_of(rank) for rank in range(group.size)]


def exchange_between_hosts(group):
    """A token with a route to each rank: its row is sent once to each other host, and each of these hosts returns one row."""
    with sy.Exchange(group, dtype="f32", hidden=16, num_experts=group.size, topk=group.size, max_tokens=1) as exchange:
        rows, handle = exchange.dispatch(np.full((1, 16), 1 + group.rank, "f"), np.arange(group.size)[None])
        assert np.array_equal(rows, np.repeat(np.arange(1, group.size + 1, dtype="f"), 16).reshape(-1, 16))
        assert exchange.last_call().network_bytes == (128 + 128) * (group.hosts - 1)  # head, row padded to 128 bytes
        assert (exchange.combine(rows, handle, order="per_host") == group.size * (1 + group.rank)).all()
        assert exchange.last_call().network_bytes == 64 * (group.hosts - 1)


def test_threads_on_hosts():
    def rank(group):
        assert hosts_of(group) == (2, [0, 0, 1, 0]) and group.host == (group.rank == 2)
        assert f"host {group.host} of 2" in repr(group)
        with pytest.raises(sy.InvalidArgument, match="rank = 4"):
            group.host_of(4)
        exchange_once(group)
        exchange_between_hosts(group)
        with pytest.raises(sy.Unsupported, match="2 hosts"):
            sy.Exchange(group, dtype="f32", hidden=16, num_experts=4, topk=2, max_tokens=4, staging="ring")
        exchange_once(group)

    sy.run_ranks(rank, 4, host="a,a,b", **OPTIONS)


def _on_hosts(rank, world, store):
    with sy.Group.connect(rank, world, store, "token", host="a,a,b", silence=20, **OPTIONS) as group:
        assert hosts_of(group) == (2, [0, 0, 1]) and group.host == (rank == 2)
        exchange_once(group)
        exchange_between_hosts(group)
        group.barrier()
        with group._once_more(1 << 24, {"host": "a,b,c"}) as again:
            assert hosts_of(again) == (3, [0, 1, 2])
            exchange_once(again)
        group.barrier()


def test_processes_on_hosts():
    run("fork", _on_hosts, 3, a_store())


def _one_stays_away(rank, world, store):
    with sy.Group.connect(rank, world, store, "token", host="a,b", **OPTIONS) as group:
        group.barrier()
        if rank == 1:
            with pytest.raises((sy.PeerTimeout, sy.PeerFailed)):
                while True:
                    group.check()
                    time.sleep(0.001)
            return
        group.set_timeout(0.3)
        with pytest.raises(sy.PeerTimeout) as caught:
            group.barrier()
        report = caught.value.report
        assert report.awaited_rank == 1 and report.site == "network" and report.silent_ms >= 0


def test_a_rank_of_another_host_that_does_not_come():
    run("fork", _one_stays_away, 2, a_store())


def test_torch_is_not_imported_for_numpy(environment):
    code = ("import sys, numpy, switchyard as sy\n"
            "sy.run_ranks(lambda g: sy.Exchange(g, hidden=16, num_experts=2, topk=1, max_tokens=2, dtype='f32').dispatch("
            "numpy.zeros((2, 16), 'f'), numpy.zeros((2, 1), int)), 2, heap_bytes=1 << 24)\n"
            "assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)
