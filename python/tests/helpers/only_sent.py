# SPDX-License-Identifier: Apache-2.0
"""A plug-in for pytest: tests of GPU ranks run as if there were two ranks, and the scenarios that they send are received by a
process of a team but not run. Tests that send nothing are excluded. It is loaded before helpers that import `run_on_team` and
`run_processes` by name."""
import pickle

import torch

import processes
import team

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2

SENDERS = {"over_ranks", "over_groups", "over_gpus", "on_two", "run_processes"}
_run_on_team = team.run_on_team


def _arrives(_rank, _world, message):
    """Checks that the function can be imported by name in a process that has not collected tests."""
    scenario, _ = pickle.loads(message)
    assert callable(scenario)


def _send(_method, _world, scenario, *arguments, seconds=0, name=None):
    _run_on_team("spawn", 1, _arrives, pickle.dumps((scenario, arguments)))


def _send_to_new_ones(_method, target, world, *arguments, seconds=0):
    _run_on_team("spawn", 1, _arrives, pickle.dumps((target, arguments)))
    return [0] * world


team.run_on_team, processes.run_processes = _send, _send_to_new_ones


def pytest_collection_modifyitems(config, items):
    left_out = [each for each in items if not SENDERS & set(each.function.__code__.co_names)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [each for each in items if each not in left_out]
