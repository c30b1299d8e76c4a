# SPDX-License-Identifier: Apache-2.0
"""Changes of SGLang, through its registries where possible, and their removal, for which the registries have no function."""
from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, Callable, List

from ..._abi import names as _names
from .._patches import Patches

#: The function that creates the dispatcher of a MoE layer, from the layer's configuration and quantization method.
FACTORY = "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"

_ONE_OF_THEM = "two plug-ins cannot replace the same place; disable one of them"


def _registry() -> Any:
    from sglang.srt.plugins import hook_registry

    return hook_registry


class Hook:
    """A hook of type AROUND on the function `target`, a dotted name."""

    def __init__(self, target: str, hook: Callable[..., Any]) -> None:
        self._target, self._hook = target, hook
        self._module, _, self._name = target.rpartition(".")
        self._original: Any = None

    def _now(self) -> Any:
        return vars(importlib.import_module(self._module)).get(self._name)

    def _all(self) -> List[Any]:
        """Returns the hooks on the target, without adding it to the registry."""
        hooks = _registry().HookRegistry._hooks
        return hooks[self._target] if self._target in hooks else []

    def check(self) -> None:
        """Raises InvalidArgument unless the target is SGLang's own function and has no hooks."""
        now = self._now()
        if now is None:
            _names.invalid(f"{self._target} does not exist in this version of SGLang: this plug-in does not support it")
        others = [source for _, _, source in self._all()]
        if others:
            name = getattr(others[0], "plugin_name", None) or "another plug-in"
            _names.invalid(f"{self._target} has a hook of {name}: {_ONE_OF_THEM}")
        if now.__module__ != self._module or hasattr(now, "__wrapped__"):
            _names.invalid(f"{self._target} was replaced by {now.__module__}: {_ONE_OF_THEM}")

    def install(self) -> None:
        """Registers the hook. Applies it unless called by SGLang's loader, which applies all hooks after the last plug-in."""
        registry = _registry()
        self._original = self._now()
        registry.HookRegistry.register(self._target, self._hook, registry.HookType.AROUND)
        if registry._current_plugin_source.get() is None:
            registry.HookRegistry.apply_hooks()

    def check_undo(self) -> None:
        """Raises InvalidArgument if the target has another hook, or was replaced after the hook was applied."""
        registry = _registry().HookRegistry
        others = [source for _, hook, source in self._all() if hook is not self._hook]
        applied = self._target in registry._patched
        if others or (applied and getattr(self._now(), "__wrapped__", None) is not self._original):
            _names.invalid(f"{self._target} was replaced after this plug-in: remove the other plug-in first")

    def undo(self) -> None:
        """Removes the hook, and restores the function in all modules that refer to the wrapper."""
        registry, module = _registry(), importlib.import_module(self._module)
        del registry.HookRegistry._hooks[self._target]
        if self._target in registry.HookRegistry._patched:
            wrapper = self._now()
            registry.HookRegistry._patched.discard(self._target)
            setattr(module, self._name, self._original)
            registry._propagate_patch(wrapper, self._original, module)


class Core:
    """A factory of runner cores for the runner `name`."""

    def __init__(self, name: str, factory: Callable[..., Any]) -> None:
        self._name, self._factory = name, factory

    @staticmethod
    def _cores() -> Any:
        from sglang.srt.layers.moe.moe_runner import runner

        return runner._CUSTOM_RUNNER_CORE_FACTORIES

    def check(self) -> None:
        """Raises InvalidArgument if the runner has another core."""
        other = self._cores().get(self._name)
        if other is not None:
            _names.invalid(f"the MoE runner {self._name!r} was replaced by {other.__module__}: {_ONE_OF_THEM}")

    def install(self) -> None:
        from sglang.srt.layers.moe.moe_runner import register_moe_runner_core

        register_moe_runner_core(self._name, self._factory)

    def check_undo(self) -> None:
        """Raises InvalidArgument if the core was replaced."""
        if self._cores().get(self._name) is not self._factory:
            _names.invalid(f"the MoE runner {self._name!r} was replaced after this plug-in: remove the other plug-in first")

    def undo(self) -> None:
        del self._cores()[self._name]


class AfterEach:
    """A function that is called after each call of a method, from :meth:`attach` on.

    SGLang's registry imports the modules of all targets in every process that loads plug-ins. This class instead replaces the method
    once the module has been imported, around any hooks that the registry has already applied.

    Args:
        module: the module of the method.
        target: class and method, separated by a period.
        after: the function. If it raises, the method raises the same error.
    """

    def __init__(self, module: str, target: str, after: Callable[[], None]) -> None:
        self._module, self._after = module, after
        self._class, _, self._method = target.partition(".")
        self._patches, self._installed, self._attached = Patches("sglang"), False, False

    def _owner(self) -> Any:
        """Returns the class, or None if its module has not been imported."""
        module = sys.modules.get(self._module)
        if module is None:
            return None
        if not hasattr(module, self._class):
            _names.invalid(f"{self._module}.{self._class} does not exist in this version of SGLang: this plug-in does not support it")
        return getattr(module, self._class)

    def check(self) -> None:
        """Raises InvalidArgument if the module has been imported and the method does not exist or is not SGLang's."""
        owner = self._owner()
        if owner is not None:
            self._patches.check(owner, self._method)

    def install(self) -> None:
        self._installed = True

    def attach(self) -> None:
        """Replaces the method if the module has been imported. Repeated calls have no effect. Raises like :meth:`check`."""
        owner = self._owner()
        if owner is None or not self._installed or self._attached:
            return
        original, after = self._patches.check(owner, self._method), self._after

        @functools.wraps(original)
        def method(*arguments: Any, **keywords: Any) -> Any:
            result = original(*arguments, **keywords)
            after()
            return result

        self._patches.replace(owner, self._method, method)
        self._attached = True

    def check_undo(self) -> None:
        """Raises InvalidArgument if the method was replaced after :meth:`attach`."""
        self._patches.check_undo()

    def undo(self) -> None:
        self._patches.undo()
        self._installed = self._attached = False


class _Refusal(Hook):
    """A hook that coexists with other hooks, because it ends the construction of the model."""

    def check_undo(self) -> None:
        pass

    def undo(self) -> None:
        hooks = self._all()
        hooks[:] = [each for each in hooks if each[1] is not self._hook]
        if not hooks:
            super().undo()


def refuse(error: Exception) -> List[Hook]:
    """Makes the construction of every MoE layer raise `error` if the caller is SGLang's loader, which only logs exceptions.

    Returns:
        The changes of SGLang; none for other callers or if the hook cannot be installed.
    """
    def refused(*arguments: Any, **keywords: Any) -> Any:
        raise error

    hook = _Refusal(FACTORY, refused)
    try:
        if _registry()._current_plugin_source.get() is None:
            return []
        hook.install()
    except Exception:  # another version of SGLang, with other extension points
        return []
    return [hook]
