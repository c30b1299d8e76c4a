# SPDX-License-Identifier: Apache-2.0
"""The clone that contains the tests, unless they were copied elsewhere."""
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"


def script(name):
    """Returns scripts/NAME.py as a module. Skips the test without a clone."""
    path = ROOT / f"scripts/{name}.py"
    if not path.is_file():
        pytest.skip("the tests are not in a clone")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
