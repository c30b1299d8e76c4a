# SPDX-License-Identifier: Apache-2.0
"""Structs and enumerations of the package, compared with the library and, in a clone, with the headers."""
import ctypes
import re
import shutil
import subprocess
import sys

import pytest

import switchyard as sy
from clone import ROOT
from switchyard._abi import ffi as _ffi, names as _names, signatures as _signatures, structs as _structs

HEADERS = ROOT / "include"


@pytest.fixture(scope="module")
def headers():
    if not (HEADERS / "switchyard" / "c").is_dir():
        pytest.skip("the headers are not here: the tests are not in a clone")
    return {path.name: path.read_text(encoding="utf-8") for path in (HEADERS / "switchyard" / "c").glob("*.h")}


def test_sizes_are_those_of_the_library():
    size = ctypes.c_size_t()
    for struct in _structs.ALL:
        assert _ffi.library().functions.sy_struct_bytes(struct.name.encode(), ctypes.byref(size)) == 0
        assert size.value == ctypes.sizeof(struct) == struct().struct_size, struct.name
    assert sy.library_version().startswith(f"{_ffi._MAJOR}.{_ffi._MINOR}.") and sy.library_path()


def test_members_and_defaults_are_those_of_the_headers(headers, tmp_path):
    """A C program prints the offset and size of every member, and the bytes of every INIT macro."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler")
    lines = ["#include <stddef.h>", "#include <stdio.h>", '#include "switchyard/c/layer.h"', '#include "switchyard/c/low_latency.h"',
             '#include "switchyard/c/trace.h"', '#include "switchyard/c/gemm_gradients.h"', '#include "switchyard/c/tuning.h"', '#include "switchyard/c/ledger.h"', '#include "switchyard/c/expert_map.h"', '#include "switchyard/c/gemm.h"',
             "int main(void) {"]
    for struct in _structs.ALL:
        macro = f"SY_{struct.name[3:].upper()}_INIT"
        lines.append(f'  {{ const {struct.name} s = {macro}; printf("{struct.name} -");')
        lines += [f'  printf(" %zu:%zu", offsetof({struct.name}, {name}), sizeof s.{name});' for name, _ in struct._fields_]
        lines.append('  for (size_t i = 0; i < sizeof s; ++i) printf(" %d", ((const unsigned char*)&s)[i]); puts(""); }')
    (tmp_path / "sizes.c").write_text("\n".join([*lines, "  return 0;", "}"]))
    subprocess.run([compiler, "-std=c11", f"-I{HEADERS}", "-o", tmp_path / "sizes", tmp_path / "sizes.c"], check=True)
    printed = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(printed) == len(_structs.ALL)
    for struct, line in zip(_structs.ALL, printed):
        words = [struct.name, "-"]
        words += [f"{getattr(struct, name).offset}:{getattr(struct, name).size}" for name, _ in struct._fields_]
        words += [str(byte) for byte in bytes(struct())]
        assert line == " ".join(words), struct.name


def test_files_are_what_the_generator_makes(headers):
    """structs.py, signatures.py and enumerations.py are generated from the headers."""
    made = subprocess.run([sys.executable, ROOT / "scripts" / "interface" / "generate.py", "--check"], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    assert _signatures.EXCHANGE["sy_exchange_dispatch"] == "pppppp" and _signatures.EXCHANGE["sy_scale_row_bytes"] == "lip"
    assert _signatures.EXCHANGE["sy_group_agree"] == "psispzp" and _signatures.LAYER["sy_moe_layer_create"] == "pppppp"


def test_names_are_those_of_the_headers(headers):
    text = "\n".join(headers.values())
    values = {name: int(number) for name, number in re.findall(r"SY_([A-Z0-9_]+) *=\s*(\d+)", text)}
    types = (HEADERS / "switchyard" / "dtypes.def").read_text(encoding="utf-8")
    values.update({f"DTYPE_{n}": int(v) for n, v in re.findall(r"SY_ROW_TYPE\(\w+, (\w+), (\d)", types)})
    bits = {int(v): int(b) for v, b in re.findall(r"SY_ROW_TYPE\(\w+, \w+, (\d), (\d+)", types)}
    assert len(bits) == len(_names.DTYPES) and bits == _names.DTYPE_BITS
    assert [_names.bytes_of(code, 7) for code in sorted(bits)] == [14, 14, 28, 7]
    for table, prefix in [(_names.BACKENDS, "BACKEND"), (_names.NETWORKS, "NETWORK"),
                          (_names.DTYPES, "DTYPE"), (_names.SCALES, "SCALE"), (_names.LAYOUTS, "LAYOUT"),
                          (_names.STAGINGS, "STAGING"), (_names.SIZES, "SIZE"), (_names.OVERFLOWS, "OVERFLOW"),
                          (_names.PADDINGS, "PADDING"), (_names.ORDERS, "ORDER"), (_names.SCALE_ORDERS, "SCALES"),
                          (_names.SENDINGS, "SENDING"), (_names.STORAGES, "WEIGHTS"), (_names.MOE_EXCHANGES, "MOE_EXCHANGE"),
                          (_names.MOE_FORMS, "MOE_FORM"), (_names.WEIGHT_ORDERS, "WEIGHTS"),
                          (_names.EPILOGUES, "EPILOGUE"), (_names.TUNING_MODES, "TUNING")]:
        for word, number in table.items():
            assert values[f"{prefix}_{word.upper()}"] == number
    for code in sy.Code:
        assert values[code.name] == code
