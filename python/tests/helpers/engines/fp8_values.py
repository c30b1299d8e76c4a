# SPDX-License-Identifier: Apache-2.0
"""The values of fp8 e4m3 rows and weights, in plain torch."""
import torch


def fp8_of(x):
    """Returns the float32 values of rows sent as fp8: groups of 128 columns with the scale amax / 448."""
    groups = x.float().view(*x.shape[:-1], x.shape[-1] // 128, 128)
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).view(x.shape)


def blocks_of(weights):
    """Returns fp8 weights with a scale per block of 128 x 128, and their values."""
    experts, rows, columns = weights.shape
    blocks = weights.float().view(experts, rows // 128, 128, columns // 128, 128)
    scales = blocks.abs().amax((2, 4), keepdim=True) / 448
    q = (blocks / scales).to(torch.float8_e4m3fn)
    return q.view(weights.shape), scales.view(experts, rows // 128, columns // 128), (q.float() * scales).view(weights.shape)


def fp8_mlp(x, w13, w2):
    """SwiGLU of rows in the type of `x`, with intermediate values rounded to fp8."""
    gate, up = (x @ w13.to(x.dtype).T).chunk(2, -1)
    return fp8_of(torch.nn.functional.silu(gate) * up).to(x.dtype) @ w2.to(x.dtype).T
