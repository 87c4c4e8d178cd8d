"""Several ranks, one per GPU: ``torchrun --nproc-per-node 8 -m pspo.train --distributed.strategy fsdp2 ...``.

Every rank generates, scores and trains on whole groups of its own prompts. Gradients are summed over the ranks, and so
are the counts that a loss is divided by. In a single process nothing is communicated.

* ddp: every rank holds the whole model and optimizer; gradients are summed once per optimizer step.
* fsdp2: weights, gradients and optimizer state are sharded over the ranks by FSDP2 (`fully_shard`), whose modules take
  a second to import. Layers are gathered for each pass, and all weights once for a rollout.
"""

import atexit
import contextlib
import functools
import operator
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed import is_torchelastic_launched as launched_by_torchrun

from pspo.errors import RunFailed
from pspo.signals import end_with_parent

TIMEOUT = 600.0  # seconds that a run's ranks wait for each other
T = TypeVar("T")


def local_device() -> torch.device:
    """This process's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if launched_by_torchrun() else torch.device("cuda")


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    every = ",".join(str(gpu) for gpu in range(torch.cuda.device_count()))
    return [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",") if gpu]


def init(strategy: str, timeout: float = TIMEOUT) -> None:
    """Join the other ranks, if torchrun started this process; ValueError if strategy and launcher do not fit."""
    if torch_dist.is_initialized():  # by an earlier run in this process
        return
    if not launched_by_torchrun():
        if strategy != "none":
            raise ValueError(f"--distributed.strategy {strategy} needs torchrun --nproc-per-node N -m pspo.train ...")
        return
    if strategy == "none" and int(os.environ["WORLD_SIZE"]) > 1:
        raise ValueError("--distributed.strategy none under torchrun: choose ddp, or fsdp2 if a GPU is too small")
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_device())
        backend = "cpu:gloo,cuda:nccl"
    torch_dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    if not is_main():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open as long as the process lives)


def run_main(main: Callable[[], None]) -> None:
    """Run a command. Under torchrun, wait for all ranks, and exit without Python's shutdown, which gloo could abort."""
    if not launched_by_torchrun():
        return main()
    end_with_parent()
    code = 0
    try:
        main()
        if torch_dist.is_initialized():
            torch_dist.barrier()
            torch_dist.destroy_process_group()
    except SystemExit as error:
        code = error.code or 0
        if isinstance(code, str):  # a message, which Python would print
            print(code, file=sys.stderr)
            code = 1
    atexit._run_exitfuncs()  # trackers register exit functions; Python has no public way to run them
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
    """The result of ``function``, called on rank 0, on every rank; if it raises, the other ranks end, too."""
    result: Any = None
    code = 0
    try:
        if is_main():
            result = function()
    except BaseException as error:
        code = 2 if isinstance(error, ValueError | OSError) else 1  # exit codes as in `pspo.errors`
        raise
    finally:
        result, code = gather_objects((result, code))[0]
    if code != 0:
        raise SystemExit(code) if code == 2 else RunFailed("rank 0 has failed")  # which prints why
    return result


def gather_objects(value: T) -> list[T]:
    """Every rank's value, in rank order. Tensors must be on the CPU."""
    if not torch_dist.is_initialized():
        return [value]
    values = [value] * world_size()
    torch_dist.all_gather_object(values, value)
    return values


def gather_on_main(values: list[T]) -> list[T]:
    """On rank 0 the values of every rank, in rank order; on other ranks []. Tensors must be on the CPU."""
    gathered = gather_objects(values)
    return [value for values in gathered for value in values] if is_main() else []


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a tensor over the ranks in place, and return it."""
    torch_dist.all_reduce(values)
    return values


def max_over_ranks(value: int) -> int:
    """The largest of the ranks' values; for a flag, whether any rank's is set."""
    return max(gather_objects(value))


def concat_over_ranks(values: Tensor) -> Tensor:
    """Concatenate the rows of every rank's tensor; ranks may have different row counts."""
    return torch.cat(gather_objects(values.cpu())).to(values.device) if world_size() > 1 else values


def take_rank_share(items: list[T], minibatches: int) -> list[T]:
    """This rank's part of a rollout's prompts: an equal part of each minibatch, so that ranks share every minibatch."""
    size = len(items) // (minibatches * world_size())
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    return [item for part in parts[rank() :: world_size()] for item in part]


# --- sharded models


def shard(policy: nn.Module, autocast: torch.dtype | None) -> None:
    """Shard a model layer by layer: each rank keeps a part on its device; passes gather layers in autocast's dtype."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    precision = MixedPrecisionPolicy(param_dtype=autocast, reduce_dtype=None if autocast is None else torch.float32)
    layers = [module for module in policy.modules() if type(module).__name__ in policy._no_split_modules]
    for module in (*layers, policy):
        fully_shard(module, mp_policy=precision, reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)  # a sum, not a mean
        module.set_force_sum_reduction_for_comms(True)  # gloo divides otherwise
    policy.call_with_weights = operator.call  # calls a function
    register_fsdp_forward_method(policy, "call_with_weights")  # FSDP gathers weights for it, as for `forward`


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
    return hasattr(model, "set_reshard_after_forward")  # only an FSDPModule has it


@contextlib.contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gather all weights on every rank for a `with` block: passes need no communication."""
    modules = [module for module in model.modules() if is_sharded(module)] if is_sharded(model) else []
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
        if parameter.grad is None:  # unused on this rank; another rank may have used it
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    for handle in [torch_dist.all_reduce(parameter.grad, async_op=True) for parameter in trained]:
        handle.wait()


def shard_like(parameter: Tensor, values: Tensor) -> Tensor:
    """Rank 0's values, sharded over the ranks as the parameter is."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values.to(parameter.device), parameter.device_mesh, parameter.placements)


def set_parameter(parameter: Tensor, values: Tensor) -> None:
    """Set a parameter, sharded or not, to rank 0's values on every rank."""
    values = values.to(parameter.device)
    if hasattr(parameter, "placements"):
        values = shard_like(parameter, values)
    elif world_size() > 1:
        torch_dist.broadcast(values, src=0)
    parameter.copy_(values)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "placements") else tensor


def gather_shards(value: Any) -> Any:
    """A nested dict (or one value) with each sharded tensor whole on rank 0's CPU; on other ranks None in its place."""
    if isinstance(value, dict):
        return {name: gather_shards(part) for name, part in value.items()}
    if not hasattr(value, "placements"):
        return value
    whole = value.full_tensor()  # all ranks take part
    return whole.cpu() if is_main() else None


def full_state_dict(model: nn.Module) -> dict[str, Tensor] | None:
    """Gather a sharded model's trained weights on rank 0's CPU; None for a model that is not sharded."""
    if not is_sharded(model):
        return None
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return gather_shards({name: value for name, value in model.state_dict().items() if name not in frozen})


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state; for a sharded model, shard the tensors that `gather_shards` has made whole."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in state.get("state", {}).items():
        parameter = parameters[number]
        for name, value in values.items():
            if hasattr(parameter, "placements") and value.shape == parameter.shape:
                values[name] = shard_like(parameter, value)
    optimizer.load_state_dict(state)
