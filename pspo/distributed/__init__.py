"""Several processes, one per GPU, started by torchrun: what they share, and how the weights are spread over them.

    torchrun --nproc-per-node 8 -m pspo.train --distributed.strategy fsdp2 ...

Every rank generates, scores and trains on its own prompts, whole groups. Gradients are summed over the ranks, and so
are the counts that a loss is divided by: ranks, microbatches and gradient accumulation can be traded for each other.
Rank 0 alone talks and writes. In a single process every function here returns what it was given.

The strategies:

* ddp: every rank holds the whole model and optimizer; gradients are summed once per optimizer step. PyTorch's
  DistributedDataParallel would sum them within the backward pass and expects one; here the output embedding has earlier
  ones of its own (`pspo.model.backward_in_one_pass`), and minibatches have several.
* fsdp2: weights, gradients and optimizer state are spread over the ranks (`fully_shard`) and gathered layer by layer.
  For rollouts all weights are gathered once, so that decoding needs no communication.
"""

import atexit
import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

T = TypeVar("T")
Strategy = Literal["none", "ddp", "fsdp2"]


def launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def own_device() -> torch.device:
    """This process's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if launched() else torch.device("cuda")


def start(strategy: Strategy, timeout: float) -> None:
    """Join the other processes, if torchrun started this one.

    Args:
        timeout: seconds after which a rank gives up waiting for the others.

    Raises ValueError where strategy and launcher do not fit, or there are too few GPUs.
    """
    if not launched():
        if strategy != "none":
            raise ValueError(
                f"--distributed.strategy {strategy} needs torchrun: torchrun --nproc-per-node N -m pspo.train ..."
            )
        return
    gpu = torch.cuda.is_available()
    if gpu:
        if (processes := int(os.environ["LOCAL_WORLD_SIZE"])) > torch.cuda.device_count():
            raise ValueError(f"--nproc-per-node {processes}: there are {torch.cuda.device_count()} GPUs for them here")
        torch.cuda.set_device(own_device())
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timedelta(seconds=timeout))
    if not is_main():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open for as long as the process is there)
    from_main(lambda: check_strategy(strategy))


def check_strategy(strategy: Strategy) -> None:
    """Raise ValueError where several processes would train the same model each on its own."""
    if strategy == "none" and world_size() > 1:
        raise ValueError("--distributed.strategy none under torchrun: choose ddp, or fsdp2 where a GPU is too small")


def run(main: Callable[[], None]) -> NoReturn:
    """Run a command and end its process, under torchrun when every rank has ended well.

    There it ends without Python's shutting down: a thread of gloo may still have to let go of a collective's tensors,
    which takes the interpreter, and PyTorch 2.13 aborts where that is no longer to be had.
    """
    code = 0
    try:
        main()
        if dist.is_initialized():
            barrier()
            dist.destroy_process_group()
    except SystemExit as ended:
        code = ended.code or 0
    if not launched():
        sys.exit(code)
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()  # trackers' among them
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is the rank that talks and writes."""
    return rank() == 0


def barrier() -> None:
    """Until every rank is here."""
    if world_size() > 1:
        dist.barrier()


def from_main(function: Callable[[], T]) -> T:
    """What ``function`` returns on rank 0, for every rank; where it raises, the others leave quietly."""
    outcome: list[Any] = [None, False]
    try:
        if is_main():
            outcome = [function(), True]
    finally:
        if world_size() > 1:
            dist.broadcast_object_list(outcome)
    if not outcome[1]:
        raise SystemExit(2)  # rank 0 says why
    return outcome[0]


def gather(value: T) -> list[T]:
    """Every rank's value, in their order. Tensors must be the CPU's."""
    values: list[Any] = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def pool(*parts: Any) -> tuple[Any, ...]:
    """Every rank's parts put together: lists and tensors one after the other, dicts by key, others by their `join`."""
    return tuple(_join(values) for values in zip(*gather(parts), strict=True)) if world_size() > 1 else parts


