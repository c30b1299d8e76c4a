#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_struct_sizes.py LIBRARY SOURCE_DIR: checks that sy_struct_bytes supports every struct in the C headers that begins with
struct_size, and nothing else."""
import ctypes
import re
import sys
from pathlib import Path


def main():
    library, source = ctypes.CDLL(sys.argv[1]), Path(sys.argv[2])
    names = set()
    for header in sorted((source / "include" / "switchyard" / "c").glob("*.h")):
        names |= set(re.findall(r"typedef struct (sy_\w+) \{\s*size_t struct_size;", header.read_text(encoding="utf-8")))
    library.sy_struct_bytes.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    bytes_ = ctypes.c_size_t(0)
    problems = [] if len(names) > 30 else [f"only {len(names)} structs found in the headers"]
    for name in sorted(names):
        bytes_.value = 0
        if library.sy_struct_bytes(name.encode(), ctypes.byref(bytes_)) != 0:
            problems.append(f"sy_struct_bytes does not know {name}")
        elif bytes_.value < 16 or bytes_.value % 8 != 0:
            problems.append(f"sy_struct_bytes says that {name} has {bytes_.value} bytes")
    known = set(re.findall(r"SY_STRUCT\((sy_\w+)\)", (source / "src" / "capi" / "structs.def").read_text(encoding="utf-8")))
    problems += [f"sy_struct_bytes knows {name}, which is in no header" for name in sorted(known - names)]
    print("\n".join(problems) or f"{len(names)} structs")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
