# SPDX-License-Identifier: Apache-2.0
"""NeMo Automodel's unmodified MoE layer with its DeepEP dispatcher on the drop-in: router, dispatcher, experts, outputs and
gradients. No stand-ins."""
import pytest

torch = pytest.importorskip("torch")

from automodel_ranks import check_automodel  # noqa: E402
from deep_ep_ranks import over_groups  # noqa: E402

TOKENS = 20


@pytest.mark.parametrize("routing, world, where", [("any", 2, "cpu"), ("skewed", 2, "copies"), ("empty", 2, "copies"), ("empty", 2, "cpu")])
def test_layer(routing, world, where):
    over_groups(where, world, check_automodel, TOKENS, routing == "skewed", 1 if routing == "empty" else None, {})


def test_asynchronous_dispatch():
    over_groups("copies", 2, check_automodel, TOKENS, False, None, {"dispatcher_async_dispatch": True})