def _join(values: tuple[Any, ...]) -> Any:
    first = values[0]
    if isinstance(first, list):
        return [item for value in values for item in value]
    if isinstance(first, dict):
        return {key: _join(tuple(value[key] for value in values)) for key in first}
    return torch.cat(values) if isinstance(first, Tensor) else type(first).join(values)


def total(values: Tensor) -> Tensor:
    """The sum over the ranks."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def concatenate(tensor: Tensor, dim: int) -> Tensor:
    """Every rank's tensor, one after the other along a dimension in which they may differ."""
    return torch.cat(gather(tensor.cpu()), dim).to(tensor.device) if world_size() > 1 else tensor


def highest(value: int) -> int:
    """The largest of the ranks' values; for flags, whether any rank's is set."""
    return max(gather(value))


def own(values: Tensor) -> Tensor:
    """This rank's of the values that the ranks have pooled, all as many."""
    return values.chunk(world_size())[rank()]


def share(prompts: list[T], minibatches: int) -> list[T]:
    """This rank's part of a rollout's prompts: an equal part of each minibatch, which together are the minibatch."""
    size = len(prompts) // (minibatches * world_size())
    parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    return [prompt for part in parts[rank() :: world_size()] for prompt in part]


def seed_generators(seed: int, steps: int = 0) -> None:
    """Seed python's, numpy's and torch's by the run's seed and the steps taken, on every rank in another way.

    On rank 0 at the start it is the run's seed, as in a single process.
    """
    parts = np.random.SeedSequence((seed, rank(), steps))
    own_seed = seed if rank() == steps == 0 else int(parts.generate_state(1)[0])
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(own_seed)


def shard(policy: nn.Module, autocast: torch.dtype | None) -> None:
    """Spread a model's weights over the ranks, layer by layer.

    The float32 shards are what is optimized. Where forward passes are autocast, weights are gathered in that dtype, and
    norms and the residual stream are in it, too (under autocast alone they are not); gradients are reduced in float32.
    The model stays in training mode, which without dropout changes no number: prompts are not shared then, and every
    rank goes through every layer the same number of times.
    """
    precision = MixedPrecisionPolicy(param_dtype=autocast, reduce_dtype=None if autocast is None else torch.float32)
    layers = [module for module in policy.modules() if type(module).__name__ in policy._no_split_modules]
    for module in (*layers, policy):
        fully_shard(module, mp_policy=precision, reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)  # a sum, as everywhere here;
        module.set_force_sum_reduction_for_comms(True)  # which gloo does only if told so
    type(policy).as_forward = _call
    register_fsdp_forward_method(policy, "as_forward")
    policy.train()


