# SPDX-License-Identifier: Apache-2.0
"""Argument kinds: the declarations used in arguments.py, and a check of values for each kind.

``check(name, value)`` returns the value in the library's form, or raises InvalidArgument (InvalidType for a wrong type), whose
message contains the argument, its value and the allowed values. Tensors are checked by :func:`.arrays.take` against the sizes
of the call.
"""
from __future__ import annotations

import math
import operator
import os
from typing import Any, Dict, NamedTuple, NoReturn, Optional, Tuple, Union

from .names import DTYPES, dtype_of, invalid, invalid_type, value_of


def shown(value: object) -> str:
    """Returns the text of `value` for an error message, at most 60 characters long."""
    try:
        text = repr(value)
    except Exception:  # an object of the caller's
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _wrong_type(name: str, value: object, allowed: str) -> NoReturn:
    invalid_type(f"{name} = {shown(value)} ({type(value).__name__}): must be {allowed}")


class Tensor(NamedTuple):
    """An array or tensor. `shape` contains numbers and symbols; a symbol defined by neither the object nor the call matches any
    number. `types` are the allowed row and element types. `written`: the call writes to the array, which must not be read-only
    or share memory with another argument. `strided`: the array need not be dense. `pair`: fp8 rows are passed as (rows,
    scales). `by_dtype`: types that the array may have if the object is created with a matching keyword `dtype`."""

    shape: Tuple[Union[str, int], ...]
    types: Tuple[int, ...]
    written: bool = False
    strided: bool = False
    optional: bool = False
    pair: bool = False
    by_dtype: Tuple[int, ...] = ()


class Integer(NamedTuple):
    """An integer in [low, high]: a Python or numpy integer, or any object with ``__index__`` except a bool."""

    low: int
    high: int
    optional: bool = False

    def check(self, name: str, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if type(value) is not int:
            if isinstance(value, bool) or not hasattr(type(value), "__index__"):
                _wrong_type(name, value, f"an integer{' or None' if self.optional else ''}")
            try:
                value = operator.index(value)
            except TypeError:  # an array of several numbers
                _wrong_type(name, value, "an integer")
        if not self.low <= value <= self.high:
            invalid(f"{name} = {value}: must be in [{self.low}, {self.high}]")
        return value


class Real(NamedTuple):
    """A number that is not NaN."""

    def check(self, name: str, value: Any) -> float:
        if isinstance(value, (str, bytes, bool)):
            _wrong_type(name, value, "a number")
        try:
            number = float(value)
        except (TypeError, ValueError):
            _wrong_type(name, value, "a number")
        if math.isnan(number):
            invalid(f"{name} = {number}: must be a number")
        return number


class Seconds(NamedTuple):
    """A duration of at least one millisecond. `optional`: None is allowed and means no deadline, or the default."""

    optional: bool = False

    def check(self, name: str, value: Any) -> Optional[float]:
        if value is None and self.optional:
            return None
        if value is None:
            _wrong_type(name, value, "a number of seconds")
        number = Real().check(name, value)
        if number < 0.001:
            invalid(f"{name} = {value!r}: must be at least 0.001 (seconds){', or None' if self.optional else ''}")
        return number


class Word(NamedTuple):
    """The name of an enumeration value. None stands for "none" if the enumeration contains it, or for the default if
    `optional`."""

    table: Dict[str, int]
    optional: bool = False

    def check(self, name: str, value: Any) -> Any:
        if value is not None or not self.optional:
            value_of(self.table, name, value)
        return value


class RowType(NamedTuple):
    """The name of a row type, or the numpy or torch dtype with that name."""

    optional: bool = False

    def check(self, name: str, value: Any) -> Any:
        if value is not None or not self.optional:
            dtype_of(name, value)
        return value


class Flag(NamedTuple):
    """True or False, or None if `optional`."""

    optional: bool = False

    def check(self, name: str, value: Any) -> Any:
        if not (isinstance(value, bool) or type(value).__name__ in ("bool_", "bool") or (value is None and self.optional)):
            _wrong_type(name, value, "True or False")
        return value


class Text(NamedTuple):
    """A str without NUL."""

    def check(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            _wrong_type(name, value, "a str")
        if "\0" in value:
            invalid(f"{name} = {shown(value)}: must not have NUL in it")
        return value


class Path(NamedTuple):
    """A str or a path."""

    optional: bool = False

    def check(self, name: str, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if not isinstance(value, (str, os.PathLike)):
            _wrong_type(name, value, "a str or a path")
        return Text().check(name, os.fspath(value)) and value


class Content(NamedTuple):
    """Bytes."""

    def check(self, name: str, value: Any) -> bytes:
        if not isinstance(value, (bytes, bytearray, memoryview)):
            _wrong_type(name, value, "bytes")
        return bytes(value)


class Instance(NamedTuple):
    """An object of this package, described by its class name and by how callers obtain it."""

    name: str
    source: str
    optional: bool = False

    def check(self, name: str, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if not any(each.__name__ == self.name and each.__module__.startswith("switchyard") for each in type(value).__mro__):
            _wrong_type(name, value, f"a {self.name}{' or None' if self.optional else ''} ({self.source})")
        return value


class Foreign(NamedTuple):
    """An object of another package's class, recognized by an attribute, or None if `optional`."""

    what: str
    attribute: str
    optional: bool = False

    def check(self, name: str, value: Any) -> Any:
        if not hasattr(value, self.attribute) and not (value is None and self.optional):
            _wrong_type(name, value, self.what)
        return value


class Any_(NamedTuple):
    """A value passed unchanged to the caller's function."""

    def check(self, name: str, value: Any) -> Any:
        return value


class Several(NamedTuple):
    """A tuple or list of at most `most` tensors, a single tensor, or None."""

    each: Tensor
    most: int


INT32 = (1 << 31) - 1
INT64 = (1 << 63) - 1
#: Any int32_t or int64_t; the library checks the argument's allowed values.
ANY_INT32, ANY_INT64 = Integer(-INT32 - 1, INT32), Integer(-INT64 - 1, INT64)
BYTES = Integer(0, INT64)
ROW_TYPES = tuple(DTYPES.values())
