"""Ranks: one process per GPU, started by torchrun, and what they send each other.

In a single process every function here returns what it was given.
"""

import atexit
import os
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor

from pspo.tasks.workers import end_with_parent

TIMEOUT = 600.0  # seconds that ranks wait for each other
T = TypeVar("T")


def launched_by_torchrun() -> bool:
    """True if torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def local_device() -> torch.device:
    """This process's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if launched_by_torchrun() else torch.device("cuda")


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(gpu) for gpu in range(torch.cuda.device_count())]
    return visible.split(",") if visible else []


def init(strategy: str, timeout: float = TIMEOUT) -> None:
    """Join the other ranks, if torchrun started this one; ``timeout`` is how many seconds they wait for each other.

    Raises ValueError if strategy and launcher do not fit, or there are too few GPUs.
    """
    if not launched_by_torchrun():
        if strategy != "none":
            raise ValueError(f"--distributed.strategy {strategy} needs torchrun --nproc-per-node N -m pspo.train ...")
        return
    backend = "gloo"
    gpus = torch.cuda.device_count()
    if gpus:
        processes = int(os.environ["LOCAL_WORLD_SIZE"])
        if processes > gpus:
            raise ValueError(f"--nproc-per-node {processes}: this machine has {gpus} GPUs")
        torch.cuda.set_device(local_device())
        backend = "cpu:gloo,cuda:nccl"
    torch_dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    if not is_main():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open as long as the process lives)
    run_on_main(lambda: check_strategy(strategy))


def check_strategy(strategy: str) -> None:
    """Raise ValueError if several ranks would each train the same model alone."""
    if strategy == "none" and world_size() > 1:
        raise ValueError("--distributed.strategy none under torchrun: choose ddp, or fsdp2 if a GPU is too small")


def run_main(main: Callable[[], None]) -> None:
    """Run a command; under torchrun, wait for every rank and end the process.

    It ends by `os._exit`, because gloo threads can abort the interpreter's shutdown (PyTorch 2.13).
    """
    if not launched_by_torchrun():
        return main()
    end_with_parent()
    code: int | str = 0
    try:
        main()
        if torch_dist.is_initialized():
            torch_dist.barrier()
            torch_dist.destroy_process_group()
    except SystemExit as error:
        code = error.code or 0
    except RuntimeError as error:
        if not (isinstance(error, torch_dist.DistError) or "gloo" in str(error)):
            raise
        reason = re.sub(r"^\[.*?\] ", "", str(error)).partition(". ")[0].partition("\n")[0]
        code = f"rank {rank()} lost another one ({reason}): the same command resumes from the last checkpoint"
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()  # trackers register some; `os._exit` would skip them, and Python offers no public way
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def rank() -> int:
    """This process's number among the ranks; 0 in a single process."""
    return torch_dist.get_rank() if torch_dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks; 1 in a single process."""
    return torch_dist.get_world_size() if torch_dist.is_initialized() else 1


def is_main() -> bool:
    """True on rank 0, which prints and writes."""
    return rank() == 0


def run_on_main(function: Callable[[], T]) -> T:
    """Call ``function`` on rank 0 and return its result on every rank; if it raises, the others exit with code 2."""
    if world_size() == 1:
        return function()
    result, succeeded = None, False
    try:
        if is_main():
            result = function()
            succeeded = True
    finally:
        outcome = [result, succeeded]
        torch_dist.broadcast_object_list(outcome)
    result, succeeded = outcome
    if not succeeded:
        raise SystemExit(2)  # rank 0 prints why
    return result


def gather_objects(value: T) -> list[T]:
    """Every rank's value, in rank order. Tensors must be on the CPU."""
    values: list[Any] = [value] * world_size()
    if world_size() > 1:
        torch_dist.all_gather_object(values, value)
    return values


def gather_on_main(value: T) -> list[T]:
    """On rank 0 every rank's value, in rank order; nothing elsewhere. Tensors must be on the CPU."""
    values: list[Any] = [value] * world_size() if is_main() else []
    if world_size() > 1:
        torch_dist.gather_object(value, values if is_main() else None)
    return values


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum in place over the ranks, and return the tensor."""
    if world_size() > 1:
        torch_dist.all_reduce(values)
    return values


def max_over_ranks(value: int) -> int:
    """The largest of the ranks' values; for a flag, whether any rank's is set."""
    return max(gather_objects(value))


def concat_over_ranks(values: Tensor) -> Tensor:
    """Concatenate the rows of every rank's tensor; ranks may have different row counts."""
    return torch.cat(gather_objects(values.cpu())).to(values.device) if world_size() > 1 else values


def pad_to_longest(items: list[T], filler: T) -> list[T]:
    """Append ``filler`` until this rank has as many items as the rank with the most."""
    return items + [filler] * (max_over_ranks(len(items)) - len(items))


def take_rank_share(items: list[T], minibatches: int) -> list[T]:
    """This rank's part of a rollout's prompts: an equal part of each minibatch, so that ranks share every minibatch."""
    size = len(items) // (minibatches * world_size())
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    return [item for part in parts[rank() :: world_size()] for item in part]
