# SPDX-License-Identifier: Apache-2.0
"""Replacement of attributes of engines without a registry, and the checks that precede it."""
from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any, List, Optional, Sequence, Tuple

from .._abi import names as _names

_MISSING = object()


def requested(variable: str, choices: Sequence[str]) -> Optional[str]:
    """Returns the value of an environment variable that enables a plug-in.

    Args:
        variable: its name.
        choices: the allowed values.

    Returns:
        One of `choices`, or None if the variable is unset, empty or ``0``.

    Raises:
        InvalidArgument: any other value.
    """
    value = os.environ.get(variable, "")
    if value in ("", "0"):
        return None
    if value not in choices:
        _names.invalid(f"{variable} = {value!r}: must be {_names.listed(map(repr, [*choices, '0']))}")
    return value


def installed(distribution: str) -> Optional[str]:
    """Returns the installed version of `distribution`, or None. Imports nothing."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def require_version(distribution: str, supported: Sequence[str], instead: str) -> str:
    """Returns the installed version if its first parts equal an element of `supported`.

    Args:
        distribution: name of the engine on the package index.
        supported: prefixes of the versions whose extension points were tested, such as "0.33" or "0.5.23".
        instead: alternative for other versions, as a clause.

    Raises:
        InvalidArgument: another version is installed, or none.
    """
    found = installed(distribution)
    parts = [] if found is None else found.split("+")[0].split(".")
    if found is None or not any(parts[:len(each)] == each for each in (version.split(".") for version in supported)):
        _names.invalid(f"{distribution} {found or 'is not installed'}: this plug-in was tested with {distribution} "
                       f"{_names.listed(supported)} and its extension points change between versions; {instead}")
    return found


class Patches:
    """Attributes of an engine that a plug-in replaced; :meth:`undo` restores them.

    Args:
        package: top-level package of the engine. Only functions and classes of this package are replaced; an attribute that another
            plug-in has already replaced is an error.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._done: List[Tuple[Any, str, Any, Any]] = []

    def check(self, owner: Any, name: str) -> Any:
        """Returns ``owner.name``, the engine's own value.

        Raises:
            InvalidArgument: the engine has no such attribute, or its value was defined outside the engine.
        """
        old = vars(owner).get(name, _MISSING)
        place = f"{getattr(owner, '__module__', '') + '.' if isinstance(owner, type) else ''}{owner.__name__}.{name}"
        if old is _MISSING:
            _names.invalid(f"{place} does not exist in this version of {self._package}: this plug-in does not support it")
        origin = getattr(getattr(old, "__func__", old), "__module__", None) or ""
        if callable(getattr(old, "__func__", old)) and origin.split(".")[0] != self._package:
            _names.invalid(f"{place} was replaced by {origin or 'another plug-in'}: two plug-ins cannot replace the same place; "
                           f"disable one of them")
        return old

    def replace(self, owner: Any, name: str, new: Any) -> Any:
        """Replaces ``owner.name`` by `new` and returns the original. Raises like :meth:`check`."""
        old = self.check(owner, name)
        setattr(owner, name, new)
        self._done.append((owner, name, old, new))
        return old

    def provide(self, owner: Any, name: str, new: Any) -> None:
        """Like :meth:`replace`, for an attribute that the engine defines only if an optional package is installed."""
        if name in vars(owner):
            self.replace(owner, name, new)
        else:
            setattr(owner, name, new)
            self._done.append((owner, name, _MISSING, new))

    def check_undo(self) -> None:
        """Raises InvalidArgument if another plug-in has since replaced one of the attributes."""
        for owner, name, _, new in self._done:
            if vars(owner).get(name) is not new:
                _names.invalid(f"{owner.__name__}.{name} was replaced after this plug-in: remove the other plug-in first")

    def undo(self) -> None:
        """Restores all attributes, in reverse order. Repeated calls have no effect. If :meth:`check_undo` raises, so does this
        method, and no attribute is restored."""
        self.check_undo()
        while self._done:
            owner, name, old, _ = self._done.pop()
            if old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
