"""The device: the dtype of forward passes on it, its memory, and running out of it."""

import resource
import sys

import torch
from torch import Tensor

GIB = 2**30


def casts_to_bf16(mode: str, device: torch.device) -> bool:
    """True if --model.autocast ``mode`` (auto, bf16 or none) casts on this device."""
    return mode == "bf16" or (
        mode == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    )


def autocast(mode: str, device: torch.device) -> torch.autocast:
    """The context of every forward pass for --model.autocast ``mode``."""
    return torch.autocast(device.type, torch.bfloat16, enabled=casts_to_bf16(mode, device))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor; to a GPU from pinned memory, so that the CPU does not wait for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def is_out_of_memory(error: Exception) -> bool:
    """True if a GPU's allocator found no memory, or the CPU's, oneDNN's or C++'s."""
    cpu = ("can't allocate memory", "could not create a primitive", "bad_alloc")
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in cpu)


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory so far in GiB: of the GPU's tensors, or of the whole process without a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes, but bytes on macOS
    return peak / (GIB if sys.platform == "darwin" else 2**20)
