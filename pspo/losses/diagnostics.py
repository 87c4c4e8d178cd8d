"""Statistics of one optimizer step, the same for every surrogate.

The weight w = dL/dlogprob of the per-token loss is 0 if the surrogate ignores a token. |w / (A r)| is the surrogate's
slope relative to NoClip's: 1 - alpha for PSPO, 1 or 0 for Clip.

* ``ratio_...``: mean, min, max and percentiles of r = exp(logprob - old)
* ``ess``: effective sample size (sum r)^2 / (N sum r^2), in (0, 1]
* ``ess_sequence``: the same for the n sequences' ratios, each the product of its tokens' ratios
* ``kl_old_new``: KL(old || new) in nats, the mean of r - 1 - log r
* ``tv``: total variation between old and new, the mean of |r - 1| / 2
* ``tv_smoothed``: the mean of |w / (A r)| |r - 1| / 2; for PSPO (1 - alpha) ``tv`` (paper, Lemma 2.1). It may be
  huge for losses whose slope has no bound where r is small: REINFORCE's slope is 1 / r
* ``zero_weight_share``: share of the tokens whose weight is 0; ``..._positive`` and ``..._negative`` are
  the shares among the tokens with A > 0 and with A < 0
* ``clamped_share``: share of the tokens whose log-ratio is beyond the clamp of +-20
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pspo.losses.surrogates import MAX_LOG_RATIO, log_ratio
from pspo.losses.terms import Correction


def token_weights(
    surrogate: Callable[..., Tensor], logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """dL/dlogprob of the summed per-token loss by autograd, (B, T), 0 where masked; shapes as in `Surrogate`."""
    leaf = logprobs.detach().requires_grad_()
    with torch.enable_grad():
        loss = surrogate(leaf, old_logprobs.detach(), advantages.detach(), mask).sum()
        (weights,) = torch.autograd.grad(loss, leaf, materialize_grads=True)  # 0 if the loss does not depend on them
    return torch.where(mask, weights, 0.0)


@torch.no_grad()
def diagnose(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, rows: Tensor
) -> dict[str, float]:
    """The module's statistics of one optimizer step, over its N tokens with A != 0.

    All are (N,); ``rows`` numbers the tokens' sequences. Without a token ratios and sample sizes are 1, all others 0.
    """
    if not len(logprobs):  # as for one unchanged token
        logprobs = old_logprobs = rows = logprobs.new_zeros(1)
        advantages = weights = logprobs.new_ones(1)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    difference = logprobs.to(dtype) - old_logprobs.to(dtype)
    log_r = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_r.exp()
    ordered = ratio.sort().values  # torch.quantile refuses more than 2^24 values
    last = len(ordered) - 1
    _, sequence = rows.unique(return_inverse=True)
    sequence_log_r = log_r.new_zeros(int(sequence.max()) + 1).index_add(0, sequence, log_r)  # (n,)
    sequence_ratio = (sequence_log_r - sequence_log_r.max()).exp()
    distance = (ratio - 1).abs()
    slope = (weights.to(dtype) / (advantages * ratio)).abs()
    is_zero = (weights == 0).to(dtype)
    positive = advantages > 0
    negative = advantages < 0
    statistics = {
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "ratio_p1": ordered[round(0.01 * last)],
        "ratio_p50": ordered[round(0.5 * last)],
        "ratio_p99": ordered[round(0.99 * last)],
        "ess": ratio.mean().square() / ratio.square().mean(),
        "ess_sequence": sequence_ratio.mean().square() / sequence_ratio.square().mean(),
        "kl_old_new": (torch.expm1(log_r) - log_r).mean(),
        "tv": 0.5 * distance.mean(),
        "tv_smoothed": 0.5 * (slope * distance).mean(),
        "zero_weight_share": is_zero.mean(),
        "zero_weight_share_positive": (is_zero * positive).sum() / positive.sum().clamp(min=1),
        "zero_weight_share_negative": (is_zero * negative).sum() / negative.sum().clamp(min=1),
        "clamped_share": (difference.abs() > MAX_LOG_RATIO).to(dtype).mean(),
    }
    values = torch.stack([value.to(dtype) for value in statistics.values()]).tolist()  # one wait for a GPU
    return dict(zip(statistics, values, strict=True))


@torch.no_grad()
def diagnose_correction(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    rows: Tensor,
    is_active: Tensor,
    mode: Correction | Callable,
    cap: float,
    floor: float = 0.0,
) -> dict[str, float]:
    """Statistics of one optimizer step's correction, with ratios r = exp(old - sampler), over its tokens with A != 0.

    The tensors are (N,), over all tokens: ``rows`` numbers the tokens' sequences, ``is_active`` is true where A != 0.
    ``mode``, ``cap`` and ``floor`` are as in `correction_weights`.

    Returns:
        * ``kl_sampler_old``: KL(sampler || old) in nats, the mean of r - 1 - log r
        * ``sampler_ratio_max``: the largest r; 1 without a token
        * ``corrected_share``: share of the tokens whose ratio is above the cap or below the floor; none for functions
    """
    log_r = log_ratio(old_logprobs, sampler_logprobs, torch.ones_like(is_active))
    active = log_r[is_active] if is_active.any() else log_r.new_zeros(1)  # as for one token of equal log-probs
    statistics = {
        "kl_sampler_old": (torch.expm1(active) - active).mean().item(),
        "sampler_ratio_max": active.max().exp().item(),
    }
    if callable(mode):
        return statistics
    if mode.startswith("sequence") and len(rows):
        rows = rows.long()
        log_r = log_r.new_zeros(int(rows.max()) + 1).index_add(0, rows, log_r)[rows]
    ratio = log_r.exp()
    is_corrected = ((ratio > cap) | (ratio < floor))[is_active].to(log_r.dtype)
    return statistics | {"corrected_share": is_corrected.mean().item() if len(is_corrected) else 0.0}
