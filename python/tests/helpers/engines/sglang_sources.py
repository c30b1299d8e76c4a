# SPDX-License-Identifier: Apache-2.0
"""SGLang's own files, importable on a machine without a GPU and without its ninety dependencies.

The dispatchers, formats, permutations, runners, layers, quantisation methods, registries and hooks are the unmodified files of
the wheel. Only the modules in STAND_INS are replaced.
"""
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types

import pytest

from clients import source_of

#: Dependencies of SGLang that must be installed.
NEEDED = ("msgspec", "dill", "transformers")

#: Modules that tests replace, with the reason. The replacement has any attribute and computes nothing.
STAND_INS = {
    "orjson": "compiled; JSON of requests",
    "pybase64": "compiled; images in requests",
    "zmq": "compiled; messages between processes of a server",
    "PIL": "compiled; images",
    "tvm_ffi": "compiled; loads CUDA kernels",
    "sglang.kernels.jit": "compiles CUDA kernels; its headers are not Python",
    "sgl_kernel": "compiled; operators on GPUs other than those of the dispatcher and the layer",
    "compressed_tensors": "another quantisation, never used here",
    "gguf": "another quantisation, never used here",
    "requests": "HTTP client of a server",
    "starlette": "HTTP server",
    "IPython": "interactive output",
    "uvicorn": "HTTP server",
    "fastapi": "HTTP server",
    "partial_json_parser": "JSON of function calls in outputs",
    "sglang.srt.entrypoints": "HTTP server",
    "sglang.srt.managers": "scheduler of requests",
    "sglang.srt.observability": "metrics of a server",
    "sglang.srt.utils.hf_transformers": "configurations of models, for another transformers",
    "sglang.srt.utils.hf_transformers_utils": "configurations of models, for another transformers",
}

#: Packages whose ``__init__`` imports the client interface or every model's configuration; their modules are the real ones.
BARE_PACKAGES = ("sglang", "sglang.srt.configs")


class _Anything(type):
    """Classes with any attribute, usable as base, exception and decorator."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (Exception,), {})

    def __call__(cls, *arguments, **keywords):
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not keywords else lambda function=None: function


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Anything(name, (Exception,), {"__module__": self.__name__}))
        return getattr(self, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if any(name == each or name.startswith(each + ".") for each in STAND_INS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        module.__path__ = []


def check():
    """Skips the test if SGLang's sources or NEEDED are missing, and fails instead if SWITCHYARD_CLIENTS is set, as in CI."""
    source_of("sglang")
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            (pytest.fail if os.environ.get("SWITCHYARD_CLIENTS") else pytest.skip)(f"SGLang needs {name}, which is not installed")


def importable():
    """Makes ``import sglang`` work in this process, which must be of its own: stand-ins are visible to everything in it."""
    root = source_of("sglang")
    if any(isinstance(each, _Finder) for each in sys.meta_path):
        return
    import torch._dynamo  # noqa: F401  (before the stand-ins, as it looks for optional packages)
    import transformers  # noqa: F401

    sys.meta_path.insert(0, _Finder())
    for name in BARE_PACKAGES:
        module = _Module(name)
        module.__path__ = [str(root / name.replace(".", "/"))]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
