"""Random batches for the losses."""

import torch


def random_batch(lengths, seed=0, spread=0.5, dtype=torch.float64):
    """Make logprobs, old_logprobs (B, T), advantages (B, 1) and mask (B, T) of rows with so many unmasked tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths)
    old = -3 * torch.rand(shape, generator=generator, dtype=dtype)
    logprobs = old + spread * torch.randn(shape, generator=generator, dtype=dtype)
    advantages = torch.randn(len(lengths), 1, generator=generator, dtype=dtype)
    return logprobs, old, advantages, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
