# SPDX-License-Identifier: Apache-2.0
"""The torch example of the README runs on the CPU, and its gradients match the formula."""
import re
import subprocess
import sys

import pytest

from clone import ROOT

pytest.importorskip("torch")


def test_torch_example_of_the_readme(tmp_path, environment):
    if not (ROOT / "README.md").is_file():
        pytest.skip("the tests are not in a clone")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    program = next(block for block in blocks if "import torch" in block)
    # The sum over a token's results is 2 * sum(x) * sum(weights).
    checked = program.replace("return x.grad.shape", "return torch.allclose(x.grad, 2 * weights.sum(-1, keepdim=True).expand(16, 64))")
    assert checked != program
    (tmp_path / "program.py").write_text(checked)
    out = subprocess.run([sys.executable, tmp_path / "program.py"], check=True, timeout=60, env=environment, capture_output=True, text=True).stdout
    assert out.strip() == "[True, True, True, True]"