@torch.no_grad()
def fill(model: nn.Module, files: list[Path], device: torch.device) -> list[str]:
    """Give a sharded model on the meta device its memory, and each rank its rows of the weights in safetensors files.

    Returns the names that the files lack.
    """
    model.to_empty(device=device)
    model.tie_weights()
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is not None:  # rotary frequencies and the like
            model._init_weights(module)
    kept = model.state_dict().keys()  # parameters, and buffers that belong into files
    missing = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in kept}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in missing.keys() & tensors.keys():
                tensor = missing.pop(name)
                if not isinstance(tensor, DTensor):
                    tensor.copy_(tensors.get_tensor(name))
                    continue
                size = -(-len(tensor) // world_size())  # rows of a rank; the last ones may have fewer, or none
                rows = tensors.get_slice(name)[rank() * size : min((rank() + 1) * size, len(tensor))]
                tensor.to_local().copy_(rows)
    return sorted(missing)


def _call(model: nn.Module, function: Callable[..., T], *args: Any) -> T:
    return function(model, *args)


def as_forward(function: Callable[..., T], model: nn.Module, *args: Any) -> T:
    """``function(model, *args)``; of a sharded model as its forward pass, for which the weights are gathered."""
    return model.as_forward(function, *args) if is_sharded(model) else function(model, *args)


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


@contextlib.contextmanager
def gathered(model: nn.Module, how: str) -> Iterator[None]:
    """With "gathered" all weights are on every rank meanwhile: its passes need no communication, nor be as many."""
    modules = [module for module in model.modules() if is_sharded(module)] if how == "gathered" else []
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(True, recurse=False)


def microbatches(model: nn.Module, batches: list[T], gather: str) -> Iterator[T]:
    """An optimizer step's microbatches; with "step" a sharded model communicates in the first and in the last only."""
    once = is_sharded(model) and gather == "step"
    if once:
        model.set_reshard_after_forward(False)
    for i, batch in enumerate(batches):
        if once:
            last = i == len(batches) - 1
            model.set_reshard_after_backward(last)
            model.set_requires_gradient_sync(last)
        yield batch
    if once:
        model.set_reshard_after_forward(True)


def sum_gradients(model: nn.Module) -> None:
    """Sum the gradients over the ranks; those of a sharded model were, in its backward passes."""
    if world_size() > 1 and not is_sharded(model):
        for parameter in model.parameters():
            if parameter.grad is None:  # on this rank; another may have used it
                parameter.grad = torch.zeros_like(parameter)
        for handle in [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]:
            handle.wait()


def state_dict(model: nn.Module) -> dict[str, Tensor] | None:
    """On rank 0 the weights of a sharded model, whole, on the CPU; None of one that is whole on every rank."""
    if not is_sharded(model):
        return None
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


class Scalars:
    """What an optimizer over shards keeps that is the same on every rank, beside what `save_shards` writes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.state = optimizer, {}

    def state_dict(self) -> dict[str, Any]:
        step = next((float(state["step"]) for state in self.optimizer.state.values() if "step" in state), 0.0)
        return {"step": step, "lr": [group["lr"] for group in self.optimizer.param_groups]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for group, lr in zip(self.optimizer.param_groups, saved["lr"], strict=True):
            group["lr"] = lr
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(saved["step"])


def shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """This rank's shards: of the weights, and of what the optimizer keeps of each."""
    weights = dict(model.named_parameters())
    moments = {
        f"{name}.{key}": value
        for name, parameter in weights.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if value.ndim > 0
    }
    return {"model": weights, "optimizer": moments}


def save_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every rank writes its shards, by PyTorch's distributed checkpoints; raises RuntimeError where one cannot."""
    try:
        checkpoint.save(shards(model, optimizer), checkpoint_id=folder)
    except CheckpointException as error:  # which is no Exception
        raise RuntimeError(_first_line(error)) from None


def load_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put back what `save_shards` wrote, from however many ranks it did; raises RuntimeError where that fails."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # until `Scalars` are loaded
    optimizer.step()  # which moves nothing, but makes the tensors that are to be loaded
    optimizer.zero_grad()
    wanted, reader = shards(model, optimizer), TensorReader(folder)
    if not any(name.startswith("optimizer.") for name in reader.read_metadata().state_dict_metadata):
        del wanted["optimizer"]  # it had not moved yet: its moments are 0, as they are now
    try:
        with torch.no_grad():
            checkpoint.load(wanted, storage_reader=reader)
    except CheckpointException as error:
        raise RuntimeError(_first_line(error)) from next(iter(error.failures.values()))[0]


def _first_line(error: CheckpointException) -> str:
    cause, *_ = error.failures.values()
    return " ".join(str(cause[0]).split())


class TensorReader(checkpoint.FileSystemReader):
    """Reads tensors alone: a distributed checkpoint's metadata is a pickle, which could be made to execute anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            return _MetadataUnpickler(file).load()


class _MetadataUnpickler(Unpickler):
    """Knows what describes tensors, and no other name."""

    KNOWN: ClassVar = {
        "collections": ("OrderedDict",),
        "pathlib": ("PosixPath",),
        "pathlib._local": ("PosixPath",),  # where Python 3.13 has it
        "torch": ("Size", "float32", "bfloat16"),
        "torch.serialization": ("_get_layout",),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.distributed.checkpoint.metadata": (
            "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
            "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        ),
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.KNOWN.get(module, ()):
            raise UnpicklingError(f"{module}.{name} in the metadata of a distributed checkpoint")
        return super().find_class(module, name)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, of a tensor that is spread over the ranks."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor, on every rank, where it is spread over them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
