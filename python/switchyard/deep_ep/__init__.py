# SPDX-License-Identifier: Apache-2.0
"""DeepEP's interface on top of Switchyard: ``Buffer`` with the methods, arguments, row order and tuple positions of DeepEP V1.

    import switchyard.deep_ep
    switchyard.deep_ep.install()        # from now on `import deep_ep` finds this package

``from switchyard.deep_ep import Buffer`` also works. docs/deep_ep.md lists every function and the differences.
``ElasticBuffer`` and ``HybridEPBuffer`` are not provided.
"""
from __future__ import annotations

from .._torch.registry import torch_for

torch = torch_for("switchyard.deep_ep, the drop-in for deep_ep,")

from ._buffer import Buffer
from ._config import Config
from ._events import EventHandle, EventOverlap
from ._install import install, uninstall

#: Type of expert ids.
topk_idx_t = torch.int64

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "install", "topk_idx_t", "uninstall"]
