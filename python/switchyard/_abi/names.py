# SPDX-License-Identifier: Apache-2.0
"""Words for the enumerations of the C interface, and errors that name the allowed values."""
from __future__ import annotations

from typing import Dict, NoReturn, Union

from ..errors import InvalidArgument, InvalidType

BACKENDS = {"cpu": 0, "cuda": 1}
NETWORKS = {"sockets": 0, "mpi": 1, "nccl": 2}
DTYPES = {"bf16": 0, "f16": 1, "f32": 2, "fp8_e4m3": 3}
DTYPE_BYTES = {0: 2, 1: 2, 2: 4, 3: 1}
SCALES = {"none": 0, "f32": 1, "ue8m0": 2}
LAYOUTS = {"rank_major": 0, "expert_major": 1}
STAGINGS = {"direct": 0, "ring": 1}
SIZES = {"exact": 0, "capacity": 1, "worst_case": 2, "automatic": 3}
OVERFLOWS = {"fail": 0, "drop_and_report": 1}
INVALID_IDS = {"raise": 0, "count": 1}
PADDINGS = {"zero": 0, "unspecified": 1}
ORDERS = {"per_rank": 0, "per_route": 1, "per_host": 2}
SCALE_ORDERS = {"row_major": 0, "column_major": 1}
SENDINGS = {"per_rank": 0, "per_route": 1}
STORAGES = {"packed": 0, "view": 1}
TUNING_MODES = {"normal": 0, "low_latency": 1, "flat": 2, "ledger": 3, "normal_expert_major": 4}
WEIGHT_ORDERS = {"nk": 0, "kn": 1}
EPILOGUES = {"none": 0, "relu": 1, "silu": 2, "swiglu": 3}
MOE_EXCHANGES = {"automatic": 0, "normal": 1, "low_latency": 2}
MOE_FORMS = {"automatic": 0, "separate": 1, "fused": 2}

BF16, F16, F32, FP8 = 0, 1, 2, 3
RANK_MAJOR, EXPERT_MAJOR = 0, 1
PER_RANK, PER_ROUTE = 0, 1
CPU, CUDA = 0, 1

# Names of the same types in other libraries.
_ALIASES = {"bfloat16": "bf16", "float16": "f16", "half": "f16", "float32": "f32", "float": "f32", "float8_e4m3fn": "fp8_e4m3",
            "fp8": "fp8_e4m3"}


def name_of(table: Dict[str, int], value: int) -> str:
    """Returns the word for `value`."""
    return next((word for word, number in table.items() if number == value), str(value))


def invalid(text: str) -> NoReturn:
    """Raises InvalidArgument for an error that Python found before the library."""
    error = InvalidArgument(text)
    error.found_by_python = True
    raise error


def invalid_type(text: str) -> NoReturn:
    """Raises InvalidType, which is also a TypeError."""
    error = InvalidType(text)
    error.found_by_python = True
    raise error


def value_of(table: Dict[str, int], argument: str, word: Union[str, None]) -> int:
    """Returns the number of `word`. `None` is "none" where that word exists."""
    key = "none" if word is None and "none" in table else word
    try:
        return table[key]  # type: ignore[index]
    except (KeyError, TypeError):
        invalid(f"{argument} = {word!r}: must be {', '.join(map(repr, table))}")


def dtype_of(argument: str, dtype: object) -> int:
    """Returns the number of a row type, given as one of the package's words, or as a numpy or torch dtype."""
    word = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
    word = _ALIASES.get(word, word)
    if word in DTYPES:
        return DTYPES[word]
    named = getattr(dtype, "__name__", None)  # numpy.float32 is a class
    if named is not None and _ALIASES.get(named, named) in DTYPES:
        return DTYPES[_ALIASES.get(named, named)]
    invalid(f"{argument} = {dtype!r}: must be {', '.join(map(repr, DTYPES))}, or the numpy or torch dtype of that name")
