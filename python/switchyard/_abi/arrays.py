# SPDX-License-Identifier: Apache-2.0
"""Conversion of numpy arrays and torch tensors to pointers, and of library memory to arrays.

numpy has neither bf16 nor fp8. If arguments have ml_dtypes types, so do the results; otherwise bf16 bits are stored as uint16
and fp8 e4m3 bits as uint8. torch is used only if other code has imported it.
"""
from __future__ import annotations

import sys
from typing import Any, Dict, NamedTuple, NoReturn, Optional, Sequence, Tuple, Union

import numpy as np

from .names import BF16, CPU, CUDA, DTYPES, F32, invalid, invalid_type, listed, name_of

#: Element types of routing arrays, in addition to the row types (0 to 3).
I32, I64, U8 = 10, 11, 12
_ELEMENTS = {"i32": I32, "i64": I64, "u8": U8, **DTYPES}
_NUMPY = {0: "<u2", 1: "<f2", 2: "<f4", 3: "|u1", I32: "<i4", I64: "<i8", U8: "|u1"}
#: Bytes per element.
_BYTES = {0: 2, 1: 2, 2: 4, 3: 1, I32: 4, I64: 8, U8: 1}
#: All element types.
ELEMENTS = tuple(_BYTES)
_NUMPY_CODES: Dict[Any, int] = {
    np.dtype(np.float32): 2, np.dtype(np.float16): 1, np.dtype(np.uint16): 0, np.dtype(np.uint8): 3, np.dtype(np.int32): I32,
    np.dtype(np.int64): I64,
}


class _Memory:
    """Library memory, exposed through numpy's and torch's array protocols; arrays that refer to it keep `owner` alive."""

    __slots__ = ("__array_interface__", "__cuda_array_interface__", "owner")

    def __init__(self, pointer: int, shape: Sequence[int], element: int, owner: Any, cuda: bool) -> None:
        interface = {"shape": tuple(shape), "typestr": _NUMPY[element], "data": (pointer, False), "version": 3}
        if cuda:
            self.__cuda_array_interface__ = {**interface, "version": 2}
        else:
            self.__array_interface__ = interface
        self.owner = owner


class NumpyArrays:
    """Reads and creates numpy arrays."""

    backend = CPU

    def code(self, array: np.ndarray) -> int:
        """Returns the row or element type, or -1 if unsupported."""
        code = _NUMPY_CODES.get(array.dtype)
        if code is None:
            code = {"bfloat16": 0, "float8_e4m3fn": 3}.get(array.dtype.name, -1)
            _NUMPY_CODES[array.dtype] = code
        return code

    def pointer(self, array: np.ndarray) -> int:
        return array.ctypes.data if array.size else 0

    def is_dense(self, array: np.ndarray) -> bool:
        return array.flags.c_contiguous

    def has_memory(self, array: np.ndarray) -> bool:
        """Returns whether the array's elements are stored in its memory."""
        return type(array) is np.ndarray or not isinstance(array, np.ma.MaskedArray)

    def where(self, array: np.ndarray) -> Tuple[int, int]:
        return CPU, -1

    def stream(self, array: np.ndarray) -> int:
        return 0

    def _dtype(self, code: int, like: Optional[np.ndarray]) -> Any:
        if like is not None and self.code(like) == code:
            return like.dtype
        if code in (0, 3) and like is not None and like.dtype.type.__module__ == "ml_dtypes":
            module = sys.modules["ml_dtypes"]
            return np.dtype(module.bfloat16 if code == 0 else module.float8_e4m3fn)
        return np.dtype(_NUMPY[code])

    def empty(self, shape: Sequence[int], code: int, like: np.ndarray) -> np.ndarray:
        return np.empty(shape, self._dtype(code, like))

    def wrap(self, pointer: Optional[int], shape: Sequence[int], code: int, owner: Any, like: Optional[np.ndarray]) -> np.ndarray:
        """Wraps library memory as an array, without a copy."""
        dtype = self._dtype(code, like)
        if not pointer or 0 in shape:
            return np.empty(shape, dtype)
        array = np.asarray(_Memory(pointer, shape, code, owner, False))
        return array if array.dtype == dtype else array.view(dtype)


