"""A loss of the equal-movement study: NoClip without the tokens whose ratio is out of range, or some of them."""

from dataclasses import dataclass

from torch import Tensor

from pspo.losses.surrogates import Surrogate, log_ratio, masked


@dataclass(frozen=True)
class Cut(Surrogate):
    """-r A where r is within 1 - epsilon and 1 + epsilon, and of the other tokens those that ``keep`` names.

    A token is outward where its gradient takes r further from 1, A (r - 1) > 0, and else inward. Clip keeps the inward.

    Args:
        keep: nothing, inward or outward.
        epsilon: half-width of the range.
    """

    keep: str = "nothing"
    epsilon: float = 0.2
    silent_at_zero_advantage = token_local = True

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        ratio = log_ratio(logprobs, old_logprobs, mask).exp()
        outward = (ratio - 1) * advantages > 0
        kept = {"nothing": outward & False, "inward": ~outward, "outward": outward}[self.keep]
        return masked(-ratio * advantages * (kept | ((ratio - 1).abs() <= self.epsilon)), mask)
