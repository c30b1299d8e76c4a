# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/routing.md that record the routing of vLLM 0.33, with vLLM's own routers and its own capture of routed
experts. Stand-ins, with reasons: vllm_stand_ins.STAND_INS."""
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from clone import ROOT  # noqa: E402
from vllm_host import in_vllm  # noqa: E402

SCRIPT = str(ROOT / "scripts" / "record_routing.py")


def _recipes():
    """The Python blocks of the page's vLLM section."""
    page = (ROOT / "docs" / "routing.md").read_text()
    part = page[page.index("**vLLM**"):page.index("**Megatron Core**")]
    return re.findall(r"```python\n(.*?)```", part, re.DOTALL)


@pytest.mark.parametrize("scenario, number", [("wrapped", 0), ("returned", 1)])
def test_recipe(scenario, number):
    recipes = _recipes()
    assert len(recipes) == 2
    recorded, expected = in_vllm(f"vllm_recording:{scenario}", 1, SCRIPT, recipes[number])[0]
    assert recorded.keys() == expected.keys() and expected
    for name, values in expected.items():
        np.testing.assert_array_equal(recorded[name], values, err_msg=name)
