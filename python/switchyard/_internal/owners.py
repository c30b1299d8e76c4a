# SPDX-License-Identifier: Apache-2.0
"""Finds installed distributions that contain a package ``deep_ep``. pip allows several of them to write to the same folder
without a warning."""
from __future__ import annotations

import re
from importlib.metadata import Distribution, distributions
from typing import List

#: The distribution of this project that contains only ``deep_ep``: python/drop_in.
OURS = "switchyard-deep-ep"

_IN_RECORD = re.compile(r"^\"?deep_ep/", re.M)
_TOP_LEVEL = re.compile(r"^deep_ep$", re.M)


def _owns(distribution: Distribution) -> bool:
    return bool(_IN_RECORD.search(distribution.read_text("RECORD") or "")
                or _TOP_LEVEL.search(distribution.read_text("top_level.txt") or ""))


def owners() -> List[str]:
    """Returns the names of these distributions, sorted and without duplicates. Reads the metadata of all installed
    distributions."""
    return sorted({each.metadata["Name"] for each in distributions() if _owns(each)})


def check_alone() -> None:
    """Raises ImportError if a distribution other than :data:`OURS` has a package ``deep_ep``."""
    others = [name for name in owners() if name != OURS]
    if others:
        raise ImportError(f"{OURS} and {', '.join(others)} both have a package deep_ep, and the files of one lie over those of the other: "
                          f"uninstall all of them, then install the one that you want")
