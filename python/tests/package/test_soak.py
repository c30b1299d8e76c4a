# SPDX-License-Identifier: Apache-2.0
"""Runs tests/soak/serving.py for half a minute; tests/soak/soak_results.txt has the results of the last long runs."""
import subprocess
import sys
from pathlib import Path

import switchyard as sy
from switchyard._abi import ffi as _ffi

PROGRAM = Path(__file__).resolve().parents[3] / "tests/soak/serving.py"


def has_layer():
    try:
        _ffi.layer_library()
    except sy.LibraryNotFound:
        return False
    return True


def test_serving_worker():
    command = [sys.executable, str(PROGRAM), "--seconds", "30", "--seed", "1"] + ([] if has_layer() else ["--no-layer"])
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = dict(part.strip().rsplit(" ", 1) for part in run.stdout.split(": ", 1)[1].split(","))
    assert all(int(counts[name]) > 0 for name in ("ExchangeCase", "LowLatencyCase", "kept", "objects")), run.stdout