class TorchArrays:
    """Reads and creates torch tensors on the CPU and on GPUs."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.Tensor, self._Parameter, self._strided = torch.Tensor, torch.nn.Parameter, torch.strided
        self.codes = {torch.float32: 2, torch.float16: 1, torch.bfloat16: 0, torch.int32: I32, torch.int64: I64, torch.uint8: U8}
        if hasattr(torch, "float8_e4m3fn"):
            self.codes[torch.float8_e4m3fn] = 3
        self.dtypes = {code: dtype for dtype, code in self.codes.items()}
        #: Returns the handle of a GPU's current stream, without creating a stream object if torch supports that.
        self.raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream)

        # The allocation function used by code that torch.compile generates; it takes less than half the time of
        # Tensor.new_empty.
        made = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        self._empty_cpu, self._empty_cuda = getattr(made, "_empty_strided_cpu", None), getattr(made, "_empty_strided_cuda", None)
        self.increment_version = self._find_increment_version(torch)
        self.records = torch.is_grad_enabled
        self._current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)

    @staticmethod
    def _find_increment_version(torch: Any) -> Any:
        """Returns a function that takes a sequence of tensors: torch's own, of which older versions take a single tensor."""
        try:
            torch._C._increment_version(())
            return torch._C._increment_version
        except (AttributeError, TypeError, RuntimeError):
            def one_by_one(tensors: Sequence[Any]) -> None:
                for each in tensors:
                    torch.autograd.graph.increment_version(each)

            return one_by_one

    def code(self, tensor: Any) -> int:
        return self.codes.get(tensor.dtype, -1)

    def rows(self, number: int, columns: int, like: Any) -> Any:
        """Creates a tensor [number, columns] with the type and device of `like`, which must not be an instance of a Tensor
        subclass."""
        if like.is_cuda:
            if self._empty_cuda is not None and like.get_device() == self._current_device():
                return self._empty_cuda((number, columns), (columns, 1), like.dtype)
        elif self._empty_cpu is not None:
            return self._empty_cpu((number, columns), (columns, 1), like.dtype)
        return like.new_empty((number, columns))

    def pointer(self, tensor: Any) -> int:
        return tensor.data_ptr()

    def is_dense(self, tensor: Any) -> bool:
        return tensor.layout is self._strided and tensor.is_contiguous()

    def has_memory(self, tensor: Any) -> bool:
        """Returns whether the tensor's elements are stored in its memory, which is false for sparse tensors and wrappers such
        as DTensor."""
        if type(tensor) is self.Tensor or type(tensor) is self._Parameter:
            return tensor.layout is self._strided
        return tensor.layout is self._strided and (not tensor.numel() or tensor.data_ptr() != 0)

    def where(self, tensor: Any) -> Tuple[int, int]:
        return (CUDA, tensor.device.index) if tensor.is_cuda else (CPU if tensor.device.type == "cpu" else -1, -1)

    def stream(self, tensor: Any) -> int:
        return self.raw_stream(tensor.get_device()) if tensor.is_cuda else 0

    def empty(self, shape: Sequence[int], code: int, like: Any) -> Any:
        if self.codes.get(like.dtype) == code:
            return like.new_empty(shape)
        return self.torch.empty(shape, dtype=self.dtypes[code], device=like.device)

    def wrap(self, pointer: Optional[int], shape: Sequence[int], code: int, owner: Any, like: Any) -> Any:
        """Wraps library memory as a tensor on `like`'s device, without a copy."""
        dtype = self.dtypes[code]
        if not pointer or 0 in shape:
            return self.torch.empty(shape, dtype=dtype, device=like.device)
        if like.is_cuda:
            # torch's protocol lacks unsigned 16-bit integers, so bf16 bits are passed as signed integers.
            memory = _Memory(pointer, shape, code, owner, True)
            if code == 0:
                memory.__cuda_array_interface__["typestr"] = "<i2"
            tensor = self.torch.as_tensor(memory, device=like.device)
        else:
            array = np.asarray(_Memory(pointer, shape, code, owner, False))
            tensor = self.torch.from_numpy(array.view(np.int16) if code == 0 else array)
        return tensor if tensor.dtype == dtype else tensor.view(dtype)


NUMPY = NumpyArrays()
_torch: Optional[TorchArrays] = None
Arrays = Union[NumpyArrays, TorchArrays]


class Taken(NamedTuple):
    """An accepted argument: its address, shape and type."""

    pointer: int
    shape: Tuple[int, ...]
    code: int
    array: Any
    arrays: Arrays


