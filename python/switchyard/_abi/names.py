# SPDX-License-Identifier: Apache-2.0
"""Names for the enumerations of the C interface, and errors that list the allowed values."""
from __future__ import annotations

from typing import Dict, Iterable, NoReturn, Union

from ..errors import InvalidArgument, InvalidType
from .enumerations import (ACCUMULATIONS, BACKENDS, DTYPES, DTYPE_BITS, EPILOGUES, GRANULARITIES, INVALID_IDS, LAYOUTS,
                           MOE_EXCHANGES, MOE_FORMS, NETWORKS, ORDERS, OUTPUT_SCALINGS, OVERFLOWS, PADDINGS, SCALES,
                           SCALE_ORDERS, SENDINGS, SIZES, STAGINGS, STORAGES, TUNING_MODES, WEIGHT_ORDERS)  # noqa: F401

BF16, F16, F32, FP8 = 0, 1, 2, 3
RANK_MAJOR, EXPERT_MAJOR = 0, 1
PER_RANK, PER_ROUTE = 0, 1
CPU, CUDA = 0, 1

# Names of the row types in other libraries.
_ALIASES = {"bfloat16": "bf16", "float16": "f16", "half": "f16", "float32": "f32", "float": "f32", "float8_e4m3fn": "fp8_e4m3",
            "fp8": "fp8_e4m3"}


def bytes_of(dtype: int, elements: int) -> int:
    """Returns the number of bytes of `elements` consecutive elements; the last byte may be partly used."""
    return (elements * DTYPE_BITS[dtype] + 7) // 8


def name_of(table: Dict[str, int], value: int) -> str:
    """Returns the name of `value`."""
    return next((word for word, number in table.items() if number == value), str(value))


def invalid(text: str) -> NoReturn:
    """Raises InvalidArgument for an error detected in Python before the library is called."""
    error = InvalidArgument(text)
    error.found_by_python = True
    raise error


def invalid_type(text: str) -> NoReturn:
    """Raises InvalidType, which is also a TypeError."""
    error = InvalidType(text)
    error.found_by_python = True
    raise error


def listed(words: Iterable[object]) -> str:
    """Returns "a", "a or b" or "a, b or c"."""
    texts = [str(word) for word in words]
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def value_of(table: Dict[str, int], argument: str, word: Union[str, None]) -> int:
    """Returns the number for the name `word`. None stands for "none" if the enumeration contains it."""
    key = "none" if word is None and "none" in table else word
    try:
        return table[key]  # type: ignore[index]
    except (KeyError, TypeError):
        invalid(f"{argument} = {word!r}: must be {listed(map(repr, table))}")


def dtype_of(argument: str, dtype: object) -> int:
    """Returns the number of a row type given by its name in this package or as a numpy or torch dtype."""
    word = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
    word = _ALIASES.get(word, word)
    if word in DTYPES:
        return DTYPES[word]
    named = getattr(dtype, "__name__", None)  # numpy.float32 is a class
    if named is not None and _ALIASES.get(named, named) in DTYPES:
        return DTYPES[_ALIASES.get(named, named)]
    invalid(f"{argument} = {dtype!r}: must be {listed(map(repr, DTYPES))}, as a word or as a numpy or torch dtype")
