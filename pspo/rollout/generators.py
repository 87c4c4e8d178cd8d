"""The random numbers of a run: sampling's own, and those that users' code draws from."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pspo import distributed as dist


class Generators:
    """Torch's generators as sampling alone advances them: inside ``with generators:`` they are the global ones.

    Python's, numpy's and torch's global generators are left to users' code: what a reward, an environment or a loss
    draws from them, or seeds, changes no completion. Making one seeds all. The state is that of both, on this rank.
    """

    per_rank = True

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.seed(seed)

    def seed(self, seed: int, steps: int = 0) -> None:
        """Seed all, differently on every rank and after every number of steps.

        On rank 0 at step 0 the seed of sampling is the run's own, as in a single process.
        """
        for for_users in (False, True):
            mixed = np.random.SeedSequence((seed, dist.rank(), steps, for_users)).generate_state(1)
            plain = dist.rank() == 0 and steps == 0 and not for_users
            for seed_generator in (random.seed, np.random.seed, torch.manual_seed):
                seed_generator(seed if plain else int(mixed[0]))
            if not for_users:
                self.state = self.current()

    def __enter__(self) -> None:
        self.users = self.current()
        self.set(self.state)

    def __exit__(self, *_: object) -> None:
        self.state = self.current()
        self.set(self.users)

    def current(self) -> list[Tensor]:
        """The states of torch's global generators: the CPU's, and this GPU's."""
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else [])]

    def set(self, states: list[Tensor]) -> None:
        """Set them; a GPU's state is left out where there is none."""
        cpu, *gpu = (state.cpu() for state in states)
        torch.set_rng_state(cpu)
        if gpu and self.device.type == "cuda":
            torch.cuda.set_rng_state(gpu[0], self.device)

    def state_dict(self) -> dict[str, Any]:
        kind, keys, *rest = np.random.get_state()  # noqa: NPY002 (users' code may draw from it)
        users = {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest], "torch": self.current()}
        return users | {"sampling": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
        self.set(state["torch"])
        self.state = state["sampling"]
