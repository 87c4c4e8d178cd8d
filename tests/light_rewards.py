"""Rewards for worker processes, which import this file and no torch."""

import asyncio
import contextlib
import multiprocessing
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pspo.tasks import Reward

FORKS = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Bad(Reward):
    """Draws from all generators; as long as the file "broken" is there, it fails at step 4."""

    rows: int = 8  # of a training rollout; 4 in a validation

    def __call__(self, completions, step):
        import numpy as np
        import torch

        noise = random.random() + np.random.random() + torch.rand(()).item()  # noqa: NPY002
        if step == 4 and len(completions) == self.rows and Path("broken").exists():
            raise KeyError("no such key")
        return [len(text) + row % 3 + noise for row, text in enumerate(completions)]  # never all the same


def failing_term(losses, x):
    if x.step == 4 and Path("broken").exists():
        raise KeyError("no such key")
    return losses


def lengths_by_processes(completions):
    """A pool, one that is late, and a process that is ended at once: all end by SIGTERM."""
    with FORKS.Pool(4) as pool:
        lengths = pool.map(len, completions)
    with FORKS.Pool(1) as pool, contextlib.suppress(multiprocessing.TimeoutError):
        pool.apply_async(time.sleep, (60,)).get(timeout=0.1)
    for _ in range(5):
        process = FORKS.Process(target=time.sleep, args=(60,))
        process.start()
        process.terminate()
        process.join(20)
        assert process.exitcode == -signal.SIGTERM
    child = subprocess.Popen(["sleep", "60"])
    child.terminate()
    assert child.wait(20) == -signal.SIGTERM
    return lengths


@dataclass(frozen=True)
class Leaves(Reward):
    """A reward that leaves by what is no Exception."""

    def __call__(self, completions):
        raise SystemExit("bye")


SEMAPHORE = asyncio.Semaphore(1)  # of the first loop that waits for it


async def calls_in_turn(completions):
    async def one(text):
        async with SEMAPHORE:
            await asyncio.sleep(0.001)
            if text == "exit":
                sys.exit(3)
            return len(text)

    return await asyncio.gather(*map(one, completions))
