"""SkyRL's registry of policy losses, with ours: trainer.algorithm.policy_loss_type=pspo.PSPO.

In the script that starts SkyRL, before it initialises ray:

    import pspo_bridge.skyrl                             # every surrogate with its default arguments
    pspo_bridge.skyrl.register("PSPO", alpha=0.2)        # and one with others

Tested with stand-ins of SkyRL's published functions: it is on no package index.
"""

from typing import Any

from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import apply_off_policy_correction
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, reduce_loss
from torch import Tensor

from pspo.losses import DRO, P3O
from pspo_bridge import BUILT_IN, Surrogate, evaluate, make_surrogate


def register(surrogate: Surrogate | str, **arguments: Any) -> None:
    """Register a surrogate as ``pspo.NAME``, NAME that of its class: an instance, or a name with arguments.

    SkyRL divides advantages by the number of tokens and sums losses, so that the loss must be proportional to the
    advantages, as all of `pspo.losses` but P3O with a kl_coef and DRO are; ValueError for these.
    """
    made = make_surrogate(surrogate, **arguments)
    if isinstance(made, P3O | DRO) and not made.silent_at_zero_advantage:
        rule = "SkyRL scales advantages, not losses, so that kl_coef or tau must be 0; use its KL loss"
        raise ValueError(f"{made!r}: {rule}")

    def loss(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss and metrics of a microbatch; all tensors are (B, T), corrected and summed as SkyRL's own losses are."""
        mask = log_probs.new_ones(log_probs.shape) if loss_mask is None else loss_mask
        result = evaluate(made, log_probs, old_log_probs, advantages, mask)
        losses, loss_mask, corrections = apply_off_policy_correction(
            result.losses, old_log_probs, rollout_logprobs, loss_mask, config.off_policy_correction
        )
        metrics = {f"surrogate/{name}": value.item() for name, value in result.metrics.items()}
        return reduce_loss(losses, loss_mask), metrics | corrections

    PolicyLossRegistry.register(f"pspo.{type(made).__name__}", loss)


for built_in in BUILT_IN:
    if built_in != "DRO":
        register(built_in)
