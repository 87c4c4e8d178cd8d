"""Sharded models: weights, gradients and optimizer state spread over the ranks by FSDP2 (`fully_shard`).

Layers are gathered for each pass; for rollouts all weights are gathered once, so that decoding needs no communication.
torch's own parts for this take a second to import: only a sharded run does.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pspo.distributed.ranks import local_device, sum_over_ranks, world_size

T = TypeVar("T")


@functools.cache  # its groups of ranks are made once
def _mesh(ranks: int | None) -> Any:
    """Neighbouring ranks that a model is spread over, and their copies; None for all ranks, PyTorch's default."""
    if ranks in (None, world_size()):
        return None
    from torch.distributed.device_mesh import init_device_mesh

    shape = (world_size() // ranks, ranks)
    return init_device_mesh(local_device().type, shape, mesh_dim_names=("replicate", "shard"))


def shard(policy: nn.Module, autocast: torch.dtype | None, ranks: int | None = None) -> None:
    """Spread a model's weights over all ranks, layer by layer; or over so many neighbours, once in each such group.

    The float32 shards are optimized. Under autocast, weights are gathered in that dtype, and so are the norms and the
    residual stream (autocast alone keeps those in float32); gradients are reduced in float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    precision = MixedPrecisionPolicy(param_dtype=autocast, reduce_dtype=None if autocast is None else torch.float32)
    layers = [module for module in policy.modules() if type(module).__name__ in policy._no_split_modules]
    for module in (*layers, policy):
        fully_shard(module, mesh=_mesh(ranks), mp_policy=precision, reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)  # a sum, not a mean,
        module.set_force_sum_reduction_for_comms(True)  # which gloo needs to be told
    type(policy).call_as_forward = lambda _, function: function()
    register_fsdp_forward_method(policy, "call_as_forward")


def gathers_weights(function: Callable[..., T]) -> Callable[..., T]:
    """Decorate ``function(model, ...)``: a sharded model runs it as its forward pass, with weights gathered."""

    @functools.wraps(function)
    def call(model: nn.Module, *args: Any, **kwargs: Any) -> T:
        bound = functools.partial(function, model, *args, **kwargs)  # FSDP would cast tensors that it sees
        return model.call_as_forward(bound) if is_sharded(model) else bound()

    return call


def is_sharded(model: nn.Module) -> bool:
    return hasattr(model, "set_reshard_after_forward")  # of an FSDPModule


def sum_over_shards(values: Tensor, model: nn.Module) -> Tensor:
    """Sum over the ranks, of a sharded model that several groups of them hold over one group."""
    mesh = next(model.parameters()).device_mesh if is_sharded(model) else None
    return sum_over_ranks(values) / (mesh.size(0) if mesh is not None and mesh.ndim == 2 else 1)


@torch.no_grad()
def fill(model: nn.Module, folder: Path, device: torch.device) -> tuple[set[str], set[str]]:
    """Allocate a sharded model of the meta device, and read each rank's rows of the weights from safetensors files.

    Returns the names that the files lack, and those that the model lacks.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    model.to_empty(device=device)
    model.tie_weights()
    for module in model.modules():
        if next(module.buffers(recurse=False), None) is not None:  # rotary frequencies and the like
            model._init_weights(module)
    kept = model.state_dict().keys()  # parameters, and the buffers that are saved
    own = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in kept}
    own = {name.replace(".base_layer.", "."): tensor for name, tensor in own.items()}  # beneath LoRA's
    reader = HuggingFaceStorageReader(str(folder))
    saved = reader.read_metadata().state_dict_metadata.keys()
    with _plain_error():
        checkpoint.load({name: tensor for name, tensor in own.items() if name in saved}, storage_reader=reader)
    return own.keys() - saved, saved - {name.replace(".base_layer.", ".") for name in kept}


@contextlib.contextmanager
def unsharded(model: nn.Module, how: str = "gathered") -> Iterator[None]:
    """Gather all weights on every rank for a `with` block, if ``how`` is "gathered": passes need no communication."""
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


def communicate_once(model: nn.Module, batches: list[T], gather: str) -> Iterator[T]:
    """Yield a step's microbatches; a sharded model's copies are summed in the last.

    With ``gather`` "step" it communicates only in the first and last.
    """
    if not is_sharded(model):
        yield from batches
        return
    model.set_reshard_after_forward(gather != "step")
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        if gather == "step":
            model.set_reshard_after_backward(last)
            model.set_requires_gradient_sync(last)
        model.set_requires_all_reduce(last)
        yield batch
    model.set_reshard_after_forward(True)


def sum_gradients(model: nn.Module) -> None:
    """Sum the gradients over the ranks; a sharded model's backward passes have done so already."""
    if world_size() > 1 and not is_sharded(model):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            if parameter.grad is None:  # on this rank; another may have used it
                parameter.grad = torch.zeros_like(parameter)
        for handle in [dist.all_reduce(parameter.grad, async_op=True) for parameter in trained]:
            handle.wait()


def assign(parameter: Tensor, whole: Tensor) -> None:
    """Set a parameter, sharded or not, to rank 0's whole tensor on every rank."""
    whole = whole.to(parameter.device)
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    elif world_size() > 1:
        dist.broadcast(whole, src=0)
    parameter.copy_(whole)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank, if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "placements") else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard, if the tensor is sharded."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def full_state_dict(model: nn.Module) -> dict[str, Tensor] | None:
    """A sharded model's whole trained weights, on rank 0's CPU; None for a model that is not sharded."""
    if not is_sharded(model):
        return None
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    return get_model_state_dict(model, options=options)


def _shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """This rank's shards of the weights that are trained, and of what the optimizer keeps of each."""
    shards = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state = optimizer.state.get(parameter, {})
            shards |= {f"model.{name}": parameter} | {f"optimizer.{name}.{key}": value for key, value in state.items()}
    return shards


def save_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write every rank's shards as safetensors files; raises RuntimeError if a rank cannot."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _plain_error():
        checkpoint.save(_shards(model, optimizer), storage_writer=writer)


def load_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read what `save_shards` wrote, on any number of ranks; raises RuntimeError if that fails."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()  # makes the state's tensors; they and the weights are read next
    optimizer.zero_grad()
    reader = HuggingFaceStorageReader(str(folder))
    if not any(name.startswith("optimizer.") for name in reader.read_metadata().state_dict_metadata):
        optimizer.state.clear()  # saved before any step
    with torch.no_grad(), _plain_error():
        checkpoint.load(_shards(model, optimizer), storage_reader=reader)


@contextlib.contextmanager
def _plain_error() -> Iterator[None]:
    """Raise RuntimeError, with the first rank's reason in one line, for PyTorch's error, which is no Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))
        raise RuntimeError(" ".join(str(reason).split())) from reason
