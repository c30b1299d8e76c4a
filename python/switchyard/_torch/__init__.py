# SPDX-License-Identifier: Apache-2.0
"""Calls as operators of torch, with gradients and for torch.compile. Private.

Modules of this package import torch, except ``registry``; callers therefore import them only in the calls that need them.
"""
