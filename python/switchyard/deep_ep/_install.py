# SPDX-License-Identifier: Apache-2.0
"""Makes ``import deep_ep`` resolve to this package."""
from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any, Optional, Sequence

__all__ = ["install", "uninstall"]

_NAME, _OURS = "deep_ep", "switchyard.deep_ep"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Resolves ``deep_ep`` and its modules to the modules of this package."""

    def find_spec(self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None) -> Any:
        if name != _NAME and not name.startswith(_NAME + "."):
            return None
        ours = _OURS + name[len(_NAME):]
        if importlib.util.find_spec(ours) is None:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=name == _NAME)

    def create_module(self, spec: Any) -> ModuleType:
        module = importlib.import_module(_OURS + spec.name[len(_NAME):])
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it with its own


_finder = _Finder()


def install(replace: bool = False) -> None:
    """Makes ``import deep_ep`` resolve to this package in the current process. Raises ImportError if another deep_ep has been
    imported or, without `replace`, if another one is installed. May be called twice."""
    loaded = sys.modules.get(_NAME)
    if loaded is not None and loaded is not sys.modules[_OURS]:
        raise ImportError(f"another deep_ep has been imported from {getattr(loaded, '__file__', 'somewhere')}: call install() before")
    if _finder in sys.meta_path:
        return
    if not replace and importlib.util.find_spec(_NAME) is not None:
        raise ImportError("another deep_ep is installed: uninstall it, or call install(replace=True)")
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undoes :func:`install` for later imports."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name in [name for name, module in sys.modules.items() if name == _NAME or name.startswith(_NAME + ".")]:
        if getattr(sys.modules[name], "__name__", "").startswith(_OURS):
            del sys.modules[name]
