# SPDX-License-Identifier: Apache-2.0
"""Rates from which SlotSelector.balance decides whether weights move (docs/how_to/replicate_experts.md)."""
from __future__ import annotations

from typing import NamedTuple

from ._abi import arguments as _arguments
from ._abi.arguments import named
from ._abi.ffi import byref, check_collective, library, structs
from .group import Group, constructs

__all__ = ["StepRates", "agree_on_step_rates", "measure_step_rates"]


class StepRates(NamedTuple):
    """Keywords of :meth:`SlotSelector.balance`: ``selector.balance(topk_ids, w13, w2, **rates._asdict())``."""

    link_bytes_per_s: float  #: at which a rank sends or receives weights
    seconds_per_row: float  #: of the experts
    seconds_per_move: float  #: fixed costs of moving any weights


def _rates_of(options: structs.BalanceOptions) -> StepRates:
    return StepRates(options.link_bytes_per_s, options.seconds_per_row, options.seconds_per_move)


@constructs
@named("agree_on_step_rates")
def agree_on_step_rates(group: Group, *, link_bytes_per_s: float = 300e9, seconds_per_row: float = 0.14e-6,
                        seconds_per_move: float = 0.5e-3) -> StepRates:
    """Collective. Returns the rates of the slowest rank, so that ranks that measure their own rates compute the same plans."""
    _arguments.check("agree_on_step_rates", group=group, link_bytes_per_s=link_bytes_per_s, seconds_per_row=seconds_per_row,
                     seconds_per_move=seconds_per_move)
    options = structs.BalanceOptions(link_bytes_per_s=link_bytes_per_s, seconds_per_row=seconds_per_row,
                                     seconds_per_move=seconds_per_move)
    check_collective(library().functions.sy_agree_on_step_rates(group.pointer, byref(options)))
    return _rates_of(options)


@constructs
@named("measure_step_rates")
def measure_step_rates(group: Group, *, seconds_per_row: float = 0.14e-6, staging_bytes: int = 64 << 20) -> StepRates:
    """Collective. Measures `link_bytes_per_s` and `seconds_per_move` with calls of :func:`move_weights` in which every rank
    receives temporary weights of up to 64 MiB; `seconds_per_row` is that of the slowest rank. Takes milliseconds within a host, more over
    slow networks, and allocates memory for two such sets of weights, in addition to `staging_bytes`. GPUs: runs on the current
    stream of the group's GPU."""
    _arguments.check("measure_step_rates", group=group, seconds_per_row=seconds_per_row, staging_bytes=staging_bytes)
    options = structs.BalanceOptions(seconds_per_row=seconds_per_row, staging_bytes=staging_bytes)
    check_collective(library().functions.sy_measure_step_rates(group.pointer, byref(options), group._current_stream()))
    return _rates_of(options)
