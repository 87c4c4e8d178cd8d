"""Entropy of the policy's distribution over the whole vocabulary, from the logits of a chunk of tokens.

A bonus keeps the policy from becoming certain too soon; a token's entropy also says whether it is a choice at all.
"""

import math

import torch
from torch import Tensor

CACHED = 2**16  # logits that stay in a CPU's cache


def token_entropies(logits: Tensor) -> Tensor:
    """H = -sum_v p_v log p_v in nats, (n,), of logits (n, V); exact, with its gradient, logits of -inf included."""
    return _Entropy.apply(logits)


def add_entropy_slopes_(probs: Tensor, slopes: Tensor, entropy_slopes: Tensor, entropies: Tensor) -> None:
    """Turn probabilities p (n, V) in place into -p s - p (log p + H) e, of slopes s, e and entropies H (n, 1).

    With dH / dlogits = -p (log p + H) it is the gradient of what depends on logits by log-probs and entropies, but for
    the drawn tokens' s.
    """
    parts = (probs, slopes, entropy_slopes, entropies)
    for p, s, e, h in zip(*(x.split(cached_rows(probs)) for x in parts), strict=True):
        p.mul_(safe_log(p).add_(h).mul_(e).add_(s).neg_())


def safe_log(probs: Tensor) -> Tensor:
    """log p, finite where p is 0."""
    return probs.clamp(min=torch.finfo(probs.dtype).tiny).log_()


def cached_rows(logits: Tensor) -> int:
    """Rows of logits (n, V) that stay in a CPU's cache; on a GPU all."""
    return max(1, CACHED // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))


class _Entropy(torch.autograd.Function):
    """`token_entropies`; autograd's own gradient is NaN where a probability is 0."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        probs = logits.softmax(dim=1)
        entropies = torch.cat([-(p * safe_log(p)).sum(dim=1) for p in probs.split(cached_rows(probs))])
        ctx.save_for_backward(probs, entropies)
        return entropies

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        probs, entropies = ctx.saved_tensors
        slopes = probs.clone()
        add_entropy_slopes_(slopes, torch.zeros_like(gradient)[:, None], gradient[:, None], entropies[:, None])
        return slopes


def entropy_quantile(entropies: Tensor, share: float) -> Tensor:
    """Entropy that the most uncertain ``share`` of tokens (N,) reach, a scalar: of rank (1 - share) (N - 1) or higher.

    "Beyond the 80/20 Rule" (2506.01939) trains on the tokens that reach it alone; ties belong to them.
    """
    if len(entropies) == 0:
        return entropies.new_zeros(())
    return entropies.sort().values[math.ceil((1 - share) * (len(entropies) - 1))]


def adapt_coef(coef: float, entropy: float, target: float, change: float) -> tuple[float, float]:
    """Coefficient after a step of this mean entropy, and the weight of the next step's bonus (Skywork-OR1, 2505.22312).

    The coefficient rises by ``change`` while the entropy is at most the target, and falls, to 0 at least, while it is
    above, when there is no bonus.
    """
    below = entropy <= target
    coef = max(0.0, coef + (change if below else -change))
    return coef, coef if below else 0.0
