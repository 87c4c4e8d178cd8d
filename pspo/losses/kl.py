"""Per-token estimates of KL(policy || reference) from the policy's own samples (Schulman 2020, "Approximating KL
divergence"). With x = ref_logprob - logprob: k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x.

A good value does not make a good gradient. In expectation the gradient of k2 is that of KL(policy || reference), k3's
is that of KL(reference || policy), and k1's is 0. So k1 comes with k2's gradient here. Times the ratio r, k3 has an
unbiased value and gradient, from an older policy's samples, too, if r is to the policy that drew. All of this is for
tokens drawn from the whole distribution: those of a nucleus (top_p 0.85) bias every estimate.
"""

from typing import Literal

import torch
from torch import Tensor

from pspo.losses.surrogates import log_ratio, masked

KLEstimator = Literal["k1", "k2", "k3", "unbiased_k3"]


def kl_estimate(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    estimator: KLEstimator = "k3",
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) at every token.

    Args:
        logprobs, ref_logprobs, old_logprobs: (B, T), at the same temperature; the last for "unbiased_k3" alone.
        estimator: "k1" (unbiased, signed, k2's gradient), "k2" (biased, low variance), "k3" (unbiased, at least 0) or
            "unbiased_k3" (r k3, r = exp(logprob - old_logprob) with its gradient: DeepSeek-V3.2, 2512.02556).

    Returns:
        (B, T), in nats, 0 where masked. x is clamped to +-20. Beyond, the gradient is that at the bound, not 0: it
        pulls where the policy is furthest away.
    """
    moved = masked(logprobs.detach() - logprobs, mask)  # 0, with the gradient of -logprobs
    x = log_ratio(ref_logprobs, logprobs.detach(), mask) + moved  # (B, T)
    k2 = 0.5 * x.square()
    if estimator == "k1":
        return k2 - k2.detach() - x.detach()
    if estimator == "k2":
        return k2
    if estimator == "k3":
        return torch.expm1(x) - x
    if estimator == "unbiased_k3":
        return log_ratio(logprobs, old_logprobs, mask).exp() * (torch.expm1(x) - x)
    raise ValueError(f"unknown KL estimator {estimator!r}: choose k1, k2, k3 or unbiased_k3")
