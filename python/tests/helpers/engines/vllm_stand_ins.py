# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for compiled modules that vLLM imports on its way to `vllm.model_executor.layers.fused_moe`. No file of that package,
of its prepare/finalize classes, router, oracles or layer is among them."""
import importlib.abc
import importlib.util
import sys
import types

#: Module, with the modules below it, and why it has a stand-in.
STAND_INS = {
    "PIL": "compiled; images of multimodal models. The real one where it is installed, because torchvision needs it",
    "aiohttp": "compiled; downloads of media",
    "cbor2": "compiled; hashes of prompts",
    "msgspec": "compiled; messages between server processes",
    "openai": "needs the compiled jiter; types of the server",
    "openai_harmony": "compiled; tool calls of the server",
    "pybase64": "compiled; media of prompts",
    "uvloop": "compiled; event loop of the server",
    "zmq": "compiled; messages between server processes",
    "vllm._C_stable_libtorch": "compiled; operators. Those that are called during imports answer that they are unavailable",
    "vllm.distributed.kv_transfer": "needs compiled transports; moves KV caches between servers",
    "vllm.v1.attention.ops.rocm_aiter_mla_sparse": "kernels of a ROCm extension; attention",
    "vllm.vllm_flash_attn": "compiled; attention",
}

#: Compiled operators that vLLM calls while it is imported on a machine with GPUs, to determine the available kernels.
QUESTIONS = ("cutlass_group_gemm_supported", "cutlass_scaled_mm_supports_block_fp8", "cutlass_scaled_mm_supports_fp4",
             "cutlass_scaled_mm_supports_fp8", "mxfp4_experts_quant_supported")


class _Base:
    def __init_subclass__(cls, **keywords):
        pass


class _Anything:
    """A class, function or value of a stand-in: can be called, subscripted, inherited from and used in a union of types."""

    def __init__(self, *arguments, **keywords):
        pass

    def __call__(self, *arguments, **keywords):
        return arguments[0] if arguments and callable(arguments[0]) else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, key):
        return _Anything()

    def __or__(self, other):
        return object

    __ror__ = __or__

    def __mro_entries__(self, bases):
        return (_Base,)


class _Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self):
        self.names = [name for name in STAND_INS if name != "PIL" or importlib.util.find_spec("PIL") is None]

    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in self.names):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def use_stand_ins(device="cpu"):
    """Makes imports of the modules above find their stand-ins, in this process. device: "cuda" also provides compiled operators that
    vLLM calls on GPUs: QUESTIONS, which return False here, and weak_ref_tensor, which returns a strong reference."""
    sys.meta_path.insert(0, _Finder())
    if device != "cpu":
        from torch import ops

        for name in QUESTIONS:
            setattr(ops._C, name, lambda *_: False)
        ops._C.weak_ref_tensor = lambda tensor: tensor
