# SPDX-License-Identifier: Apache-2.0
"""The names of ``deep_ep.utils``."""
from __future__ import annotations

from typing import Any

from ._config import Config
from ._events import EventHandle, EventOverlap

__all__ = ["Config", "EventHandle", "EventOverlap", "check_nvlink_connections"]


def check_nvlink_connections(group: Any) -> None:
    """Does nothing, because forming a group checks that its ranks can access each other."""
