# SPDX-License-Identifier: Apache-2.0
"""Support for shares under DistributedDataParallel and FSDP. Shares are not replicas, so wrappers must not copy, average or
shard them."""
from __future__ import annotations

import sys
from typing import Any, Iterator, List, Tuple

from ..errors import InvalidArgument
from .find import share_of


def of_experts(model: Any) -> Iterator[Tuple[str, Any]]:
    """Yields the names and parameters of divided experts: shares and parameters added to their modules, such as LoRA
    factors."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if share_of(module) is None:
            continue
        outer = name
        while "." in outer and hasattr(modules[outer.rpartition(".")[0]], "base_layer"):
            outer = outer.rpartition(".")[0]
        for each, parameter in modules[outer].named_parameters():
            yield (f"{outer}.{each}" if outer else each), parameter


def keep_out_of_ddp(model: Any) -> None:
    """Adds the shares to the parameters that DistributedDataParallel(model) ignores."""
    kept = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    model._ddp_params_and_buffers_to_ignore = sorted(kept | {name for name, _ in of_experts(model)})


def _active_ddp() -> Any:
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    return None if parallel is None else getattr(parallel.DistributedDataParallel, "_active_ddp_module", None)


def _is_sharded(module: Any) -> bool:
    """Returns whether fully_shard has been applied to this module."""
    return any(each.__name__ == "FSDPModule" for each in type(module).__mro__)


_AVERAGE = ("averages the other parameters' gradients over the ranks, and those of experts are sums: call parallelize_moe(..., "
            "gradients='mean')")


def check(share: Any, above: List[Any], average: bool) -> None:
    """Raises InvalidArgument if a wrapper does not support shares. Runs before each untraced pass."""
    ddp = _active_ddp()
    if ddp is not None:
        inside = {id(each) for each in share.parameters().values()}
        names = [name for name, each in ddp.module.named_parameters() if id(each) in inside] if ddp not in _checked(share) else []
        missing = [name for name in names if name not in ddp.parameters_to_ignore]
        if missing:
            raise InvalidArgument(f"DistributedDataParallel has the experts {missing[0]} for a replica, and made them those of rank 0: divide the "
                                  "model before it is wrapped, and call switchyard.keep_out_of_ddp(module) on the module that is wrapped")
        _checked(share).add(ddp)
        if not average and share.group.size > 1 and _training():
            raise InvalidArgument(f"DistributedDataParallel {_AVERAGE}")
    if not average and share.group.size > 1 and any(map(_is_sharded, above)) and _training():
        raise InvalidArgument(f"fully_shard {_AVERAGE}")


def _training() -> bool:
    return bool(sys.modules["torch"].is_grad_enabled())


def _checked(share: Any) -> Any:
    """Returns the DDP modules that passed the check."""
    import weakref

    if not hasattr(share, "_ddp"):
        share._ddp = weakref.WeakSet()
    return share._ddp


def check_replaced(share: Any, module: Any, above: List[Any]) -> None:
    """Raises InvalidArgument if FSDP has taken over the share's parameters. Other code may replace them with anything of the
    share's shape."""
    fully = any(map(_is_sharded, above))
    gone = [name for name in share.names if name not in module._parameters and not hasattr(module, "parametrizations")]
    if not fully and not gone:
        return
    kind, how = ("fully_shard", "ignored_params=set(switchyard.expert_parameters(model))") if fully else \
        ("FullyShardedDataParallel", "ignored_states=switchyard.expert_parameters(model)")
    raise InvalidArgument(f"{kind} shards the experts of {share.name}, which are divided among the ranks already: give it {how}")
