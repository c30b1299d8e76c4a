# SPDX-License-Identifier: Apache-2.0
import os
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("helpers", "helpers/engines")]

import switchyard as sy  # noqa: E402
from team import close_teams  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _one_thread_per_rank():
    """Uses one thread per rank, because ranks are already threads or processes."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _teams():
    """At the end of the session, ends the ranks that are kept from test to test."""
    yield
    close_teams()


@pytest.fixture
def environment():
    """Environment variables for other interpreters, with the import path of this one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SWITCHYARD_RANK", "RANK", "WORLD_SIZE"))}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.fixture
def ranks():
    """run_ranks with a small heap and a short deadline, so a hanging test fails soon."""

    def run(function, world, *arguments, **options):
        options = {"heap_bytes": 32 << 20, "timeout": 20, "rendezvous_timeout": 20, **options}
        return sy.run_ranks(function, world, *arguments, **options)

    return run
