"""The process that a run computes in: what the run sets for all of it is put back at the run's end."""

import contextlib
import os
import random

import numpy as np
import torch

from pspo.model.device import VARIABLES
from pspo.rollout.drawing import set_torch_states, torch_states


def restore_at_end(resources: contextlib.ExitStack, device: torch.device) -> None:
    """Put back generators, deterministic mode, the number of threads and variables when ``resources`` are closed."""
    resources.callback(random.setstate, random.getstate())
    resources.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 (users' code may draw from it)
    resources.callback(set_torch_states, torch_states(device), device)  # fork_rng would put them back when collected
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    resources.callback(torch.use_deterministic_algorithms, was_deterministic, warn_only=warns)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    resources.callback(setattr, torch.utils.deterministic, "fill_uninitialized_memory", fills)
    resources.callback(torch.set_num_threads, torch.get_num_threads())
    for name in VARIABLES.keys() - os.environ.keys():
        resources.callback(os.environ.pop, name, None)


def compute_in_order(device: torch.device) -> None:
    """Have a CPU's threads add up gradients in one order."""
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
