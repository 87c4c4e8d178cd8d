"""The random numbers of a run: seeds, and the states of generators."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pspo import distributed as dist


def torch_states(device: torch.device) -> list[Tensor]:
    """The states of torch's global generators: the CPU's, and this GPU's."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_torch_states(states: list[Tensor], device: torch.device) -> None:
    """Set them; a GPU's state is left out where there is none."""
    torch.set_rng_state(states[0])
    if len(states) > 1 and device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def mix_seed(seed: int, steps: int, is_user_rng: bool) -> int:
    """32 bits from a seed, this rank, the number of steps, and whose the generators are."""
    return int(np.random.SeedSequence((seed, dist.rank(), steps, is_user_rng)).generate_state(1)[0])


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


class Generators:
    """The sampling's own states of torch's generators; `random_numbers` puts them into the global ones.

    Python's, numpy's and torch's global generators are left to users' code: what a reward, an environment or a loss
    draws from them, or seeds, changes no completion. Making one seeds all. Its state holds both, on this rank.

    Attributes:
        max_rows: at most so many are decoded at a time once memory has run out. What is drawn depends on it, too.
    """

    per_rank = True

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.max_rows = math.inf
        self.seed(seed)

    def seed(self, seed: int, steps: int = 0) -> None:
        """Seed all, differently on every rank and after every number of steps.

        On rank 0 at step 0 the seed of sampling is the run's own, as in a single process.
        """
        is_first = dist.rank() == 0 and steps == 0
        seed_all(seed if is_first else mix_seed(seed, steps, is_user_rng=False))
        self.states = torch_states(self.device)
        seed_all(mix_seed(seed, steps, is_user_rng=True))

    def state_dict(self) -> dict[str, Any]:
        kind, keys, *position = np.random.get_state()  # noqa: NPY002 (users' code may draw from it)
        return {
            "python": random.getstate(),
            "numpy": [kind, keys.tolist(), *position],
            "torch": torch_states(self.device),
            "sampling": self.states,
            "max_rows": self.max_rows,
        }

    def fork_state(self, state: dict[str, Any], changes: dict[str, tuple[Any, Any]]) -> dict[str, Any] | None:
        """A parent's states, unless the seed is another, without the limit that its memory set."""
        return None if "run.seed" in changes else state | {"max_rows": math.inf}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        kind, keys, *position = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *position))  # noqa: NPY002
        set_torch_states(state["torch"], self.device)
        self.states = state["sampling"]
        self.max_rows = state["max_rows"]


@contextmanager
def random_numbers(generators: Generators | None) -> Iterator[None]:
    """Give torch's global generators these states for a `with` block, and keep what they become; nothing for None."""
    if generators is None:
        yield
        return
    device = generators.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        set_torch_states(generators.states, device)
        try:
            yield
        finally:
            generators.states = torch_states(device)
