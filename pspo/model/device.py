"""The device: threads and dtype of passes on it, and how many rows and tokens fit its memory."""

import math
import os
import resource
import sys
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pspo import distributed as dist

GIB = 2**30
MICROBATCH_TOKENS = 4096  # on a CPU
MAX_ROWS = 256
GPU_BYTES_PER_ROW = 2**27
ONE_THREAD_PARAMETERS = 2**21
VARIABLES = {  # environment variables that libraries read for passes on a CPU
    "TRANSFORMERS_SDPA_FORCE_GQA": "1",  # otherwise keys and values are copied for every query head
    # oneDNN and PyTorch cache primitives of 1,024 shapes each: hundreds of MB. A pass with LoRA needs some 30.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "48",
    "LRU_CACHE_CAPACITY": "48",
}


def set_variables() -> None:
    """Set `VARIABLES`, except those that a user has set."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)


def choose_threads(model: PreTrainedModel) -> None:
    """Compute a small model on a CPU by one thread, unless OMP_NUM_THREADS is set.

    Threads of a short pass wait for each other by spinning. If another process wants the cores meanwhile, the embedded
    models take three to ten times as long.
    """
    is_small = model.device.type == "cpu" and model.num_parameters() < ONE_THREAD_PARAMETERS
    if is_small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@cache
def casts_to_bf16(mode: str, device: torch.device) -> bool:
    """True if --model.autocast ``mode`` (auto, bf16 or none) casts on this device."""
    if mode == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return mode == "bf16"


def autocast(mode: str, device: torch.device) -> torch.autocast:
    """The context of every forward pass for --model.autocast ``mode``."""
    return torch.autocast(device.type, torch.bfloat16, enabled=casts_to_bf16(mode, device))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor; to a GPU from pinned memory, so that the CPU does not wait for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def default_max_rows(device: torch.device) -> int:
    """Default of --rollout.max_rows, the rows decoded at a time: on a GPU one row for each 128 MiB of memory."""
    if device.type != "cuda":
        return MAX_ROWS
    return max(1, torch.cuda.get_device_properties(device).total_memory // GPU_BYTES_PER_ROW)


def default_microbatch_tokens(model: PreTrainedModel, recomputes: bool) -> int:
    """Default of --optimizer.microbatch_tokens, the tokens of a forward and backward pass: on a GPU by its memory.

    The number is a power of 2. Activations (in each layer and for each token about 30 bytes a hidden feature, and 8 an
    intermediate feature) take at most 60% of the memory that weights, gradients, AdamW's states and logits leave; 30%
    if the model is sharded, which cannot try half as many tokens.
    """
    if model.device.type != "cuda":
        return MICROBATCH_TOKENS
    memory = torch.cuda.get_device_properties(model.device).total_memory
    states = sum(p.numel() * (16 if p.requires_grad else p.element_size()) for p in model.parameters())
    is_sharded = dist.is_sharded(model)
    if is_sharded:
        states /= dist.world_size()
    config = model.config.get_text_config()
    intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if not isinstance(intermediate, int):  # one number a layer
        intermediate = max(intermediate)
    layer = 30 * config.hidden_size + 8 * intermediate
    values_per_token = config.num_hidden_layers * layer
    if recomputes:  # gradient checkpointing
        values_per_token = config.num_hidden_layers * 4 * config.hidden_size + layer
    share = 0.3 if is_sharded else 0.6
    tokens = share * (memory * 15 / 16 - states) / values_per_token
    return 2 ** max(8, math.floor(math.log2(max(1.0, tokens))))


def is_out_of_memory(error: Exception) -> bool:
    """True if the error says that memory has run out: on a GPU, or for the CPU's allocator, oneDNN or C++."""
    cpu = ("can't allocate memory", "could not create a primitive", "bad_alloc")
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in cpu)


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory so far in GiB: of the GPU's tensors, or of the whole process without a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes, but bytes on macOS
    return peak / (GIB if sys.platform == "darwin" else 2**20)
