# SPDX-License-Identifier: Apache-2.0
"""Translates library messages to Python: they contain names of C++ struct members where callers used keywords."""
from __future__ import annotations

import re

#: Members whose keyword has a different name.
_KEYWORDS = {"num_warps": "workers", "num_blocks": "workers"}
#: Classes and functions with different names in Python.
_NAMES = (
    ("NormalExchange::", "Exchange."), ("LowLatencyExchange::", "LowLatency."), ("Group::", "Group."), ("Handle::", "Handle."),
    ("LedgerCombine::", "LedgerCombine."), ("MoeLayer::", "MoeLayer."), ("NormalExchange", "Exchange"), ("LowLatencyExchange", "LowLatency"),
    ("raise heap_bytes", "raise heap_bytes of the Group; Exchange.heap_bytes(...), and heap_bytes of other classes, says how much one needs"))
_RINGS = re.compile(r"\bRingSettings::(num_channels|send_chunk|slots|max_bytes)")
_MEMBER = re.compile(r"\b(?:Normal|LowLatency|Ledger|MoeLayer|FusedMoe|GroupedGemm)Config::(\w+)|"
                     r"\b(?:GroupOptions|\w*DispatchOptions|\w*CombineOptions|AllToAllOptions|FusedMoeCall|MoeLayerCall)::(\w+)")


def in_python(text: str) -> str:
    """Returns `text` with C++ names replaced by those of the Python API."""
    if "::" in text:
        text = _RINGS.sub(r"ring_\1", text)
        text = _MEMBER.sub(lambda found: _KEYWORDS.get(found[1] or found[2], found[1] or found[2]), text)
    for theirs, ours in _NAMES:
        text = text.replace(theirs, ours)
    return text
