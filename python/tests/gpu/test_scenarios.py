# SPDX-License-Identifier: Apache-2.0
"""What can be seen of tests on GPUs without one."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

TESTS = Path(__file__).resolve().parents[1]


def test_they_reach_their_ranks(environment):
    """Every scenario, with its arguments, is one that another process can unpickle: a function of a module that it finds. Models of
    transformers take long to make and are left out."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "only_sent", "-p", "no:cacheprovider", "-k", "cuda",
               "--ignore-glob=*transformers*", TESTS / "gpu", TESTS / "drop_in"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 100, done.stdout
