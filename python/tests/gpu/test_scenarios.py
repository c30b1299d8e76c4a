# SPDX-License-Identifier: Apache-2.0
"""Checks of GPU tests that need no GPU."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

TESTS = Path(__file__).resolve().parents[1]


def test_they_reach_their_ranks(environment):
    """Every scenario, with its arguments, can be unpickled by another process: it must be a function of an importable module.
    Models of transformers are excluded because they take long to create."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "only_sent", "-p", "no:cacheprovider", "-k", "cuda",
               "--ignore-glob=*transformers*", TESTS / "gpu", TESTS / "drop_in"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 100, done.stdout
