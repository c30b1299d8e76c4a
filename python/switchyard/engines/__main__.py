# SPDX-License-Identifier: Apache-2.0
"""``python -m switchyard.engines``: lists the engines of this environment and the active form in each. Imports no engine."""
from __future__ import annotations

import argparse
import sys
from typing import Optional, Sequence

from . import _found

_DESCRIPTION = """\
Lists vLLM, SGLang, torchtitan, Megatron-core, NeMo Automodel and transformers: the installed version, whether it is supported, what
enables Switchyard in it, and what would be active in a process that this environment starts. Reads metadata and environment
variables; imports no engine. Exit status 1: an environment variable has a value that is refused."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Prints the list. Returns the exit status."""
    argparse.ArgumentParser(prog="python -m switchyard.engines", description=_DESCRIPTION, allow_abbrev=False,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(arguments)
    found = [_found.find(each) for each in _found.ENGINES]
    print("\n".join(line for each in found for line in _found.lines_of(each)))
    return int(any(each.refused for each in found))


if __name__ == "__main__":
    sys.exit(main())