def is_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def arrays_of(array: Any, name: str) -> Tuple[Any, Arrays]:
    """Returns the array, or its numpy counterpart if it supports DLPack, and the object that handles arrays of its kind."""
    global _torch
    if is_tensor(array):
        if _torch is None:
            _torch = TorchArrays(sys.modules["torch"])
        return array, _torch
    if isinstance(array, np.ndarray):
        return array, NUMPY
    if hasattr(array, "__dlpack__"):
        try:
            return np.from_dlpack(array), NUMPY
        except Exception as error:  # the other library may raise anything
            invalid(f"{name} is {type(array).__module__}.{type(array).__name__}, which numpy cannot read by DLPack ({error}): give a numpy "
                    f"array or a torch tensor; bits of bf16 may be uint16, of fp8 uint8")
    invalid_type(f"{name} is {type(array).__name__}: must be a numpy array or a torch tensor (or speak DLPack, on the CPU)")


def written(*arrays: Any) -> None:
    """Increments the version counters of the torch tensors among `arrays`, which the library has overwritten. Autograd then
    rejects a backward pass that needs their previous content."""
    if _torch is not None:
        _torch.increment_version([each for each in arrays if isinstance(each, _torch.Tensor)])


def describe(shape: Sequence[object]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _fits(given: Sequence[int], shape: Sequence[Union[int, str]]) -> bool:
    """Returns whether the shape `given` matches `shape`, in which a str matches any number."""
    if len(given) != len(shape):
        return False
    for want, got in zip(shape, given):
        if want != got and not isinstance(want, str):
            return False
    return True


def arrays_of_torch() -> Any:
    """Returns the tensor handler; call it only after :func:`code_of` has recognized a tensor."""
    return _torch


def code_of(tensor: Any, shape: Sequence[int], codes: Tuple[int, ...], backend: int) -> Optional[int]:
    """Returns the row or element type of a torch tensor that :func:`take` would accept with exactly this shape, or None if only
    :func:`take` can decide."""
    if _torch is None or not isinstance(tensor, _torch.Tensor):
        return None
    code = _torch.codes.get(tensor.dtype)
    if code in codes and tensor.shape == shape and (tensor.is_cuda if backend else tensor.is_cpu) and tensor.is_contiguous():
        return code
    return None


def code_of_rows(tensor: Any, columns: int, codes: Tuple[int, ...], backend: int) -> Optional[int]:
    """Like :func:`code_of`, for any number of rows."""
    if _torch is None or not isinstance(tensor, _torch.Tensor):
        return None
    code = _torch.codes.get(tensor.dtype)
    if code in codes and (tensor.is_cuda if backend else tensor.is_cpu) and tensor.is_contiguous():
        shape = tensor.shape
        return code if len(shape) == 2 and shape[1] == columns else None
    return None


class Taker:
    """A tensor argument of one object: its name, its allowed values, and the check applied to values passed in calls. In
    `shape`, a str matches any number. `strided`: the tensor need not be dense. `written`: the call writes to it. `by_dtype`:
    types accepted by objects of `owner` that are created with such a `dtype`."""

    __slots__ = ("name", "shape", "types", "backend", "strided", "written", "by_dtype", "owner", "_rest")

    def __init__(self, name: str, shape: Tuple[Union[str, int], ...], types: Tuple[int, ...], backend: int, strided: bool = False,
                 written: bool = False, by_dtype: Tuple[int, ...] = (), owner: str = "") -> None:
        self.by_dtype, self.owner = by_dtype, owner
        self.name, self.shape, self.types, self.backend, self.strided, self.written = name, shape, types, backend, strided, written
        self._rest = shape[1:]

    def __call__(self, array: Any, first: Optional[int] = None, types: Optional[Tuple[int, ...]] = None, device: int = -1) -> Taken:
        """Returns the address, shape and type of `array`. Raises InvalidArgument listing the allowed values. `first`: the size
        of the first dimension, if known only per call. `types`: the types allowed in this call. `device`: the GPU that must
        hold the array; -1: the group's GPU, which the library checks."""
        codes, shape = types or self.types, self.shape if first is None else (first, *self._rest)
        # Fast paths for correct calls.
        if type(array) is np.ndarray:
            code, flags = _NUMPY_CODES.get(array.dtype), array.flags
            if code in codes and not self.backend and (array.shape == shape or _fits(array.shape, shape)) and flags.aligned and (self.strided or flags.c_contiguous) \
                    and (flags.writeable or not self.written):
                return Taken(array.ctypes.data if array.size else 0, array.shape, code, array, NUMPY)  # type: ignore[arg-type]
        elif _torch is not None and isinstance(array, _torch.Tensor):
            code, given = _torch.codes.get(array.dtype), array.shape
            here = array.is_cuda and (device < 0 or array.get_device() == device) if self.backend else array.is_cpu
            if here and code in codes and (given == shape or _fits(given, shape)) and (type(array) is _torch.Tensor or _torch.has_memory(array)):
                try:
                    if self.strided or array.is_contiguous():
                        return Taken(array.data_ptr(), given, code, array, _torch)  # type: ignore[arg-type]
                except RuntimeError:  # a sparse tensor
                    pass
        return self._look(array, shape, codes, device)

    def _look(self, array: Any, shape: Sequence[Union[int, str]], codes: Tuple[int, ...], device: int) -> Taken:
        """Like :meth:`__call__`, but handles any array and raises an error that gives the reason for a rejection."""
        name = self.name
        array, arrays = arrays_of(array, name)
        given = tuple(array.shape)
        if not _fits(given, shape):
            invalid(f"{name} has the shape {describe(given)}: must be {describe(shape)}")
        code = arrays.code(array)
        if code not in codes:
            self._refuse_type(array, code, codes)
        where, index = arrays.where(array)
        if where != self.backend:
            wanted = "on a GPU (the group's backend is cuda)" if self.backend == CUDA else "in host memory (the group's backend is cpu)"
            invalid(f"{name} is on {getattr(array, 'device', 'the CPU')}: must be {wanted}")
        if device >= 0 and index != device:
            invalid(f"{name} is on cuda:{index}: must be on cuda:{device}, with the rest")
        _check_memory(array, arrays, name, self.strided, self.written)
        return Taken(arrays.pointer(array), given, code, array, arrays)

    def _refuse_type(self, array: Any, code: int, codes: Tuple[int, ...]) -> NoReturn:
        """Raises InvalidArgument for an element type, and names the ways to an accepted one."""
        ways = []
        if code in self.by_dtype:
            ways.append(f"for {name_of(DTYPES, code)}, create the {self.owner} with dtype='{name_of(DTYPES, code)}'")
        elif F32 in codes and str(array.dtype).endswith("float64"):
            ways.append(f"{'.float()' if is_tensor(array) else '.astype(numpy.float32)'} converts it")
        if BF16 in codes and F32 not in codes and not is_tensor(array):
            ways.append("numpy has no bf16: give its bits as uint16, or ml_dtypes.bfloat16")
        invalid("; ".join([f"{self.name} is {array.dtype}: must be {listed(name_of(_ELEMENTS, each) for each in codes)}", *ways]))


def take(array: Any, name: str, shape: Sequence[Union[int, str]], codes: Tuple[int, ...], backend: int, device: int = -1,
         strided: bool = False, written: bool = False) -> Taken:
    """Accepts `array` as an argument whose shape depends on other arguments of the call."""
    return Taker(name, tuple(shape), codes, backend, strided, written)(array, None, None, device)


def _check_memory(array: Any, arrays: Arrays, name: str, strided: bool, written: bool) -> None:
    """Rejects arrays whose memory does not hold the elements that the library would read or write."""
    if not arrays.has_memory(array):
        kind = type(array).__name__ if isinstance(array, np.ndarray) else f"{type(array).__name__}, layout {array.layout}"
        invalid(f"{name} is a {kind}: must be a plain array in memory of its own, without masks, and not sparse")
    if isinstance(array, np.ndarray):
        if not array.flags.aligned:
            invalid(f"{name} begins at an address that is no multiple of its elements' size: give numpy.array(x), a copy")
        if written and not array.flags.writeable:
            invalid(f"{name} is read-only, and the call writes into it: give an array that can be written")
    if not strided and not arrays.is_dense(array):
        invalid(f"{name} is not dense and row-major: give {'x.contiguous()' if is_tensor(array) else 'numpy.ascontiguousarray(x)'}")


def bytes_of(taken: Taken) -> int:
    """Returns the number of bytes from the first element to the end of the last, assuming no gaps."""
    size = _BYTES[taken.code]
    for each in taken.shape:
        size *= each
    return size


def check_apart(name: str, written: Taken, **others: Optional[Taken]) -> None:
    """Rejects an output argument that shares memory with another argument, because other ranks read that argument's rows during
    the call."""
    begin = written.pointer
    end = begin + bytes_of(written)
    for other, taken in others.items():
        if taken is None:
            continue
        first = taken.pointer
        if begin <= first < end or (first < begin < first + bytes_of(taken) and begin < end):
            refuse_overlap(name, other)


def refuse_overlap(name: str, other: str) -> NoReturn:
    """Raises InvalidArgument because two arguments share memory."""
    invalid(f"{name} shares memory with {other}: the call reads {other} while it writes {name}; give {name} memory of its own")
