# SPDX-License-Identifier: Apache-2.0
"""Gradients of shares. A rank has only the gradients of its own experts. A function that reduces the gradients of all
parameters to one value, such as a norm or a test that all are finite, therefore needs the gradients from every rank. Gradients
of shares are marked tensors, for which the torch functions that compute such values (``clip_grad_norm_``, ``GradScaler``) are
collective and return the value of the undivided model. In all other operations, the gradients behave like ordinary tensors.
"""
from __future__ import annotations

import math
import struct
import weakref
from typing import Any, List, Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

_whole: Any = torch._C.DisableTorchFunctionSubclass


def _over_ranks(group: Any, norms: Sequence[float], order: float) -> List[float]:
    """Returns the norms of vectors distributed over the ranks, given the norms of this rank's parts. Collective."""
    parts = [struct.unpack(f"{len(norms)}d", each) for each in group.all_gather(struct.pack(f"{len(norms)}d", *norms))]
    columns = list(zip(*parts))
    if math.isinf(order):
        chosen = max if order > 0 else min
        return [math.nan if any(map(math.isnan, column)) else chosen(column) for column in columns]
    if order == 0:
        return [math.fsum(column) for column in columns]
    return [math.inf if any(map(math.isinf, column)) else math.fsum(each ** order for each in column) ** (1 / order) for column in columns]


class _Norm(torch.Tensor):
    """A norm over all ranks. It can be combined with DTensor norms, such as those from FSDP."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _whole():
            if func is torch.stack:
                norms = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in args[0]]
                return func(norms, *args[1:], **(kwargs or {}))
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(_Norm) if func is torch.Tensor.to else result


class ShareGradient(torch.Tensor):
    """The gradient of a share."""

    _group: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        collective: Any = _COLLECTIVE.get(func)
        if collective is not None:
            return collective(func, *args, **kwargs)
        with _whole():
            if func is torch.Tensor.__deepcopy__:
                return mark(args[0].as_subclass(torch.Tensor).clone(), args[0]._group)
            return func(*args, **kwargs)


def mark(gradient: Any, group: Any) -> Any:
    """Marks `gradient` as the gradient of a share."""
    marked = gradient.as_subclass(ShareGradient)
    marked._group = group
    return marked


def _norm(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    order = kwargs.get("ord", kwargs.get("p", args[0] if args else 2))
    with _whole():
        result = func(tensor, *args, **kwargs)
    if result.dim() != 0 or not isinstance(tensor, ShareGradient):
        return result  # norms of parts of it
    order = 2.0 if order in (None, "fro") else float(order)
    total, = _over_ranks(tensor._group, [float(result)], order)
    return result.new_tensor(total).as_subclass(_Norm)


def _norms(func: Any, tensors: Any, order: Any = 2, **kwargs: Any) -> Any:
    order = kwargs.pop("ord", order)
    with _whole():
        results = list(func(tensors, order, **kwargs))
    of_shares = [i for i, each in enumerate(tensors) if isinstance(each, ShareGradient)]
    totals = _over_ranks(tensors[of_shares[0]]._group, [float(results[i]) for i in of_shares], float(order))
    for i, total in zip(of_shares, totals):
        results[i] = results[i].new_tensor(total).as_subclass(_Norm)
    return results


def _check_and_unscale(func: Any, tensors: Any, found: Any, scale: Any) -> Any:
    """Used by GradScaler: a non-finite value on one rank makes all ranks skip the step."""
    with _whole():
        func(tensors, found, scale)
    group = next(each._group for each in tensors if isinstance(each, ShareGradient))
    with _whole():
        found.fill_(_over_ranks(group, [float(found)], math.inf)[0])


_COLLECTIVE = {torch.linalg.vector_norm: _norm, torch.linalg.norm: _norm, torch.norm: _norm, torch.Tensor.norm: _norm,
               torch._foreach_norm: _norms, torch._amp_foreach_non_finite_check_and_unscale_: _check_and_unscale}


_shares: Any = WeakIdKeyDictionary()  # share of each parameter whose gradients are marked


def share_of_parameter(parameter: Any) -> Any:
    """Returns the share that contains `parameter`, or None."""
    reference = _shares.get(parameter)
    return None if reference is None else reference()


def follow(parameter: Any, share: Any, divisor: int) -> None:
    """Marks all later gradients of `parameter` and divides the gradient added by each pass by `divisor`. Call once per
    parameter."""
    if parameter in _shares:
        return
    group = share.group
    if divisor != 1:
        parameter.register_hook(lambda gradient: gradient / divisor)
    parameter.register_post_accumulate_grad_hook(lambda each: _mark_gradient(each, group))
    _shares[parameter] = weakref.ref(share)


def _mark_gradient(parameter: Any, group: Any) -> None:
    if parameter.grad is not None and type(parameter.grad) is not ShareGradient:
        parameter.grad = mark(parameter.grad, group)
