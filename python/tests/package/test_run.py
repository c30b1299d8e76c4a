# SPDX-License-Identifier: Apache-2.0
"""run_ranks, and processes, when a rank fails or returns early or the user presses Ctrl-C: all ranks end at once and report the
reason."""
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import switchyard as sy
from processes import a_store

CONFIG = {"hidden": 16, "num_experts": 4, "topk": 2, "max_tokens": 8, "dtype": "f32"}
#: No test may end because a deadline of the library expired.
OPTIONS = {"heap_bytes": 4 << 20, "timeout": 600, "rendezvous_timeout": 600}


def step(exchange):
    rows, handle = exchange.dispatch(np.ones((2, 16), np.float32), np.array([[0, 3], [1, 2]]))
    return exchange.combine(rows, handle)


def test_a_rank_that_returns_early():
    def rank(group):
        exchange = sy.Exchange(group, **CONFIG)
        step(exchange)
        if group.rank != 1:
            step(exchange)

    with pytest.raises(sy.PeerFailed, match=r"rank 1 left the group.*the function of rank 1 had returned") as caught:
        sy.run_ranks(rank, 3, **OPTIONS)
    assert caught.value.rank == 1 and caught.value.text == str(caught.value)


def test_a_rank_that_skips_a_call():
    def rank(group):
        exchange = sy.Exchange(group, **CONFIG)
        for _ in range(3 - group.rank):
            step(exchange)

    with pytest.raises(sy.PeerFailed, match="the function of rank 1 had returned"):
        sy.run_ranks(rank, 2, **OPTIONS)


def test_ranks_that_return_at_different_times_are_no_failure():
    """Rank 0 ends long before the others, whose last call needs nothing more from rank 0."""
    done = threading.Event()

    def rank(group):
        out = step(sy.Exchange(group, **CONFIG))
        if group.rank == 0:
            done.set()
        else:
            done.wait()
        return float(out.sum())

    assert len(set(sy.run_ranks(rank, 4, **OPTIONS))) == 1


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt(), SystemExit(3), RuntimeError("x")], ids=lambda each: type(each).__name__)
def test_an_exception_names_its_rank(error):
    def rank(group):
        exchange = sy.Exchange(group, **CONFIG)
        if group.rank == 2:
            raise error
        step(exchange)

    with pytest.raises(type(error)) as caught:
        sy.run_ranks(rank, 3, **OPTIONS)
    assert caught.value is error and "raised by rank 2 of 3 in run_ranks" in error.__notes__


def test_exceptions_of_several_ranks():
    barrier = threading.Barrier(2)

    def rank(group):
        barrier.wait()
        raise ValueError(f"number {group.rank}")

    with pytest.raises(ValueError, match="number 0") as caught:
        sy.run_ranks(rank, 2, **OPTIONS)
    assert caught.value.__notes__[1:] == ["rank 1 raised ValueError: number 1"]


THREADS = """
import numpy as np, switchyard as sy, sys, time
def rank(group):
    exchange = sy.Exchange(group, hidden=16, num_experts=4, topk=2, max_tokens=8, dtype="f32")
    if group.rank == 1:
        print("waits", flush=True)
        {other}
    if group.rank == 2:
        time.sleep(600)
    exchange.dispatch(np.ones((2, 16), "f"), np.zeros((2, 2), "i8"))
sy.run_ranks(rank, 3, heap_bytes=4 << 20, timeout=None)
"""
PROCESS = """
import numpy as np, switchyard as sy, sys
with sy.Group.connect(int(sys.argv[1]), 2, sys.argv[2], "token", 4 << 20, timeout=None) as group:
    exchange = sy.Exchange(group, hidden=16, num_experts=4, topk=2, max_tokens=8, dtype="f32")
    print("waits", flush=True)
    if group.rank == 1:
        sys.stdin.readline()
    exchange.dispatch(np.ones((2, 16), "f"), np.zeros((2, 2), "i8"))
"""


def interrupted(process, seconds=60):
    """Sends one SIGINT when the program reports that it is waiting; returns its stderr."""
    assert process.stdout.readline().strip() == "waits"
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        pytest.fail("the process is still there after one SIGINT")


def start(environment, program, *arguments):
    def as_from_a_terminal():  # background jobs of a shell ignore the signal, and their children would too
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True,
                            preexec_fn=as_from_a_terminal)


@pytest.mark.parametrize("other", ["time.sleep(600)", "pass", "while True: pass"])
def test_ctrl_c_ends_run_ranks(environment, other):
    """Rank 0 waits in a call without a deadline, because rank 2 sleeps; so does rank 1 if it passes."""
    process = start(environment, THREADS.format(other=other))
    said = interrupted(process)
    assert "KeyboardInterrupt" in said and process.returncode != 0


def test_ctrl_c_ends_a_process_in_a_call_and_its_peers(environment):
    """Rank 0 waits in a call without a deadline. Its peer, which waits for input, receives the error at its next call."""
    store = a_store()
    ranks = [start(environment, PROCESS, str(rank), store) for rank in (0, 1)]
    assert ranks[1].stdout.readline().strip() == "waits"
    try:
        said = interrupted(ranks[0])
        assert "KeyboardInterrupt" in said
        peer = ranks[1].communicate("\n", timeout=60)[1]
        assert "PeerFailed" in peer and "rank 0" in peer
    finally:
        ranks[1].kill()
        ranks[1].communicate()


def test_an_exception_in_a_process_is_told_to_its_peers(ranks):
    """At the end of ``with group:``, even if objects of the group are still referenced."""
    kept = []

    def rank(group):
        exchange = sy.Exchange(group, **CONFIG)
        kept.append(exchange)
        if group.rank == 0:
            with pytest.raises(KeyError), group:
                kept.append(exchange.dispatch)
                raise KeyError("mine")
        else:
            with pytest.raises(sy.PeerFailed) as caught:
                step(exchange)
            assert caught.value.rank == 0

    sy.run_ranks(rank, 2, **OPTIONS)


def test_an_error_that_ranks_share_is_printed_once():
    def rank(group):
        sy.Exchange(group, hidden=4096, num_experts=64, topk=8, max_tokens=4096)

    with pytest.raises(sy.HeapExhausted) as caught:
        sy.run_ranks(rank, 4, heap_bytes=1 << 20)
    assert caught.value.__notes__ == ["raised by ranks 0 to 3 of 4 in run_ranks"]
    text = str(caught.value)
    needed = sy.Exchange.heap_bytes(4, hidden=4096, num_experts=64, topk=8, max_tokens=4096)
    assert text.startswith("Exchange, rank 0: needs ") and text.count("rank") == 1 and len(text) < 220
    assert needed - 8192 <= int(text.split()[4]) <= needed
    assert text.endswith("raise heap_bytes of the group to Exchange.heap_bytes(...), or to the sum over its objects")


def test_errors_that_differ_are_all_noted():
    def rank(group):
        raise ValueError(f"number {group.rank % 2}")

    with pytest.raises(ValueError, match="number 0") as caught:
        sy.run_ranks(rank, 4)
    assert caught.value.__notes__ == ["raised by ranks 0 and 2 of 4 in run_ranks", "rank 1 raised ValueError: number 1",
                                      "rank 3 raised ValueError: number 1"]
