# SPDX-License-Identifier: Apache-2.0
"""Sources of other projects that call Switchyard, as scripts/clients.sh unpacks them."""
import os
import sys

import pytest

from clone import ROOT


def source_of(name):
    """Returns the folder with the unmodified sources of the client `name`, as on the package index, and appends it to ``sys.path``.
    Skips the test if it was not fetched, and fails instead if SWITCHYARD_CLIENTS is set, as in CI."""
    found = sorted((ROOT / "build/clients").glob(f"{name.replace('-', '_')}-*"))
    if not found:
        reason = f"scripts/clients.sh has not fetched {name}"
        if os.environ.get("SWITCHYARD_CLIENTS"):
            pytest.fail(reason)
        pytest.skip(reason, allow_module_level=True)
    if str(found[-1]) not in sys.path:
        sys.path.append(str(found[-1]))
    return found[-1]
