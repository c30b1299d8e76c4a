# SPDX-License-Identifier: Apache-2.0
"""The program that documents show runs, and does what they say."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["docs/python.md", "python/README.md"])
def test_ten_lines(name, tmp_path, environment):
    if not (ROOT / name).is_file():
        pytest.skip("the tests are not in a clone")
    program = next(block for block in re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.S)
                   if "run_ranks" in block)
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    (tmp_path / "ten_lines.py").write_text(program + "\nassert set(np.unique(sy.run_ranks(rank, 4)[3])) == {3.0, 6.0}\n")
    subprocess.run([sys.executable, tmp_path / "ten_lines.py"], check=True, timeout=60, env=environment)
