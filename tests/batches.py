"""Random batches for the losses, and every built-in loss, for the tests that hold for all of them."""

import re
from types import SimpleNamespace

import torch

from pspo import losses as L

SURROGATES = [  # with parameters that a few steps are enough to tell apart
    L.Clip(), L.NoClip(), L.PSPO(0.3), L.P3O(), L.SAPO(), L.TOPR(),
    L.REINFORCE(), L.CISPO(epsilon_high=0.1), L.GSPO(0.1, 0.2), L.GMPO(0.2), L.VESPO(), L.DPPO(epsilon=0.02),
    L.SPO(), L.DRO(1.0), L.CEGPPO(0.01), L.ASPO(0.01),
]  # fmt: skip
AGGREGATIONS = ["dapo", "grpo", "dr_grpo"]
PAIRS = [*zip(SURROGATES, 6 * AGGREGATIONS, strict=False)]  # every surrogate with one aggregation


def name(value) -> str:
    """A parameter in a test's name, where a function's address would be another one in every process."""
    return re.sub(r" at 0x\w+", "", repr(value))


def random_batch(lengths, seed=0, spread=0.5, dtype=torch.float64):
    """Make logprobs, old_logprobs (B, T), advantages (B, 1) and mask (B, T) of rows with so many unmasked tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths)
    old = -3 * torch.rand(shape, generator=generator, dtype=dtype)
    logprobs = old + spread * torch.randn(shape, generator=generator, dtype=dtype)
    advantages = torch.randn(len(lengths), 1, generator=generator, dtype=dtype)
    return logprobs, old, advantages, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def loss_and_gradient(surrogate, logprobs, old_logprobs, advantages, mask):
    """Losses of tokens, (B, T), and the gradient of their sum."""
    logprobs = logprobs.detach().clone().requires_grad_()
    losses = surrogate(logprobs, old_logprobs, advantages, mask)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return losses.detach(), gradient


def packing(microbatch_tokens, shares_prompts=True, is_sharded=False):
    """Of a learner, what decides how rows are packed into microbatches."""
    settings = {"microbatch_tokens": microbatch_tokens, "shares_prompts": shares_prompts, "is_sharded": is_sharded}
    return SimpleNamespace(**settings, n_ranks=1)


def completions(rollout):
    """The unmasked tokens of each row, a list of lists."""
    return [ids[mask].tolist() for ids, mask in zip(rollout.completion_ids, rollout.completion_mask, strict=True)]


# Pieces of an algorithm of one's own


def by_token(rewards, group_size, mask):
    """Advantages (B, T): the rewards, more for later tokens."""
    return rewards[:, None] * (1 + torch.arange(mask.shape[1]) / 4)


def by_root(mask, counts):
    """An aggregation: a completion weighs the root of its length."""
    return counts.sequences * mask.sum(dim=1).clamp(min=1).sqrt()


def row_mean_weights(old_logprobs, sampler_logprobs, mask):
    """A correction: the mean of a row's ratios."""
    ratios = (old_logprobs - sampler_logprobs).exp().where(mask, 0.0)
    return ratios.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
