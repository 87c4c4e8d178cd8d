"""Add the surrogates to SkyRL's registry of policy losses: trainer.algorithm.policy_loss_type=pspo.PSPO.

In the script that starts SkyRL, before it initialises ray:

    import pspo_bridge.skyrl                             # every surrogate but DRO, with default arguments
    pspo_bridge.skyrl.register("PSPO", alpha=0.2)        # one surrogate, with your arguments

Tested with stand-ins for SkyRL's published functions, as SkyRL is on no package index.
"""

from typing import Any

from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import apply_off_policy_correction
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, reduce_loss
from torch import Tensor

from pspo.losses import DRO, P3O
from pspo_bridge import BUILT_IN, Surrogate, make_surrogate, token_losses


def register(surrogate: Surrogate | str, anchor: str = "old", **arguments: Any) -> None:
    """Register a surrogate as ``pspo.`` and its class name, in place of an earlier surrogate of the same name.

    ``anchor`` says which log-probs ratios are to. "old": those that SkyRL computes before its update; it corrects the
    losses as its own. "rollout": the engine's log-probs, and no correction. Use it with SkyRL's fully async trainer,
    whose policy has already moved when SkyRL computes "old".

    Raises ValueError for P3O with a kl_coef and DRO with a tau: SkyRL divides advantages, not losses, by token counts.
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
        """Return loss and metrics of a microbatch. Tensors are (B, T); SkyRL corrects and reduces the losses."""
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
        PolicyLossRegistry.unregister(name)  # the registry refuses a name twice
    PolicyLossRegistry.register(name, loss)


for built_in in BUILT_IN:
    if built_in != "DRO":
        register(built_in)
