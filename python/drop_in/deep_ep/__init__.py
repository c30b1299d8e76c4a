# SPDX-License-Identifier: Apache-2.0
"""``deep_ep`` of the distribution switchyard-deep-ep: the modules of switchyard.deep_ep themselves, under this name."""
import sys

from switchyard._internal import owners as _owners

_owners.check_alone()

import switchyard.deep_ep as _drop_in  # noqa: E402

del sys.modules[__name__]  # this module only leads to the other
_drop_in.install(replace=True)
sys.modules[__name__] = _drop_in
