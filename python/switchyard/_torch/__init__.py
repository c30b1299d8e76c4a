# SPDX-License-Identifier: Apache-2.0
"""Calls as torch operators, with gradients and for torch.compile. Private.

Except for ``registry``, modules of this package import torch and are therefore imported only inside the calls that need them.
"""
