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
import torch.distributed as torch_dist
from torch import Tensor, nn

from pspo.distributed.ranks import world_size

T = TypeVar("T")


def shard(policy: nn.Module, autocast: torch.dtype | None) -> None:
    """Spread a model's weights over all ranks, layer by layer.

    The float32 shards are optimized. Under autocast, weights are gathered in that dtype, and so are the norms and the
    residual stream (autocast alone keeps those in float32); gradients are reduced in float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    precision = MixedPrecisionPolicy(param_dtype=autocast, reduce_dtype=None if autocast is None else torch.float32)
    layers = [module for module in policy.modules() if type(module).__name__ in policy._no_split_modules]
    for module in (*layers, policy):
        fully_shard(module, mp_policy=precision, reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)  # a sum, not a mean
        module.set_force_sum_reduction_for_comms(True)  # gloo divides otherwise
    policy.call_with_weights = call
    register_fsdp_forward_method(policy, "call_with_weights")  # FSDP gathers weights for it, as for `forward`


def call(function: Callable[[], T]) -> T:
    """Call a function."""
    return function()


def gathers_weights(function: Callable[..., T]) -> Callable[..., T]:
    """Decorate ``function(model, ...)``: a sharded model runs it as its forward pass, with weights gathered."""

    @functools.wraps(function)
    def gathering(model: nn.Module, *args: Any, **kwargs: Any) -> T:
        if not is_sharded(model):
            return function(model, *args, **kwargs)
        return model.call_with_weights(lambda: function(model, *args, **kwargs))  # FSDP would cast tensors that it sees

    return gathering


def is_sharded(model: nn.Module) -> bool:
    """True for a model that `shard` has spread over the ranks."""
    return hasattr(model, "set_reshard_after_forward")  # an FSDPModule's


@torch.no_grad()
def read_weights(model: nn.Module, folder: Path, device: torch.device) -> tuple[set[str], set[str]]:
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
    state_names = model.state_dict().keys()  # parameters, and the buffers that are saved
    tensors = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in state_names}
    tensors = {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}  # beneath LoRA's
    reader = HuggingFaceStorageReader(str(folder))
    file_names = reader.read_metadata().state_dict_metadata.keys()
    with checkpoint_errors():
        checkpoint.load({name: t for name, t in tensors.items() if name in file_names}, storage_reader=reader)
    return tensors.keys() - file_names, file_names - {name.replace(".base_layer.", ".") for name in state_names}


@contextlib.contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gather all weights on every rank for a `with` block, if the model is sharded: passes need no communication."""
    if not is_sharded(model):
        yield
        return
    modules = [module for module in model.modules() if is_sharded(module)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
            module.set_reshard_after_forward(True, recurse=False)


def sum_gradients(model: nn.Module) -> None:
    """Sum the gradients over the ranks; a sharded model's backward passes have done so already."""
    if world_size() == 1 or is_sharded(model):
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        if parameter.grad is None:  # unused on this rank; another may have used it
            parameter.grad = torch.zeros_like(parameter)
    for handle in [torch_dist.all_reduce(parameter.grad, async_op=True) for parameter in trained]:
        handle.wait()


def set_parameter(parameter: Tensor, values: Tensor) -> None:
    """Set a parameter, sharded or not, to rank 0's values on every rank."""
    values = values.to(parameter.device)
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor import distribute_tensor

        values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
    elif world_size() > 1:
        torch_dist.broadcast(values, src=0)
    parameter.copy_(values)


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


def save_shards(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write every rank's shards as safetensors files; raises RuntimeError if a rank cannot."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with checkpoint_errors():
        checkpoint.save(trained_state(model, optimizer), storage_writer=writer)


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
    with torch.no_grad(), checkpoint_errors():
        checkpoint.load(trained_state(model, optimizer), storage_reader=reader)


def trained_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """This rank's shards of the trained weights and of the optimizer's state, by name."""
    state = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state[f"model.{name}"] = parameter
            for key, value in optimizer.state.get(parameter, {}).items():
                state[f"optimizer.{name}.{key}"] = value
    return state


@contextlib.contextmanager
def checkpoint_errors() -> Iterator[None]:
    """Raise RuntimeError, with the first rank's reason in one line, for PyTorch's error, which is no Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))
        raise RuntimeError(" ".join(str(reason).split())) from reason
