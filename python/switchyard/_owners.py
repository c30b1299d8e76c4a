# SPDX-License-Identifier: Apache-2.0
"""Which installed distributions have a package ``deep_ep``. pip lets several write the same folder, and says nothing."""
from __future__ import annotations

import re
from importlib.metadata import Distribution, distributions
from typing import List

#: The distribution of this project that has nothing but that package: python/drop_in.
OURS = "switchyard-deep-ep"

_IN_RECORD = re.compile(r"^\"?deep_ep/", re.M)
_TOP_LEVEL = re.compile(r"^deep_ep$", re.M)


def _owns(distribution: Distribution) -> bool:
    return bool(_IN_RECORD.search(distribution.read_text("RECORD") or "")
                or _TOP_LEVEL.search(distribution.read_text("top_level.txt") or ""))


def owners() -> List[str]:
    """Their names, each once, in order. Reads the records of everything that is installed."""
    return sorted({each.metadata["Name"] for each in distributions() if _owns(each)})


def check_alone() -> None:
    """ImportError if somebody else than :data:`OURS` has a package ``deep_ep``."""
    others = [name for name in owners() if name != OURS]
    if others:
        raise ImportError(f"{OURS} and {', '.join(others)} both have a package deep_ep, and the files of one lie over those of the other: "
                          f"uninstall all of them, then install the one that you want")
