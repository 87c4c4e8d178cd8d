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
from pspo_bridge import BUILT_IN, Surrogate, make_surrogate, token_losses


def register(surrogate: Surrogate | str, anchor: str = "old", **arguments: Any) -> None:
    """Register a surrogate as ``pspo.`` and its class's name, in place of an earlier one of that name.

    Ratios are to ``anchor``: "old", log-probs that SkyRL computes before its update, corrected as for its own losses;
    or "rollout", the engine's, uncorrected: for its fully async trainer, whose policy has moved before that.

    Raises ValueError for P3O with a kl_coef and DRO: SkyRL divides advantages, not losses, by the number of tokens.
    """
    made = make_surrogate(surrogate, **arguments)
    if anchor not in ("old", "rollout"):
        raise ValueError(f"anchor must be 'old' or 'rollout', got {anchor!r}")
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
        if anchor == "rollout" and rollout_logprobs is None:
            raise ValueError("anchor='rollout' needs the engine's log-probs: generator.sampling_params.logprobs=1")
        old_log_probs = rollout_logprobs if anchor == "rollout" else old_log_probs
        losses, metrics = token_losses(made, log_probs, old_log_probs, advantages, mask)
        corrections = {}
        if anchor == "old":
            losses, loss_mask, corrections = apply_off_policy_correction(
                losses, old_log_probs, rollout_logprobs, loss_mask, config.off_policy_correction
            )
        metrics = {f"surrogate/{name}": value.nan_to_num().item() for name, value in metrics.items()}
        return reduce_loss(losses, loss_mask), metrics | corrections

    name = f"pspo.{type(made).__name__}"
    if name in PolicyLossRegistry.list_available():
        PolicyLossRegistry.unregister(name)  # it refuses a second one
    PolicyLossRegistry.register(name, loss)


for built_in in BUILT_IN:
    if built_in != "DRO":
        register(built_in)
